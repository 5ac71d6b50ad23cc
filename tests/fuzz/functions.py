"""Parts of a graph as functions of the model: the same nodes, called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx

DOMAIN = "fuzz"
_OWN = 2
"""One of so many recipes hands constants to its functions; in the others functions have constants of their own."""
Span = tuple[int, int]


class Outliner:
    """Makes functions of spans of nodes; those that have the same body are one."""

    def __init__(self, model: onnx.ModelProto, numbers: int) -> None:
        self._model = onnx.ModelProto()
        self._model.CopyFrom(model)
        self._handed = numbers % _OWN == 0
        self._constants = {tensor.name: tensor for tensor in self._model.graph.initializer}
        self._known: dict[bytes, str] = {}

    def outlined(self, spans: Iterable[tuple[Span, Span | None]]) -> onnx.ModelProto:
        """The model with a call in the place of each span, whose function calls one for the span inside, if there is one."""
        graph = self._model.graph
        nodes = list(graph.node)
        for (start, end), inner in sorted(spans, reverse=True):
            behind = len(nodes) - end
            if inner is not None:
                nodes[inner[0] : inner[1]] = self._call(nodes, *inner)
            nodes[start : len(nodes) - behind] = self._call(nodes, start, len(nodes) - behind)
        del graph.node[:]
        graph.node.extend(nodes)
        read = {name for node in nodes for name in node.input}
        kept = [tensor for tensor in graph.initializer if tensor.name in read]
        del graph.initializer[:]
        graph.initializer.extend(kept)
        self._model.opset_import.append(onnx.helper.make_opsetid(DOMAIN, 1))
        return self._model

    def _call(self, nodes: Sequence[onnx.NodeProto], start: int, end: int) -> list[onnx.NodeProto]:
        """The call of a function with these nodes."""
        body = nodes[start:end]
        made = [name for node in body for name in node.output if name]
        read = dict.fromkeys(name for node in body for name in node.input if name and name not in made)
        outside = {name for node in (*nodes[:start], *nodes[end:]) for name in node.input}
        outside |= {entry.name for entry in self._model.graph.output}
        inputs = [name for name in read if self._handed or name not in self._constants]
        outputs = [name for name in made if name in outside]
        constants = [
            onnx.helper.make_node("Constant", [], [name], value=self._constants[name]) for name in read if name not in inputs
        ]
        name = self._function([*constants, *body], inputs, outputs)
        return [onnx.helper.make_node(name, inputs, outputs, name=f"call_{outputs[0]}", domain=DOMAIN)]

    def _function(self, body: Sequence[onnx.NodeProto], inputs: Sequence[str], outputs: Sequence[str]) -> str:
        """The name of the function; values have names that say nothing."""
        places = {"": ""} | {name: f"in{place}" for place, name in enumerate(inputs)}
        places |= {name: f"out{place}" for place, name in enumerate(outputs)}
        written: list[onnx.NodeProto] = []
        for node in body:
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            del copy.input[:], copy.output[:]
            copy.input.extend(places[name] for name in node.input)
            copy.output.extend(places.setdefault(name, f"value{len(places)}") for name in node.output)
            copy.name = ""
            for attribute in copy.attribute:
                if attribute.HasField("t"):
                    attribute.t.name = ""
            written.append(copy)
        imports = [*self._model.opset_import, onnx.helper.make_opsetid(DOMAIN, 1)]
        called, given = ([places[name] for name in group] for group in (inputs, outputs))
        function = onnx.helper.make_function(DOMAIN, "Part", called, given, written, imports)
        key = function.SerializeToString(deterministic=True)
        if key not in self._known:
            self._known[key] = function.name = f"Part{len(self._known)}"
            self._model.functions.append(function)
        return self._known[key]
