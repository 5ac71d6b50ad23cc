"""From Softmax down to the product with the values."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axis, Factor, leaves
from onnx_attnfuse.attention.axes.views import IndexedValue, downward
from onnx_attnfuse.attention.match.contraction import Contraction, operand_axes, read_contraction
from onnx_attnfuse.attention.match.steps import Kept, Readers, Taken, Weighted, WeightStep, Zeroed
from onnx_attnfuse.graph.constants import is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.rounding import why_no_pair
from onnx_attnfuse.reasons import Refused


@dataclasses.dataclass(frozen=True)
class WeightPath:
    """The steps between the Softmax and the product with the values, and that product."""

    contraction: Contraction
    value: IndexedValue
    output: IndexedValue
    v_head_axis: Axis
    steps: tuple[Taken[WeightStep], ...]
    nodes: tuple[ir.Node, ...]


def read_weights(weights: IndexedValue, key_axis: Axis, facts: Facts, readers: Readers) -> WeightPath:
    """Walks from the output of Softmax to the product with the values.

    Raises:
        Refused: The walk met something it cannot read; `not-attention` if there is no product at all.
    """
    failures: list[Refused] = []
    path = _descend(weights, key_axis, facts, readers, failures)
    if path is not None:
        return path
    readable = [failure for failure in failures if failure.reason.code != "not-attention"]
    raise (readable or failures or [Refused("not-attention", "the softmax is not multiplied with values")])[0]


def _descend(indexed: IndexedValue, key_axis: Axis, facts: Facts, readers: Readers, failures: list[Refused]) -> WeightPath | None:
    for node, index in indexed.value.uses():
        if node.op_type == "Shape":
            continue
        try:
            path = _through(node, index, indexed, key_axis, facts, readers, failures)
        except Refused as refused:
            failures.append(refused)
            continue
        if path is not None:
            return path
    return None


def _through(
    node: ir.Node, index: int, indexed: IndexedValue, key_axis: Axis, facts: Facts, readers: Readers, failures: list[Refused]
) -> WeightPath | None:
    mixed = _mixture(node, index, indexed, key_axis, facts)
    if mixed is not None and _descend(mixed, key_axis, facts, readers, failures) is not None:
        raise Refused(
            "mixed-heads", "the weights of several heads are mixed before the product with the values (talking heads)", node.name
        )
    contraction = read_contraction(node, facts)
    if contraction is not None and index < 2:
        return _read_product(contraction, index, indexed, key_axis, facts)
    view = downward(node, indexed.axes, facts)
    if view is not None:
        path = _descend(view, key_axis, facts, readers, failures)
        return path and dataclasses.replace(path, nodes=(node, *path.nodes))
    reader = readers.weight(node)
    step = reader(node, indexed.value, facts) if reader is not None else None
    if step is None and index == 0 and is_standard(node, "Slice"):
        raise Refused("extra-column", "columns of the softmax are dropped after it, as with a sink or blocks of keys", node.name)
    if step is None and (reason := why_no_pair(node, facts)) is not None:
        raise Refused(reason.code, reason.message, reason.node)
    if step is None:
        raise Refused("not-attention", f"{node.op_type} reads the softmax, and is not a product with values", node.name)
    if facts.rank(step.output) != len(indexed.axes):
        raise Refused("broadcast-weights", "one set of weights is multiplied by several factors", node.name)
    also = () if isinstance(step, (Zeroed, Weighted)) else step.also
    path = _descend(IndexedValue(step.output, indexed.axes), key_axis, facts, readers, failures)
    if path is None:
        return None
    taken: Taken[WeightStep] = Taken(step, node, indexed.axes)
    steps = path.steps if isinstance(step, Kept) else (taken, *path.steps)
    return dataclasses.replace(path, steps=steps, nodes=(node, *also, *path.nodes))


def _mixture(node: ir.Node, index: int, indexed: IndexedValue, key_axis: Axis, facts: Facts) -> IndexedValue | None:
    """The weights mixed by a node that keeps their columns and sums over others of their axes, as heads; None if it does not."""
    dims, before = facts.dims(node.outputs[0]), facts.dims(indexed.value)
    if dims is None or before is None or index > 1:
        return None
    if is_standard(node, "Conv"):
        if index != 0 or dims[2:] != before[2:] or not set(leaves(indexed.axes[1])).isdisjoint(leaves(key_axis)):
            return None
        return IndexedValue(node.outputs[0], (indexed.axes[0], (Factor(dims[1]),), *indexed.axes[2:]))
    contraction = read_contraction(node, facts)
    if contraction is None or not contraction.summed:
        return None
    known: dict[str, Axis] = dict(zip(contraction.labels[index], indexed.axes, strict=True))
    axes = tuple(known.get(label, (Factor(dim),)) for label, dim in zip(contraction.out, dims, strict=True))
    kept = {leaf for axis in axes for leaf in leaves(axis)}
    return IndexedValue(node.outputs[0], axes) if kept.issuperset(leaves(key_axis)) else None


def _read_product(contraction: Contraction, index: int, indexed: IndexedValue, key_axis: Axis, facts: Facts) -> WeightPath:
    name = contraction.node.name
    known: dict[str, Axis] = {label: leaves(axis) for label, axis in zip(contraction.labels[index], indexed.axes, strict=True)}
    summed = [leaf for label in contraction.labels[index] if label in contraction.summed for leaf in known[label]]
    if set(summed) != set(leaves(key_axis)):
        raise Refused("not-attention", "the product with the values does not sum over the columns of the softmax", name)
    dims = facts.dims(contraction.operands[1 - index])
    if dims is None:
        raise Refused("unknown-rank", f"the rank of the values '{contraction.operands[1 - index].name}' is unknown", name)
    v_head_axis: list[Factor] = []
    for label, dim in zip(contraction.labels[1 - index], dims, strict=True):
        if label in known:
            if dim != 1 and not known[label]:
                raise Refused("broadcast-weights", "one set of weights is used with several sets of values", name)
        else:
            known[label] = () if dim == 1 else (Factor(dim),)
            v_head_axis.extend(known[label])
    value_axes = operand_axes(contraction, 1 - index, known, facts)
    assert value_axes is not None
    output = IndexedValue(contraction.node.outputs[0], tuple(known[label] for label in contraction.out))
    value = IndexedValue(contraction.operands[1 - index], value_axes)
    return WeightPath(contraction, value, output, tuple(v_head_axis), (), (contraction.node,))
