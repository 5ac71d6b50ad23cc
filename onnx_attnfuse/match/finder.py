"""All places in a graph where an attention may be, in the order in which they can be rewritten."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnx_attnfuse.graph.scopes import Scope
from onnx_attnfuse.match.attention_op import is_attention, read_attention
from onnx_attnfuse.match.site import read_site
from onnx_attnfuse.match.softmax import Softmax, find_softmax
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.spec import AttentionSpec


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A Softmax, or a node that is an attention by itself."""

    node: ir.Node
    softmax: Softmax | None
    """None for an attention node."""
    order: int
    """Position in its graph of the node before which it is rewritten."""

    def read(self, scope: Scope, keep_outputs: bool) -> AttentionSpec:
        """What the attention means.

        Raises:
            Refused: It is none, or one that cannot be read.
        """
        if self.softmax is None:
            return read_attention(self.node, scope.facts)
        return read_site(self.softmax, scope.facts, keep_outputs)


def find_candidates(scope: Scope, keep_outputs: bool) -> list[Candidate]:
    """The candidates of one graph, sorted so that what is built for one stands before all later ones."""
    found: list[Candidate] = []
    positions: dict[ir.Node, int] = {}
    for position, node in enumerate(scope.graph):
        positions[node] = position
        if is_attention(node):
            found.append(Candidate(node, None, position))
        elif (softmax := find_softmax(node, scope.facts, scope.opset)) is not None:
            found.append(Candidate(node, softmax, position))
    ordered: list[Candidate] = []
    for candidate in found:
        order = candidate.order
        if candidate.softmax is not None:
            try:
                anchor = anchor_of(candidate.read(scope, keep_outputs))
                order = positions.get(anchor, order)
            except Refused:
                pass
        ordered.append(dataclasses.replace(candidate, order=order))
    return sorted(ordered, key=lambda candidate: candidate.order)


def anchor_of(spec: AttentionSpec) -> ir.Node:
    """The node that gives the result: everything the attention needs stands before it."""
    node = spec.output[0].value.producer()
    assert node is not None
    return node
