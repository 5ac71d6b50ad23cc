"""Rewrites around the attention that let ONNX Runtime's own fusions fire: one file per idea, each exact, judged like a site."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import onnx_ir as ir

from onnx_attnfuse.containment import Subject, contained
from onnx_attnfuse.fusion.enabling.gelu import as_gelu
from onnx_attnfuse.fusion.enabling.gemm import as_product
from onnx_attnfuse.fusion.enabling.rsqrt import as_quotient
from onnx_attnfuse.fusion.enabling.rule import EnablingRule
from onnx_attnfuse.fusion.enabling.skip_norm import as_skip_norm
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.edit import connect, tidy
from onnx_attnfuse.graph.scopes import Scope
from onnx_attnfuse.graph.sweep import sweep
from onnx_attnfuse.graph.uses import label
from onnx_attnfuse.kernels.execution_provider import ExecutionProvider
from onnx_attnfuse.verify.verifier import Verifier

BEFORE: tuple[EnablingRule, ...] = (
    EnablingRule("Gemm split into product and bias, which then goes into what follows", as_product, "split-gemm"),
)
"""Rules that are applied before attention is matched."""
AFTER: tuple[EnablingRule, ...] = (
    EnablingRule(
        "products with a reciprocal written as quotients, which ONNX Runtime's RMS normalization starts from",
        as_quotient,
        "quotients",
    ),
    EnablingRule(
        "sums and normalizations as one operator, where the sum goes on as the next residual", as_skip_norm, "skip-norm"
    ),
    EnablingRule("Gelu of half precision as one operator", as_gelu, "half-gelu"),
)


def apply_enabling(
    rules: Iterable[EnablingRule],
    scope: Scope,
    model: ir.Model,
    builder: Builder,
    verifier: Verifier,
    provider: ExecutionProvider,
) -> Counter[str]:
    """Applies rules in one graph, judging each change; returns how often each was applied."""
    done: Counter[str] = Counter()
    for rule in rules:
        if rule.pays not in provider.pays:
            continue
        for node in list(scope.graph):
            if node.graph is not scope.graph:
                continue
            builder.at(node)
            change = None
            with contained(Subject(f"rewriting {rule.does}"), label(node), lambda: tidy(builder)) as attempt:
                change = rule.change(node, builder)
                if change is not None:
                    verifier.check(change.results, change.frontier, node.name or node.op_type, scope, model)
            if change is None or attempt.reason is not None:
                continue
            for old, new in change.results:
                connect(old, new, builder, [user for user, _ in old.uses()])
            sweep([old for old, _ in change.results])
            done[rule.does] += 1
    return done
