"""Models made to be captured in a CUDA graph: sizes fixed, nothing asked at run time, results as before; else refused."""

from __future__ import annotations

import pathlib
from collections import Counter
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnx_attnfuse
from onnx_attnfuse.errors import ModelError, OptionError
from onnx_attnfuse.fusion import model_passes
from onnx_attnfuse.graph.constants import all_nodes
from onnx_attnfuse.graph.fixed_sizes import input_sizes
from onnx_attnfuse.kernels import providers
from tests.support.bundled import BUNDLED, cases, name_of, run

NAMED = {path.stem: path for path in BUNDLED}
BERT = NAMED["bert__dyn18__sdpa"]
OLD = [path for path in BUNDLED if "__dyn23__" not in path.stem and "_past__" not in path.stem]
"""Models whose opsets CUDA has had kernels for since long, before and after fusing."""
HEADER = '<ir_version: 9, opset_import: ["" : 18]>'


def sizes_of(path: pathlib.Path, feeds: dict[str, Any]) -> dict[str, int]:
    """The sizes of a model's inputs by name, as some inputs have them."""
    inputs = {item.name: item.type.tensor_type.shape.dim for item in onnx.load(path).graph.input}
    pairs = [pair for name, dims in inputs.items() for pair in zip(dims, feeds[name].shape, strict=True)]
    return {dim.dim_param: number for dim, number in pairs if dim.dim_param}


def captured(model: Any, **choices: Any) -> onnx_attnfuse.Result:
    return onnx_attnfuse.optimize(model, ep="cuda", arch="sm80", cuda_graph=True, **choices)


@pytest.mark.parametrize("path", OLD, ids=name_of)
def test_a_model_of_fixed_sizes_asks_nothing_at_run_time_and_gives_the_same(path: pathlib.Path) -> None:
    feeds = cases(path)["example"]
    result = captured(path, dim=sizes_of(path, feeds))
    assert result.report.fused == result.report.candidates
    assert result.report.capture is not None
    assert (result.report.capture.possible, result.report.capture.sizes) == (True, ())
    left = Counter(node.op_type for node in all_nodes(result.model.graph))
    assert not left.keys() & {"Shape", "Size", "If", "Loop"}
    assert all(isinstance(dim, int) for value in (*result.model.graph.inputs, *result.model.graph.outputs) for dim in value.shape)
    expected, given = run(onnx.load(path), feeds), run(ir.to_proto(result.model), feeds)
    assert expected.keys() == given.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(given[name], array, rtol=2e-3, atol=2e-4, err_msg=name)


def test_without_it_the_report_says_that_sizes_have_to_be_fixed_first() -> None:
    report = onnx_attnfuse.explain(BERT, ep="cuda", arch="sm80", padding="exact")
    assert str(report.capture) == ("CUDA graph: can be captured once its sizes are fixed (batch, seq); --cuda-graph does that")
    assert report.to_dict()["capture"] == {"name": "CUDA graph", "possible": True, "sizes": ("batch", "seq"), "blockers": ()}


@pytest.mark.parametrize("path", BUNDLED, ids=name_of)
def test_what_is_told_of_a_fused_model_is_what_is_read_off_it_anew(path: pathlib.Path) -> None:
    result = onnx_attnfuse.optimize(path, ep="cuda", arch="sm80", verify="none", padding="guarded")
    assert result.report.capture is not None
    assert result.report.capture == model_passes.report_capture(result.model, providers.provider("cuda"), folded=False)


def test_a_test_at_run_time_prevents_a_capture_and_is_not_written_into_a_model_that_is_captured() -> None:
    report = onnx_attnfuse.explain(BERT, ep="cuda", arch="sm80", padding="guarded")
    assert str(report.capture).startswith("CUDA graph: no, If is control flow [")
    for padding in ("auto", "exact", "assume-right", "assume-none"):
        graph = captured(BERT, dim={"batch": 2, "seq": 32}, padding=padding).model.graph
        assert "If" not in {node.op_type for node in all_nodes(graph)}


def test_providers_that_capture_nothing_say_nothing() -> None:
    assert onnx_attnfuse.explain(BERT, ep="cpu").capture is None


def test_the_whole_model_is_held_against_its_source_at_the_fixed_sizes() -> None:
    notes = captured(BERT, dim={"batch": 2, "seq": 16}, verify="model").report.notes
    assert any(note.startswith("whole model verified on") for note in notes)


def test_the_pass_fixes_sizes_too_and_refuses_as_the_call_does() -> None:
    model = ir.load(BERT)
    choices: dict[str, Any] = {"ep": "cuda", "arch": "sm80", "cuda_graph": True}
    result = onnx_attnfuse.AttentionFusionPass(dim={"batch": 2, "seq": 16}, **choices)(model)
    assert result.modified
    assert input_sizes(result.model) == ()
    with pytest.raises(OptionError, match="'batch'"):
        onnx_attnfuse.AttentionFusionPass(**choices)(ir.load(BERT))


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({}, r"cuda_graph needs numbers for the sizes 'batch', 'seq'; add --dim batch=N --dim seq=N"),
        ({"dim": {"batch": 2}}, r"for the sizes 'seq'; add --dim seq=N"),
        ({"ep": "cpu"}, r"cuda_graph is asked for, and cpu captures no model; choose --ep cuda with it"),
        ({"padding": "guarded"}, r"padding is 'guarded', a test at run time, .*; leave it or cuda_graph out"),
        (
            {"target": "packed"},
            r"target is 'packed', and a CUDA graph has .* rows; add --packed-tokens N, .*, or leave cuda_graph out",
        ),
    ],
    ids=["sizes", "size", "ep", "padding", "target"],
)
def test_what_contradicts_a_capture_is_an_error(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        onnx_attnfuse.optimize(BERT, **{"ep": "cuda", "cuda_graph": True, **choices})


def test_a_model_with_a_node_that_prevents_it_is_refused_by_its_name() -> None:
    nodes = "m = ReduceMax<keepdims = 0>(n) [count] r = Range(zero, m, one) f = Cast<to = 1>(r) y = Add(x, f)"
    text = f"{HEADER} main (float[s] x, int64[s] n) => (float[s] y) <int64 zero = {{0}}, int64 one = {{1}}> {{ {nodes} }}"
    with pytest.raises(ModelError, match=r"cannot be captured in a CUDA graph: Range reads 'm' on the host, .* \[count\]; leave"):
        captured(ir.from_onnx_text(text), dim={"s": 4})
    report = onnx_attnfuse.explain(ir.from_onnx_text(text), ep="cuda", cuda_graph=True, dim={"s": 4})
    assert report.capture is not None
    assert [reason.code for reason in report.capture.blockers] == ["read-on-host"]


def test_what_sizes_decide_is_decided_and_what_data_decides_is_not() -> None:
    branches = "then_branch = yes () => (float[s] r) { r = Relu(x) }, else_branch = no () => (float[s] r) { r = Neg(x) }"
    nodes = f"k = Size(x) w = Equal(k, three) y = If<{branches}>(w)"
    text = f"{HEADER} main (float[s] x) => (float[s] y) <int64 three = {{3}}> {{ {nodes} }}"
    for size, op in ((3, "Relu"), (4, "Neg")):
        result = captured(ir.from_onnx_text(text), dim={"s": size})
        assert [node.op_type for node in result.model.graph] == [op]


def test_a_size_without_a_name_is_called_after_its_place_and_sums_of_sizes_follow() -> None:
    text = f"{HEADER} main (float[?, s] x, float[a] z) => (float[?, s] y) {{ k = Shape(z) y = Reshape(x, k) }}"
    model = ir.from_onnx_text(text)
    model.graph.inputs[1].shape = ir.Shape(["s + s"])
    assert input_sizes(model) == ("x.0", "s")
    onnx_attnfuse.explain(model, ep="cuda", cuda_graph=True, dim={"x.0": 2, "s": 3})
    with pytest.raises(OptionError, match=r"add --dim x\.0=N"):
        captured(model, dim={"s": 3})
    model.graph.inputs[1].shape = ir.Shape(["s - 3"])
    with pytest.raises(OptionError, match="comes to 0; choose sizes that make it 1 or more"):
        captured(model, dim={"x.0": 2, "s": 3})


def test_an_input_without_a_shape_cannot_be_fixed() -> None:
    model = ir.from_onnx_text(f"{HEADER} main (float[s] x, float z) => (float[s] y) {{ y = Add(x, z) }}")
    model.graph.inputs[1].shape = None
    report = onnx_attnfuse.explain(model.clone(), ep="cuda")
    assert str(report.capture) == "CUDA graph: no, the input 'z' has no shape"
    with pytest.raises(ModelError, match="the input 'z' has no shape; export the model with the shapes of its inputs"):
        captured(model, dim={"s": 3})
