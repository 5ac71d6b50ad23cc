"""Operators of other domains replaced by the formulas that define them."""

from __future__ import annotations

import inspect

import onnx_ir as ir

from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.fusion.pattern_rewrites.undoable_rewrite import NewNodes, PatternRewriter
from onnx_attnfuse.graph.constants import attribute
from onnx_attnfuse.language.decorators import Operator
from onnx_attnfuse.language.expression import Tensor, variable
from onnx_attnfuse.language.matcher.expression_emitter import ExpressionEmitter, Given
from onnx_attnfuse.language.normal_form import plain
from onnx_attnfuse.reasons import Refused


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
