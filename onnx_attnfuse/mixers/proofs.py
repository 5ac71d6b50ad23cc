"""Proofs that the nodes built for a mixer equal the replaced ones: certificates' meanings execute both from the same values.

    ends = proved([(old, new)], lambda value: value in operands, facts)     # the values that both were executed from, or None

No solver is asked: two results are equal where they come to one normal form, whatever the sizes are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnx_attnfuse.certify.arrays import axes_of, without_repeats
from onnx_attnfuse.certify.claims import places_of
from onnx_attnfuse.certify.execution import UNKNOWN, Execution
from onnx_attnfuse.certify.interned import aside
from onnx_attnfuse.certify.prover import Prover
from onnx_attnfuse.certify.terms import ONE, ZERO, Term, size
from onnx_attnfuse.graph.constants import constant_array, is_constant
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import ASKS_SHAPE, CASTS, ELEMENTWISE, GATHERS, REARRANGES, REDUCTIONS, REPEATS, SLICES, is_standard

Ends = Callable[[ir.Value], bool]
_LIGHT = ASKS_SHAPE | CASTS | ELEMENTWISE | GATHERS | REARRANGES | REDUCTIONS | REPEATS | SLICES | {"Softplus", "Concat"}


class Reading(Execution):
    """A graph, executed from some values, each an array with a name of its own; constants of one content are one."""

    def __init__(self, ends: Ends, facts: Facts) -> None:
        self._named: dict[object, str] = {}
        self._valued: dict[str, ir.Value] = {}
        super().__init__(facts, self._name, {}, ends, facts.opset, size)

    def _name(self, value: ir.Value) -> str:
        array = constant_array(value) if is_constant(value) else None
        content = None if array is None else without_repeats(array)
        key = value if content is None else (str(content.dtype), content.shape, content.tobytes())
        name = self._named.setdefault(key, f"v{len(self._named)}")
        self._valued[name] = value
        return name

    def element(self, value: ir.Value) -> tuple[tuple[Term, ...], Term]:
        """Indices of a value, 0 on axes of length 1, and its element there, computed by the nodes above it."""
        array = self.array(value, beyond=True)
        place = tuple(ZERO if length is ONE else item for length, item in zip(array.shape, axes_of(array), strict=True))
        return place, array.at(*place)

    def value(self, atom: Term) -> ir.Value | None:
        """The value that an atom is an element of; None if it is something else."""
        return self._valued.get(atom.data) if atom.op == "element" else None


def is_heavy(value: ir.Value) -> bool:
    """Whether execution ends at a value that is neither a view nor computed element by element."""
    return not is_standard(value.producer(), *_LIGHT)


def proved(pairs: Sequence[tuple[ir.Value, ir.Value]], ends: Ends, facts: Facts) -> tuple[ir.Value, ...] | None:
    """The values from which both of each pair were executed, if all elements are equal then; None if they may differ."""
    with aside():
        reading, prover = Reading(ends, facts), Prover(lambda _: False)
        try:
            for old, new in pairs:
                one, other = reading.array(old, beyond=True), reading.array(new, beyond=True)
                lengths = [*zip(one.shape, other.shape, strict=True)]
                place = [ZERO if length is ONE else item for item, length in zip(places_of(one, other), one.shape, strict=True)]
                if not all(prover.equal(*terms, ()) for terms in (*lengths, (one.at(*place), other.at(*place)))):
                    return None
        except UNKNOWN:
            return None
        return tuple(value for value in reading.read.values() if not is_constant(value))
