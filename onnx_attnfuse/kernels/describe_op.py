"""The parameters of an attention operator that exists in a model, read off its inputs alone; what its mask means is not asked.

params = params_of_node(node, facts)    # to forecast its kernel; a Reason where they cannot be told
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.constants import attribute
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.known import Dims
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.kernels.conditions import AttentionParams, MaskForm
from onnx_attnfuse.reasons import Reason, Refused


@dataclasses.dataclass(frozen=True)
class _Operator:
    """A node and what is known of its inputs."""

    node: ir.Node
    facts: Facts

    def has(self, place: int) -> bool:
        """Whether there is such an input."""
        return place < len(self.node.inputs) and self.node.inputs[place] is not None

    def dims(self, place: int) -> Dims:
        """The shape of an input.

        Raises:
            Refused: It is not known.
        """
        value = self.node.inputs[place] if self.has(place) else None
        dims = None if value is None else self.facts.dims(value)
        if dims is None:
            raise Refused("unknown-rank", f"the shape of input {place} of {self.node.op_type} is not known", self.node.name)
        return dims

    def dtype(self) -> ir.DataType:
        """The element type of the first input.

        Raises:
            Refused: It is not known.
        """
        value = self.node.inputs[0]
        dtype = None if value is None else self.facts.dtype(value)
        if dtype is None:
            raise Refused("unknown-type", f"the element type of {self.node.op_type} is not known", self.node.name)
        return dtype

    def part(self, dim: Dim, count: int) -> Dim:
        """A length divided into so many parts.

        Raises:
            Refused: It does not come out even.
        """
        found = sizes.exact_quotient(dim, count) if count else None
        if found is None:
            raise Refused("unknown-head-size", f"{dim} channels are not {count} heads", self.node.name)
        return found

    def number(self, name: str, default: int = 0) -> int:
        """An attribute."""
        return int(attribute(self.node, name, default))

    def mask(self, place: int, bias: int, batch: Dim) -> MaskForm:
        """The form of a mask of com.microsoft, and of what is added besides."""
        if not self.has(place):
            return "bias" if self.has(bias) else "none"
        dims = self.dims(place)
        if len(dims) != 1:
            return "raw"
        if self.has(bias):
            raise Refused("unknown-form", "lengths and a bias together", self.node.name)
        if dims[0] == batch:
            return "lengths"
        if dims[0] != batch * 3 + 2:
            raise Refused("unknown-form", f"a mask of {dims[0]} numbers for {batch} entries", self.node.name)
        return "ranges"


def params_of_node(node: ir.Node, facts: Facts) -> AttentionParams | Reason:
    """What the operator is asked to do, or what of it is not known."""
    reader = _READERS.get((node.domain, node.op_type))
    if reader is None:
        return Reason("unknown-operator", f"the kernels of {node.op_type} are not forecast", node.name)
    try:
        return reader(_Operator(node, facts))
    except Refused as refused:
        return refused.reason


def _multi_head(found: _Operator) -> AttentionParams:
    heads = found.number("num_heads")
    query = found.dims(0)
    batch, rows = query[:2]
    if len(query) == 5:
        columns, head = rows, query[4]
        v_head = head
    else:
        head = found.part(query[2], heads)
        key, value = found.dims(1), found.dims(2) if found.has(2) else ()
        columns = key[2] if len(key) == 4 else key[1]
        v_head = head if len(value) != 3 else found.part(value[2], heads)
    if found.has(6):
        columns = found.dims(6)[2] + columns
    return AttentionParams(
        dtype=found.dtype(),
        batch=batch,
        heads=heads,
        rows=rows,
        columns=columns,
        head_size=head,
        v_head_size=v_head,
        mask=found.mask(4, 5, batch),
        causal=bool(found.number("unidirectional")),
        cached=found.has(6),
    )


def _projected(found: _Operator) -> AttentionParams:
    heads = found.number("num_heads")
    batch, rows = found.dims(0)[:2]
    widths: Sequence[int] = attribute(found.node, "qkv_hidden_sizes", ())
    total = found.dims(1)[1]
    query, value = (widths[0], widths[2]) if len(widths) == 3 else [found.part(total, 3)] * 2
    past = found.dims(4)[3] if found.has(4) else 0
    return AttentionParams(
        dtype=found.dtype(),
        batch=batch,
        heads=heads,
        rows=rows,
        columns=past + rows,
        head_size=found.part(query, heads),
        v_head_size=found.part(value, heads),
        mask=found.mask(3, 5, batch),
        causal=bool(found.number("unidirectional")),
        cached=found.has(4),
        op="Attention",
    )


def _grouped(found: _Operator) -> AttentionParams:
    heads, kv_heads = found.number("num_heads"), found.number("kv_num_heads")
    batch, rows, width = found.dims(0)[:3]
    head = found.part(width, heads if found.has(1) else heads + 2 * kv_heads)
    past = found.dims(3)[2] if found.has(3) else 0
    capped = bool(attribute(found.node, "softcap", 0.0)) or found.number("smooth_softmax", -1) > 0 or found.has(11)
    return AttentionParams(
        dtype=found.dtype(),
        batch=batch,
        heads=heads,
        rows=rows,
        columns=past + rows,
        head_size=head,
        v_head_size=head,
        mask="bias" if found.has(10) else "none",
        causal=True,
        windowed=found.number("local_window_size", -1) > 0,
        capped=capped,
        cached=found.has(3),
        grouped=heads != kv_heads,
        op="GroupQueryAttention",
    )


def _standard(found: _Operator) -> AttentionParams:
    query, key, value = (found.dims(place) for place in range(3))
    heads, kv_heads = (
        count if isinstance(count := dims[1] if len(dims) == 4 else found.number(name), int) else 0
        for dims, name in ((query, "q_num_heads"), (key, "kv_num_heads"))
    )
    long = [dims[-2] for dims in (query, key)]
    head = query[3] if len(query) == 4 else found.part(query[2], heads)
    past = found.dims(4)[2] if found.has(4) else 0
    return AttentionParams(
        dtype=found.dtype(),
        batch=query[0],
        heads=heads,
        rows=long[0],
        columns=past + long[1],
        head_size=head,
        v_head_size=value[3] if len(value) == 4 else found.part(value[2], kv_heads),
        mask="bias" if found.has(3) else "none",
        causal=bool(found.number("is_causal")),
        capped=bool(attribute(found.node, "softcap", 0.0)),
        cached=found.has(4),
        grouped=heads != kv_heads,
        op="onnx.Attention",
    )


def _packed(found: _Operator) -> AttentionParams:
    heads = found.number("num_heads")
    query, offsets = found.dims(0), found.dims(4)
    head = query[3] if len(query) == 4 else found.part(query[1], heads)
    v_head = found.part(found.dims(2)[1], heads) if found.has(2) else head
    return AttentionParams(
        dtype=found.dtype(),
        batch=offsets[0],
        heads=heads,
        rows=offsets[1],
        columns=offsets[1],
        head_size=head,
        v_head_size=v_head,
        mask="bias" if found.has(6) else "none",
        op="PackedMultiHeadAttention",
    )


_READERS: Mapping[tuple[str, str], Callable[[_Operator], AttentionParams]] = {
    ("com.microsoft", "MultiHeadAttention"): _multi_head,
    ("com.microsoft", "Attention"): _projected,
    ("com.microsoft", "GroupQueryAttention"): _grouped,
    ("com.microsoft", "PackedMultiHeadAttention"): _packed,
    ("", "Attention"): _standard,
    ("ai.onnx", "Attention"): _standard,
}
