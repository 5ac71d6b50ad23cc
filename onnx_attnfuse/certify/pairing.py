"""Two models side by side: which values are the same by construction, and which must be proved equal.

Model-local functions are put in place of their calls, so that changes in them are claimed and proved.

A value's identity is a digest of everything above it. Where a name of the first model names something else in the second,
the two are claimed to be equal: that has to be proved, and values below it assume the claim. So if all
claims are proved, in whichever order, all outputs are equal, since each claim rests on claims above it only.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common

from onnx_attnfuse.certify import meanings
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.constants import constant_tensor, subgraphs
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import CONTRIB, RANDOM, STANDARD
from onnx_attnfuse.graph.opset import CHANGED
from onnx_attnfuse.graph.scopes import Scope, scopes
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.graph.thresholds import ORDINARY
from onnx_attnfuse.graph.uses import reached

_SOFTMAXES = frozenset(["Softmax", "LogSoftmax", "Hardmax"])
_ORIGIN = "attnfuse.origin"
_ATTENTIONS = frozenset(["Attention", "MultiHeadAttention", "GroupQueryAttention"])
_VIEWS = frozenset(
    "Reshape Transpose Unsqueeze Squeeze Expand Concat Slice Split Flatten Identity Gather GatherND Tile Cast Where Pad "
    "If".split()
)


@dataclasses.dataclass(frozen=True)
class Claim:
    """Two values that are claimed to be equal."""

    before: ir.Value
    after: ir.Value

    @property
    def name(self) -> str:
        """The name that both have."""
        return self.before.name or ""


def _digest(*parts: object) -> str:
    hashed = hashlib.blake2b(digest_size=12)
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        hashed.update(len(data).to_bytes(8, "little"))
        hashed.update(data)
    return hashed.hexdigest()


class Side:
    """One model with the identity of each value."""

    def __init__(self, model: ir.Model, known: dict[str, ir.Value] | None = None, other: Side | None = None) -> None:
        self.written, self.model = model, inlined(model)
        self.scope: Scope = next(scopes(self.model))
        self.identity: dict[ir.Value, str] = {}
        self.own: dict[ir.Value, str] = {}
        """The own arrays of values that are claimed to be equal to others."""
        self.named: dict[str, ir.Value] = {}
        self.is_data: set[ir.Value] = set()
        self.masked: set[ir.Value] = set()
        """Data that a mask, an input or a fill is mixed into."""
        self.claims: list[Claim] = []
        self._known, self._other = known or {}, other
        self._bodies: dict[ir.OperatorIdentifier, str] = {}
        self._drawing: dict[ir.Node, bool] = {}
        self._inside: list[str] = []
        """The first outputs of the nodes whose branches are looked at."""
        for value in self.scope.graph.inputs:
            self._note(value, _digest("input", value.name))
        for value in self.scope.graph.initializers.values():
            self._note(value, self._constant(value))
        for node in self.scope.graph:
            self._learn(node)

    @property
    def content(self) -> str:
        """A digest of the model as it is written: names, operators, attributes, weights; nothing is taken for granted."""
        hashed = hashlib.sha256()
        graph = self.written.graph
        for value in (*graph.inputs, *graph.outputs):
            hashed.update(f"{value.name}|{value.dtype}|{value.shape}\n".encode())
        for name, value in sorted(getattr(graph, "initializers", {}).items()):
            hashed.update(f"{name}|{self._constant(value)}\n".encode())
        for node in graph:
            names = [None if item is None else item.name for item in (*node.inputs, *node.outputs)]
            hashed.update(f"{node.domain}|{node.op_type}|{node.overload}|{names}\n".encode())
            for _, item in sorted(node.attributes.items()):
                hashed.update(ir.serde.serialize_attribute(item).SerializeToString(deterministic=True))
        for _, function in sorted(self.written.functions.items()):
            hashed.update(ir.serde.serialize_function(function).SerializeToString(deterministic=True))
        hashed.update(str(sorted(self.written.opset_imports.items())).encode())
        return hashed.hexdigest()

    def identity_of(self, value: ir.Value) -> str:
        """The identity of a value, also of one inside a branch."""
        found = self.identity.get(value)
        if found is None:
            node = value.producer()
            found = (
                self._constant(value)
                if constant_tensor(value) is not None or node is None
                else self._of(node, value.index() or 0)
            )
            self.identity[value] = found
        return found

    def _note(self, value: ir.Value, identity: str) -> None:
        name = value.name or ""
        self.named.setdefault(name, value)
        old = self._known.get(name)
        if old is not None and self._other is not None:
            same = self._other.identity[old]
            if same != identity:
                self.claims.append(Claim(old, value))
                self.own[value] = identity
            identity = same
        self.identity[value] = identity

    def _learn(self, node: ir.Node) -> None:
        inputs = [item for item in node.inputs if item is not None]
        heavy = meanings.of(node) is None or node.op_type in meanings.HEAVY
        for place, output in enumerate(node.outputs):
            if not output.name:
                continue
            self._note(output, self._constant(output) if constant_tensor(output) is not None else self._of(node, place))
            dtype = self.scope.facts.dtype(output)
            floating = dtype is not None and dtype.is_floating_point()
            if floating and (heavy or not self.is_data.isdisjoint(inputs)) and constant_tensor(output) is None:
                self.is_data.add(output)
                if not heavy and any(self._is_float(item) and not self.is_ordinary(item) for item in inputs):
                    self.masked.add(output)

    def _constant(self, value: ir.Value) -> str:
        tensor = constant_tensor(value)
        if tensor is None:
            return _digest("input", value.name)
        return _digest("constant", tensor.dtype, tuple(tensor.shape.numpy()), tensor.tobytes())

    def _of(self, node: ir.Node, place: int) -> str:
        """The identity of an output of a node: operator, attributes and the identities of its inputs."""
        inputs = ["" if item is None else self.identity_of(item) for item in node.inputs]
        self._inside.append(node.outputs[0].name or "")
        own = tuple(self._inside) if self._draws(node) else ""
        attributes = [self._attribute(item) for _, item in sorted(node.attributes.items())]
        self._inside.pop()
        domain, op = ("" if node.domain == "ai.onnx" else node.domain), node.op_type
        version, body = self._version(node, domain), self._function(node.op_identifier())
        if not body and meanings.is_plain_product(node):  # FusedMatMul may be a MatMul
            domain, op, version, attributes = "", "MatMul", True, []
        return _digest(domain, op, node.overload, version, own, place, *inputs, "attributes", *attributes, body)

    def _version(self, node: ir.Node, domain: str) -> object:
        """The opset's part in a node's identity: of the standard, whether it means the same today; of others, the version."""
        if domain and node.op_identifier() not in self.model.functions:
            return self.model.opset_imports.get(domain)
        return self.scope.opset >= (13 if node.op_type in _SOFTMAXES else CHANGED.get(node.op_type, 0))

    def _function(self, identifier: ir.OperatorIdentifier) -> str:
        """A digest of a function of the model and of those that it calls; empty if there is none of that name."""
        function = self.model.functions.get(identifier)
        if function is None:
            return ""
        if identifier not in self._bodies:
            called = sorted({node.op_identifier() for node in function.all_nodes()} & self.model.functions.keys())
            own = ir.serde.serialize_function(function).SerializeToString(deterministic=True)
            self._bodies[identifier] = _digest(own, *map(self._function, called))
        return self._bodies[identifier]

    def _draws(self, node: ir.Node) -> bool:
        """Whether each run of a node may give something else."""
        if node not in self._drawing:
            self._drawing[node] = any(item.op_type in RANDOM for item in run_by(self.model, node))
        return self._drawing[node]

    def _attribute(self, item: ir.Attr) -> str:
        if item.type is ir.AttributeType.GRAPH and not item.is_ref():
            return _digest(item.name, *self._body(item.as_graph()))
        copy = ir.serde.serialize_attribute(item)
        copy.ClearField("doc_string")
        return _digest(copy.SerializeToString(deterministic=True))

    def _body(self, graph: ir.Graph) -> Iterator[str]:
        for place, value in enumerate(graph.inputs):
            self.identity[value] = _digest("body input", graph.name, place, value.name, value.dtype)
        for value in graph.initializers.values():
            self.identity[value] = self._constant(value)
        for node in graph:
            for place, output in enumerate(node.outputs):
                self.identity[output] = self._of(node, place)
        return (self.identity_of(value) for value in graph.outputs)

    def default(self, value: ir.Value) -> str:
        """A digest of an input's default; empty if it has to be given."""
        tensor = value.const_value if value.is_graph_input() else None
        return "" if tensor is None else _digest(tensor.dtype, tuple(tensor.shape.numpy()), tensor.tobytes())

    def _is_float(self, value: ir.Value) -> bool:
        dtype = self.scope.facts.dtype(value)
        return dtype is not None and dtype.is_floating_point()

    def is_arithmetic(self, value: ir.Value) -> bool:
        """Whether a value is data that is computed, and not only arranged."""
        node = value.producer()
        return node is not None and value in self.is_data and node.op_type not in _VIEWS

    def is_ordinary(self, value: ir.Value) -> bool:
        """Whether an array holds nothing that masks: activations do not, weights are looked at, masks and inputs may."""
        tensor = constant_tensor(value)
        if tensor is None:
            return value in self.is_data and value not in self.masked
        if not tensor.dtype.is_floating_point():
            return True
        array = np.asarray(tensor.numpy(), np.float32)
        return array.size == 0 or bool(np.isfinite(array).all() and np.abs(array).max() <= ORDINARY)

    @staticmethod
    def is_of_activations(value: ir.Value) -> bool:
        """Whether a value is a product without weights."""
        node = value.producer()
        return node is not None and node.op_type in {"MatMul", "Einsum"} and all(map(_is_computed, node.inputs))

    @staticmethod
    def is_heavy(value: ir.Value) -> bool:
        """Whether a value comes from an operator that is left uninterpreted where both models have it."""
        node = value.producer()
        return node is not None and (meanings.of(node) is None or node.op_type in meanings.HEAVY) and not subgraphs(node)


class Pair:
    """The model before and the model after."""

    def __init__(self, before: ir.Model, after: ir.Model) -> None:
        self.before = Side(before)
        self.after = Side(after, self.before.named, self.before)
        self.shared = set(self.before.identity.values())
        """The identities of all values of the model before."""
        self.shared_after = set(self.after.identity.values())
        """The identities of all values of the model after."""
        self.joined = {
            self.after.identity[value] for node in self.after.scope.graph if node.op_type in meanings.JOINED
            for value in node.outputs if value in self.after.identity
        }  # fmt: skip
        """The identities of the results of operators of which each does the work of several of the model before."""
        self.aliases = _aliases(self.before.scope.facts)
        """Symbols that name other sizes, because an operator of the model before takes two sizes that are equal."""
        lengths = list(_lengths(self.before))
        self.positive = frozenset(name for dim in lengths if (name := sizes.lone_symbol(dim)) is not None)
        """Symbols that are at least 1, as there is one batch entry, one query and one key."""
        self.divided = list(dict.fromkeys(dim for dim in lengths if "//" in dim.atoms[0].key))
        """Lengths of scores that are quotients of sizes."""
        self.levels: dict[object, int] = {}
        """How far up the last claim between two operators had to go."""
        self.compared: dict[object, tuple[bool, list[Any], list[Any], set[Any], tuple[Any, ...]]] = {}
        """The comparisons with their results, the proofs, the open and assumed facts, and side conditions of simplifications."""
        self.by_identity: dict[str, ir.Value] = {}
        for value, identity in self.before.identity.items():
            self.by_identity.setdefault(identity, value)

    def sites(self, claim: Claim) -> tuple[str, ...]:
        """The names of all values that a claim may be about: its own in its function, and those of its node's graphs."""
        node = claim.before.producer()
        inside = [] if node is None else [item for item in run_by(self.before.model, node) if item is not node]
        return (claim.name, origin(claim.before), *(value.name or "" for item in inside for value in item.outputs))

    @property
    def claims(self) -> list[Claim]:
        """The claims to prove, in the order of the model after."""
        return self.after.claims

    def differences(self) -> list[str]:
        """In which the interfaces of the two models differ: names, types, shapes and defaults."""
        found: list[str] = []
        for what in ("inputs", "outputs"):
            graphs = self.before.scope.graph, self.after.scope.graph
            before, after = ({value.name or "": value for value in getattr(graph, what)} for graph in graphs)
            found += [f"only one of the models has '{name}'" for name in sorted(before.keys() ^ after.keys())]
            for name in sorted(before.keys() & after.keys()):
                kinds = [[value.dtype, str(value.shape), side.default(value)] for value, side in
                         ((before[name], self.before), (after[name], self.after))]  # fmt: skip
                if kinds[0] != kinds[1]:
                    found.append(f"the {what[:-1]} '{name}' has another type, shape or default in each model")
        return found


def _is_computed(value: ir.Value | None) -> bool:
    return value is not None and constant_tensor(value) is None


def _lengths(side: Side) -> Iterator[sizes.Size]:
    """The lengths of axes of scores, and of what else a softmax goes over, that are one symbol or one sum or quotient."""
    for node in side.scope.graph:
        value = node.inputs[0] if node.op_type in {"Softmax", *_ATTENTIONS} and node.inputs else None
        for dim in side.scope.facts.dims(value) or ():
            if isinstance(dim, sizes.Size) and sizes.lone_atom(dim) is not None:
                yield dim


def _aliases(facts: Facts) -> dict[str, Dim]:
    found: dict[str, Dim] = {}
    for pair in facts.equalities:
        ordered = sorted(_without_difference(*pair), key=lambda dim: (len(sizes.symbols(dim)), str(dim)))
        for alias, dim in (ordered, ordered[::-1]):
            name = sizes.lone_symbol(alias)
            if name is not None and name not in found and name not in _reached(dim, found):
                found[name] = dim
                break
    return found


def _without_difference(left: Dim, right: Dim) -> tuple[Dim, Dim]:
    """Two equal sizes with the subtracted terms of one side added on the other, as a difference may be below 0."""
    for _ in range(2):
        taken = [part for part in sizes.summands(right) if (part if isinstance(part, int) else part.factor) < 0]
        for part in taken:
            left, right = sizes.add(left, part * -1), sizes.add(right, part * -1)
        left, right = right, left
    return left, right


def _reached(dim: Dim, aliases: dict[str, Dim]) -> set[str]:
    """All symbols that a size comes to."""
    return set(reached(sizes.symbols(dim), lambda name: sizes.symbols(aliases[name]) if name in aliases else ()))


def inlined(model: ir.Model) -> ir.Model:
    """The model without calls of functions; the model itself where they cannot all be put in place.

    A function that has the name of a known operator stays: it is read as that operator.
    """
    if not model.functions:
        return model
    copy = model.clone()
    for function in copy.functions.values():
        for node in function:
            for value in node.outputs:
                value.metadata_props[_ORIGIN] = value.name or ""
    try:
        onnx_ir.passes.common.InlinePass(lambda function: function.domain not in {*STANDARD, CONTRIB})(copy)
    except (ValueError, ir.passes.PassError):  # another opset, or a graph as a parameter
        return model
    return copy if _interface(copy) == _interface(model) and _is_unique(copy.graph) else model


def origin(value: ir.Value) -> str:
    """The name that a value has in the function that it is from."""
    return value.metadata_props.get(_ORIGIN) or value.name or ""


def run_by(model: ir.Model, node: ir.Node) -> Iterator[ir.Node]:
    """A node, and all those in its branches and in the functions that it calls, directly or not."""

    def inside(item: ir.Node) -> Iterator[ir.Node]:
        for graph in (*subgraphs(item), model.functions.get(item.op_identifier(), ())):
            yield from graph

    return reached([node], inside)


def _interface(model: ir.Model) -> list[str | None]:
    return [value.name for value in (*model.graph.inputs, *model.graph.outputs)]


def _is_unique(graph: ir.Graph) -> bool:
    """Whether no two values have one name: a function that returns its input renames it."""
    given = {value.name for value in (*graph.inputs, *graph.initializers.values())}
    names = [value.name for node in graph for value in node.outputs if value.name]
    return len(names) == len(set(names)) and given.isdisjoint(names)
