"""Whether two models can be compared call by call: their inputs and outputs, and what becomes of their caches."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from onnx_attnfuse.errors import ModelError
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import is_attention


def check_interfaces(models: tuple[ir.Model, ir.Model]) -> None:
    """Checks that two models may be given the same inputs and give the same outputs.

    Raises:
        ModelError: They may not; the message says how they can be compared, if they can.
    """
    first, second = (model.graph for model in models)
    if _written_in_place(second) > _as_long_as_inputs(first):
        raise ModelError(
            "the second model keeps its cache in one buffer, where that of the first grows, so that their calls differ; "
            "run attnfuse optimize FIRST --cache shared --verify model, which judges both in a decoding loop"
        )
    for what, one, other in (
        ("inputs", _names(_given(first)), _names(_given(second))),
        ("outputs", _names(first.outputs), _names(second.outputs)),
    ):
        if one != other:
            raise ModelError(
                f"the models have not the same {what}: only one has {', '.join(sorted(one ^ other))}; "
                "compare models of one interface"
            )


def _written_in_place(graph: ir.Graph) -> int:
    """How many caches attentions write in place: outputs of the graph that are as long as an input which the attention reads."""
    facts, given, found = Facts(graph), set(graph.inputs), 0
    for value in graph.outputs:
        node = value.producer()
        if node is not None and is_attention(node):
            found += facts.dims(value) in [facts.dims(item) for item in node.inputs if item in given]
    return found


def _as_long_as_inputs(graph: ir.Graph) -> int:
    """How many outputs of the graph are as long as an input: a cache that grows is not."""
    facts = Facts(graph)
    lengths = {facts.dims(value) for value in graph.inputs}
    return sum(facts.dims(value) in lengths for value in graph.outputs)


def _given(graph: ir.Graph) -> Iterable[ir.Value]:
    return (value for value in graph.inputs if value.const_value is None)


def _names(values: Iterable[ir.Value]) -> set[str]:
    return {value.name or "" for value in values}
