"""Where tokens are multiplied by their mask or replaced by a number at padding, as pooling by a mask does."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axis, Factor
from onnx_attnfuse.attention.masks.classify import position
from onnx_attnfuse.attention.masks.expression import Expression, conjunction, constant, negation, truth
from onnx_attnfuse.attention.masks.fully_masked import implied
from onnx_attnfuse.attention.masks.index_reader import Reader
from onnx_attnfuse.attention.masks.predicates import Padding, Predicate
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.fusion.packing.token_axes import Marks
from onnx_attnfuse.graph.ops import read_as


class MaskedRows:
    """The padding of an attention as something to compare other masks with."""

    def __init__(self, reader: Reader, spec: AttentionSpec, predicates: Iterable[Predicate]) -> None:
        self._reader = reader
        self._at = {"b": position(spec.axes.b), "s": position(spec.axes.j)}
        self._kept = conjunction(item.predicate for item in predicates if isinstance(item, Padding))

    def forgets(self, node: ir.Node, value: ir.Value, marks: Marks) -> bool:
        """Whether the result of a node does not depend on rows of padding of one of its inputs.

        Args:
            node: The node.
            value: The input; its rows of padding are finite.
            marks: Its axes.
        """
        match read_as(node):
            case ("", "Mul"):
                others = [item for item in node.inputs if item is not value and item is not None]
                return any(self._keeps(truth(read)) for item in others if (read := self._read(item, marks)) is not None)
            case ("", "Where"):
                condition, chosen, other = node.inputs
                read = None if condition is None else self._read(condition, marks)
                if read is None or (chosen is value) == (other is value):
                    return False
                return self._keeps(read if chosen is value else negation(read))
            case _:
                return False

    def _keeps(self, condition: Expression) -> bool:
        """Whether a condition holds at no place of padding."""
        return implied(condition, self._kept)

    def _read(self, value: ir.Value, marks: Marks) -> Expression | None:
        """The element of a value that meets a token."""
        dims = self._reader.facts.dims(value)
        if dims is None or len(dims) > len(marks):
            return None
        at: list[Expression] = []
        for mark, dim in zip(marks[len(marks) - len(dims) :], dims, strict=True):
            if len(mark) > 1:
                return None
            channels: Axis = (Factor(dim),)
            at.append(constant(0) if dim == 1 else self._at[mark] if mark else position(channels))
        return self._reader.element(value, tuple(at))
