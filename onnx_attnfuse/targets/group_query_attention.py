"""com.microsoft.GroupQueryAttention: causal attention of as many queries as keys, also within a window, capped, of grouped heads.

It reads lengths, not masks: padding is not handed over, only batches without any are its own. Its kernels spare the scores
outside of the window, which no bias does; but it writes a cache, also where nobody reads it. So it pays before Hopper, with many
scores.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.axes.factors import length
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.masks.meaning import Causal, Meaning, Window
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.spec import AttentionSpec
from onnx_attnfuse.targets.emitted import Emitted, Way, Workbench
from onnx_attnfuse.targets.layout import grouped, replacing
from onnx_attnfuse.targets.padding import is_padding
from onnx_attnfuse.targets.rows import Rows

OP: str = "GroupQueryAttention"
DOMAIN: str = "com.microsoft"
PROVIDERS: frozenset[str] = frozenset(["cuda"])
ALONE: bool = False
_EIGHT = 8
_DTYPES = {"cpu": {ir.DataType.FLOAT, ir.DataType.FLOAT16}, "cuda": {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}}


def refuse(spec: AttentionSpec, meaning: Meaning, bench: Workbench) -> Reason | None:
    """Why this operator cannot compute `spec`, or None if it can."""
    ep = bench.device.ep
    if spec.dtype not in _DTYPES[ep]:
        name = spec.dtype.name.lower() if spec.dtype is not None else "an unknown type"
        return Reason("no-kernel-for-type", f"GroupQueryAttention has no kernel on {ep} for {name}")
    axes = spec.axes
    size = length(axes.h)
    if size != length(axes.v) or not isinstance(size, int) or size % _EIGHT:
        return Reason("head-size", "GroupQueryAttention wants equal head sizes, a multiple of 8")
    if spec.scale <= 0:
        return Reason("scale-not-positive", f"GroupQueryAttention takes no scale of {spec.scale:g}")
    triangles = [item for item in meaning.predicates if isinstance(item, Causal)]
    if len(triangles) != 1 or triangles[0].offset != 0 or length(axes.i) != length(axes.j):
        return Reason("not-causal", "GroupQueryAttention is for causal attention of as many queries as keys")
    rest = [item for item in meaning.predicates if not isinstance(item, (Causal, Window))]
    if meaning.biases or _window(meaning) is None or (rest and not is_padding(rest, spec)):
        return Reason("mask-form", "GroupQueryAttention takes a causal triangle and a window, nothing besides")
    if any(rule.condition is not None for rule in spec.row_rules):
        return Reason("weights-zeroed", "the weights are set to 0 after the softmax")
    return None


def ways(spec: AttentionSpec, meaning: Meaning) -> tuple[Way, ...]:
    """Without a mask, for batches without padding where there may be some."""
    del spec
    windowed = _window(meaning) != -1
    padded = any(not isinstance(item, (Causal, Window)) for item in meaning.predicates)
    return (Way("none", causal=True, when="unpadded" if padded else "always", windowed=windowed),)


def emit(spec: AttentionSpec, meaning: Meaning, bench: Workbench, way: Way, *, flat: bool = False) -> Emitted:
    """Builds the operator for `spec` beside its nodes.

    Raises:
        Refused: An operand cannot be brought into its layout.
    """
    del way, flat
    assert spec.dtype is not None
    builder, axes = bench.builder, spec.axes
    operands = grouped(builder, spec)
    last, total = _lengths(builder, length(axes.b), length(axes.j))
    window = _window(meaning)
    assert window is not None
    attributes = {
        "num_heads": axes.num_heads,
        "kv_num_heads": length(operands.kv_heads),
        "scale": operands.scale,
        "local_window_size": window,
    }
    fused = builder.node(
        OP,
        [*operands.values, None, None, last, total],
        attributes if spec.softcap is None else {**attributes, "softcap": spec.softcap},
        domain=DOMAIN,
        dims=[length(axes.b), length(axes.i), length((*axes.n, *axes.v))],
        dtype=spec.dtype,
        hint=f"{spec.name}/{OP}",
        outputs=3,
    )
    words = "causal" if window == -1 else f"causal, local_window_size {window}"
    return replacing(builder, fused, spec, Rows(None), operands.chosen, operands.targets, f"{OP} {words}")


def _window(meaning: Meaning) -> int | None:
    """How many keys a row sees, itself counted; -1: all before it; None: that is not known."""
    windows = [item for item in meaning.predicates if isinstance(item, Window)]
    if not windows:
        return -1
    reach = windows[0].reach
    return reach + 1 if len(windows) == 1 and isinstance(reach, int) and reach >= 0 else None


def _lengths(builder: Builder, batch: Dim, columns: Dim) -> tuple[ir.Value, ir.Value]:
    """The place of the last key in every entry, (b) int32, and how many keys there are, a scalar int32."""
    total = builder.cast(builder.reshape(builder.shape([columns]), []), ir.DataType.INT32)
    last = builder.elementwise("Sub", [total, builder.constant(np.asarray(1, np.int32))], ir.DataType.INT32)
    return builder.expand(builder.reshape(last, [1]), [batch], [True]), total
