"""Dispatch at run time: one test that selects between fast forms of an attention and the one that is always exact.

Each guarded site becomes an `If` whose branches hold nothing but the operator and its consumers. A test is computed once for
all sites that share it, and not at all where sizes decide; nodes of the exact form alone, its bias above all, are computed only
when that form runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.uses import producer_of
from onnx_attnfuse.targets.base import Emitted

_MOST_SPARED = 1024
"""The longest last axis of what is given in place of values that are not needed."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """A form that is taken where a test holds."""

    test: ir.Value
    """One truth value."""
    emitted: Emitted


@dataclasses.dataclass(frozen=True)
class _Home:
    """A branch that takes in nodes that only it needs."""

    node: ir.Node
    """The `If` in the graph that the branch belongs to."""
    tests: tuple[ir.Value, ...]
    """Homes under the same tests share their nodes."""
    branch: ir.Graph


class Guards:
    """The guards of one graph."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder
        self._homes: list[_Home] = []
        self._gates: dict[tuple[ir.Value, ...], ir.Value] = {}

    def test(self, exact: ir.Value, sizes: Sequence[ir.Value]) -> ir.Value:
        """`exact` where all truth values of `sizes` hold, else false without computing it."""
        build = self._builder
        if not sizes:
            return exact
        key = exact, *sizes
        known = self._gates.get(key)
        if known is not None and known.graph is build.graph:
            return known
        asked = _leaf("Identity", [exact], {}, build)
        refused = _leaf("Constant", [], {"value": ir.tensor(np.asarray(False))}, build)
        branches = {"then_branch": asked, "else_branch": refused}
        gate = build.node("If", [build.chained("And", sizes)], branches, dims=(), dtype=ir.DataType.BOOL, hint="attnfuse/test")
        self._gates[key] = gate
        self._homes.append(_Home(producer_of(gate), (gate,), asked))
        return gate

    def join(self, choices: Sequence[Choice], otherwise: Emitted) -> Emitted:
        """Puts judged forms of one site under their tests, the first that holds deciding."""
        build, name = self._builder, otherwise.node.name or "attention"
        forms = [otherwise, *(choice.emitted for choice in choices)]
        presents = list(dict.fromkeys(old for form in forms for old, _ in form.presents))
        fallback = branch = _branch(build, otherwise, presents, f"{name}/otherwise")
        node: ir.Node | None = None
        for choice in reversed(choices):
            if node is not None:
                build.graph.remove(node)
                branch = ir.Graph([], node.outputs, nodes=[node], name=f"{name}/else")
            then = _branch(build, choice.emitted, presents, f"{name}/{choice.emitted.mask}")
            value = build.node(
                "If",
                [choice.test],
                {"then_branch": then, "else_branch": branch},
                dims=build.facts.dims(otherwise.value),
                dtype=build.facts.dtype(otherwise.value),
                hint=f"{name}/If",
                outputs=1 + len(presents),
            )
            node = producer_of(value)
        assert node is not None
        self._homes.append(_Home(node, tuple(choice.test for choice in choices), fallback))
        value, *kept = node.outputs
        return dataclasses.replace(otherwise, value=value, presents=tuple(zip(presents, kept, strict=True)))

    def fork(self, test: ir.Value, chosen: Sequence[ir.Value], otherwise: Sequence[ir.Value]) -> list[ir.Value]:
        """Values that are `chosen` where a test holds, else `otherwise`; nodes that only one needs move into it at last."""
        build = self._builder
        then, other = (_handed_on(build, values, name) for values, name in ((chosen, "packed"), (otherwise, "padded")))
        branches = {"then_branch": then, "else_branch": other}
        node = producer_of(build.node("If", [test], branches, hint="attnfuse/fork", outputs=len(chosen)))
        for value, output in zip(chosen, node.outputs, strict=True):
            build.facts.copy(value, output)
        self._homes += [_Home(node, (test, test), then), _Home(node, (test,), other)]
        return list(node.outputs)

    def sink_into_branches(self) -> int:
        """Sinks nodes into the `If` branches that use them (code sinking); returns how many branches there are.

        Nodes that one branch needs go into it; those that several with the same tests need are computed once, under those tests.
        """
        if not self._homes:
            return 0
        groups: dict[tuple[ir.Value, ...], list[_Home]] = {}
        for item in self._homes:
            groups.setdefault(item.tests, []).append(item)
        owners = _owners(self._builder.graph, groups)
        for tests, items in groups.items():
            shared: list[ir.Node] = []
            own: dict[ir.Graph, list[ir.Node]] = {item.branch: [] for item in items}
            for node, homes in owners.items():
                if own.keys() >= homes:
                    (own[next(iter(homes))] if len(homes) == 1 else shared).append(node)
            for branch, nodes in own.items():
                self._builder.graph.remove(nodes)
                branch.insert_before(branch[0], nodes)
            _compute_if_needed(self._builder, tests, items, shared)
        self._builder.graph.sort()  # a node computed if needed may come before its test
        return len(self._homes)


def _leaf(op: str, inputs: Sequence[ir.Value], attributes: dict[str, ir.TensorProtocol], builder: Builder) -> ir.Graph:
    """A branch of one node."""
    node = ir.node(op, inputs, attributes, name=builder.name(f"attnfuse/{op}"))
    return _giving([node], node.name, builder)


def _giving(nodes: Sequence[ir.Node], name: str | None, builder: Builder) -> ir.Graph:
    """A branch of nodes, which gives the result of each."""
    for node in nodes:
        node.outputs[0].name = builder.name(f"{node.name}_output")
    return ir.Graph([], [node.outputs[0] for node in nodes], nodes=nodes, name=name)


def _handed_on(builder: Builder, values: Sequence[ir.Value], name: str) -> ir.Graph:
    """A branch that gives values from outside."""
    nodes = [ir.node("Identity", [value], name=builder.name(f"attnfuse/{name}")) for value in values]
    for node, value in zip(nodes, values, strict=True):
        node.outputs[0].type = None if (dtype := builder.facts.dtype(value)) is None else ir.TensorType(dtype)
    return _giving(nodes, builder.name(f"attnfuse/{name}"), builder)


def _branch(builder: Builder, emitted: Emitted, presents: Sequence[ir.Value], name: str) -> ir.Graph:
    """The operator and its consumers up to the results, moved into a graph of their own.

    Of keys and values that are asked for, it gives the source's where it has none itself.
    """
    given = dict(emitted.presents)
    kept = [builder.node("Identity", [old], hint=f"{name}/present") for old in presents if old not in given]
    given.update(zip((old for old in presents if old not in given), kept, strict=True))
    moved = [producer_of(value) for value in kept]
    below = set(emitted.node.outputs)
    for node in builder.added:
        if node is emitted.node or (node.graph is builder.graph and not below.isdisjoint(node.inputs)):
            moved.append(node)
            below.update(node.outputs)
    builder.graph.remove(moved)
    return ir.Graph([], [emitted.value, *(given[old] for old in presents)], nodes=moved, name=name)


def _owners(graph: ir.Graph, groups: dict[tuple[ir.Value, ...], list[_Home]]) -> dict[ir.Node, set[ir.Graph]]:
    """The branches that need a node, for every node that nothing else needs and that can be moved there; in order."""
    group = {item.branch: tests for tests, items in groups.items() for item in items}
    nodes = list(graph)
    place = {node: index for index, node in enumerate(nodes)}
    first = {tests: place[items[0].node] for tests, items in groups.items()}
    owners: dict[ir.Node, set[ir.Graph]] = {}
    for index in range(len(nodes) - 1, -1, -1):
        node = nodes[index]
        users = [user for value in node.outputs for user, _ in value.uses()]
        if not users or any(value.is_graph_output() for value in node.outputs):
            continue
        if not all(user in owners or user.graph in group for user in users):
            continue
        homes = {home for user in users for home in owners.get(user) or [_branch_of(user)]}
        tests = {group[home] for home in homes}
        if len(homes) == 1 or (len(tests) == 1 and index < first[tests.pop()]):
            owners[node] = homes
    return dict(reversed(owners.items()))


def _branch_of(node: ir.Node) -> ir.Graph:
    assert isinstance(node.graph, ir.Graph)
    return node.graph


def _compute_if_needed(builder: Builder, tests: Sequence[ir.Value], items: Sequence[_Home], moved: Sequence[ir.Node]) -> None:
    """Moves nodes ahead of the first site into an `If` under all tests."""
    first = items[0].node
    homes = {item.branch for item in items}
    wanted = [value for node in moved for value in node.outputs if any(user.graph in homes for user, _ in value.uses())]
    dtypes = [dtype for value in wanted if (dtype := builder.facts.dtype(value)) is not None]
    if not wanted or len(dtypes) < len(wanted):
        return
    builder.at(first)
    test = builder.chained("Or", tests)
    builder.graph.remove(moved)
    name = builder.name("attnfuse/bias")
    computed = ir.Graph([], wanted, nodes=moved, name=f"{name}/computed")
    branches = {"then_branch": _nothing(builder, wanted, dtypes), "else_branch": computed}
    node = ir.node("If", [test], branches, num_outputs=len(wanted), name=name)
    for inner, outer, dtype in zip(wanted, node.outputs, dtypes, strict=True):
        outer.name = builder.name(f"{inner.name}_if_needed")
        outer.dtype = dtype
        builder.facts.copy(inner, outer)
        if builder.facts.dims(inner) is not None:
            outer.shape = ir.Shape([size if size > 1 else None for size in _least(builder, inner)])
        for user, place in list(inner.uses()):
            if user.graph in homes:
                user.replace_input_with(place, outer)
    builder.graph.insert_before(first, node)


def _least(builder: Builder, value: ir.Value) -> list[int]:
    """The least sizes of a value that keep its last axis, by which tables are read, if that is a small number."""
    sizes: list[int] = [1] * (builder.facts.rank(value) or 0)
    last = (builder.facts.dims(value) or (None,))[-1]
    return [*sizes[:-1], last] if isinstance(last, int) and sizes and 0 < last <= _MOST_SPARED else sizes


def _nothing(builder: Builder, values: Sequence[ir.Value], dtypes: Sequence[ir.DataType]) -> ir.Graph:
    """A branch that gives zeros of the least sizes in place of values that are not needed."""
    zeros = [ir.tensor(np.zeros(_least(builder, value), dtype.numpy())) for value, dtype in zip(values, dtypes, strict=True)]
    nodes = [ir.node("Constant", [], {"value": item}, name=builder.name("attnfuse/spared")) for item in zeros]
    return _giving(nodes, "attnfuse/spared", builder)
