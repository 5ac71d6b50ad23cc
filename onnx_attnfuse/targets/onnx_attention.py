"""ai.onnx Attention: any attention of float operands, capped or not, whose rows all see a key; masks as a bias.

On a CPU it is the faster operator where there are few queries and keys; elsewhere it does what MultiHeadAttention cannot.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from onnx_attnfuse.axes.factors import length
from onnx_attnfuse.graph.constants import is_constant
from onnx_attnfuse.masks.meaning import Meaning
from onnx_attnfuse.masks.walk import elements_of
from onnx_attnfuse.reasons import Reason, Refused
from onnx_attnfuse.spec import FORBIDS, AttentionSpec
from onnx_attnfuse.targets.bias import BiasEmitter
from onnx_attnfuse.targets.emitted import Emitted, Way, Workbench
from onnx_attnfuse.targets.layout import grouped, replacing
from onnx_attnfuse.targets.rows import Rows

OP: str = "Attention"
DOMAIN: str = ""
PROVIDERS: frozenset[str] = frozenset(["cpu", "cuda"])
ALONE: bool = False
_SINCE = 23
_DTYPES = {"cpu": {ir.DataType.FLOAT}, "cuda": {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}}


def refuse(spec: AttentionSpec, meaning: Meaning, bench: Workbench) -> Reason | None:
    """Why this operator cannot compute `spec`, or None if it can."""
    opset = bench.builder.opset
    if opset < _SINCE:
        return Reason("old-opset", f"ai.onnx Attention needs opset {_SINCE}, and the model has {opset}")
    if spec.dtype not in _DTYPES[bench.device.ep]:
        name = spec.dtype.name.lower() if spec.dtype is not None else "an unknown type"
        return Reason("no-kernel-for-type", f"ai.onnx Attention is not used for {name} on {bench.device.ep}")
    if spec.scale <= 0:
        return Reason("scale-not-positive", f"ai.onnx Attention takes no scale of {spec.scale:g}")
    if not _rows_agree(spec, meaning, bench):
        return Reason("rows-without-a-key", "ai.onnx Attention gives rows without a key 0, and the source may not")
    return None


def ways(spec: AttentionSpec, meaning: Meaning) -> tuple[Way, ...]:
    """How the mask is handed over; its causal triangle begins with the first row and key, whatever their numbers."""
    if meaning.is_trivial:
        return (Way("none"),)
    alone = meaning.only_causal
    if alone is not None and alone.offset == 0:
        return (Way("none", causal=True),)
    return (Way("bias", causal=spec.causal),)


def emit(spec: AttentionSpec, meaning: Meaning, bench: Workbench, way: Way, *, flat: bool = False) -> Emitted:
    """Builds the operator for `spec` beside its nodes.

    Raises:
        Refused: A part of the meaning cannot be expressed exactly.
    """
    del meaning, flat
    assert spec.dtype is not None
    builder, axes = bench.builder, spec.axes
    operands = grouped(builder, spec)
    if operands.scale <= 0:
        raise Refused("scale-not-positive", f"ai.onnx Attention takes no scale of {operands.scale:g}")
    inputs = list(operands.values)
    form = "is_causal" if way.causal else "none"
    if way.mask == "bias":
        assert spec.mask is not None
        bias = BiasEmitter(builder, axes, spec.dtype)
        compact = bias.compact(spec.mask)
        inputs.append(bias.full(compact))
        letters = (letter if axis else "1" for letter, axis in zip("bnst", compact.axes, strict=True))
        form = f"{'is_causal + ' if way.causal else ''}attn_mask {' '.join(letters)}"
    attributes = {
        "q_num_heads": axes.num_heads,
        "kv_num_heads": length(operands.kv_heads),
        "scale": operands.scale,
        "is_causal": int(way.causal),
    }
    fused = builder.node(
        OP,
        inputs,
        attributes if spec.softcap is None else {**attributes, "softcap": spec.softcap},
        dims=[length(axes.b), length(axes.i), length((*axes.n, *axes.v))],
        dtype=spec.dtype,
        hint=f"{spec.name}/{OP}",
    )
    return replacing(builder, fused, spec, Rows(None), operands.chosen, operands.targets, form)


def _rows_agree(spec: AttentionSpec, meaning: Meaning, bench: Workbench) -> bool:
    """Whether rows without a key cannot occur, or the source gives them 0 too."""
    if any(rule.condition is not None for rule in spec.row_rules):
        return False
    if spec.mask is None:
        return True
    if spec.row_rules:
        low_counts = all(rule.lowest_counts for rule in spec.row_rules)
        return low_counts or (meaning.fills <= {-math.inf} and not meaning.biases)
    if not meaning.predicates and bench.bounds.lowest(spec.mask) > FORBIDS:
        return True
    return meaning.rows_alive and all(is_constant(item.value) for bias in meaning.biases for item in elements_of(bias))
