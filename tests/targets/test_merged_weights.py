"""Weights that are merged: computed when they are written, one at a time, and kept where those lie that they are made of."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

import onnx_attnfuse
from onnx_attnfuse.errors import ModelError
from tests.support import small_models

_LAYER = """
    q0{n} = MatMul({x}, wq{n}) k0{n} = MatMul({x}, wk{n}) v0{n} = MatMul({x}, wv{n}) q1{n} = Add(q0{n}, b{n})
    q2{n} = Reshape(q1{n}, split) k2{n} = Reshape(k0{n}, split) v2{n} = Reshape(v0{n}, split)
    q{n} = Transpose<perm=[0, 2, 1, 3]>(q2{n}) k{n} = Transpose<perm=[0, 2, 3, 1]>(k2{n})
    v{n} = Transpose<perm=[0, 2, 1, 3]>(v2{n}) qk{n} = MatMul(q{n}, k{n}) scaled{n} = Mul(qk{n}, scale)
    weights{n} = Softmax<axis=-1>(scaled{n}) mixed{n} = MatMul(weights{n}, v{n})
    back{n} = Transpose<perm=[0, 2, 1, 3]>(mixed{n}) out{n} = Reshape(back{n}, flat)
"""


def model_in(folder: pathlib.Path, width: int = 32, layers: int = 2, data: str = "model.data") -> pathlib.Path:
    """A file in `folder`, its weights in a data file beside it."""
    nodes = "".join(_LAYER.format(n=n, x=f"out{n - 1}" if n else "x") for n in range(layers))
    model = onnx.parser.parse_model(
        f"""<ir_version: 9, opset_import: ["" : 18]> model (float[b, s, {width}] x) => (float[b, s, {width}] out{layers - 1})
        <int64[4] split = {{0, 0, 4, {width // 4}}}, int64[3] flat = {{0, 0, {width}}}, float scale = {{0.35}}> {{ {nodes} }}"""
    )
    rng = np.random.default_rng(0)
    with (folder / data).open("wb") as file:
        for layer in range(layers):
            for name in ("wq", "wk", "wv", "b"):
                shape = (width,) if name == "b" else (width, width)
                array = np.resize(rng.standard_normal(65537, np.float32), shape) / np.float32(width**0.5)
                tensor = onnx.TensorProto(name=f"{name}{layer}", data_type=onnx.TensorProto.FLOAT, dims=shape)
                small_models.point_to(tensor, data, offset=file.tell(), length=array.nbytes)
                file.write(array.tobytes())
                model.graph.initializer.append(tensor)
    return small_models.written(model, folder / "model.onnx")


def fused(model: Any) -> onnx_attnfuse.Result:
    result = onnx_attnfuse.optimize(model, ep="cpu", target="Attention", verify="none")
    assert result.report.fused == result.report.candidates > 0
    return result


def outputs(path: pathlib.Path) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options)
    (item,) = session.get_inputs()
    x = np.random.default_rng(1).standard_normal((2, 5, item.shape[2]), np.float32)
    return np.asarray(session.run(None, {"x": x})[0])


def initializers(path: pathlib.Path) -> dict[str, tuple[list[int], str]]:
    """The shape of every matrix and the file that it is in."""
    model = onnx.load_model(path, load_external_data=False)
    where = {item.name: {entry.key: entry.value for entry in item.external_data} for item in model.graph.initializer}
    matrices = [item for item in model.graph.initializer if len(item.dims) == 2]
    return {item.name: (list(item.dims), where[item.name].get("location", "")) for item in matrices}


def test_beside_the_model_they_get_a_file_of_their_own(tmp_path: pathlib.Path) -> None:
    source = model_in(tmp_path)
    before = small_models.contents(tmp_path)
    fused(source).save(tmp_path / "out.onnx")
    assert {name: data for name, data in small_models.contents(tmp_path).items() if name in before} == before
    assert list(initializers(tmp_path / "out.onnx").values()) == [([32, 96], "out.onnx.data")] * 2
    np.testing.assert_allclose(outputs(tmp_path / "out.onnx"), outputs(source), atol=1e-5)


def test_in_another_folder_the_old_file_is_not_needed(tmp_path: pathlib.Path) -> None:
    source = model_in(tmp_path)
    wanted = outputs(source)
    (tmp_path / "there").mkdir()
    fused(source).save(tmp_path / "there" / "out.onnx")
    assert sorted(small_models.contents(tmp_path / "there")) == ["out.onnx", "out.onnx.data"]
    (tmp_path / "model.data").unlink()
    np.testing.assert_allclose(outputs(tmp_path / "there" / "out.onnx"), wanted, atol=1e-5)


def test_the_file_they_are_made_of_is_not_written_over(tmp_path: pathlib.Path) -> None:
    source = model_in(tmp_path, data="out.onnx.data")
    before = (tmp_path / "out.onnx.data").read_bytes()
    result = fused(source)
    result.save(tmp_path / "out.onnx")
    assert {where for _, where in initializers(tmp_path / "out.onnx").values()} == {"out.onnx.2.data"}
    assert (tmp_path / "out.onnx.data").read_bytes() == before
    with pytest.raises(onnx_attnfuse.OptionError, match="holds the weights of the model"):
        result.save(tmp_path / "out.onnx.data")


def test_a_model_that_holds_its_weights_goes_on_holding_them(tmp_path: pathlib.Path) -> None:
    model = onnx.load_model(model_in(tmp_path))
    fused(model).save(tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx.data").exists()
    assert [dims for dims, _ in initializers(tmp_path / "out.onnx").values()] == [[32, 96]] * 2
    assert len(model.graph.initializer) == 11
    assert fused(model).model.SerializeToString() == (tmp_path / "out.onnx").read_bytes()


def test_a_saved_model_is_saved_again(tmp_path: pathlib.Path) -> None:
    result = fused(model_in(tmp_path))
    for name in ("one.onnx", "two.onnx"):
        result.save(tmp_path / name)
    np.testing.assert_array_equal(outputs(tmp_path / "one.onnx"), outputs(tmp_path / "two.onnx"))
    again = onnx_attnfuse.optimize(tmp_path / "one.onnx", ep="cpu", target="Attention")
    assert (again.report.fused, again.report.already_fused) == (0, 2)


def test_nothing_is_read_before_it_is_written(tmp_path: pathlib.Path) -> None:
    result = fused(model_in(tmp_path))
    data = tmp_path / "model.data"
    shutil.move(data, tmp_path / "away")
    with pytest.raises(ModelError, match=r"the data of the weight 'wq0' is gone; put the file back"):
        result.save(tmp_path / "out.onnx")
    assert sorted(small_models.contents(tmp_path)) == ["away", "model.onnx"]
    shutil.move(tmp_path / "away", data)
    result.save(tmp_path / "out.onnx")
    np.testing.assert_allclose(outputs(tmp_path / "out.onnx"), outputs(tmp_path / "model.onnx"), atol=1e-5)


def test_weights_that_are_not_there_are_not_merged(tmp_path: pathlib.Path) -> None:
    model = onnx.load_model(model_in(tmp_path, layers=1), load_external_data=False)
    (site,) = onnx_attnfuse.optimize(model, ep="cpu", target="Attention", verify="none").report.sites
    assert [reason.code for reason in site.reasons] == ["weight-unreadable"]


MEASURED = """
import resource, sys
import onnx_attnfuse
from onnx_attnfuse.fusion import pipeline
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
before = peak()
result = onnx_attnfuse.optimize(sys.argv[1], ep="cpu", target="Attention", verify="none")
assert result.report.fused == 8
print(peak() - before)
result.save(sys.argv[2])
print(peak() - before)
"""


@pytest.mark.exhaustive
def test_one_at_a_time_is_in_memory(tmp_path: pathlib.Path) -> None:
    """96 MB of weights in eight layers; one of them merged takes 12 MB and what it is made of as much again."""
    source = model_in(tmp_path, width=1024, layers=8)
    command = [sys.executable, "-c", MEASURED, str(source), str(tmp_path / "out.onnx")]
    planned, saved = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert int(planned) < 25
    assert int(saved) < 55


def test_in_a_branch_it_takes_weights_from_outside(tmp_path: pathlib.Path) -> None:
    model = onnx.load_model(model_in(tmp_path, layers=1))
    inner = [onnx.NodeProto.FromString(node.SerializeToString()) for node in model.graph.node]
    result = model.graph.output[0]
    branches = [onnx.helper.make_graph(nodes, name, [], [result]) for nodes, name in ((inner, "then"), (inner[:1], "else"))]
    branches[1].node[0].output[0] = result.name
    model.graph.input.append(onnx.helper.make_tensor_value_info("flag", onnx.TensorProto.BOOL, []))
    del model.graph.node[:]
    choice = onnx.helper.make_node("If", ["flag"], [result.name], then_branch=branches[0], else_branch=branches[1])
    model.graph.node.append(choice)
    new = fused(model).model
    (then,) = [item.g for item in new.graph.node[0].attribute if item.name == "then_branch"]
    assert [node.op_type for node in then.node] == ["Attention"]
    assert [list(item.dims) for item in then.initializer if len(item.dims) == 2] == [[32, 96]]
    assert sorted(item.name for item in new.graph.initializer if len(item.dims) == 2) == ["wq0"]
    feeds = {"x": np.random.default_rng(1).standard_normal((2, 5, 32), np.float32)}
    for flag in (True, False):
        given = {**feeds, "flag": np.asarray(flag)}
        old, now = (onnxruntime.InferenceSession(item.SerializeToString()).run(None, given)[0] for item in (model, new))
        np.testing.assert_allclose(now, old, atol=1e-5)
