"""A guard: one test at run time that selects between a fast form and the one that is always exact.

Each guarded site becomes an `If` whose branches hold nothing but the operator and what follows it. The test is computed once for
all sites that share it; what only the exact form needs, its bias above all, is computed only when that form runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.targets.emitted import Emitted


@dataclasses.dataclass(frozen=True)
class Choice:
    """A form that is taken where a test holds."""

    test: ir.Value
    """One truth value."""
    emitted: Emitted


@dataclasses.dataclass(frozen=True)
class Guarded:
    """A site with a guard."""

    node: ir.Node
    """The outermost `If`."""
    tests: tuple[ir.Value, ...]
    fallback: ir.Graph
    """What runs where no test holds."""


def guard(builder: Builder, choices: Sequence[Choice], otherwise: Emitted) -> tuple[Emitted, Guarded]:
    """Puts judged forms of one site under their tests, the first that holds deciding."""
    name = otherwise.node.name or "attention"
    fallback = branch = _branch(builder, otherwise, f"{name}/otherwise")
    value = otherwise.value
    for choice in reversed(choices):
        then = _branch(builder, choice.emitted, f"{name}/{choice.emitted.mask}")
        value = builder.node(
            "If",
            [choice.test],
            {"then_branch": then, "else_branch": branch},
            dims=builder.facts.dims(otherwise.value),
            dtype=builder.facts.dtype(otherwise.value),
            hint=f"{name}/If",
        )
        outermost = value.producer()
        assert outermost is not None
        if choice is not choices[0]:
            builder.graph.remove(outermost)
            branch = ir.Graph([], [value], nodes=[outermost], name=f"{name}/else")
    outermost = value.producer()
    assert outermost is not None
    emitted = dataclasses.replace(otherwise, value=value)
    return emitted, Guarded(outermost, tuple(choice.test for choice in choices), fallback)


def _branch(builder: Builder, emitted: Emitted, name: str) -> ir.Graph:
    """The operator and what follows it up to the result, moved into a graph of their own."""
    moved: list[ir.Node] = []
    below = set(emitted.node.outputs)
    for node in builder.added:
        if node is emitted.node or (node.graph is builder.graph and not below.isdisjoint(node.inputs)):
            moved.append(node)
            below.update(node.outputs)
    builder.graph.remove(moved)
    return ir.Graph([], [emitted.value], nodes=moved, name=name)


def spare(builder: Builder, guarded: Sequence[Guarded]) -> None:
    """Moves what only the exact forms of guarded sites need under their tests.

    What one site needs goes into its own branch; what several with the same tests need is computed once, under those tests.
    """
    if not guarded:
        return
    owners = _owners(builder.graph, guarded)
    for item in guarded:
        own = [node for node, homes in owners.items() if homes == {item.fallback}]
        builder.graph.remove(own)
        item.fallback.insert_before(item.fallback[0], own)
    for tests, items in _by_tests(guarded).items():
        homes = {item.fallback for item in items}
        _compute_if_needed(builder, tests, items, [node for node, found in owners.items() if len(found) > 1 and found <= homes])


def _by_tests(guarded: Iterable[Guarded]) -> dict[tuple[ir.Value, ...], list[Guarded]]:
    groups: dict[tuple[ir.Value, ...], list[Guarded]] = {}
    for item in guarded:
        groups.setdefault(item.tests, []).append(item)
    return groups


def _owners(graph: ir.Graph | ir.Function, guarded: Sequence[Guarded]) -> dict[ir.Node, set[ir.Graph]]:
    """The branches that need a node, for every node that nothing else needs and that can be moved there; in order."""
    group = {item.fallback: tests for tests, items in _by_tests(guarded).items() for item in items}
    nodes = list(graph)
    place = {node: index for index, node in enumerate(nodes)}
    first = {tests: place[items[0].node] for tests, items in _by_tests(guarded).items()}
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


def _compute_if_needed(builder: Builder, tests: Sequence[ir.Value], items: Sequence[Guarded], moved: Sequence[ir.Node]) -> None:
    """Moves nodes ahead of the first site into an `If` under all tests."""
    first = items[0].node
    homes = {item.fallback for item in items}
    wanted = [value for node in moved for value in node.outputs if any(user.graph in homes for user, _ in value.uses())]
    dtypes = [dtype for value in wanted if (dtype := builder.facts.dtype(value)) is not None]
    if not wanted or len(dtypes) < len(wanted):
        return
    builder.at(first)
    test = tests[0]
    for other in tests[1:]:
        test = builder.elementwise("Or", [test, other], ir.DataType.BOOL)
    builder.graph.remove(moved)
    name = builder.name("attnfuse/bias")
    computed = ir.Graph([], wanted, nodes=moved, name=f"{name}/computed")
    branches = {"then_branch": _nothing(builder, wanted, dtypes), "else_branch": computed}
    node = ir.node("If", [test], branches, num_outputs=len(wanted), name=name)
    for inner, outer, dtype in zip(wanted, node.outputs, dtypes, strict=True):
        outer.name = builder.name(f"{inner.name}_if_needed")
        outer.dtype = dtype
        builder.facts.copy(inner, outer)
        for user, place in list(inner.uses()):
            if user.graph in homes:
                user.replace_input_with(place, outer)
    builder.graph.insert_before(first, node)


def _nothing(builder: Builder, values: Sequence[ir.Value], dtypes: Sequence[ir.DataType]) -> ir.Graph:
    """A branch that gives zeros of the least size in place of values that are not needed."""
    nodes: list[ir.Node] = []
    for value, dtype in zip(values, dtypes, strict=True):
        zeros = ir.tensor(np.zeros((1,) * (builder.facts.rank(value) or 0), dtype.numpy()))
        node = ir.node("Constant", [], {"value": zeros}, name=builder.name("attnfuse/spared"))
        node.outputs[0].name = builder.name(f"{node.name}_output")
        nodes.append(node)
    return ir.Graph([], [node.outputs[0] for node in nodes], nodes=nodes, name="attnfuse/spared")
