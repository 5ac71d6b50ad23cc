"""Operators replaced by what defines them: those of other domains, and attentions of the standard with a window."""

from __future__ import annotations

import inspect

import onnx_ir as ir

from onnx_attnfuse.bodies.fused_node import FusedNode
from onnx_attnfuse.bodies.onnx_attention import WINDOWS
from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.fusion.pattern_rewrites.undoable_rewrite import NewNodes, PatternRewriter
from onnx_attnfuse.graph.constants import attribute, is_standard
from onnx_attnfuse.graph.sweep import sweep
from onnx_attnfuse.graph.uses import label
from onnx_attnfuse.kernels.operators import onnx_attention
from onnx_attnfuse.language.decorators import Operator
from onnx_attnfuse.language.expression import Tensor, variable
from onnx_attnfuse.language.matcher.expression_emitter import ExpressionEmitter, Given
from onnx_attnfuse.language.normal_form import plain
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.transforms.decompose.decompose import exact_body


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


def _defined(node: ir.Node, definition: Operator, rewriter: PatternRewriter) -> NewNodes:
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
    return NewNodes(new, tuple(emitter.softmaxes), given, judged=definition.reference is not None)


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


def _decomposed(node: ir.Node, rewriter: PatternRewriter) -> NewNodes:
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
    return NewNodes(new, tuple(softmaxes), answer.frontier)
