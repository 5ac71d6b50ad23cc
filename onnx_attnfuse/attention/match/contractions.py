"""Products of two tensors, summed over the labels that they share: MatMul, FusedMatMul, Gemm and Einsum are one thing."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, Axis
from onnx_attnfuse.graph.constants import attribute, is_constant, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import CASTS, ELEMENTWISE, REARRANGES, REPEATS, SLICES, is_contrib
from onnx_attnfuse.graph.rules.reading import einsum_terms
from onnx_attnfuse.graph.uses import reached, sources

Labels = tuple[str, ...]
PRODUCTS = frozenset(["Einsum", "FusedMatMul", "Gemm", "MatMul"])
"""Operators of which a node may be a contraction."""
_MOVES = frozenset(["Pad", "Where"]) | REARRANGES | REPEATS | SLICES | CASTS
_MOST_STEPS = 32
"""Values above or below a node that are looked at to say what it is."""


@dataclasses.dataclass(frozen=True)
class Contraction:
    """`output[out] = factor · sum over labels not in out of operands[0][labels[0]] · operands[1][labels[1]]`."""

    node: ir.Node
    operands: tuple[ir.Value, ir.Value]
    labels: tuple[Labels, Labels]
    out: Labels
    factor: float = 1.0

    @property
    def summed(self) -> frozenset[str]:
        """Labels that both operands have and the result lacks."""
        return frozenset(self.labels[0]) & frozenset(self.labels[1]) - frozenset(self.out)


def read_contraction(node: ir.Node, facts: Facts) -> Contraction | None:
    """Reads `node` as a contraction of two tensors, or returns None."""
    if node.op_type not in PRODUCTS or len(node.inputs) < 2 or node.inputs[0] is None or node.inputs[1] is None:
        return None
    if is_standard(node, "Einsum"):
        return _einsum(node, facts)
    has_summand = node.op_type == "Gemm" and len(node.inputs) > 2 and node.inputs[2] is not None
    is_matmul = is_standard(node, "Gemm", "MatMul") or is_contrib(node, "FusedMatMul")
    return _matmul(node, facts) if is_matmul and not has_summand else None


def _matmul(node: ir.Node, facts: Facts) -> Contraction | None:
    left, right = node.inputs[0], node.inputs[1]
    assert left is not None
    assert right is not None
    ranks = facts.rank(left), facts.rank(right)
    if ranks[0] is None or ranks[1] is None or min(ranks[0], ranks[1]) < 2:
        return None
    leading = [f"lead{index}" for index in range(max(ranks[0], ranks[1]) - 2)][::-1]
    matrices = [("rows", "sum"), ("sum", "columns")]
    labels: list[Labels] = []
    for rank, matrix, side in zip((ranks[0], ranks[1]), matrices, "AB", strict=True):
        first, last = matrix[::-1] if attribute(node, f"trans{side}", 0) else matrix
        lead = leading[len(leading) - (rank - 2) :]
        labels.append((first, *lead, last) if attribute(node, f"transBatch{side}", 0) else (*lead, first, last))
    return Contraction(
        node, (left, right), (labels[0], labels[1]), (*leading, "rows", "columns"), float(attribute(node, "alpha", 1.0))
    )


def _einsum(node: ir.Node, facts: Facts) -> Contraction | None:
    terms = einsum_terms(node, facts)
    left, right = node.inputs[0], node.inputs[1]
    if terms is None or len(terms[0]) != 2 or left is None or right is None:
        return None
    (first, second), out = terms
    if any(len(set(term)) != len(term) for term in (first, second, out)):
        return None
    if (set(first) ^ set(second)) - set(out):
        return None
    return Contraction(node, (left, right), (tuple(first), tuple(second)), tuple(out))


def operand_axes(contraction: Contraction, index: int, known: dict[str, Axis], facts: Facts) -> Axes | None:
    """The axes of one operand, given the factors of each label; an axis of length 1 has none (it broadcasts)."""
    dims = facts.dims(contraction.operands[index])
    if dims is None:
        return None
    return tuple(() if dim == 1 else known[label] for dim, label in zip(dims, contraction.labels[index], strict=True))


def is_of_weights(value: ir.Value | None, facts: Facts) -> bool:
    """Whether a value is a product with weights, seen through views and a constant addend; a convolution of scores is none."""
    node = None if value is None else value.producer()
    if value is None or node is None:
        return False
    if (product := read_contraction(node, facts)) is not None:
        return any(map(is_constant, product.operands))
    if is_standard(node, "Conv"):
        return is_constant(node.inputs[1]) and not _is_of_product(node.inputs[0], facts)
    computed = [item for item in node.inputs if item is not None and not is_constant(item)]
    if is_standard(node, "Add"):
        return len(computed) == 1 and is_of_weights(computed[0], facts)
    return is_standard(node, *REARRANGES, *SLICES) and is_of_weights(node.inputs[0], facts)


def _is_of_product(value: ir.Value | None, facts: Facts) -> bool:
    """Whether a value is a product of two computed ones, seen through views and elementwise operators."""
    follows = REARRANGES | CASTS | ELEMENTWISE
    above = sources([] if value is None else [value], lambda _, node: is_standard(node, *follows))
    makers = (item.producer() for item in itertools.islice(above, _MOST_STEPS))
    return any(node is not None and _multiplies(node, facts) for node in makers)


def is_multiplied(node: ir.Node, facts: Facts) -> bool:
    """Whether a product with computed values reads weights that a node, and others after it, move, cut, pad or mask."""

    def moved(nodes: Iterable[ir.Node]) -> Iterator[ir.Value]:
        return (output for node in nodes if is_standard(node, *_MOVES) for output in node.outputs)

    below = reached(moved([node]), lambda value: moved(user for user, _ in value.uses()))
    return any(_multiplies(user, facts) for value in itertools.islice(below, _MOST_STEPS) for user, _ in value.uses())


def _multiplies(node: ir.Node, facts: Facts) -> bool:
    """Whether a node is a product of two computed values."""
    product = read_contraction(node, facts)
    return product is not None and not any(map(is_constant, product.operands))
