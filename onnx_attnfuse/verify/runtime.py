"""Running a piece: by ONNX Runtime on the CPU with nothing optimised; where it refuses the original, by ONNX's own reference.

Graphs that end the process in a kernel are known beforehand as far as possible (`is_dangerous`). They were found by running
every operator of pieces on empty shapes and hostile numbers: kernels of attention and Einsum divide by the number of heads or
channels, integer quotients by whatever they are given.

Where ONNX Runtime has no kernel on the CPU for an operator of the piece, the reference runs it, with the operator in NumPy.
"""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import onnx
import onnx_ir as ir

from onnx_attnfuse.errors import MissingDependencyError
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.constants import constant_array, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.sizes import Size
from onnx_attnfuse.kernels.operators import find, info_of
from onnx_attnfuse.verify import child, subprocess_runner
from onnx_attnfuse.verify.inputs import Array
from onnx_attnfuse.verify.subprocess_runner import RuntimeRefusal

if TYPE_CHECKING:
    from onnx_attnfuse.verify.references import Operator

_REFERENCE_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    TypeError,
)
Operators: TypeAlias = Sequence[type["Operator"]]
OLDEST = (1, 28)
"""The ONNX Runtime from which on its kernels compute what their documentation says; the extras cpu and gpu ask for it.

Before it Attention of ai.onnx computes other rows without a key, before 1.24 GroupQueryAttention with a window other windows.
"""
_QUOTIENTS = frozenset(["Div", "Mod"])
_TRAPS = (0, -1)
"""Divisors that trap: anything by 0, which newer runtimes refuse, and the lowest number by -1."""
_READ = 1 << 20
INSTALL = "run pip install 'onnx-attnfuse[cpu]'" if sys.version_info >= (3, 11) else "use Python 3.11 or newer"
"""The remedy for a missing onnxruntime."""


def available() -> bool:
    """Whether onnxruntime is installed."""
    return importlib.util.find_spec("onnxruntime") is not None


def loaded() -> Any:
    """The module onnxruntime.

    Raises:
        MissingDependencyError: It is not installed, or its import fails.
    """
    try:
        return importlib.import_module("onnxruntime")
    except Exception as error:  # an import runs code of others, and libraries of the system
        remedy = "run pip install --force-reinstall 'onnx-attnfuse[cpu]'"
        raise MissingDependencyError(
            f"onnxruntime cannot be imported, {type(error).__name__}: {one_line(error)}; {remedy}"
        ) from error


def installed() -> str:
    """The version of the installed onnxruntime.

    Raises:
        MissingDependencyError: Its import fails.
    """
    return str(loaded().__version__)


def judging() -> tuple[int, int] | None:
    """The version of the ONNX Runtime that judges here, major and minor, whichever distribution it is of; None: there is none."""
    found = re.match(r"(\d+)\.(\d+)", installed()) if available() else None
    return None if found is None else (int(found[1]), int(found[2]))


def is_old(version: str) -> bool:
    """Whether the kernels of an ONNX Runtime cannot be trusted where they differ from the expected result, or refuse it."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and tuple(map(int, found.groups())) < OLDEST


class PieceSession:
    """A model in ONNX Runtime."""

    def __init__(self, model: bytes | str, folder: pathlib.Path | None = None) -> None:
        """Loads a model.

        Args:
            model: A serialized model, or the name of a file.
            folder: Where a serialized model's data files lie.

        Raises:
            MissingDependencyError: The import of onnxruntime fails.
            RuntimeRefusal: ONNX Runtime does not take it.
        """
        onnxruntime = loaded()
        self._source = model, folder
        self.apart = False
        """Whether to run it in another process, as running it may end this one."""
        self._errors = _runtime_errors()
        try:
            self._session: Any = child.session(onnxruntime, model, None if folder is None else str(folder))
        except self._errors as error:
            raise RuntimeRefusal(one_line(error)) from error

    def run(self, outputs: Sequence[str] | None, feeds: Mapping[str, Array]) -> list[Array]:
        """The outputs asked for, or all.

        Raises:
            RuntimeRefusal: ONNX Runtime ended with an error.
            ProcessDied: It was run apart and ended its process.
        """
        if self.apart:
            return subprocess_runner.run(*self._source, outputs, feeds)
        try:
            return cast("list[Array]", self._session.run(None if outputs is None else list(outputs), dict(feeds)))
        except self._errors as error:
            raise RuntimeRefusal(one_line(error)) from error

    def inputs(self) -> list[str]:
        """Names of the inputs that have to be fed."""
        return [given.name for given in self._session.get_inputs()]

    def outputs(self) -> list[str]:
        """Names of the outputs."""
        return [output.name for output in self._session.get_outputs()]


class Reference:
    """A model in ONNX's reference implementation, with the operators of ONNX Runtime in NumPy."""

    def __init__(self, model: onnx.ModelProto, operators: Operators = ()) -> None:
        """Loads a model.

        Args:
            model: The model.
            operators: Operators of other domains.

        Raises:
            RuntimeRefusal: The reference has no implementation of an operator.
        """
        from onnx.reference import ReferenceEvaluator

        from onnx_attnfuse.verify.references import OPERATORS

        self.apart = False
        """As that of `PieceSession`; NumPy ends no process."""
        try:
            self._evaluator: Any = ReferenceEvaluator(_all_named(model), new_ops=[*OPERATORS, *operators])
        except (ValueError, *_REFERENCE_ERRORS) as error:
            raise RuntimeRefusal(one_line(error)) from error

    def run(self, outputs: Sequence[str] | None, feeds: Mapping[str, Array]) -> list[Array]:
        """The outputs asked for, or all.

        Raises:
            RuntimeRefusal: The reference ended with an error.
        """
        try:
            with np.errstate(all="ignore"):
                return cast("list[Array]", self._evaluator.run(None if outputs is None else list(outputs), dict(feeds)))
        except (ValueError, *_REFERENCE_ERRORS) as error:
            raise RuntimeRefusal(one_line(error)) from error

    def inputs(self) -> list[str]:
        """Names of the inputs that have to be fed."""
        return list(self._evaluator.input_names)

    def outputs(self) -> list[str]:
        """Names of the outputs."""
        return list(self._evaluator.output_names)


def load(model: onnx.ModelProto, operators: Operators = ()) -> PieceSession | Reference:
    """A model in ONNX Runtime, or in the reference if ONNX Runtime has not all the kernels.

    Args:
        model: The model.
        operators: Operators of other domains, which ONNX Runtime does not know.

    Raises:
        RuntimeRefusal: It is not taken.
    """
    known = {(operator.op_domain, operator.__name__) for operator in operators}
    foreign = any((node.domain, node.op_type) in known for part in (model.graph, *model.functions) for node in part.node)
    return Reference(model, operators) if foreign or without_kernel(model) else PieceSession(model.SerializeToString())


def without_kernel(model: onnx.ModelProto) -> list[str]:
    """The operators of the model that ONNX Runtime cannot run on the CPU, at all or with the inputs that they are given."""
    return sorted({node.op_type for node in model.graph.node if _lacks_kernel(node)})


def _lacks_kernel(node: onnx.NodeProto) -> bool:
    info = find(node.domain, node.op_type)
    if info is None:
        return False
    given = {name for name, value in zip(info.inputs, node.input, strict=False) if value}
    return info.on_cpu == "no kernel" or not given.isdisjoint(info.not_on_cpu)


def _all_named(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with a name for every output: the evaluator keeps one without as '', which is what absent inputs are called."""
    named = onnx.ModelProto()
    named.CopyFrom(model)
    for part in (named.graph, *named.functions):
        for count, node in enumerate(part.node):
            node.output[:] = [name or f"unnamed {count} {place}" for place, name in enumerate(node.output)]
    return named


def _runtime_errors() -> tuple[type[Exception], ...]:
    """Every exception that ONNX Runtime raises; its own have no common base but `Exception`."""
    state = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")
    members: list[object] = list(vars(state).values())
    own = [member for member in members if isinstance(member, type) and issubclass(member, Exception)]
    return (*own, RuntimeError, ValueError, MemoryError)


def one_line(error: Exception) -> str:
    """The error's message without line breaks, cut to a readable length."""
    return " ".join(str(error).split())[:300]


def is_dangerous(nodes: Iterable[ir.Node], facts: Facts, values: Mapping[str, int]) -> bool:
    """Whether running `nodes` with the symbols of `values` may end the process."""
    return any(_may_divide_by_zero(node, facts, values) or _is_starved(node, facts, values) for node in nodes)


def _is_starved(node: ir.Node, facts: Facts, values: Mapping[str, int]) -> bool:
    """Whether a fragile operator is given something empty that is no past."""
    info = info_of(node)
    if node.op_type != "Einsum" and (info is None or not info.fragile):
        return False
    operands = [value for place, value in enumerate(node.inputs) if info is None or info.role(place) != "past"]
    return any(sizes.evaluate(dim, values) == 0 for value in operands if value is not None for dim in facts.dims(value) or ())


def _may_divide_by_zero(node: ir.Node, facts: Facts, values: Mapping[str, int]) -> bool:
    """Whether a quotient of integers has a divisor that is not known to be harmless."""
    if node.op_type not in _QUOTIENTS or not is_standard(node) or len(node.inputs) < 2:
        return False
    dtype = facts.dtype(node.outputs[0])
    if dtype is None or not dtype.is_integer():
        return False
    divisor = node.inputs[1]
    content = facts.content(divisor)
    if content is not None:
        items = content if isinstance(content, tuple) else (content,)
        return any(not isinstance(item, (int, Size)) or sizes.evaluate(item, values) in _TRAPS for item in items)
    array = constant_array(divisor, limit=_READ)
    return array is None or bool(np.isin(array, _TRAPS).any())
