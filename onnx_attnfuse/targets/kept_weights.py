"""Whether the weights that a mask behind a softmax keeps have a sum that floats hold, told from one run's own numbers."""

from __future__ import annotations

import math

import onnx_ir as ir

from onnx_attnfuse.attention.axes.rearrange import arrange
from onnx_attnfuse.attention.masks.classify import Meaning
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.targets.base import BuildContext
from onnx_attnfuse.targets.bias import bias_emitter
from onnx_attnfuse.targets.row_tests import no_key


def kept_weights_hold(spec: AttentionSpec, meaning: Meaning, context: BuildContext) -> ir.Value:
    """One truth value: every row keeps no key, or weights of a sum as large as `kept-weights` says.

    Args:
        spec: An attention whose weights are divided by their sum, `renormalized`.
        meaning: Its mask.
        context: What to build with; nodes are built behind the attention of the source.
    """
    assert spec.renormalized is not None
    builder, axes = context.builder, spec.axes
    total = arrange(builder, spec.renormalized.total, (axes.b, axes.n, axes.i, ()))
    wide = builder.cast(total, ir.DataType.FLOAT)
    least = builder.scalar(spec.renormalized.least, ir.DataType.FLOAT)
    enough = builder.elementwise("GreaterOrEqual", [wide, least], ir.DataType.BOOL)
    empty = no_key(bias_emitter(spec, meaning, context).compact(spec.mask, "exact"), -math.inf, context)
    held = builder.elementwise("Or", [empty.value, enough], ir.DataType.BOOL)
    lost = builder.holds_along(builder.elementwise("Not", [held], ir.DataType.BOOL), [0, 1, 2, 3], keep=False)
    return builder.elementwise("Not", [lost], ir.DataType.BOOL)
