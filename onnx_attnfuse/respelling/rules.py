"""Rewrite rules of onnxscript, as they are: one match at a time, built beside the old nodes, judged, and only then connected."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnx_attnfuse.catalogue.foreign import GraphRule
from onnx_attnfuse.graph.constants import is_constant
from onnx_attnfuse.graph.sweep import sweep, sweep_unused
from onnx_attnfuse.graph.uses import label
from onnx_attnfuse.reasons import Reason, Refused
from onnx_attnfuse.respelling.changes import Changes
from onnx_attnfuse.rewrite import connect


def apply_rules(changes: Changes) -> None:
    """Applies every rule at every node, each match by itself."""
    rules = [rule for made in changes.catalogue.rules for rule in made.rules]
    for visit in (rule.graph_pre_visitor for rule in rules):
        if visit:
            visit()
    graph = changes.scope.graph
    for node in list(graph) if rules else ():
        for made in changes.catalogue.rules:
            if node.graph is not graph:
                break
            with changes.tally.trying(made.name) as tried:
                tried.hit = any(_applied(rule, made, node, changes) for rule in made.rules)
    for visit in (rule.graph_post_visitor for rule in rules):
        if visit:
            visit()


def _applied(rule: Any, made: GraphRule, node: ir.Node, changes: Changes) -> bool:
    """Applies a rule at a node, if it matches there and what it gives is equal."""
    graph, model = changes.scope.graph, changes.model
    imports = [(owner, dict(owner.opset_imports)) for owner in (graph, model.graph)]
    try:
        delta: Any = rule.try_rewrite(model, graph, node)
    except Exception as error:  # noqa: BLE001 - whatever a rule raises, the node stays as it is
        changes.refused[label(node)] = Reason("rule-failed", f"rule '{made.name}': {type(error).__name__}: {error}", node.name)
        return False
    if delta is None:
        return False
    try:
        _take(delta, made, node, changes)
    except Refused as refused:
        for owner, before in imports:
            for domain in set(owner.opset_imports) - set(before):
                del owner.opset_imports[domain]
        message = f"rule '{made.name}': {refused.reason.message}"
        changes.refused[label(node)] = Reason(refused.reason.code, message, node.name)
        return False
    return True


def _take(delta: Any, made: GraphRule, node: ir.Node, changes: Changes) -> None:
    """Builds what a rule gives, has it judged, and connects it.

    Raises:
        Refused: It differs, could not be shown equal, or is nothing that can stand here.
    """
    builder, graph = changes.builder, changes.scope.graph
    if delta.new_initializers and not isinstance(graph, ir.Graph):
        raise Refused("initializers", "it makes initializers, which a function cannot have")
    builder.at(node)
    new_nodes: list[ir.Node] = list(delta.new_nodes)
    for value in delta.new_initializers:
        value.name = builder.name(value.name or f"attnfuse/{made.name}")
        assert isinstance(graph, ir.Graph)
        graph.register_initializer(value)
    for new in new_nodes:
        new.name = builder.name(new.name or f"{node.name}/{new.op_type}")
        for value in new.outputs:
            value.name = builder.name(value.name or f"{new.name}_output")
        graph.insert_before(node, new)
        changes.scope.facts.learn(new)
    old_values: list[ir.Value] = list(delta.match.outputs)
    matched = set(delta.match.nodes)
    read = [value for item in matched for value in item.inputs if value is not None and value.producer() not in matched]
    stops = [value for value in read if not is_constant(value)]
    pairs: list[tuple[ir.Value, ir.Value]] = []
    try:
        for old, new in zip(old_values, delta.new_outputs, strict=True):
            pairs.append((old, new if new.producer() in new_nodes else _same(new, node, new_nodes, changes)))
        changes.court.pairs(pairs, stops, node.name or made.name, changes.scope, changes.model)
    except Refused:
        sweep_unused(new_nodes)
        raise
    for old, new in pairs:
        connect(old, new, builder, [user for user, _ in old.uses() if user not in new_nodes])
    if len(pairs) > 1:
        graph.sort()
    sweep(old_values)


def _same(value: ir.Value, node: ir.Node, new_nodes: list[ir.Node], changes: Changes) -> ir.Value:
    """A value of its own for one that is there already."""
    same = ir.node("Identity", [value], name=changes.builder.name("attnfuse/same"))
    same.outputs[0].name = changes.builder.name(f"{same.name}_output")
    changes.scope.graph.insert_before(node, same)
    changes.scope.facts.learn(same)
    new_nodes.append(same)
    return same.outputs[0]
