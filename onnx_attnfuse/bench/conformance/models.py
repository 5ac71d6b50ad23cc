"""The model of one node that a case is run as, and what it is fed."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from onnx_attnfuse.bench.conformance.drawing import Array, Case, Inputs

_IR_VERSION = 10


def model_of(case: Case, inputs: Inputs) -> onnx.ModelProto:
    """A model of the one node, whose inputs are `x0`, `x1`, ... and whose outputs `y0`, `y1`, ..."""
    names = ["" if array is None else f"x{place}" for place, array in enumerate(inputs)]
    results = [f"y{place}" for place in range(case.outputs)]
    given = [(name, array) for name, array in zip(names, inputs, strict=True) if array is not None]
    wide = {name for name, array in given if array.dtype.name == "bfloat16"}
    casts = [helper.make_node("Cast", [name], [f"{name} narrow"], to=onnx.TensorProto.BFLOAT16) for name in wide]
    read = [f"{name} narrow" if name in wide else name for name in names]
    written = [f"{name} narrow" if wide and _is_float(case, place) else name for place, name in enumerate(results)]
    node = helper.make_node(case.op, read, written, domain=case.domain, **dict(case.attributes))
    back = [
        helper.make_node("Cast", [inner], [name], to=onnx.TensorProto.FLOAT)
        for inner, name in zip(written, results, strict=True)
        if inner != name
    ]
    kind = _kind(given[0][1])
    inner = [helper.make_tensor_value_info(name, _kind(array), array.shape) for name, array in given]
    outer = [
        helper.make_tensor_value_info(name, kind if _is_float(case, place) else onnx.TensorProto.INT32, None)
        for place, name in enumerate(results)
    ]
    graph = helper.make_graph([*casts, node, *back], "case", inner, outer)
    imports = [helper.make_opsetid("", case.opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=_IR_VERSION)


def _is_float(case: Case, place: int) -> bool:
    return case.op != "RemovePadding" or place == 0


def _kind(array: Array) -> int:
    return helper.np_dtype_to_tensor_dtype(_plain(array).dtype)


def _plain(array: Array) -> Array:
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def feeds_of(inputs: Inputs) -> dict[str, Array]:
    """The inputs of a case's model, by name."""
    return {f"x{place}": _plain(array) for place, array in enumerate(inputs) if array is not None}
