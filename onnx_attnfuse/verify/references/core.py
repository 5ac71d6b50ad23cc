"""An operator as onnx's evaluator calls it."""

from __future__ import annotations

from typing import Any, ClassVar, TypeAlias

import numpy.typing as npt
from onnx.reference.op_run import OpRun

from onnx_attnfuse.graph.ops import CONTRIB

Array: TypeAlias = npt.NDArray[Any]
Results: TypeAlias = tuple[Array, ...]


class Operator(OpRun):
    """An operator of that domain; the evaluator wants its class to be called as the operator is."""

    op_domain = CONTRIB
    op_schema: ClassVar[None] = None
    """Else the evaluator would take the defaults of the standard's operator of the same name."""

    def _run(self, *inputs: Any, **attributes: Any) -> Results:
        return self.called(*inputs, **attributes)

    @classmethod
    def called(cls, *inputs: Any, **attributes: Any) -> Results:
        """Computes the operator; inputs and attributes that are left out are None."""
        raise NotImplementedError(cls.__name__)
