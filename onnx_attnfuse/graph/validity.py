"""Is this a model the engine may trust? Checks that cost one pass over the names, none over the weights.

`check` is the entry point. Nodes may be in any order here: whether they can be put in order is the loader's to find out,
so `check` returns the first node that comes before its inputs, or None.
"""

from __future__ import annotations

import dataclasses
import functools
import graphlib
from collections.abc import Collection, Iterable, Iterator, Mapping

import onnx

from onnx_attnfuse.errors import InternalError, ModelError
from onnx_attnfuse.graph.ops import STANDARD, plain_domain

_ASK = "export the model again or report it to the tool that wrote it"
_SPARSE = frozenset([onnx.AttributeProto.SPARSE_TENSOR, onnx.AttributeProto.SPARSE_TENSORS])
_EXPORT = "export with the default opset of the exporter, or a later one"


@dataclasses.dataclass(frozen=True)
class OutOfOrder:
    """A node that comes before the node it reads from."""

    node: str
    value: str


def check(model: onnx.ModelProto, where: str) -> OutOfOrder | None:
    """Check header, names, scopes and attribute kinds of a model.

    Args:
        model: The model; not changed.
        where: The name of the model in messages.

    Returns:
        The first node that comes before the node it reads from, if there is one.

    Raises:
        ModelError: The model is not valid; the message says the problem and the remedy.
    """
    _check_header(model, where)
    functions = {(function.domain, function.name) for function in model.functions}
    opsets = _opsets(model.opset_import)
    if len(functions) < len(model.functions) and not any(function.overload for function in model.functions):
        raise ModelError(f"{where} defines two functions of one name; {_ASK}")
    _check_calls(model, where)
    found = _GraphCheck(where, opsets, functions).run(model.graph, outer=None)
    for function in model.functions:
        own = _opsets(function.opset_import) or opsets
        found = _GraphCheck(where, own, functions).run(_as_graph(function), outer=None) or found
    return found


def check_written(model: onnx.ModelProto) -> None:
    """Check a model that was made here before it counts as a result.

    Besides the requirements of `check`, nodes are in order.

    Args:
        model: The model; weights may be left out of it, but not their names.

    Raises:
        InternalError: It would not load.
    """
    try:
        found = check(model, "the result")
    except ModelError as error:
        raise InternalError(str(error)) from error
    if found is not None:
        raise InternalError(f"the result: {found.node} reads {found.value!r} before it is computed")


def _check_header(model: onnx.ModelProto, where: str) -> None:
    if not model.ir_version or not model.HasField("graph"):
        raise ModelError(
            f"{where} is not an ONNX model: it has no graph or no IR version; pass a file written by an ONNX exporter"
        )
    if model.ir_version > onnx.IR_VERSION:
        raise ModelError(
            f"{where} has IR version {model.ir_version}, but onnx {onnx.__version__} knows versions up to {onnx.IR_VERSION}; "
            "update onnx, or export for an older version"
        )
    if model.training_info:
        raise ModelError(f"{where} carries training information, which would be lost; remove `training_info` first")
    version = next((entry.version for entry in model.opset_import if entry.domain in STANDARD), None)
    known = onnx.defs.onnx_opset_version()
    if version is None:
        raise ModelError(f"{where} does not say which ai.onnx opset it uses; {_ASK}")
    if not 0 < version <= known:
        raise ModelError(
            f"{where} uses ai.onnx opset {version}, but onnx {onnx.__version__} knows opsets up to {known}; "
            "update onnx, or export for an older opset"
        )


def _check_calls(model: onnx.ModelProto, where: str) -> None:
    """Refuse functions that call themselves, which the standard forbids: nothing that follows calls would end."""
    calls = {
        (function.domain, function.name, function.overload): [
            (node.domain, node.op_type, node.overload) for node in _nodes(function.node)
        ]
        for function in model.functions
    }
    try:
        tuple(graphlib.TopologicalSorter(calls).static_order())
    except graphlib.CycleError as error:
        _, name, _ = error.args[1][0]
        raise ModelError(f"{where}: the function {name!r} calls itself; {_ASK}") from None


def _nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Nodes with those of their subgraphs."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for subgraph in _subgraphs(attribute):
                yield from _nodes(subgraph.node)


def _opsets(imports: Iterable[onnx.OperatorSetIdProto]) -> dict[str, int]:
    return {plain_domain(entry.domain): entry.version for entry in imports}


def _as_graph(function: onnx.FunctionProto) -> onnx.GraphProto:
    """A function's body in a graph's clothes, so that one check serves both."""
    return onnx.GraphProto(
        name=function.name,
        node=function.node,
        input=[onnx.ValueInfoProto(name=name) for name in function.input],
        output=[onnx.ValueInfoProto(name=name) for name in function.output],
    )


@dataclasses.dataclass
class _Scope:
    """Names visible in one graph: all it will ever define, and those defined by the nodes seen so far."""

    outer: _Scope | None
    declared: set[str] = dataclasses.field(default_factory=set[str])
    ready: set[str] = dataclasses.field(default_factory=set[str])

    def owner(self, name: str) -> _Scope | None:
        scope: _Scope | None = self
        while scope is not None and name not in scope.declared:
            scope = scope.outer
        return scope


@dataclasses.dataclass
class _GraphCheck:
    """Walks graphs that share one set of opset imports."""

    where: str
    opsets: Mapping[str, int]
    functions: Collection[tuple[str, str]]
    out_of_order: OutOfOrder | None = None

    def run(self, graph: onnx.GraphProto, outer: _Scope | None) -> OutOfOrder | None:
        """Check `graph` and everything below it."""
        scope = self._declare(graph, outer)
        for node in graph.node:
            if not _is_text(node.op_type, node.domain, node.name, *node.input, *node.output):
                raise ModelError(f"{self.where}: the name of a {node.op_type!r} node or its values is not UTF-8; {_ASK}")
            if not node.op_type:
                raise ModelError(f"{self.where}: the node that computes {next(iter(node.output), '')!r} has no operator; {_ASK}")
            self._check_inputs(node, scope)
            self._check_operator(node, scope)
            scope.ready.update(node.output)
        for output in graph.output:
            if scope.owner(output.name) is None:
                raise ModelError(f"{self.where}: nothing computes the graph output {output.name!r}; {_ASK}")
        return self.out_of_order

    def _declare(self, graph: onnx.GraphProto, outer: _Scope | None) -> _Scope:
        if graph.sparse_initializer:
            raise ModelError(f"{self.where} has sparse initializers, which would be lost; make them dense first")
        inputs = self._unique((entry.name for entry in graph.input), "an input")
        weights = self._unique((tensor.name for tensor in graph.initializer), "an initializer")
        results = self._unique((name for node in graph.node for name in node.output if name), "a node output")
        if clash := results & (inputs | weights):
            raise ModelError(f"{self.where}: {min(clash)!r} is computed by a node and is an input or initializer too; {_ASK}")
        return _Scope(outer, declared=inputs | weights | results, ready=inputs | weights)

    def _unique(self, names: Iterable[str], role: str) -> set[str]:
        seen: set[str] = set()
        for name in names:
            if not name:
                raise ModelError(f"{self.where}: {role} has no name; {_ASK}")
            if name in seen:
                raise ModelError(f"{self.where}: the name {name!r} is given to {role} twice; {_ASK}")
            seen.add(name)
        return seen

    def _check_inputs(self, node: onnx.NodeProto, scope: _Scope) -> None:
        for name in node.input:
            if not name or name in scope.ready:
                continue
            owner = scope.owner(name)
            if owner is None:
                raise ModelError(f"{self.where}: {_label(node)} reads {name!r}, which nothing computes; {_ASK}")
            if self.out_of_order is None and name not in owner.ready:
                self.out_of_order = OutOfOrder(_label(node), name)

    def _check_operator(self, node: onnx.NodeProto, scope: _Scope) -> None:
        op, domain = node.op_type, plain_domain(node.domain)
        if (node.domain, op) in self.functions:
            op = ""
        known = _attribute_kinds(op, self.opsets.get(domain, 0), domain)
        if known is None:  # left by an exporter that could not convert the model
            raise ModelError(
                f"{self.where}: {_label(node)} is not in opset {self.opsets.get('', 0)}, which is imported; {_EXPORT}"
            )
        if len(node.attribute) > 1:
            self._unique((attribute.name for attribute in node.attribute), f"an attribute of {_label(node)}")
        for attribute in node.attribute:
            kind = attribute.type
            if kind in _SPARSE:
                raise ModelError(f"{self.where}: {_label(node)} holds a sparse tensor, which cannot be kept; make it dense first")
            if kind == onnx.AttributeProto.UNDEFINED:
                raise ModelError(f"{self.where}: attribute {attribute.name!r} of {_label(node)} does not say its kind; {_ASK}")
            if kind != (expected := known.get(attribute.name, kind)):
                given, asked = map(onnx.AttributeProto.AttributeType.Name, (kind, expected))
                raise ModelError(
                    f"{self.where}: attribute {attribute.name!r} of {_label(node)} is of kind {given}, not {asked}; {_ASK}"
                )
            for subgraph in _subgraphs(attribute):
                if node.op_type == "If" and domain == "" and len(subgraph.output) < len(node.output):
                    given = f"{len(node.output)} outputs, and its {attribute.name} {len(subgraph.output)}"
                    raise ModelError(f"{self.where}: {_label(node)} has {given}; {_ASK}")
                self.run(subgraph, scope)


def _is_text(*names: object) -> bool:
    """Protobuf passes bytes where a string field does not hold UTF-8."""
    return set(map(type, names)) == {str}


def _subgraphs(attribute: onnx.AttributeProto) -> Iterator[onnx.GraphProto]:
    if attribute.type == onnx.AttributeProto.GRAPH:
        yield attribute.g
    elif attribute.type == onnx.AttributeProto.GRAPHS:
        yield from attribute.graphs


def _label(node: onnx.NodeProto) -> str:
    return f"{node.op_type} {node.name!r}" if node.name else f"the {node.op_type} of {next(iter(node.output), '')!r}"


@functools.cache
def _attribute_kinds(op: str, version: int, domain: str) -> Mapping[str, int] | None:
    """Kind of each attribute of an operator; empty for those that ONNX does not know, None where only other versions have it."""
    if not onnx.defs.has(op, version, domain):
        return None if domain == "" and onnx.defs.has(op) else {}
    schema = onnx.defs.get_schema(op, version, domain)
    kinds = onnx.AttributeProto.AttributeType
    return {name: kinds.Value(str(attribute.type).rpartition(".")[2]) for name, attribute in schema.attributes.items()}
