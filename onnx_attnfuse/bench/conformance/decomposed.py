"""The attention of a form decomposed as exporters write it: MatMul, one scale, one added mask, Softmax, MatMul.

Sizes are numbers, keys are transposed where they lie, and nothing guards rows without a key, of which forms have none.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnx_attnfuse.bench.conformance.drawing import Array
from onnx_attnfuse.bench.conformance.inputs import CAPPED_AT, Added, kv_heads
from onnx_attnfuse.kernels.conformance import Form

_OPSET = 18
_IR_VERSION = 10
_CONSTANT = frozenset(["weights", "projection bias"])


class _Graph:
    """Nodes and constants of a model that is made."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        """A node; its only result."""
        name = f"{op.lower()} {len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], **attributes))
        return name

    def constant(self, array: Array) -> str:
        """A constant."""
        self.constants.append(numpy_helper.from_array(array, f"constant {len(self.constants)}"))
        return self.constants[-1].name

    def shaped(self, value: str, *shape: int) -> str:
        """A value in another shape."""
        return self.add("Reshape", value, self.constant(np.asarray(shape, np.int64)))


def model_of(form: Form, added: Added) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """The model, whose only output is what the operator gives first, and what it is fed."""
    graph = _Graph()
    feeds = {role.replace(" ", "_"): array for role, array in added.operands.items() if role not in _CONSTANT}
    query, key, value = _operands(graph, form, added)
    if form.cached:
        past = ["past", "past_value"]
        if "past_value" not in feeds:
            past = [graph.add("Gather", "past", graph.constant(np.asarray(place)), axis=0) for place in (0, 1)]
        key, value = (graph.add("Concat", old, new, axis=2) for old, new in zip(past, (key, value), strict=True))
    if form.grouped:
        key, value = (_repeated(graph, form, operand) for operand in (key, value))
    dtype = next(iter(feeds.values())).dtype
    scores = graph.add("MatMul", query, graph.add("Transpose", key, perm=[0, 1, 3, 2]))
    scores = graph.add("Mul", scores, graph.constant(np.asarray(1 / math.sqrt(form.head_size), dtype)))
    if form.capped:
        cap = graph.constant(np.asarray(CAPPED_AT, dtype))
        scores = graph.add("Mul", graph.add("Tanh", graph.add("Div", scores, cap)), cap)
    if added.mask is not None:
        feeds["added"] = added.mask
        scores = graph.add("Add", scores, "added")
    result = graph.add("MatMul", graph.add("Softmax", scores, axis=-1), value)
    result = graph.shaped(graph.add("Transpose", result, perm=[0, 2, 1, 3]), form.batch, form.rows, form.heads * form.head_size)
    return _model(graph, feeds, result), {name: _plain(array) for name, array in feeds.items()}


def _operands(graph: _Graph, form: Form, added: Added) -> tuple[str, str, str]:
    """Queries, keys and values by head."""
    fresh = form.columns - form.past
    if "weights" not in added.operands:
        sizes = ((form.rows, form.heads), (fresh, kv_heads(form)), (fresh, kv_heads(form)))
        flat = zip(("query", "key", "value"), sizes, strict=True)
        query, key, value = (_by_head(graph, form, name, *size) for name, size in flat)
        return query, key, value
    parts = np.split(added.operands["weights"], 3, axis=1)
    biases = np.split(added.operands["projection bias"], 3)
    products = [
        graph.add("Add", graph.add("MatMul", "input", graph.constant(np.ascontiguousarray(part))), graph.constant(bias))
        for part, bias in zip(parts, biases, strict=True)
    ]
    query, key, value = (_by_head(graph, form, product, form.rows, form.heads) for product in products)
    return query, key, value


def _by_head(graph: _Graph, form: Form, flat: str, length: int, heads: int) -> str:
    return graph.add("Transpose", graph.shaped(flat, form.batch, length, heads, form.head_size), perm=[0, 2, 1, 3])


def _repeated(graph: _Graph, form: Form, operand: str) -> str:
    """Keys or values with each head as often as it serves one of the queries."""
    heads, length, size = kv_heads(form), form.columns, form.head_size
    apart = graph.shaped(operand, form.batch, heads, 1, length, size)
    wide = np.asarray([form.batch, heads, form.heads // heads, length, size], np.int64)
    return graph.shaped(graph.add("Expand", apart, graph.constant(wide)), form.batch, form.heads, length, size)


def _model(graph: _Graph, feeds: dict[str, Array], result: str) -> onnx.ModelProto:
    """The model of all nodes; bfloat16, which no session is fed, is cast from float32 and back."""
    wide = any(_is_narrow(array) for array in feeds.values())
    inner = {name: f"{name} narrow" if wide else name for name in feeds}
    nodes = [helper.make_node("Cast", [name], [inner[name]], to=onnx.TensorProto.BFLOAT16) for name in feeds if wide]
    for node in graph.nodes:
        node.input[:] = [inner.get(name, name) for name in node.input]
    if wide:
        graph.nodes.append(helper.make_node("Cast", [result], [f"{result} wide"], to=onnx.TensorProto.FLOAT))
    kind = helper.np_dtype_to_tensor_dtype(_plain(next(iter(feeds.values()))).dtype)
    given = [helper.make_tensor_value_info(name, kind, array.shape) for name, array in feeds.items()]
    out = helper.make_tensor_value_info(graph.nodes[-1].output[0], kind, None)
    proto = helper.make_graph([*nodes, *graph.nodes], "decomposed", given, [out], graph.constants)
    return helper.make_model(proto, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION)


def _is_narrow(array: Array) -> bool:
    return str(array.dtype) == "bfloat16"


def _plain(array: Array) -> Array:
    return array.astype(np.float32) if _is_narrow(array) else array
