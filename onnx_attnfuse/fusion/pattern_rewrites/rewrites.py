"""Rewrites of patterns: rules of onnxscript, operators replaced by what defines them, and formulas replaced by their meaning.

Rules are applied as they are, one match at a time. Operators of other domains have definitions, and attentions of the standard
with a window the body of their operator. Each is built beside the old nodes, verified, and connected.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import onnx_ir as ir

from onnx_attnfuse.bodies.fused_node import FusedNode
from onnx_attnfuse.bodies.onnx_attention import WINDOWS
from onnx_attnfuse.containment import FAILED, Subject, contained
from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.fusion.pattern_rewrites.undoable_rewrite import PatternRewriter
from onnx_attnfuse.graph.constants import attribute, is_constant, is_standard
from onnx_attnfuse.graph.sweep import sweep
from onnx_attnfuse.graph.uses import check_inner_uses, label, producer_of
from onnx_attnfuse.kernels.operators import onnx_attention
from onnx_attnfuse.language.decorators import Operator
from onnx_attnfuse.language.expression import Tensor, variable
from onnx_attnfuse.language.matcher.expression_emitter import ExpressionEmitter, Given
from onnx_attnfuse.language.matcher.match_state import Match, Trace
from onnx_attnfuse.language.matcher.matcher import Matcher
from onnx_attnfuse.language.matcher.replacement import Replacement, write
from onnx_attnfuse.language.normal_form import plain
from onnx_attnfuse.language.registry.registry import GraphRule
from onnx_attnfuse.reasons import Reason, Refused
from onnx_attnfuse.transforms.decompose.decompose import exact_body
from onnx_attnfuse.transforms.rewriting import Edit, GraphContext


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


def write_operators(rewriter: PatternRewriter) -> None:
    """Writes every operator that has a definition; later nodes are read again, as their results may only now be known."""
    definitions, facts = rewriter.catalogue.operators, rewriter.graph.scope.facts
    learning = False
    for node in list(rewriter.graph.scope.graph) if definitions else ():
        definition = definitions.get((node.domain, node.op_type))
        if definition is None:
            if learning:
                facts.learn(node)
            continue
        with rewriter.statistics.trying(definition.name) as tried:
            tried.hit = rewriter.attempt(node, definition.name, lambda node=node, made=definition: _defined(node, made, rewriter))
        learning |= tried.hit


def _defined(node: ir.Node, definition: Operator, rewriter: PatternRewriter) -> Replacement:
    """The definition of a custom operator as nodes; without a reference the definition is believed.

    Raises:
        Refused: The node is not as the definition has it.
    """
    if any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
        raise Refused("other-outputs", f"{node.op_type} has consumers of outputs that the definition lacks", node.name)
    operands = {name: value for name, value in zip(definition.inputs, node.inputs, strict=False) if value is not None}
    emitter = ExpressionEmitter(rewriter.graph.builder, Given(operands), node.name or definition.op)
    try:
        new = emitter.emit(plain(_formula_of(node, definition)))
    except OptionError as error:
        raise Refused("bad-definition", str(error), node.name) from error
    given = [value for value in node.inputs if value is not None]
    dtype = node.outputs[0].dtype or (rewriter.graph.scope.facts.dtype(given[0]) if given else None)
    if dtype is not None and dtype.is_floating_point() and emitter.dtype(new) != ir.DataType.BOOL:
        new = rewriter.graph.builder.cast(new, dtype)
    rewriter.graph.scope.facts.copy(new, node.outputs[0])
    return Replacement(new, tuple(emitter.softmaxes), given, judged=definition.reference is not None)


def _formula_of(node: ir.Node, definition: Operator) -> Tensor:
    """The formula of an operator with the attributes of one node.

    Raises:
        Refused: The node has an attribute or an input that the definition has not, or lacks one.
    """
    unknown = sorted(set(node.attributes) - set(definition.attributes))
    if unknown:
        raise Refused("unknown-attribute", f"its definition has no attribute '{unknown[0]}'", node.name)
    count = len(definition.inputs)
    if any(value is not None for value in node.inputs[count:]):
        raise Refused("unknown-input", f"its definition has {count} inputs, the node {len(node.inputs)}", node.name)
    attributes = {name: attribute(node, name, default) for name, default in definition.attributes.items()}
    missing = [name for name, value in attributes.items() if value is inspect.Parameter.empty]
    if missing:
        raise Refused(
            "missing-attribute", f"it has no attribute '{missing[0]}', for which its definition has no default", node.name
        )
    inputs = [*node.inputs[:count], *[None] * (count - len(node.inputs))]
    operands = [None if value is None else variable(name) for name, value in zip(definition.inputs, inputs, strict=True)]
    formula = definition.define(*operands, **attributes)
    if not isinstance(formula, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise Refused("bad-definition", f"its definition returned {formula!r}, which is not a formula", node.name)
    return formula


_NAME = "window of Attention"


def write_windows(rewriter: PatternRewriter) -> None:
    """Writes every Attention with a window; a refusal is reported at its site."""
    for node in list(rewriter.graph.scope.graph):
        if not is_standard(node, onnx_attention.INFO.name) or all(attribute(node, name, -1) < 0 for name in WINDOWS):
            continue
        if not rewriter.attempt(node, _NAME, lambda node=node: _decomposed(node, rewriter)):
            rewriter.refused[label(node)] = rewriter.spoken.pop(label(node))


def _decomposed(node: ir.Node, rewriter: PatternRewriter) -> Replacement:
    """The attention in operators of the standard.

    Raises:
        Refused: It has a cache, or cannot be decomposed exactly.
    """
    if any(node.inputs[4:]) or any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
        raise Refused("cache-inside", "it appends to a cache, takes lengths or has more outputs than its result", node.name)
    graph = rewriter.graph.scope.graph
    before = set(graph)
    answer = exact_body(FusedNode(node, rewriter.graph.builder, tuple(node.inputs)))
    new, *others = answer.values
    assert new is not None
    sweep([value for value in others if value is not None and value.producer() not in before])
    softmaxes = [made for made in graph if made not in before and is_standard(made, "Softmax")]
    return Replacement(new, tuple(softmaxes), answer.frontier)


_LOOKING = Subject("looking for patterns")


def find_formulas(rewriter: PatternRewriter, trace: Trace | None = None) -> list[Match]:
    """Every formula of a graph, in graph order; of those that overlap the outermost."""
    catalogue, scope = rewriter.catalogue, rewriter.graph.scope
    if not catalogue.net.patterns:
        return []
    matcher = Matcher(catalogue.net, scope.facts, scope.opset, catalogue.readers, trace)
    found: list[Match] = []
    taken: set[ir.Node] = set()
    for node in reversed(list(scope.graph)):
        match = None
        with contained(_LOOKING, label(node)):
            match = None if node in taken else matcher.at(node)
        if match is not None and taken.isdisjoint(match.state.nodes):
            taken.update(match.state.nodes)
            found.append(match)
    return found[::-1]


def write_formulas(rewriter: PatternRewriter, trace: Trace | None = None) -> None:
    """Replaces formulas by their meaning; notes what patterns refuse or merely name."""
    for match in find_formulas(rewriter, trace):
        pattern, softmaxes = match.variant.pattern, match.state.softmaxes
        end = producer_of(match.root.value)
        with rewriter.statistics.trying(pattern.name) as tried:
            if pattern.refused is not None:
                reason = dataclasses.replace(pattern.refused, node=end.name)
                rewriter.refused.update((label(node), reason) for node in softmaxes)
                rewriter.spoken.update({} if softmaxes else {label(end): reason})
                tried.hit = True
            elif pattern.restates:
                rewriter.named.update((label(node), pattern.name) for node in softmaxes)
                tried.hit = True
            else:
                make, taken = functools.partial(_meant, match, rewriter), match.variant.name
                tried.hit = rewriter.attempt(end, pattern.name, make, softmaxes, taken)


def _meant(match: Match, rewriter: PatternRewriter) -> Replacement:
    """The meaning of a matched formula as nodes.

    Raises:
        Refused: An inner value is used elsewhere, or it cannot be written.
    """
    if not rewriter.keep_outputs:
        check_inner_uses(match.state.nodes, match.root.value)
    return write(match, rewriter.graph.builder)
