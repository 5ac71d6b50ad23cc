"""All places in a graph where an attention may be, in the order in which they can be rewritten."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import onnx_ir as ir

from onnx_attnfuse.attention.match.fused_ops import read_attention
from onnx_attnfuse.attention.match.softmax import Softmax, find_softmax, with_sink
from onnx_attnfuse.attention.match.softmax_attention import read_site
from onnx_attnfuse.attention.match.steps import Readers
from onnx_attnfuse.attention.roundings import Rounding, in_words
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.containment import Subject, contained
from onnx_attnfuse.graph.ops import is_attention, is_other_attention
from onnx_attnfuse.graph.scopes import Scope
from onnx_attnfuse.graph.uses import label, producer_of
from onnx_attnfuse.reasons import Reason

_READING = Subject("reading an attention")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A Softmax, or a node that is an attention by itself, with its reading."""

    node: ir.Node
    softmax: Softmax | None
    """None for an attention node."""
    spec: AttentionSpec | None
    refusal: Reason | None
    """Why there is no `spec`."""
    rounded: AttentionSpec | None = None
    """The attention of a quantised model that rounds inside: its specification but for these roundings."""

    @property
    def read(self) -> AttentionSpec | None:
        """The attention that was read, whether it can be fused or not."""
        return self.spec or self.rounded

    def called(self, names: Mapping[str, str]) -> Candidate:
        """The candidate with nodes of the source in its refusal: `names` has theirs by those of their replacements."""
        if self.refusal is None or self.refusal.node is None or self.refusal.node not in names:
            return self
        return dataclasses.replace(self, refusal=dataclasses.replace(self.refusal, node=names[self.refusal.node]))


def read_candidate(node: ir.Node, softmax: Softmax | None, scope: Scope, readers: Readers, keep_outputs: bool) -> Candidate:
    """Reads the attention at `node`."""
    spec = None
    with contained(_READING, label(node)) as attempt:
        spec = read_attention(node, scope.facts) if softmax is None else read_site(softmax, scope.facts, readers, keep_outputs)
    if spec is not None and (inside := tuple(item for item in spec.roundings if item.is_inside)):
        return Candidate(node, softmax, None, _quantized(inside), spec)
    return Candidate(node, softmax, spec, attempt.reason)


def _quantized(inside: tuple[Rounding, ...]) -> Reason:
    """Why an attention that rounds inside is left as it is."""
    what = f"it rounds {in_words(inside)}, which a fused operator would not do"
    return Reason("quantized", f"{what}; --dequantise-attention allows that", inside[0].pair.quantize.name)


def find_candidates(scope: Scope, readers: Readers, keep_outputs: bool) -> list[Candidate]:
    """The candidates of one graph, sorted so that the nodes built for one come before all later ones."""
    found: list[tuple[int, Candidate]] = []
    positions = {node: position for position, node in enumerate(scope.graph)}
    for node, position in positions.items():
        softmax = None
        if not is_attention(node) and not is_other_attention(node):
            softmax = find_softmax(node, scope.facts, scope.opset)
            if softmax is None:
                continue
            softmax = with_sink(softmax, scope.facts)
        candidate = read_candidate(node, softmax, scope, readers, keep_outputs)
        order = position if candidate.read is None else positions.get(anchor_of(candidate.read), position)
        found.append((order, candidate))
    return [candidate for _, candidate in sorted(found, key=lambda pair: pair[0])]


def anchor_of(spec: AttentionSpec) -> ir.Node:
    """The node that gives the result: all that the attention needs comes before it."""
    return producer_of(spec.output[0].value)
