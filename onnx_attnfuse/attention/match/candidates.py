"""All places in a graph where an attention may be, in the order in which they can be rewritten; ai.onnx Attention as a source.

ONNX Runtime's kernel is the truth for a node it runs: a row that the mask forbids throughout gives 0, also where the mask is only
as low as float32 goes. It demands masks of full shape, which the standard does not; such nodes are read by the standard.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, Axis, leaves, length, new_axes, regroup
from onnx_attnfuse.attention.axes.views import IndexedValue, aligned
from onnx_attnfuse.attention.masks.fully_masked import DISAGREEING, rows_disagree
from onnx_attnfuse.attention.masks.index_reader import Reader
from onnx_attnfuse.attention.masks.intervals import Bounds
from onnx_attnfuse.attention.match import operands, roles
from onnx_attnfuse.attention.match.operands import read_cache
from onnx_attnfuse.attention.match.softmax import Softmax, find_softmax, with_sink
from onnx_attnfuse.attention.match.softmax_attention import read_site
from onnx_attnfuse.attention.match.steps import Readers
from onnx_attnfuse.attention.roundings import Rounding, in_words
from onnx_attnfuse.attention.spec import Added, AttentionSpec, Cache, Mask, Replaced, RowRule, Source
from onnx_attnfuse.containment import Subject, contained
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.constants import attribute, constant_tensor
from onnx_attnfuse.graph.dtypes import held_as_lowest
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.facts_view import Dims
from onnx_attnfuse.graph.ops import CONTRIB, is_attention, is_other_attention
from onnx_attnfuse.graph.schemas import why_unknown
from onnx_attnfuse.graph.scopes import Scope
from onnx_attnfuse.graph.uses import label, producer_of
from onnx_attnfuse.reasons import Reason, Refused

_MATRIX = 2
"""The last axes of scores and masks, those of rows and of keys."""
_SOMETIMES_REPEATED = (
    "of rows that the lowest number masks throughout ONNX Runtime gives 0 where the mask is as large as the scores, "
    "and the standard their mean where it is repeated; here that depends on a length"
)


def read_attention(node: ir.Node, facts: Facts) -> AttentionSpec:
    """Reads an ai.onnx Attention node.

    Raises:
        Refused: It uses something that MultiHeadAttention is not asked for yet, so the node stays as it is.
    """
    if is_other_attention(node):
        name = f"{node.domain or 'ai.onnx'}.{node.op_type}"
        raise Refused("other-attention", f"{name} is another kind of operator, which attnfuse does not read", node.name)
    unknown = why_unknown(node)
    if unknown is not None:
        raise Refused("unread-part", unknown, node.name)
    if node.domain == CONTRIB:
        raise Refused("contrib", f"com.microsoft.{node.op_type} is a fused operator of ONNX Runtime already", node.name)
    if any(attribute(node, name, -1) >= 0 for name in ("left_window_size", "right_window_size")):
        raise Refused("window-inside", "it has a window of its own", node.name)
    inputs = [*node.inputs, *[None] * 7][:7]
    query, key, value, mask = inputs[:4]
    if query is None or key is None or value is None:
        raise Refused("malformed", "an operand is missing", node.name)
    if any(inputs[4:]) or any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
        raise Refused("cache-inside", "it appends to a cache, takes lengths or has more outputs than its result", node.name)
    query_axes, key_axes, value_axes = _operand_axes(node, [query, key, value], facts)
    batch, heads, rows, channels = query_axes
    columns, v_channels = key_axes[2], value_axes[3]
    scores: Axes = (batch, heads, rows, columns)
    indexed = [
        IndexedValue(operand, axes if facts.rank(operand) == 4 else (axes[0], axes[2], (*axes[1], *axes[3])))
        for operand, axes in zip((query, key, value), (query_axes, key_axes, value_axes), strict=True)
    ]
    result: Axes = (batch, heads, rows, v_channels)
    sources = [operands.sources(item, facts, turning) for item, turning in zip(indexed, (channels, channels, ()), strict=True)]
    output = IndexedValue(node.outputs[0], result if facts.rank(query) == 4 else (batch, rows, (*heads, *v_channels)))
    read_mask, rules = _mask(node, mask, scores, facts)
    return AttentionSpec(
        name=label(node) or "Attention",
        query=sources[0],
        key=sources[1],
        value=sources[2],
        output=operands.readings(output, facts),
        batch_axis=(*batch, *heads),
        query_axis=rows,
        key_axis=columns,
        head_axis=channels,
        v_head_axis=v_channels,
        heads=heads,
        scale=_scale(node, channels),
        scale_values=(),
        softcap=attribute(node, "softcap", 0.0) or None,
        mask=read_mask,
        causal=bool(attribute(node, "is_causal", 0)),
        row_rules=rules,
        result_scales=(),
        dtype=facts.dtype(query),
        output_dtype=facts.dtype(query),
        nodes=(node,),
        cache=_cache(sources[1], sources[2], rows, columns, channels, facts),
        roundings=(
            *roles.operand_roundings("query", query, facts),
            *roles.operand_roundings("key", key, facts),
            *roles.operand_roundings("value", value, facts),
            *roles.result_roundings(output, facts),
        ),
        roles=(("attention", node),),
    )


def _cache(
    keys: tuple[Source, ...], values: tuple[Source, ...], rows: Axis, columns: Axis, channels: Axis, facts: Facts
) -> Cache | None:
    """The cache that keys and values were appended to; a key of zeros, which is a sink, is no new position."""
    found = read_cache(keys, values, rows, columns, channels, facts)
    origins = [] if found is None else [new[-1].indexed.value for new in found.new]
    return None if any(constant_tensor(value) is not None for value in origins) else found


def _operand_axes(node: ir.Node, values: list[ir.Value], facts: Facts) -> list[tuple[Axis, Axis, Axis, Axis]]:
    """Batch, heads, positions and channels of query, key and value.

    Keys with fewer heads lack the factor that they are repeated along.
    """
    heads = attribute(node, "q_num_heads"), attribute(node, "kv_num_heads"), attribute(node, "kv_num_heads")
    split: list[Dims] = []
    for value, count in zip(values, heads, strict=True):
        dims = facts.dims(value)
        if dims is None or len(dims) not in {3, 4}:
            raise Refused("unknown-rank", f"the rank of '{value.name}' is unknown", node.name)
        if len(dims) == 3:
            channels = None if count is None else sizes.exact_quotient(dims[2], count)
            if count is None or channels is None:
                raise Refused("unknown-heads", f"the number of heads of '{value.name}' is unknown", node.name)
            dims = (dims[0], count, dims[1], channels)
        split.append(dims)
    query = tuple(new_axes(split[0]))
    groups, count = split[1][1], split[0][1]
    if not (isinstance(groups, int) and isinstance(count, int) and groups and count % groups == 0):
        raise Refused("unknown-heads", "the numbers of heads are unknown", node.name)
    kv_heads: Axis = query[1]
    if groups != count:
        parts = regroup([query[1]], [groups, count // groups])
        assert parts is not None
        kv_heads = parts[0]
    columns, v_channels = new_axes([split[1][2]])[0], new_axes([split[2][3]])[0]
    batch = [() if dims[0] == 1 else query[0] for dims in split]
    key = (batch[1], leaves(kv_heads), columns, query[3])
    value = (batch[2], leaves(kv_heads), columns, v_channels)
    return [(query[0], leaves(query[1]), query[2], query[3]), key, value]


def _scale(node: ir.Node, channels: Axis) -> float:
    given = attribute(node, "scale")
    if given is not None:
        return float(given)
    size = channels[0].size if channels else 1
    if not isinstance(size, int):
        raise Refused("unknown-head-size", "the default scale needs the head size, which is unknown", node.name)
    return 1 / math.sqrt(size)


def _mask(node: ir.Node, mask: ir.Value | None, scores: Axes, facts: Facts) -> tuple[Mask, tuple[RowRule, ...]]:
    if mask is None:
        return (), ()
    indexed = aligned(mask, scores, facts)
    if indexed is None:
        raise Refused("unknown-rank", f"the rank of the mask '{mask.name}' is unknown", node.name)
    if facts.dtype(mask) == ir.DataType.BOOL:
        return (Replaced(indexed, True, -math.inf),), (RowRule(None),)
    if rows_disagree(indexed, Reader(facts), Bounds(facts), facts.opset):
        raise Refused("kernels-disagree", DISAGREEING, node.name)
    matrix = zip(reversed(facts.dims(mask) or ()), reversed(scores[-_MATRIX:]), strict=False)
    repeated = {length(axis) for dim, axis in matrix if dim == 1}
    if not all(isinstance(size, int) for size in repeated) and rows_disagree(indexed, Reader(facts), Bounds(facts)):
        raise Refused("kernels-disagree", _SOMETIMES_REPEATED, node.name)
    dtype = facts.dtype(mask)
    lowest = held_as_lowest(dtype) if dtype is not None and repeated <= {1} else -math.inf
    return (Added(indexed),), (RowRule(None, lowest=lowest),)


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
