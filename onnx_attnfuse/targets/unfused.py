"""Attention in operators of the standard, in the form of execution providers that fuse it themselves.

    scores = MatMul(Q, Kᵀ) · scale + bias          (b, n, s, t), the bias broadcast over entries and heads
    result = MatMul(Softmax(scores), V)            (b, n, s, v)

`UnfusedForm` in the provider's record has the place of the factor. An attention in that form stays untouched.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, refined
from onnx_attnfuse.attention.axes.rearrange import arrange
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.masks.classify import Meaning
from onnx_attnfuse.attention.spec import Added, AttentionSpec, Axes4, Source
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.dtypes import type_name
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import REARRANGES, REPEATS
from onnx_attnfuse.kernels.execution_provider import UNFUSED, UnfusedForm
from onnx_attnfuse.kernels.operators import OpInfo
from onnx_attnfuse.reasons import Reason, Refused
from onnx_attnfuse.targets.base import BuildContext, Emitted, MaskEncoding, refuse_device
from onnx_attnfuse.targets.bias import letters_of
from onnx_attnfuse.targets.fully_masked_rows import Rows, are_as_in_float32, read_rows
from onnx_attnfuse.targets.layout import arranged, cheapest, replacing, scale_of
from onnx_attnfuse.targets.masked_rows import Refill, filled

ALONE: bool = False
INFO = OpInfo(UNFUSED, {}, target=__name__)
_DIGITS = 1e-5
"""A factor may be off by this part of it where it is one number of the attention's type."""
_MOVES = REARRANGES | REPEATS
_BESIDE = _MOVES | {"DequantizeLinear", "QuantizeLinear"}
"""Operators between those of the form: a provider for quantised models takes roundings in."""


def refuse(spec: AttentionSpec, meaning: Meaning, context: BuildContext) -> Reason | None:
    """Why `spec` is not written in that form, or None if it can be."""
    del meaning
    ep = context.device.ep
    unsupported = refuse_device(INFO.key, spec.dtype, context.device)
    if unsupported is not None:
        return unsupported
    if spec.softcap is not None:
        return Reason("no-softcap", f"the form that {ep} fuses caps no scores")
    if spec.sink is not None:
        return Reason("sink", f"the form that {ep} fuses has no place for a sink")
    if spec.scale_values or spec.scale == 0:
        return Reason("scale-at-run-time", f"the form that {ep} fuses has one scale, a number and not 0")
    if spec.causal:
        return Reason("mask-form", f"the form that {ep} fuses has no causal attribute")
    return None


def encodings(spec: AttentionSpec, meaning: Meaning) -> tuple[MaskEncoding, ...]:
    """The form of the mask: a bias, where there is one."""
    del spec
    return (MaskEncoding("none" if meaning.is_trivial else "bias"),)


def emit(spec: AttentionSpec, meaning: Meaning, context: BuildContext, encoding: MaskEncoding) -> Emitted:
    """Builds the form beside the nodes of `spec`.

    Raises:
        Refused: A part of the meaning cannot be expressed exactly.
    """
    form = context.device.provider.unfused_form
    assert form is not None
    assert spec.dtype is not None
    builder, axes = context.builder, spec.axes
    rows = read_rows(spec, meaning, encoding, context)
    targets: tuple[Axes, Axes, Axes] = (
        (axes.b, axes.n, axes.i, axes.h),
        (axes.b, axes.n, axes.h, axes.j),
        (axes.b, axes.n, axes.j, axes.v),
    )
    chosen = [cheapest(_whole(operand), target) for operand, target in zip(spec.operands(), targets, strict=True)]
    query, key, value = (arranged(builder, item, target, spec.dtype) for item, target in zip(chosen, targets, strict=True))
    scale = scale_of(spec, chosen)
    if not _is_kept(scale, spec.dtype):
        raise Refused("no-kernel-for-type", f"{type_name(spec.dtype)} does not keep the digits of {scale:g} as one factor")
    query = _levelled(builder, query, rows, axes)
    early, late = (scale, 1.0) if form.scale == "queries" else (1.0, scale)
    scores = _product(builder, _times(builder, query, early), key, spec)
    scores = _times(builder, scores, late)
    if rows.bias is not None:
        scores = builder.elementwise("Add", [scores, rows.bias.value])
    weights = builder.node("Softmax", [scores], {"axis": -1}, hint=f"{spec.name}/Softmax")
    result = _product(builder, weights, value, spec)
    shown = _shown(scale, rows.bias, form)
    return _replacing(builder, result, spec, rows, chosen, targets, shown)


def is_in_place(spec: AttentionSpec, form: UnfusedForm) -> bool:
    """Whether an attention has a provider's form already."""
    early = form.scale == "queries"
    factors = [any(source.factor != 1.0 for source in operand) for operand in spec.operands()]
    if any(factors[1:]) or (factors[0] and not early) or (early and spec.scale != 1.0):
        return False
    if spec.row_rules or spec.scale_values or spec.result_scales or spec.softcap is not None or spec.sink is not None:
        return False
    masks = [isinstance(step, Added) and not step.negative for step in spec.mask]
    ops = ["Mul" if node.op_type == "Div" else node.op_type for node in spec.nodes if node.op_type not in _BESIDE]
    scaled = ["Mul"] if spec.scale != 1.0 else []
    return all(masks) and ops == ["MatMul", *scaled, *(["Add"] * bool(masks)), "Softmax", "MatMul"]


def keeps_rows(spec: AttentionSpec, meaning: Meaning, context: BuildContext) -> bool:
    """Whether rows without a key are right on a provider in the present form, as `is_in_place` finds it.

    Where it computes in float16, their scores or their mask have to be edited, and may be already, by an earlier run.
    """
    if not context.device.provider.computes_in_float16 or are_as_in_float32(spec, meaning, context):
        return True
    masks = [step.indexed.value for step in spec.mask if isinstance(step, Added)]
    return any(_is_edited(value, context.builder.facts) for value in [*masks, *(source.indexed.value for source in spec.query)])


def _is_edited(value: ir.Value, facts: Facts) -> bool:
    """Whether some rows of a tensor are 0, or less their own maximum."""
    node = value.producer()
    if node is None or node.op_type != "Where" or node.inputs[1] is None or node.inputs[2] is None:
        return False
    edited, kept = node.inputs[1], node.inputs[2]
    made = edited.producer()
    raised = made is not None and made.op_type == "Sub" and made.inputs[0] is kept
    return facts.number(kept) is None and (raised or facts.number(edited) == 0)


def _whole(operand: tuple[Source, ...]) -> tuple[Source, ...]:
    """The sources of an operand that need not be rotated, and that are no larger tensor of which it is a part."""
    plain = [source for source in operand if source.rotary is None]
    return tuple(
        source for source in plain if not any(leaf.position is not None for axis in refined(source.indexed.axes) for leaf in axis)
    )


def _is_kept(number: float, dtype: ir.DataType) -> bool:
    """Whether a type holds a number closely enough that scores do not move visibly."""
    kept = float(np.array(number, dtype.numpy()))
    return abs(kept - number) <= _DIGITS * abs(number)


def _times(builder: Builder, value: ir.Value, factor: float) -> ir.Value:
    dtype = builder.facts.dtype(value)
    return value if factor == 1.0 else builder.elementwise("Mul", [value, builder.scalar(factor, dtype)])


def _levelled(builder: Builder, query: ir.Value, rows: Rows, axes: Axes4) -> ir.Value:
    """Queries (b, n, s, h) whose rows without a key are 0, where scores of such rows must all be equal."""
    if rows.zero_query is None:
        return query
    test = rows.zero_query.refined()
    present = {leaf for axis in test.axes for leaf in axis}
    target = tuple(axis if present & set(axis) else () for axis in (axes.b, axes.n, axes.i, ()))
    zero = builder.scalar(0.0, builder.facts.dtype(query))
    refill = Refill(test, True, keeps_nan=rows.keeps_nan)
    levelled = filled(builder, query, arrange(builder, test, target), zero, refill)
    builder.facts.copy(query, levelled)
    return levelled


def _product(builder: Builder, left: ir.Value, right: ir.Value, spec: AttentionSpec) -> ir.Value:
    return builder.node("MatMul", [left, right], hint=f"{spec.name}/MatMul")


def _shown(scale: float, bias: IndexedValue | None, form: UnfusedForm) -> str:
    """The form for a reader, node by node."""
    factor = ["Mul"] if scale != 1.0 else []
    added = [] if bias is None else [f"Add {letters_of(bias)}"]
    first = [*factor, "MatMul"] if form.scale == "queries" else ["MatMul", *factor]
    return ", ".join([*first, *added, "Softmax", "MatMul"])


def _replacing(
    builder: Builder,
    result: ir.Value,
    spec: AttentionSpec,
    rows: Rows,
    chosen: Sequence[Source],
    targets: Sequence[Axes],
    form: str,
) -> Emitted:
    """The result in the place of that of the source; rows are corrected where heads and channels lie together."""
    axes, split = spec.axes, (spec.axes.b, spec.axes.n, spec.axes.i, spec.axes.v)
    if not rows.refills and not spec.result_scales:
        return replacing(builder, result, spec, rows, chosen, targets, form, layout=split)
    merged = arrange(builder, IndexedValue(result, split), (axes.b, axes.i, (*axes.n, *axes.v)))
    return replacing(builder, merged, spec, rows, chosen, targets, form)
