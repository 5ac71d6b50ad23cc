"""Rewrites around the attention that let ONNX Runtime's own fusions fire: one file per idea, each exact, judged like a site."""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir

from onnx_attnfuse.court import Court
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.scopes import Scope
from onnx_attnfuse.graph.sweep import sweep
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.rewrite import connect, tidy
from onnx_attnfuse.unblock.quotients import as_quotient
from onnx_attnfuse.unblock.rule import Rule

RULES: tuple[Rule, ...] = (
    Rule("products with a reciprocal written as quotients, which ONNX Runtime's RMS normalization starts from", as_quotient),
)


def unblock(scope: Scope, model: ir.Model, builder: Builder, court: Court) -> Counter[str]:
    """Applies every rule in one graph, judging each change; returns how often each was applied."""
    done: Counter[str] = Counter()
    for rule in RULES:
        for node in list(scope.graph):
            if node.graph is not scope.graph:
                continue
            builder.at(node)
            change = rule.change(node, builder)
            if change is None:
                continue
            try:
                court.pairs([(change.old, change.new)], change.stops, node.name or node.op_type, scope, model)
            except Refused:
                tidy(builder)
                continue
            connect(change.old, change.new, builder, [user for user, _ in change.old.uses()])
            sweep([change.old])
            done[rule.does] += 1
    return done
