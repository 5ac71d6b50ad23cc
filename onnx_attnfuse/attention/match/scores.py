"""From Softmax up to Q·Kᵀ: every operator on the way is read as a step or the walk stops there and says so."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, Axis, Factor, leaves
from onnx_attnfuse.attention.axes.views import IndexedValue, aligned, upward
from onnx_attnfuse.attention.match.contraction import Contraction, operand_axes, read_contraction
from onnx_attnfuse.attention.match.softmax import is_one_for_all_keys
from onnx_attnfuse.attention.match.steps import Passed, Readers, Rounded, ScoreStep, Shifted, Taken
from onnx_attnfuse.graph.constants import is_constant
from onnx_attnfuse.graph.facts import Facts
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
        if not steps:
            raise Refused("unreadable-score-step", f"{node.op_type} between Q·Kᵀ and Softmax cannot be read", node.name)
        for step in sorted(steps, key=lambda step: self._missing(step, indexed.axes)):
            inner = self._inner(step, indexed, node)
            path = None if inner is None else self.climb(inner, depth + 1)
            if path is not None:
                also = step.also if isinstance(step, (Passed, Rounded, Shifted)) else ()
                taken: Taken[ScoreStep] = Taken(step, node, indexed.axes)
                return ScorePath(path.product, (*path.steps, taken), (*path.nodes, *also, node))
        return None

    def _missing(self, step: ScoreStep, axes: Axes) -> int:
        dims = self.facts.dims(step.scores) or ()
        return len(axes) - sum(dim != 1 for dim in dims)

    def _inner(self, step: ScoreStep, indexed: IndexedValue, node: ir.Node) -> IndexedValue | None:
        if isinstance(step, Shifted) and not is_one_for_all_keys(step, indexed.axes, self.key_axis, self.facts):
            message = f"the maximum '{step.largest.name}' is subtracted, which differs by key"
            self.failures.append((0, Refused("shift-by-key", message, node.name)))
            return None
        axes = aligned(step.scores, indexed.axes, self.facts)
        if axes is None:
            self.failures.append((0, Refused("unknown-rank", f"the rank of '{step.scores.name}' is unknown", node.name)))
            return None
        lost = [axis for axis in indexed.axes[: len(indexed.axes) - len(axes)] if axis]
        lost += [old for old, new in zip(indexed.axes[len(indexed.axes) - len(axes) :], axes, strict=True) if old and not new]
        if lost:
            message = f"'{step.scores.name}' has fewer rows, columns or heads than the softmax"
            self.failures.append((0, Refused("broadcast-scores", message, node.name)))
            return None
        return IndexedValue(step.scores, axes)


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
