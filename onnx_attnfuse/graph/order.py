"""The order of nodes in a graph that changes: which is computed from which, found without walking all of it.

Every node has a place that is no smaller than those of the nodes it reads. A path between two nodes lies between their places, so
that looking for one costs as much as the nodes there: one attention, not all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx_ir as ir

from onnx_attnfuse.graph.constants import reads, subgraphs
from onnx_attnfuse.graph.uses import producer_of, reached
from onnx_attnfuse.reasons import Refused


class NodeOrder:
    """The places of the nodes of one graph; a node that holds graphs has the place of all in them."""

    def __init__(self, graph: ir.Graph) -> None:
        """Reads a graph whose nodes are in topological order."""
        self._graph = graph
        self._places = {node: place for place, node in enumerate(graph)}
        self._owners: dict[ir.Graph, ir.Node] = {}
        self._own(graph)

    def _own(self, nodes: Iterable[ir.Node]) -> None:
        for node in nodes:
            for nested in subgraphs(node):
                self._owners[nested] = node
                self._own(nested)

    def add(self, nodes: Iterable[ir.Node], anchor: ir.Node) -> None:
        """Adds new nodes to the order.

        Raises:
            Refused: One of them reads a result of `anchor` or of a later node, so that they cannot replace it.
        """
        self._own(nodes)
        for node in nodes:
            if node.graph is self._graph and self.place(node) >= self.place(anchor):
                raise Refused("circular", "an input of the fused operator depends on the attention's own result", node.name)

    def place(self, node: ir.Node) -> int:
        """The place of a node; a new one comes right after the last that it reads."""
        pending = [node]
        while pending:
            last = pending[-1]
            if last in self._places:
                pending.pop()
                continue
            read = [owner for value in reads(last) if (owner := self._owner(value.producer())) is not None and owner is not last]
            unknown = [owner for owner in read if owner not in self._places]
            if unknown:
                pending += unknown
            else:
                self._places[last] = max((self._places[owner] for owner in read), default=-1)
        return self._places[node]

    def leads(self, starts: Iterable[ir.Node], limit: int) -> set[ir.Node]:
        """`starts` and the nodes computed from them, none of a place beyond `limit`."""

        def near(nodes: Iterable[ir.Node]) -> Iterator[ir.Node]:
            owners = (owner for node in nodes if (owner := self._owner(node)) is not None)
            return (owner for owner in owners if self.place(owner) <= limit)

        return set(reached(near(starts), lambda node: near(user for output in node.outputs for user, _ in output.uses())))

    def free(self, users: Iterable[ir.Node], value: ir.Value) -> list[ir.Node]:
        """The `users` that may read a new `value`, as it is not computed from them; they are ordered after it from now on."""
        source = producer_of(value)
        limit = self.place(source)
        found: list[ir.Node] = []
        for user in dict.fromkeys(users):
            below = self.leads([user], limit)
            if source not in below:
                found.append(user)
                self._places.update(dict.fromkeys(below, limit))
        return found

    def _owner(self, node: ir.Node | None) -> ir.Node | None:
        """The node of this graph that a node is, or is nested in; None if it is outside."""
        while node is not None and node.graph is not self._graph:
            node = self._owners.get(node.graph) if isinstance(node.graph, ir.Graph) else None
        return node


def is_sorted(graph: ir.Graph) -> bool:
    """Whether every node comes after its inputs, nested graphs included."""
    before: set[ir.Node] = set()
    for node in graph:
        producers = (value.producer() for value in reads(node))
        if any(producer is not None and producer.graph is graph and producer not in before for producer in producers):
            return False
        before.add(node)
    return True
