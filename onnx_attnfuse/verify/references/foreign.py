"""Operators of other domains in NumPy, as their authors give them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np

from onnx_attnfuse.verify.references.core import Operator, Results


def foreign(domain: str, op: str, reference: Callable[..., Any]) -> type[Operator]:
    """An operator for onnx's evaluator.

    Args:
        domain: Its domain.
        op: Its name.
        reference: Gives the output, or a tuple of them, from inputs as arrays (None where left out) and attributes by name.
    """

    def called(*inputs: Any, **attributes: Any) -> Results:
        found = reference(*inputs, **{name: value for name, value in attributes.items() if value is not None})
        outputs = cast("tuple[Any, ...]", found if isinstance(found, tuple) else (found,))
        dtype = next((item.dtype for item in inputs if item is not None), None)
        return tuple(_typed(np.asarray(output), dtype) for output in outputs)

    return type(op, (Operator,), {"op_domain": domain, "called": staticmethod(called)})


def _typed(output: Any, dtype: Any) -> Any:
    """Floats in the type of the first input: NumPy computes more than it is given in float64."""
    return output.astype(dtype) if dtype is not None and output.dtype.kind == "f" and dtype.kind in "fV" else output
