"""Rewrites around the attention that let ONNX Runtime's own fusions fire: one file per idea, each exact, judged like a site."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable

import onnx_ir as ir

from onnx_attnfuse.containment import Subject
from onnx_attnfuse.fusion.enabling.activations import as_gelu, as_split_gelu, as_sum
from onnx_attnfuse.fusion.enabling.experts import as_experts, as_single_experts
from onnx_attnfuse.fusion.enabling.norms import as_quotient, as_separate_sum, as_skip_norm, as_wide_norm
from onnx_attnfuse.fusion.enabling.operators import with_bias_after, with_fewer_biases, with_norms_inside, with_packed_projections
from onnx_attnfuse.fusion.enabling.products import (
    as_fused_product,
    as_own_products,
    as_product,
    with_one_matrix,
    with_one_table,
    with_padded_columns,
)
from onnx_attnfuse.fusion.enabling.rotations import with_paired_rotations, with_rotated_rows, with_whole_rotation
from onnx_attnfuse.fusion.enabling.rule import EnablingRule, enabling
from onnx_attnfuse.fusion.enabling.slice_assignments import as_joined_parts
from onnx_attnfuse.graph.constants import has_unknown_attribute
from onnx_attnfuse.graph.folding import fold
from onnx_attnfuse.graph.ops import read_as
from onnx_attnfuse.kernels.execution_provider import ExecutionProvider
from onnx_attnfuse.transforms.rewriting import GraphContext

BEFORE: tuple[EnablingRule, ...] = (as_product, as_joined_parts, as_experts, as_single_experts)
"""Rules that are applied before attention is matched."""
_APART = "products kept apart from their bias, which ONNX Runtime would make Gemm of"
APART = {
    is_fixed: (enabling(_APART, "MatMul", "fused-products")(functools.partial(as_fused_product, is_fixed=is_fixed)),)
    for is_fixed in (False, True)
}
"""Rules that are applied last, for models whose sizes are numbers, and others."""
AFTER: tuple[EnablingRule, ...] = (
    as_product,  # that of the output projection, whose Reshape of (b, s, n, h) is one of (b, s, n·h) now
    with_fewer_biases,
    with_bias_after,
    as_quotient,
    as_skip_norm,
    with_norms_inside,
    with_packed_projections,
    as_wide_norm,
    as_split_gelu,
    as_separate_sum,
    as_gelu,
    as_sum,
    with_whole_rotation,
    as_own_products,
    with_paired_rotations,
    with_rotated_rows,
    with_padded_columns,
    with_one_table,
    with_one_matrix,
)


def apply_enabling(
    rules: Iterable[EnablingRule], graph: GraphContext, provider: ExecutionProvider, replaced: dict[ir.Value, ir.Value]
) -> Counter[str]:
    """Applies rules in one graph, each change verified; returns how often each was applied.

    Args:
        rules: The rules, in order.
        graph: The graph.
        provider: Rules that do not pay there are left out.
        replaced: Takes up the results that were replaced, with their replacements.
    """
    done: Counter[str] = Counter()
    for rule in rules:
        if rule.pays is not None and rule.pays not in provider.pays:
            continue
        subject, names = Subject(f"rewriting {rule.does}"), {name for _, name in rule.ops}
        for node in [node for node in graph.scope.graph if node.op_type in names and read_as(node) in rule.ops]:
            if node.graph is not graph.scope.graph or has_unknown_attribute(node):
                continue
            with graph.rewrite(node, subject) as edit:
                change = rule.change(node, graph.builder)
                if change is not None:
                    edit.replace(change.results, change.frontier, node.name or node.op_type)
                    replaced.update(change.results)
                    done[change.described(rule.does)] += 1
        fold(graph.builder.rearranged, graph.builder, "attnfuse/weight")  # the next rule may ask for constants
    return done
