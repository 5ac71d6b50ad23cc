"""A causal convolution of one token as CausalConvWithState, its activation and the state that goes out with it.

    Concat(state, x) → Conv → Slice(last) → x · Sigmoid(x)      is      CausalConvWithState(x, weight, bias, state)
    Slice of the Concat                                         is      its second output

The state of transformers has as many positions as the kernel, of which the oldest is never read. A kernel with a 0 in front of
its weights reads it, so that the operator's state is that of the model and needs no cut.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attribute, is_constant
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import CONTRIB, is_standard
from onnx_attnfuse.mixers.candidates import Mixer
from onnx_attnfuse.mixers.rewrite import Replacement, with_state
from onnx_attnfuse.reasons import Refused

OPERATOR = "CausalConvWithState"


def fused_convolution(mixer: Mixer, builder: Builder) -> Replacement:
    """The operator for one token of a convolution.

    Raises:
        Refused: Several tokens may be convolved at once, or the state has another length.
    """
    node, facts = mixer.node, builder.facts
    whole, weight, *bias = node.inputs
    joined = None if whole is None else whole.producer()
    if weight is None or whole is None or mixer.state is None or joined is None or len(joined.inputs) != 2:
        raise Refused("mixer-convolution", "nothing but a state and new tokens is convolved where it is fused")
    state, x = joined.inputs
    before, dims = facts.dims(mixer.state), facts.dims(x)
    lengths = facts.dims(weight)
    if x is None or state is not mixer.state or dims is None or before is None or lengths is None or dims[-1] != 1:
        raise Refused("mixer-convolution", "Conv is faster for several tokens at once, and for one alone it is replaced")
    step = attribute(node, "dilations", [1])[0]
    missing = _number(before[-1]) - (_number(lengths[-1]) - 1) * step
    if missing < 0 or missing % step:
        raise Refused("mixer-convolution", "the state is no longer than the kernel reaches back")
    kernel = _widened(weight, missing // step, builder)
    result, activation = _activated(_last(node.outputs[0], facts))
    inputs = [x, kernel, *(bias or [None]), state]
    settings = {"activation": activation, "dilation": step}
    out = builder.node(OPERATOR, inputs, settings, domain=CONTRIB, dims=dims, dtype=facts.dtype(x), outputs=2)
    present = with_state(builder, out, before)
    states = [user.outputs[0] for user, _ in whole.uses() if is_standard(user, "Slice") and facts.dims(user.outputs[0]) == before]
    ends = [x, state, weight, *bias]
    folds = (kernel,) if kernel is not weight and is_constant(weight) else ()
    return Replacement(OPERATOR, ((result, out), *((item, present) for item in states)), (ends.__contains__,), folds)


def _number(dim: object) -> int:
    if not isinstance(dim, int):
        raise Refused("mixer-convolution", "the length of the state or of the kernel is unknown")
    return dim


def _widened(weight: ir.Value, count: int, builder: Builder) -> ir.Value:
    """A kernel with zeros in front, for positions of the state that it does not read."""
    dims, dtype = builder.facts.dims(weight), builder.facts.dtype(weight)
    if not count or dims is None or dtype is None:
        return weight
    zeros = builder.constant(np.zeros((_number(dims[0]), 1, count), dtype.numpy()))
    return builder.node("Concat", [zeros, weight], {"axis": 2}, dims=(*dims[:2], _number(dims[2]) + count), dtype=dtype)


def _last(value: ir.Value, facts: Facts) -> ir.Value:
    """The results of a convolution, without those before the token."""
    dims, users = facts.dims(value), [user for user, _ in value.uses()]
    if dims is not None and dims[-1] == 1:
        return value
    if len(users) != 1 or not is_standard(users[0], "Slice", "Gather") or value.is_graph_output():
        raise Refused("mixer-convolution", "more than the token's own result is used")
    return users[0].outputs[0]


def _activated(value: ir.Value) -> tuple[ir.Value, str]:
    """A result with its activation, and what that is called."""
    users = {user for user, _ in value.uses()}
    gate = next((user for user in users if is_standard(user, "Sigmoid")), None)
    product = next((user for user in users if is_standard(user, "Mul")), None)
    if gate is None or product is None or len(users) != 2 or set(product.inputs) != {value, gate.outputs[0]}:
        return value, "none"
    if value.is_graph_output() or len(gate.outputs[0].uses()) > 1:
        return value, "none"
    return product.outputs[0], "silu"
