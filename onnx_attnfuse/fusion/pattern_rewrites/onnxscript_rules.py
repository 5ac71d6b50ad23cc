"""Rewrite rules of onnxscript applied as they are, one match at a time: built beside the old nodes, verified, then connected."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnx_attnfuse.containment import FAILED, contained
from onnx_attnfuse.fusion.pattern_rewrites.undoable_rewrite import PatternRewriter
from onnx_attnfuse.graph.constants import is_constant
from onnx_attnfuse.graph.sweep import sweep
from onnx_attnfuse.graph.uses import label
from onnx_attnfuse.language.registry.registry import GraphRule
from onnx_attnfuse.reasons import Reason, Refused
from onnx_attnfuse.rewriting import Edit, GraphContext


def apply_rules(rewriter: PatternRewriter) -> int:
    """Applies every rule at every node, each match by itself; returns how often one was applied."""
    if not rewriter.catalogue.rules:
        return 0
    applied = 0
    _visit("graph_pre_visitor", rewriter)
    graph = rewriter.graph.scope.graph
    for node in list(graph):
        for made in rewriter.catalogue.rules:
            if node.graph is not graph:
                break
            with rewriter.statistics.trying(made.name) as tried:
                tried.hit = any(_applied(rule, made, node, rewriter) for rule in made.rules)
            applied += tried.hit
    _visit("graph_post_visitor", rewriter)
    return applied


def _visit(which: str, rewriter: PatternRewriter) -> None:
    """Calls the functions that rules want before or after a graph."""
    for made in rewriter.catalogue.rules:
        for visit in (getattr(rule, which) for rule in made.rules):
            with contained(rewriter.catalogue.subject(made.name)):
                if visit:
                    visit()


def _applied(rule: Any, made: GraphRule, node: ir.Node, rewriter: PatternRewriter) -> bool:
    """Applies a rule at a node, if it matches there and its result is equal."""
    graph, model = rewriter.graph.scope.graph, rewriter.graph.model
    imports = [(owner, dict(owner.opset_imports)) for owner in (graph, model.graph)]
    with rewriter.graph.rewrite(node, rewriter.catalogue.subject(made.name)) as edit:
        delta: Any = rule.try_rewrite(model, graph, node)
        if delta is None:
            return False
        pairs = _built(delta, made, node, rewriter.graph, edit)
        edit.connect(pairs)
        if len(pairs) > 1:
            graph.sort()
        sweep(old for old, _ in pairs)
        return True
    for owner, before in imports:
        for domain in set(owner.opset_imports) - set(before):
            del owner.opset_imports[domain]
    reason = edit.reason
    assert reason is not None
    message = reason.message if reason.code in FAILED else f"rule '{made.name}': {reason.message}"
    rewriter.refused[label(node)] = Reason(reason.code, message, node.name)
    return False


def _built(delta: Any, made: GraphRule, node: ir.Node, context: GraphContext, edit: Edit) -> list[tuple[ir.Value, ir.Value]]:
    """Builds a rule's nodes beside the old ones and has it verified; returns old values and new ones.

    Raises:
        Refused: It differs, could not be shown equal, or cannot be used here.
    """
    builder, graph = context.builder, context.scope.graph
    if delta.new_initializers and builder.is_function:
        raise Refused("initializers", "it adds initializers, which a function cannot hold")
    edit.adopt(delta.new_nodes, delta.new_initializers)
    matched = set(delta.match.nodes)
    read = [value for item in matched for value in item.inputs if value is not None and value.producer() not in matched]
    frontier = [value for value in read if not is_constant(value)]
    for value in delta.new_initializers:
        value.name = builder.name(value.name or f"attnfuse/{made.name}")
        graph.register_initializer(value)
    for new in delta.new_nodes:
        new.name = builder.name(new.name or f"{node.name}/{new.op_type}")
        for value in new.outputs:
            value.name = builder.name(value.name or f"{new.name}_output")
        graph.insert_before(node, new)
        context.scope.facts.learn(new)
    pairs = [(old, edit.own(new)) for old, new in zip(delta.match.outputs, delta.new_outputs, strict=True)]
    context.verify(pairs, frontier, node.name or made.name, doubted=True)
    return pairs
