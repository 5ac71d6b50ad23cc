"""UnfoldTensor in NumPy, as ONNX Runtime and torch compute it, and spelled out."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
import torch

import onnx_attnfuse
from onnx_attnfuse.verify.references import operator

unfold_tensor = operator("UnfoldTensor").called

_TEXT = """<ir_version: 9, opset_import: ["" : 18, "com.microsoft" : 1]>
model (float[b, t] x) => (float[b, {pieces}, {size}] y)
<int64[3] shape = {{0, -1, {step}}}, int64[2] flat = {{0, -1}}>
{{ rows = Reshape(x, shape) doubled = Add(rows, rows) whole = Reshape(doubled, flat)
   y = com.microsoft.UnfoldTensor<dim = {dim}, size = {size}, step = {step}>(whole) }}"""


@pytest.mark.parametrize(("dim", "size", "step"), [(-1, 4, 4), (1, 3, 5), (1, 5, 2), (0, 2, 1)])
def test_pieces_are_those_of_onnxruntime_and_torch(dim: int, size: int, step: int) -> None:
    x = np.random.default_rng(0).standard_normal((3, 20)).astype(np.float32)
    (found,) = unfold_tensor(x, dim=dim, size=size, step=step)
    np.testing.assert_array_equal(found, torch.from_numpy(x).unfold(dim, size, step).numpy())
    node = onnx.helper.make_node("UnfoldTensor", ["x"], ["y"], domain="com.microsoft", dim=dim, size=size, step=step)
    ports = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in "xy"]
    opsets = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(
        onnx.helper.make_graph([node], "one", ports[:1], ports[1:]), opset_imports=opsets, ir_version=9
    )
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(found, session.run(None, {"x": x})[0])


def test_rows_in_one_axis_are_cut_as_torch_cuts_them() -> None:
    x = np.arange(12, dtype=np.float32)
    np.testing.assert_array_equal(unfold_tensor(x, dim=0, size=3, step=4)[0], torch.from_numpy(x).unfold(0, 3, 4).numpy())


def test_an_axis_that_is_shorter_than_a_piece_is_refused() -> None:
    with pytest.raises(ValueError, match="no pieces of 5"):
        unfold_tensor(np.zeros((2, 4), np.float32), size=5)


def test_rows_that_are_cut_are_spelled_out() -> None:
    model = onnx.parser.parse_model(_TEXT.format(dim=-1, size=3, step=4, pieces="s"))
    plain = onnx_attnfuse.unfuse(model).model
    assert [node.op_type for node in plain.graph.node][-1] == "Slice"
    x = np.random.default_rng(0).standard_normal((2, 12)).astype(np.float32)
    wanted, found = (
        onnxruntime.InferenceSession(item.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
        for item in (model, plain)
    )
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("dim", "size", "step"), [(-1, 5, 4), (0, 1, 1), (-1, 3, 8)], ids=["they overlap", "another axis", "a rest"]
)
def test_other_pieces_stay(dim: int, size: int, step: int) -> None:
    model = onnx.parser.parse_model(_TEXT.format(dim=dim, size=size, step=4, pieces="s").replace("step = 4>", f"step = {step}>"))
    result = onnx_attnfuse.unfuse(model)
    (site,) = result.report.sites
    assert site.status == "kept"
    assert site.reason is not None
    assert site.reason.code == "not-decomposed"
    assert result.model.graph.node[-1].op_type == "UnfoldTensor"
