"""The two models of a case: the operator alone, and its body, as of an attention that is not fused."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper
from onnx_ir.passes.common import RemoveUnusedNodesPass

from onnx_attnfuse.bench.conformance.cases import Array, Case, Inputs
from onnx_attnfuse.bodies.table import body_of
from onnx_attnfuse.graph.ops import CONTRIB
from onnx_attnfuse.kernels.operators import OpInfo
from onnx_attnfuse.verify.references import node_on

_IR_VERSION, _OPSET = 10, 18
_WEIGHTS = frozenset(["weights", "projection bias"])


def model_of(case: Case, inputs: Inputs) -> onnx.ModelProto:
    """A model of the one node, whose inputs are `x0`, `x1`, ... and whose outputs `y0`, `y1`, ..."""
    names = ["" if array is None else f"x{place}" for place, array in enumerate(inputs)]
    results = [f"y{place}" for place in range(case.outputs)]
    node = helper.make_node(case.op, names, results, domain=case.domain, **dict(case.attributes))
    given = [
        helper.make_tensor_value_info(name, ir.DataType.from_numpy(array.dtype).value, array.shape)
        for name, array in zip(names, inputs, strict=True)
        if array is not None
    ]
    kind = given[0].type.tensor_type.elem_type
    kinds = [onnx.TensorProto.INT32 if case.op == "RemovePadding" and place else kind for place in range(case.outputs)]
    found = [helper.make_tensor_value_info(name, item, None) for name, item in zip(results, kinds, strict=True)]
    graph = helper.make_graph([node], "case", given, found)
    imports = [helper.make_opsetid("", case.opset), helper.make_opsetid(CONTRIB, 1)]
    return _fed_in_float32(helper.make_model(graph, opset_imports=imports, ir_version=_IR_VERSION))


def feeds_of(inputs: Inputs) -> dict[str, Array]:
    """The inputs of a case's model, by name."""
    return {f"x{place}": _plain(array) for place, array in enumerate(inputs) if array is not None}


def decomposed(case: Case, info: OpInfo, inputs: Inputs) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """The body of the operator, with its first output, and its feeds; weights, lengths and masks of integers are constants.

    Raises:
        Refused: The body cannot be written.
    """
    fused = node_on((case.domain, case.op), inputs, case.attributes, case.outputs, _OPSET)
    graph, feeds = fused.build.graph, dict[str, Array]()
    for value, array, role in zip(fused.inputs, inputs, info.inputs.values(), strict=False):
        if value is None or array is None:
            continue
        if array.dtype.kind in "fV" and role not in _WEIGHTS:
            feeds[str(value.name)] = _plain(array)
            continue
        value.const_value = ir.tensor(array, name=value.name)
        graph.inputs.remove(value)
        graph.register_initializer(value)
    graph.outputs[:] = [value for value in body_of(fused).values[:1] if value is not None]
    graph.remove(fused.node)
    model = ir.Model(graph, ir_version=_IR_VERSION)
    RemoveUnusedNodesPass()(model)
    return _fed_in_float32(ir.to_proto(model)), feeds


def _fed_in_float32(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model, in place, with float32 outside where it has bfloat16, which sessions are not fed."""
    graph, narrow = model.graph, onnx.TensorProto.BFLOAT16
    casts: list[onnx.NodeProto] = []
    for values, name in ((graph.input, "input"), (graph.output, "output")):
        for value in values:
            if value.type.tensor_type.elem_type != narrow:
                continue
            value.type.tensor_type.elem_type, inner = onnx.TensorProto.FLOAT, f"{value.name} narrow"
            for node in graph.node:
                names = getattr(node, name)
                names[:] = [inner if item == value.name else item for item in names]
            sides, to = ((value.name, inner), narrow) if name == "input" else ((inner, value.name), onnx.TensorProto.FLOAT)
            casts.append(helper.make_node("Cast", [sides[0]], [sides[1]], to=to))
    nodes = [*(node for node in casts if node.attribute[0].i == narrow), *graph.node]
    nodes += [node for node in casts if node.attribute[0].i != narrow]
    del graph.node[:]
    graph.node.extend(nodes)
    return model


def _plain(array: Array) -> Array:
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array
