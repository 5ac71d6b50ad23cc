"""A cache in float8, for which there is no kernel on the CPU: keys and values are rounded in front of the operator.

The cache is in float32 then, and holds what the quantised one stands for.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnx_attnfuse.graph.constants import attribute
from onnx_attnfuse.kernels.operators.group_query_attention import INFO
from onnx_attnfuse.verify.gqa_prologue import in_front, unpack

_FLOAT = ir.DataType.FLOAT
_BITS, _SMALLEST, _LARGEST = 3.0, -6, 448.0
"""Of float8e4m3fn: bits behind the leading one, the exponent of the smallest normal number, and the largest number."""
_CACHE = ("k_quant_type", "v_quant_type", "kv_cache_bit_width")


def rounded_in_front(model: ir.Model) -> ir.Model | None:
    """A copy of a model in float32 whose attentions are given rounded keys and values; None where they rotate them afterwards."""
    copy = in_front(model)
    for node in [item for item in copy.graph if item.op_type == INFO.name and INFO.input(item, "k_scale") is not None]:
        if attribute(node, "do_rotary", 0):
            return None
        unpack(node)
        for name, scale, past in (("key", "k_scale", "past_key"), ("value", "v_scale", "past_value")):
            _round(copy.graph, node, name, scale)
            for value in (INFO.input(node, past), node.outputs[1 if name == "key" else 2]):
                assert value is not None
                value.type = ir.TensorType(_FLOAT)
            node.replace_input_with(INFO.place(scale), None)
        for name in _CACHE:
            del node.attributes[name]
    return copy


def _round(graph: ir.Graph, node: ir.Node, name: str, scale: str) -> None:
    """Puts a rounding between an operand and the operator, in operators of every opset: before 19 no Cast knows float8.

    The step of a number is 2^(e - 3), where e is the exponent of its leading bit, at least that of the smallest normal number.
    """
    operand, scales = INFO.input(node, name), INFO.input(node, scale)
    assert operand is not None
    assert scales is not None
    assert scales.const_value is not None
    numbers = np.asarray(scales.const_value.numpy(), np.float32).reshape(-1)

    def made(kind: str, *given: ir.Value | npt.NDArray[np.float32] | float) -> ir.Value:
        place = f"{node.name}/{name}/{kind}/{len(graph)}"
        weights = enumerate(given)
        inputs = [item if isinstance(item, ir.Value) else _weight(graph, item, f"{place}/{at}") for at, item in weights]
        found = ir.node(kind, inputs)
        found.outputs[0].name = place
        graph.insert_before(node, found)
        return found.outputs[0]

    scaled = made("Min", made("Max", made("Div", operand, numbers), -_LARGEST), _LARGEST)
    exponent = made("Floor", made("Div", made("Log", made("Max", made("Abs", scaled), 2.0**_SMALLEST)), math.log(2)))
    step = made("Pow", 2.0, made("Sub", exponent, _BITS))
    value = made("Mul", made("Mul", made("Round", made("Div", scaled, step)), step), numbers)
    value.shape, value.type = operand.shape, ir.TensorType(_FLOAT)
    node.replace_input_with(INFO.place(name), value)


def _weight(graph: ir.Graph, array: npt.NDArray[np.float32] | float, name: str) -> ir.Value:
    tensor = ir.tensor(np.asarray(array, np.float32), name=name)
    value = ir.Value(name=name, const_value=tensor, shape=ir.Shape(tensor.numpy().shape), type=ir.TensorType(_FLOAT))
    graph.register_initializer(value)
    return value
