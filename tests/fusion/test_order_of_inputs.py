"""Inputs that nobody reads, on an execution provider that mixes up those behind them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnx_attnfuse
from tests.support.bundled import run
from tests.support.small_models import parsed

TEXT = """<ir_version: 9, opset_import: ["" : 18]>
attention (float[b, c] first, float[b, 2, s, 4] q, int64[b] second, float[b, 2, s, 4] k, float[b, 2, s, 4] v)
    => (float[b, 2, s, 4] out)
<float scale = {0.5}>
{
    kt = Transpose<perm = [0, 1, 3, 2]>(k)
    scaled = Mul(q, scale)
    scores = MatMul(scaled, kt)
    weights = Softmax<axis = -1>(scores)
    out = MatMul(weights, v)
}"""
READ = TEXT.replace(
    "out = MatMul(weights, v)",
    """result = MatMul(weights, v)
    cast = Cast<to = 1>(second)
    largest = ReduceMax<keepdims = 0>(cast)
    other = ReduceMax<keepdims = 0>(first)
    sum = Add(result, largest)
    out = Add(sum, other)""",
)
GIVEN_OUT = TEXT.replace("=> (float[b, 2, s, 4] out)", "=> (float[b, 2, s, 4] out, int64[b] second)")


def written(text: str, ep: str) -> tuple[onnx.ModelProto, onnx_attnfuse.Report]:
    """What is written for an execution provider, and the report."""
    result = onnx_attnfuse.optimize(parsed(text), ep=ep)
    return result.model, result.report


def order(model: onnx.ModelProto) -> list[str]:
    """The names of the inputs, in order."""
    return [given.name for given in model.graph.input]


def told(report: onnx_attnfuse.Report) -> list[str]:
    """What the report says of the order of inputs."""
    return [note for note in report.notes if "unused inputs moved" in note]


@pytest.mark.parametrize("ep", ["openvino", "cpu,openvino"])
def test_inputs_that_nobody_reads_stand_last_and_others_keep_their_order(ep: str) -> None:
    model, report = written(TEXT, ep)
    assert order(model) == ["q", "k", "v", "first", "second"]
    assert [note.rsplit(": ", 1)[1] for note in told(report)] == ["first, second"]
    numbers = np.random.default_rng(0)
    feeds = {name: numbers.standard_normal((2, 2, 3, 4)).astype(np.float32) for name in "qkv"}
    feeds |= {"first": np.zeros((2, 5), np.float32), "second": np.zeros(2, np.int64)}
    np.testing.assert_allclose(run(model, feeds)["out"], run(parsed(TEXT), feeds)["out"], atol=1e-6)
    assert not told(onnx_attnfuse.optimize(model, ep=ep).report)


@pytest.mark.parametrize("ep", ["cpu", "qnn", "webgpu"])
def test_elsewhere_inputs_stay_where_they_are(ep: str) -> None:
    model, report = written(TEXT, ep)
    assert (order(model), told(report)) == (order(parsed(TEXT)), [])


def test_inputs_that_are_read_stay_where_they_are() -> None:
    model, report = written(READ, "openvino")
    assert (order(model), told(report)) == (order(parsed(READ)), [])


def test_an_input_that_is_given_out_as_it_is_counts_as_read() -> None:
    assert order(written(GIVEN_OUT, "openvino")[0]) == ["q", "second", "k", "v", "first"]
