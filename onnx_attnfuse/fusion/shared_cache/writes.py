"""Writing new keys or values into a buffer of a fixed length: which node does it, along which axis, and from which position on.

    write = read_write(value, reader)   # present[..., position + i, :] = new[..., i, :]

Whatever the operator, the positions are read as a formula: entry i of the new ones goes to `position + i`, and everything along
the other axes goes where it is.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Factor
from onnx_attnfuse.attention.masks.index_reader import Reader
from onnx_attnfuse.attention.masks.mask_terms import element_of, elements_of, index, value_of
from onnx_attnfuse.attention.masks.scatters import scattered_to
from onnx_attnfuse.certify.terms import ZERO, Term, add
from onnx_attnfuse.graph.constants import attribute, given, is_standard

_OPERATORS = "ScatterND", "ScatterElements", "TensorScatter"


@dataclasses.dataclass(frozen=True)
class Write:
    """New entries that take the place of some of a buffer."""

    node: ir.Node
    axis: int
    """The axis of positions in the buffer, the new entries and the result alike."""
    position: ir.Value
    """The input of the model that says where the first of the new entries goes, (), (1) or (s)."""

    @property
    def buffer(self) -> ir.Value:
        """The buffer that a write goes into."""
        return _input(self.node, 0)

    @property
    def new(self) -> ir.Value:
        """The new keys or values that are written."""
        return _input(self.node, 1 if self.node.op_type == "TensorScatter" else 2)

    @property
    def written(self) -> ir.Value:
        """The buffer afterwards."""
        return self.node.outputs[0]


def writer(value: ir.Value) -> ir.Node | None:
    """The node that gives a value by writing into another one; None where none does."""
    node = value.producer()
    return node if is_standard(node, *_OPERATORS) else None


def written_at(node: ir.Node) -> ir.Value | None:
    """The indices at which a node writes into another value; None where it does not."""
    if not is_standard(node, *_OPERATORS):
        return None
    return given(node, 2 if node.op_type == "TensorScatter" else 1)


def read_write(node: ir.Node, reader: Reader) -> Write | str:
    """A node that writes new entries one after the other, or why it is not known to do so.

    Args:
        node: The node that `writer` has found.
        reader: Reads the indices that it writes at.
    """
    buffer, new = (None if value is None else reader.facts.dims(value) for value in (node.inputs[0], node.inputs[-1]))
    if node.op_type == "TensorScatter":
        new = None if node.inputs[1] is None else reader.facts.dims(node.inputs[1])
    if buffer is None or new is None or len(buffer) != len(new):
        return "the written part of the buffer is unknown"
    if attribute(node, "reduction", "none") != "none" or attribute(node, "mode", "linear") != "linear":
        return "new entries are combined with those that are there, or go round"
    where = [ZERO if dim == 1 else index(Factor(dim)) for dim in new]
    forms = scattered_to(node, where, reader)
    moved = [axis for axis, form in enumerate(forms) if form is not where[axis]]
    if len(moved) != 1 or any(
        one != other for axis, (one, other) in enumerate(zip(buffer, new, strict=True)) if axis != moved[0]
    ):
        return "it is not known that new entries are written whole, along one axis of the buffer"
    (axis,) = moved
    position = _position(forms[axis], where[axis])
    return Write(node, axis, position) if position is not None else "new entries do not go to a position that an input says"


def counted(position: ir.Value, place: Term) -> tuple[Term, ...]:
    """The forms of `position + place`, where an input says the position, or that of every place."""
    rank = None if position.shape is None else len(position.shape)
    if rank == 0:
        return (add(place, element_of(position, (), position.dtype)),)
    return tuple(add(rest, element_of(position, (at,), position.dtype)) for rest, at in ((place, ZERO), (ZERO, place)))


def _position(form: Term, place: Term) -> ir.Value | None:
    """The input that a form is counted from."""
    inputs = list(map(value_of, elements_of(form)))
    if len(inputs) != 1 or not inputs[0].is_graph_input() or inputs[0].const_value is not None or inputs[0].shape is None:
        return None
    return inputs[0] if len(inputs[0].shape) < 2 and form in counted(inputs[0], place) else None


def _input(node: ir.Node, place: int) -> ir.Value:
    value = node.inputs[place]
    assert value is not None
    return value
