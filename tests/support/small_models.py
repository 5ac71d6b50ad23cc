"""Small models for tests of what lies around the engine, written as ONNX text."""

from __future__ import annotations

import pathlib

import onnx
import onnx.parser

HEADER = '<ir_version: 9, opset_import: ["" : 18]>'
ATTENTION = f"""{HEADER}
attention (float[b, 2, s, 4] q, float[b, 2, t, 4] k, float[b, 2, t, 4] v) => (float[b, 2, s, 4] out)
<float scale = {{0.5}}>
{{
    [transpose] kt = Transpose<perm = [0, 1, 3, 2]>(k)
    [scores] qk = MatMul(q, kt)
    [scaling] scaled = Mul(qk, scale)
    [softmax] weights = Softmax<axis = -1>(scaled)
    [values] out = MatMul(weights, v)
}}"""
"""One attention, plain enough that every version of the engine fuses it."""

LINEAR = f"""{HEADER}
linear (float[b, 2] x) => (float[b, 2] y)
<float[2, 2] weight = {{1, 2, 3, 4}}, float[2] bias = {{5, 6}}>
{{
    [product] h = MatMul(x, weight)
    [sum] y = Add(h, bias)
}}"""
"""No attention, two weights."""


def parsed(text: str) -> onnx.ModelProto:
    """The model that `text` describes."""
    return onnx.parser.parse_model(text)


def written(model: onnx.ModelProto | str, path: pathlib.Path) -> pathlib.Path:
    """`path`, with the model in it and nothing checked."""
    model = parsed(model) if isinstance(model, str) else model
    path.write_bytes(model.SerializeToString())
    return path


def point_to(tensor: onnx.TensorProto, location: str, **numbers: int) -> None:
    """Make a tensor refer to a data file."""
    tensor.ClearField("raw_data")
    tensor.ClearField("float_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in {"location": location, **numbers}.items():
        tensor.external_data.add(key=key, value=str(value))


def linear_with_data(folder: pathlib.Path, location: str = "weights.bin") -> pathlib.Path:
    """`LINEAR` as a file in `folder`, its weights in a data file beside it."""
    model = parsed(LINEAR)
    data = folder / location
    data.parent.mkdir(parents=True, exist_ok=True)
    with data.open("wb") as file:
        for tensor in model.graph.initializer:
            start = file.tell()
            file.write(onnx.numpy_helper.to_array(tensor).tobytes())
            point_to(tensor, location, offset=start, length=file.tell() - start)
    return written(model, folder / "model.onnx")


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    """Every file below `folder`."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
