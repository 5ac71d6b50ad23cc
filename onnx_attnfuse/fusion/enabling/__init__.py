"""Rewrites around the attention that let ONNX Runtime's own fusions fire: one file per idea, each exact, judged like a site."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable

import onnx_ir as ir

from onnx_attnfuse.containment import Subject
from onnx_attnfuse.fusion.enabling.added_in_place import as_padded_sum
from onnx_attnfuse.fusion.enabling.anywhere import as_sum
from onnx_attnfuse.fusion.enabling.attention_biases import with_bias_after, with_fewer_biases
from onnx_attnfuse.fusion.enabling.experts import as_experts, as_single_experts
from onnx_attnfuse.fusion.enabling.gelu import as_gelu
from onnx_attnfuse.fusion.enabling.gemm import as_product
from onnx_attnfuse.fusion.enabling.norms_inside import with_norms_inside
from onnx_attnfuse.fusion.enabling.packed_projections import with_packed_projections
from onnx_attnfuse.fusion.enabling.padded_columns import with_padded_columns
from onnx_attnfuse.fusion.enabling.paired_rotations import with_paired_rotations
from onnx_attnfuse.fusion.enabling.products import as_fused_product, as_own_products
from onnx_attnfuse.fusion.enabling.rotated_rows import with_rotated_rows
from onnx_attnfuse.fusion.enabling.rsqrt import as_quotient
from onnx_attnfuse.fusion.enabling.rule import EnablingRule
from onnx_attnfuse.fusion.enabling.separate_norm import as_separate_sum
from onnx_attnfuse.fusion.enabling.shared_table import with_one_table
from onnx_attnfuse.fusion.enabling.skip_norm import as_skip_norm
from onnx_attnfuse.fusion.enabling.split_gelu import as_split_gelu
from onnx_attnfuse.fusion.enabling.whole_rotations import with_whole_rotation
from onnx_attnfuse.fusion.enabling.wide_norms import as_wide_norm
from onnx_attnfuse.graph.folding import fold
from onnx_attnfuse.kernels.execution_provider import ExecutionProvider
from onnx_attnfuse.kernels.operators import branchwise_rms_norm
from onnx_attnfuse.rewriting import GraphContext

_SPLIT_GEMM = EnablingRule(
    "Gemm split into MatMul and Add, so that the bias can be fused", frozenset(["Gemm"]), as_product, "split-gemm"
)
BEFORE: tuple[EnablingRule, ...] = (
    EnablingRule(
        "sums written back into a slice rewritten as sums with a padded addend",
        frozenset(["ScatterND"]),
        as_padded_sum,
        None,
    ),
    _SPLIT_GEMM,
    EnablingRule(
        "layers of experts fused to MoE",
        frozenset(["ReduceSum"]),
        as_experts,
        "experts",
    ),
    EnablingRule(
        "layers of experts fused to MoE, one expert a token",
        frozenset(["MatMul"]),
        as_single_experts,
        "single-experts",
    ),
)
"""Rules that are applied before attention is matched."""
_APART = "products kept apart from their bias, which ONNX Runtime would make Gemm of"
APART = {
    is_fixed: (
        EnablingRule(_APART, frozenset(["MatMul"]), functools.partial(as_fused_product, is_fixed=is_fixed), "fused-products"),
    )
    for is_fixed in (False, True)
}
"""Rules that are applied last, for models whose sizes are numbers, and others."""
AFTER: tuple[EnablingRule, ...] = (
    _SPLIT_GEMM,  # that of the output projection, whose Reshape of (b, s, n, h) is one of (b, s, n·h) now
    EnablingRule(
        "key biases dropped (softmax ignores them) and value biases moved after the attention",
        frozenset(["MultiHeadAttention", "PackedMultiHeadAttention"]),
        with_fewer_biases,
        "fewer-biases",
    ),
    EnablingRule(
        "value biases merged into those of the output projections",
        frozenset(["MatMul"]),
        with_bias_after,
        "bias-after",
    ),
    EnablingRule(
        "x * (1 / r) rewritten as x / r, so that ONNX Runtime fuses RMSNorm",
        frozenset(["Mul"]),
        as_quotient,
        "quotients",
    ),
    EnablingRule(
        "residual Adds fused with their normalization",
        frozenset(["LayerNormalization", "Mul"]),
        as_skip_norm,
        "skip-norm",
    ),
    EnablingRule(
        "normalizations of queries and keys moved into GroupQueryAttention",
        frozenset(["GroupQueryAttention"]),
        with_norms_inside,
        "norms-inside",
    ),
    EnablingRule(
        "projections of queries, keys and values merged for GroupQueryAttention",
        frozenset(["GroupQueryAttention"]),
        with_packed_projections,
        "merged-projections",
    ),
    EnablingRule(
        "float32 RMSNorms of half-precision values fused (ONNX Runtime 1.31 or newer)",
        frozenset(["Cast"]),
        as_wide_norm,
        "wide-norms",
        since=branchwise_rms_norm.INFO.runtime,
    ),
    EnablingRule(
        "products gated by their own Gelu fused to BiasSplitGelu",
        frozenset(["Erf", "Gelu"]),
        as_split_gelu,
        "split-gelu",
    ),
    EnablingRule(
        "residual Adds kept apart from LayerNormalization (SkipLayerNormalization is slower on CPU)",
        frozenset(["LayerNormalization"]),
        as_separate_sum,
        "separate-norm",
    ),
    EnablingRule("half-precision Gelus fused with their bias, or zeros", frozenset(["Erf", "Gelu"]), as_gelu, "half-gelu"),
    EnablingRule(
        "tests for any true element computed by ReduceSum",
        frozenset(["ReduceMax"]),
        as_sum,
        "any-by-sum",
    ),
    EnablingRule(
        "rotations of all but the first tokens rewritten as rotations of all",
        frozenset(["Concat"]),
        with_whole_rotation,
        "whole-rotations",
    ),
    EnablingRule(
        "products that are cut into pieces split into one product for each",
        frozenset(["MatMul"]),
        as_own_products,
        "split-products",
        with_cache=False,
    ),
    EnablingRule(
        "rotations of queries and keys rewritten for pairs of channels side by side",
        frozenset(["MultiHeadAttention"]),
        with_paired_rotations,
        "paired-rotations",
    ),
    EnablingRule(
        "rows of tokens rotated before they are put back in their places",
        frozenset(["RotaryEmbedding"]),
        with_rotated_rows,
        "rotated-rows",
    ),
    EnablingRule(
        "products padded to a multiple of 64 columns for tensor cores",
        frozenset(["Gemm", "MatMul"]),
        with_padded_columns,
        "padded-columns",
    ),
    EnablingRule(
        "products that read the token embedding in place, without a transposed copy",
        frozenset(["MatMul"]),
        with_one_table,
        "shared-table",
    ),
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
        subject = Subject(f"rewriting {rule.does}")
        for node in [node for node in graph.scope.graph if node.op_type in rule.ops]:
            if node.graph is not graph.scope.graph:
                continue
            with graph.rewrite(node, subject) as edit:
                change = rule.change(node, graph.builder)
                if change is not None:
                    edit.replace(change.results, change.frontier, node.name or node.op_type)
                    replaced.update(change.results)
                    done[change.described(rule.does)] += 1
        fold(graph.builder.rearranged, graph.builder, "attnfuse/weight")  # the next rule may ask for constants
    return done
