"""CausalConvWithState: a convolution of each channel by itself, over inputs appended to a state."""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.bodies.core import joined
from onnx_attnfuse.bodies.fused_node import Body, FusedNode
from onnx_attnfuse.graph.build import Builder, dims_of
from onnx_attnfuse.reasons import Refused

_CHANNELS_FIRST = (0, 2, 1)


def body(fused: FusedNode) -> Body:
    """The state with the input after it, convolved; the last positions of both are the state that goes out.

    Raises:
        Refused: The number of channels or the length of the kernel is unknown, or several axes are convolved.
    """
    build, x, weight, bias = fused.build, fused.operand("input"), fused.operand("weight"), fused.given("bias")
    is_last, dilation, past = fused.attribute("channels_last", 0), fused.attribute("dilation", 1), fused.given("past_state")
    activation = fused.attribute("activation", "none")
    if fused.attribute("ndim", 1) != 1:
        raise Refused("not-decomposed", "several axes are convolved", fused.node.name)
    channels, _, size = fused.dims(weight)
    groups = fused.number(channels, "the number of channels")
    reach = (fused.number(size, "the length of the kernel") - 1) * dilation
    sequence = build.transpose(x, _CHANNELS_FIRST) if is_last else x
    if past is None:
        zero = build.reshape(build.scalar(0.0, build.facts.dtype(x)), (1, 1, 1))
        state = build.expand(zero, (dims_of(build, sequence)[0], groups, reach), [True] * 3)
    else:
        state = build.transpose(past, _CHANNELS_FIRST) if is_last else past
    fused.take_equal(fused.dims(state)[1:], (groups, reach), "the state")
    whole = joined(build, [state, sequence], 2)
    operands = [whole, weight, *([] if bias is None else [bias])]
    attributes = {"group": groups, "dilations": [dilation]}
    dims, dtype = dims_of(build, sequence), build.facts.dtype(x)
    result = build.node("Conv", operands, attributes, dims=dims, dtype=dtype)
    if activation in {"silu", "swish"}:
        result = build.elementwise("Mul", [result, build.elementwise("Sigmoid", [result], dtype)], dtype)
    elif activation != "none":
        raise Refused("not-decomposed", f"the activation {activation}", fused.node.name)
    present = build.slice(whole, 2, -reach, None) if reach else build.slice(whole, 2, 0, 0)
    values = (_laid(build, result, is_last), _laid(build, present, is_last))
    return Body(values, tuple(fused.all_given("input", "weight", "bias", "past_state")))


def _laid(build: Builder, value: ir.Value, is_last: int) -> ir.Value:
    """(b, c, t) with the channels where the operator has them."""
    return build.transpose(value, _CHANNELS_FIRST) if is_last else value
