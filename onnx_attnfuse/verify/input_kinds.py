"""The kind of each input of a model, by the operators that read it: token ids, masks, positions, lengths, biases, numbers.

    for name, kind in kinds(model.graph, facts).items(): ...

An integer that picks rows of a table of floats is an id, and the number of rows bounds it. One that reaches a sine or cosine is
a position. Any other of integers and truth values is a mask. A float that reaches a softmax without a product is a bias. Where
the graph tells ids from ids no further, as token types from positions, the name decides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.constants import constant_tensor, is_standard
from onnx_attnfuse.graph.dtypes import largest
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import CASTS, CONTRIB, REARRANGES
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.kernels.operators import info_of
from onnx_attnfuse.verify.inputs import Array, InputCase, Slot
from onnx_attnfuse.verify.subgraph import is_addend, uses_through

KindName = Literal["ids", "types", "positions", "mask", "bias", "lengths", "last", "total", "image", "numbers"]
"""Ids of tokens and of their types; ..., the place of the last key of each entry, the number of keys."""

_VIEWS = REARRANGES | CASTS | {"Expand", "Slice"}
_TO_ANGLES = _VIEWS | {"Concat", "Einsum", "MatMul", "Mul", "Div"}
_TO_SCORES = _VIEWS | frozenset(
    "Add And Concat Equal Gather GatherND Greater Less Max Min Mul Neg Not Or Pad Sub Tile Where".split()
)
_OTHERS: dict[tuple[str, int], KindName] = {
    ("Cos", 0): "positions",
    ("EmbedLayerNormalization", 0): "ids",
    ("EmbedLayerNormalization", 1): "types",
    ("EmbedLayerNormalization", 5): "mask",
    ("EmbedLayerNormalization", 6): "positions",
    ("Sin", 0): "positions",
}
"""The kind of inputs of operators without a record."""
_TYPES = 4
"""Tables of at most this many rows are of token types."""
_MAX_NODES_PER_INPUT = 256
_COLOURS = 3


@dataclasses.dataclass(frozen=True)
class InputKind:
    """The kind of one model input, with the bounds that its numbers need."""

    name: KindName
    below: int | None = None
    """A bound of ids, where a table has one."""
    keys: Dim | None = None
    """How many keys lengths may count."""
    rows: Dim | None = None
    """How many of these are new."""


def kinds(graph: ir.Graph, facts: Facts) -> dict[str, InputKind]:
    """The kind of every input that is fed, by name."""
    return {value.name or "": _kind(value, facts) for value in graph.inputs if value.const_value is None}


def slot_of(value: ir.Value, facts: Facts, kind: InputKind) -> Slot:
    """The input of a whole model as one to fill."""
    name, dtype, rank = value.name or "", facts.dtype(value) or ir.DataType.FLOAT, facts.rank(value) or 0
    masklike = kind.name == "bias" or not dtype.is_floating_point()
    role = "given" if masklike else "activation" if kind.name == "image" else "operand"
    return Slot(name, role, dtype, rank, blank=False, addend=is_addend(value))


def _kind(value: ir.Value, facts: Facts) -> InputKind:
    name, dtype = value.name or "", facts.dtype(value)
    if dtype is not None and dtype.is_floating_point():
        return _float_kind(value, facts)
    found = _by_use(value, facts)
    if found is None:
        return InputKind("positions" if "position" in name else "mask")
    if found.name == "mask" and facts.rank(value) == 1:
        return dataclasses.replace(found, name="lengths")
    if found.name == "ids" and "position" in name:
        return dataclasses.replace(found, name="positions")
    is_type = (found.below is not None and found.below <= _TYPES) or "type" in name or "segment" in name
    return dataclasses.replace(found, name="types") if found.name == "ids" and is_type else found


def _float_kind(value: ir.Value, facts: Facts) -> InputKind:
    for node, place in _reached(value, _TO_SCORES):
        if is_standard(node, "Softmax") or _recognised(node, place) == "bias":
            return InputKind("bias")
    dims = facts.dims(value) or ()
    return InputKind("image" if len(dims) == 4 and dims[1] == _COLOURS else "numbers")


def _by_use(value: ir.Value, facts: Facts) -> InputKind | None:
    """The kind of an integer input as far as operators tell that it reaches unchanged, or as an angle."""
    for node, place in _reached(value, _VIEWS):
        recognised = _recognised(node, place)
        if recognised is not None and recognised != "bias":
            keys, rows = _lengths(node, facts)
            return InputKind(recognised, keys=keys, rows=rows)
        if is_standard(node, "Gather") and place == 1 and (below := _rows(node.inputs[0])) is not None:
            return InputKind("ids", below)
    angles = (node for node, place in _reached(value, _TO_ANGLES) if _recognised(node, place) == "positions")
    return InputKind("positions") if next(angles, None) is not None else None


def _reached(value: ir.Value, through: frozenset[str]) -> Iterator[tuple[ir.Node, int]]:
    """The uses of a value and of its results through some operators, nearest first."""

    def passes(node: ir.Node, place: int) -> bool:
        return is_standard(node, *through) and (place == 0 or node.op_type not in _VIEWS)

    return uses_through(value, passes, _MAX_NODES_PER_INPUT)


def _recognised(node: ir.Node, place: int) -> KindName | None:
    """The kind that an operator gives the input at a place, or None."""
    info = info_of(node)
    if info is not None:
        role = info.role(place)
        return role if role in ("mask", "bias", "positions", "lengths", "last", "total") else None
    return _OTHERS.get((node.op_type, place)) if is_standard(node) or node.domain == CONTRIB else None


def _lengths(node: ir.Node, facts: Facts) -> tuple[Dim | None, Dim | None]:
    """How many keys an attention has, and how many of them are new."""
    info = info_of(node)
    key, past = (None, None) if info is None else (info.first(node, "key"), info.first(node, "past"))
    new, earlier = (facts.dims(value) for value in (key or node.inputs[0], past))
    if new is None or len(new) < 2:
        return None, None
    rows = new[2] if len(new) == 4 else new[1]
    return rows + (earlier[2] if earlier is not None and len(earlier) == 4 else 0), rows


def _rows(table: ir.Value | None) -> int | None:
    """How many rows a constant table of floats has."""
    tensor = constant_tensor(table)
    if tensor is None or len(tensor.shape) < 2 or not tensor.dtype.is_floating_point():
        return None
    first = tensor.shape[0]
    return first if isinstance(first, int) else None


_TOKENS = 10
"""Ids are below this where no table tells a bound."""
_MAX_TOKEN_ID = 1 << 30


def as_its_kind(kind: InputKind, array: Array, case: InputCase, values: Mapping[str, int], seed: int = 0) -> Array:
    """An input as its kind wants it; masks, biases and numbers stay as the case has them."""
    if kind.name == "ids":
        rng = np.random.default_rng((len(case.pattern), seed))
        return rng.integers(0, min(kind.below or _TOKENS, _MAX_TOKEN_ID), array.shape).astype(array.dtype)
    if kind.name == "types":
        return np.minimum(array, (kind.below or 2) - 1).astype(array.dtype)
    if kind.name == "positions":
        last = array.shape[-1] if array.ndim else 1
        counted = np.arange(last) if kind.below is None else np.minimum(np.arange(last), kind.below - 1)
        return np.broadcast_to(counted if array.ndim else counted[0], array.shape).astype(array.dtype)
    if kind.name == "image":
        return np.tanh(array).astype(array.dtype)
    if kind.name not in {"lengths", "last", "total"} or kind.keys is None or kind.rows is None:
        return array
    keys, rows = (sizes.evaluate(dim, values) for dim in (kind.keys, kind.rows))
    return _counted(kind, array, case, keys, rows)


def _counted(kind: InputKind, array: Array, case: InputCase, keys: int, rows: int) -> Array:
    """How many keys each entry has; in a prompt of several lengths no more is claimed of the rest, so there it has all."""
    if kind.name == "total":
        return np.full(array.shape, keys).astype(array.dtype)
    count = array.shape[0] if array.ndim else 1
    shorter = np.arange(count) % keys
    if kind.name == "last":
        shorter = np.arange(count) % (keys - rows + 1)
    elif case.pattern == "empty" and array.ndim:
        shorter[-1] = keys
    found = keys - (shorter if case.pattern not in {"full", "index"} else np.zeros(count, np.int64))
    return np.reshape(found - (kind.name == "last"), array.shape).astype(array.dtype)


def float_inputs(model: ir.Model) -> dict[str, ir.DataType]:
    """The types of float inputs."""
    facts = Facts(model.graph)
    found = {value.name or "": facts.dtype(value) for value in model.graph.inputs}
    return {name: dtype for name, dtype in found.items() if dtype is not None and dtype.is_floating_point()}


def in_both(array: Array, dtype: ir.DataType | None) -> Array:
    """Numbers that another float type has too: rounded to it, and overflows are its lowest or largest."""
    if dtype is None or dtype.itemsize >= array.dtype.itemsize:
        return array
    bounded = np.where(np.isfinite(array), np.clip(array, -largest(dtype), largest(dtype)), array)
    return bounded.astype(dtype.numpy()).astype(array.dtype)
