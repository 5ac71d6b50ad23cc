"""The ways from Softmax to both products: up to Q·Kᵀ, and down to that with the values.

Every operator on the way is read as a step, or the walk stops there and says so.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, Axis, Factor, leaves
from onnx_attnfuse.attention.axes.views import IndexedValue, aligned, downward, lacks_axis, upward
from onnx_attnfuse.attention.match.contractions import (
    Contraction,
    is_multiplied,
    is_of_weights,
    operand_axes,
    read_contraction,
)
from onnx_attnfuse.attention.match.softmax import is_one_for_all_keys
from onnx_attnfuse.attention.match.steps import (
    Kept,
    Readers,
    ScoreStep,
    Shifted,
    Taken,
    WeightStep,
)
from onnx_attnfuse.graph.constants import is_constant, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import SLICES
from onnx_attnfuse.graph.rounding import why_no_pair
from onnx_attnfuse.reasons import Refused


@dataclasses.dataclass(frozen=True)
class Product:
    """Q·Kᵀ with its operands laid out."""

    contraction: Contraction
    query: IndexedValue
    key: IndexedValue
    query_axis: Axis
    head_axis: Axis
    batch_axis: Axis


@dataclasses.dataclass(frozen=True)
class ScorePath:
    """The steps between the product of queries and keys and the Softmax, first step first."""

    product: Product
    steps: tuple[Taken[ScoreStep], ...]
    nodes: tuple[ir.Node, ...]

    def columns(self) -> frozenset[Factor]:
        """All factors of the scores that only keys run over."""
        product = self.product
        others = {*leaves(product.query_axis), *leaves(product.batch_axis), *leaves(product.head_axis)}
        return frozenset(leaf for axis in product.key.axes for leaf in leaves(axis)) - others


class _Walk:
    def __init__(self, key_axis: Axis, facts: Facts, readers: Readers) -> None:
        self.key_axis = key_axis
        self.facts = facts
        self.readers = readers
        self.failures: list[tuple[int, Refused]] = []
        self.stuck: set[ir.Value] = set()

    def climb(self, indexed: IndexedValue, depth: int) -> ScorePath | None:
        if indexed.value in self.stuck:
            return None
        try:
            path = self._climb(indexed, depth)
        except Refused as refused:
            self.failures.append((depth, refused))
            path = None
        if path is None:
            self.stuck.add(indexed.value)
        return path

    def _climb(self, indexed: IndexedValue, depth: int) -> ScorePath | None:
        node = indexed.value.producer()
        if node is None:
            raise Refused("no-product", f"the scores come from '{indexed.value.name}', not from a product of queries and keys")
        contraction = read_contraction(node, self.facts)
        if contraction is not None:
            return ScorePath(read_product(contraction, indexed.axes, self.key_axis, self.facts), (), (node,))
        view = upward(indexed, self.facts)
        if view is not None:
            path = self.climb(view, depth + 1)
            return path and dataclasses.replace(path, nodes=(*path.nodes, node))
        reader = self.readers.score(node)
        steps = reader(node, self.facts) if reader is not None else ()
        if not steps and (reason := why_no_pair(node, self.facts)) is not None:
            raise Refused(reason.code, reason.message, reason.node)
        if is_standard(node, "Conv", *SLICES) and is_of_weights(indexed.value, self.facts):
            raise Refused("not-attention", "the scores are a part of a product with weights, without keys", node.name)
        if not steps:
            raise Refused("unreadable-score-step", f"{node.op_type} between Q·Kᵀ and Softmax cannot be read", node.name)
        for step in sorted(steps, key=lambda step: self._missing(step, indexed.axes)):
            inner = self._inner(step, indexed, node)
            path = None if inner is None else self.climb(inner, depth + 1)
            if path is not None:
                taken: Taken[ScoreStep] = Taken(step, node, indexed.axes)
                return ScorePath(path.product, (*path.steps, taken), (*path.nodes, *step.further, node))
        return None

    def _missing(self, step: ScoreStep, axes: Axes) -> int:
        dims = self.facts.dims(step.scores) or ()
        return len(axes) - sum(dim != 1 for dim in dims)

    def _inner(self, step: ScoreStep, indexed: IndexedValue, node: ir.Node) -> IndexedValue | None:
        if isinstance(step, Shifted) and not is_one_for_all_keys(step, indexed.axes, self.key_axis, self.facts):
            message = f"the maximum '{step.largest.name}' is subtracted, which differs by key"
            self.failures.append((0, Refused("shift-by-key", message, node.name)))
            return None
        inner = aligned(step.scores, indexed.axes, self.facts)
        if inner is None:
            self.failures.append((0, Refused("unknown-rank", f"the rank of '{step.scores.name}' is unknown", node.name)))
            return None
        if lacks_axis(inner, indexed.axes):
            message = f"'{step.scores.name}' has fewer rows, columns or heads than the softmax"
            self.failures.append((0, Refused("broadcast-scores", message, node.name)))
            return None
        return inner


def read_scores(scores: IndexedValue, key_axis: Axis, facts: Facts, readers: Readers) -> ScorePath:
    """Walks from the input of Softmax to the product of queries and keys.

    Raises:
        Refused: The walk met something it cannot read; of several branches the one that came furthest speaks.
    """
    walk = _Walk(key_axis, facts, readers)
    path = walk.climb(scores, 0)
    if path is not None:
        return path
    raise max(walk.failures, key=lambda failure: failure[0])[1]


def read_product(contraction: Contraction, axes: Axes, key_axis: Axis, facts: Facts) -> Product:
    """Tells queries from keys: keys run along the axis that Softmax normalises.

    Raises:
        Refused: The product is none of queries with keys.
    """
    name = contraction.node.name
    columns = set(leaves(key_axis))
    known: dict[str, Axis] = {label: leaves(axis) for label, axis in zip(contraction.out, axes, strict=True)}
    key_labels = {label for label, axis in known.items() if columns & set(axis)}
    covered = {factor for label in key_labels for factor in known[label]}
    if covered > columns and any(map(is_constant, contraction.operands)):
        raise Refused("not-attention", "the scores are columns of a product with weights, without keys", name)
    if covered != columns:
        raise Refused("partial-product", "the product does not cover all columns of the softmax", name)
    holders = [index for index in (0, 1) if key_labels <= set(contraction.labels[index])]
    if len(holders) != 1 or key_labels & set(contraction.labels[1 - holders[0]]):
        raise Refused("no-product", "both factors of the product have the columns of the softmax", name)
    key = holders[0]
    dims = facts.dims(contraction.operands[1 - key])
    if dims is None:
        raise Refused("unknown-rank", "the rank of a factor of Q·Kᵀ is unknown", name)
    for label in contraction.summed:
        size = dims[contraction.labels[1 - key].index(label)]
        known[label] = () if size == 1 else (Factor(size),)
    query_laid, key_laid = (operand_axes(contraction, index, known, facts) for index in (1 - key, key))
    if query_laid is None or key_laid is None:
        raise Refused("unknown-rank", "the rank of a factor of Q·Kᵀ is unknown", name)
    rows = [label for label in contraction.out if label in contraction.labels[1 - key] and label not in contraction.labels[key]]
    query_axis = known[rows[-1]] if rows else ()
    row_leaves = set(leaves(query_axis))
    return Product(
        contraction,
        IndexedValue(contraction.operands[1 - key], query_laid),
        IndexedValue(contraction.operands[key], key_laid),
        query_axis,
        tuple(leaf for label in contraction.labels[1 - key] if label in contraction.summed for leaf in known[label]),
        tuple(leaf for axis in axes for leaf in leaves(axis) if leaf not in columns and leaf not in row_leaves),
    )


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
    if step is None and index == 0 and is_standard(node, "Slice") and is_multiplied(node, facts):
        cuts = sum(
            is_standard(user, "Slice") and is_multiplied(user, facts) for user, place in indexed.value.uses() if place == 0
        )
        dropped = "columns of the softmax are dropped after it, as with a sink or blocks of keys"
        message = f"the softmax is cut into {cuts} parts, each multiplied by values of its own" if cuts > 1 else dropped
        raise Refused("extra-column", message, node.name)
    if step is None and (reason := why_no_pair(node, facts)) is not None:
        raise Refused(reason.code, reason.message, reason.node)
    if step is None and is_multiplied(node, facts):
        message = f"{node.op_type} between Softmax and the product with the values cannot be read"
        raise Refused("unreadable-weight-step", message, node.name)
    if step is None:
        raise Refused("not-attention", f"{node.op_type} reads the softmax, and is not a product with values", node.name)
    if facts.rank(step.output) != len(indexed.axes):
        raise Refused("broadcast-weights", "one set of weights is multiplied by several factors", node.name)
    path = _descend(IndexedValue(step.output, indexed.axes), key_axis, facts, readers, failures)
    if path is None:
        return None
    taken: Taken[WeightStep] = Taken(step, node, indexed.axes)
    steps = path.steps if isinstance(step, Kept) else (taken, *path.steps)
    return dataclasses.replace(path, steps=steps, nodes=(node, *step.further, *path.nodes))


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
