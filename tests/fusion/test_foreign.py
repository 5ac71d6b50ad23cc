"""Models that were fused for one execution provider, brought over to another."""

from __future__ import annotations

import pathlib

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

import onnx_attnfuse
from tests.support.bundled import BUNDLED, cases, run

NAMES = ("bert__dyn18__sdpa", "llama_past__dyn18__sdpa", "whisper_decoder__dyn18__sdpa")
PATHS = [path for path in BUNDLED if path.stem in NAMES]


def written(model: onnx.ModelProto, ep: str, **choices: object) -> tuple[onnx.ModelProto, onnx_attnfuse.Report]:
    """What is written for an execution provider, and the report."""
    result = onnx_attnfuse.optimize(model, ep=ep, **choices)
    return result.model, result.report


def fused_nodes(model: onnx.ModelProto) -> list[str]:
    """The attentions and rotations of a model that are one operator."""
    return [node.op_type for node in model.graph.node if "Attention" in node.op_type or "Rotary" in node.op_type]


def check_equal(model: onnx.ModelProto, path: pathlib.Path) -> None:
    """Checks that a model gives on the CPU what its source gives."""
    for feeds in cases(path).values():
        expected, found = run(onnx.load(path), feeds), run(model, feeds)
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, atol=2e-4, rtol=2e-4, err_msg=name)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_model_that_was_fused_for_cuda_comes_to_qnn_and_back(path: pathlib.Path) -> None:
    fused, first = written(onnx.load(path), "cuda", arch="sm90")
    assert fused_nodes(fused)
    spelled, report = written(fused, "qnn")
    assert not [node.op_type for node in spelled.graph.node if node.domain]
    assert any(note.startswith("decomposed for qnn, which lacks them: ") for note in report.notes)
    check_equal(spelled, path)
    again, last = written(spelled, "cuda", arch="sm90")
    assert last.fused + last.already_fused == first.fused + first.already_fused
    check_equal(again, path)
    assert not any(note.startswith("decomposed for") for note in written(spelled, "qnn")[1].notes)


@pytest.mark.parametrize("ep", ["cpu", "cuda", "wasm"])
def test_what_was_fused_stays_on_providers_that_run_it(ep: str) -> None:
    fused, _ = written(onnx.load(PATHS[0]), "cpu")
    kept, report = written(fused, ep, verify="none")
    assert fused_nodes(kept) == fused_nodes(fused)
    assert not any("decomposed for" in note for note in report.notes)


def test_what_lies_as_the_provider_wants_it_stays_and_its_near_miss_is_built_anew() -> None:
    own, _ = written(onnx.load(PATHS[0]), "dml")
    kept, report = written(own, "dml", verify="none")
    assert (report.already_fused, report.fused) == (2, 0)
    assert kept.graph.node == own.graph.node
    other, _ = written(onnx.load(PATHS[0]), "cpu")
    _, report = written(other, "dml")
    assert (report.already_fused, report.fused) == (0, 2)


def test_an_operator_that_nobody_spells_out_is_told_with_why_it_does_not_run() -> None:
    fused, _ = written(onnx.load(PATHS[0]), "cuda", arch="sm90", target="packed", padding="assume-right", verify="none")
    packed = [node for node in fused.graph.node if node.op_type == "PackedMultiHeadAttention"]
    kept, report = written(fused, "qnn", verify="none")
    assert [node.op_type for node in kept.graph.node].count("PackedMultiHeadAttention") == len(packed) > 0
    assert {site.status for site in report.sites} == {"skipped"}
    assert {site.reasons[0].code for site in report.sites} == {"no-kernel-for-device"}


def test_sizes_are_fixed_where_the_provider_takes_numbers_only_and_all_are_told() -> None:
    sizes = dict.fromkeys(
        {dim.dim_param for value in onnx.load(PATHS[0]).graph.input for dim in value.type.tensor_type.shape.dim}, 3
    )
    model, report = written(onnx.load(PATHS[0]), "qnn", dim=sizes)
    assert {dim.dim_value for value in model.graph.input for dim in value.type.tensor_type.shape.dim} == {3}
    assert not [node for node in model.graph.node if node.op_type == "Shape"]
    assert {site.status for site in report.sites} == {"decomposed"}
    feeds = {value.name: np.ones((3, 3), np.int64) for value in model.graph.input}
    expected, found = run(onnx.load(PATHS[0]), feeds), run(model, feeds)
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, atol=1e-4, err_msg=name)


def test_sizes_that_are_not_told_are_asked_for_and_stay_open_elsewhere() -> None:
    name = onnx.load(PATHS[0]).graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for ep, asked in (("qnn", True), ("openvino", False)):
        model, report = written(onnx.load(PATHS[0]), ep, dim={name: 3}, verify="none")
        assert any(note.startswith(f"{ep} takes models of fixed sizes only; --dim ") for note in report.notes) == asked
        assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == name


GROUPED = """<ir_version: 9, opset_import: ["" : 18, "com.microsoft" : 1]>
grouped (float16[b, s, 32] q, float16[b, s, 16] k, float16[b, s, 16] v, int32[b] last, int32 total, float16[64, 4] cos,
    float16[64, 4] sin) => (float16[b, s, 32] out)
{
    out = com.microsoft.GroupQueryAttention<num_heads = 4, kv_num_heads = 2ATTRIBUTES>(q, k, v, , , last, totalROTARY)
}"""


@pytest.mark.parametrize(
    ("attributes", "rotary", "ep", "stays"),
    [
        ("", "", "dml", True),
        (", local_window_size = 8", "", "dml", False),
        (", do_rotary = 1", ", cos, sin", "dml", False),
        (", do_rotary = 1", ", cos, sin", "webgpu", True),
        (", local_window_size = 8", "", "webgpu", False),
        ("", "", "qnn", False),
    ],
)
def test_grouped_heads_stay_one_operator_only_in_forms_that_the_kernel_reads(
    attributes: str, rotary: str, ep: str, stays: bool
) -> None:
    source = onnx.parser.parse_model(GROUPED.replace("ATTRIBUTES", attributes).replace("ROTARY", rotary))
    model, _ = written(source, ep, verify="none", assume=("default", "wide-subgroups"))
    assert ("GroupQueryAttention" in fused_nodes(model)) == stays


NORM = """<ir_version: 9, opset_import: ["" : OPSET, "com.microsoft" : 1]>
norm (float[b, s, 4] x, float[b, s, 4] y) => (float[b, s, 4] out, float[b, s, 4] total)
<float[4] w = {1, 2, 3, 4}, float[4] c = {5, 6, 7, 8}>
{
    OUTPUTS = com.microsoft.OP<epsilon = 0.01>(x, y, w, c)
    TAIL
}"""


@pytest.mark.parametrize("opset", [14, 18])
@pytest.mark.parametrize("op", ["SkipLayerNormalization", "SkipSimplifiedLayerNormalization"])
@pytest.mark.parametrize(
    ("ep", "summed", "stays"), [("qnn", False, 0), ("openvino", True, 0), ("openvino", False, 1), ("dml", True, 1)]
)
def test_a_normalization_of_a_sum_is_spelled_out_where_it_is_known_not_to_run(
    op: str, ep: str, summed: bool, stays: int, opset: int
) -> None:
    outputs, tail = ("out, , , total", "") if summed else ("out", "total = Identity(x)")
    text = NORM.replace("OPSET", str(opset)).replace("OP<", f"{op}<").replace("OUTPUTS", outputs).replace("TAIL", tail)
    model, report = written(onnx.parser.parse_model(text), ep)
    assert sum(node.op_type == op for node in model.graph.node) == stays
    assert any("decomposed for" in note for note in report.notes) == (not stays)
    numbers = np.random.default_rng(0)
    feeds = {name: numbers.standard_normal((2, 3, 4)).astype(np.float32) for name in "xy"}
    for name, array in run(onnx.parser.parse_model(text), feeds).items():
        np.testing.assert_allclose(run(model, feeds)[name], array, atol=1e-5)


RMS = """<ir_version: 10, opset_import: ["" : 23]>
norm (TYPE[b, s, 4] x) => (TYPE[b, s, 4] out)
<TYPE[SIZES] w = {1, 2, 3, 4}>
{
    out = RMSNormalization<ATTRIBUTES>(x, w)
}"""


@pytest.mark.parametrize(("kind", "tolerance"), [("float", 1e-5), ("float16", 4e-3)])
@pytest.mark.parametrize(("attributes", "sizes"), [("epsilon = 0.1", "4"), ("axis = 2", "4"), ("axis = 1", "1, 4")])
def test_a_norm_of_roots_is_spelled_out_where_no_model_with_one_loads(
    attributes: str, sizes: str, kind: str, tolerance: float
) -> None:
    text = RMS.replace("ATTRIBUTES", attributes).replace("TYPE", kind).replace("SIZES", sizes)
    model, report = written(onnx.parser.parse_model(text), "openvino")
    assert not [node for node in model.graph.node if node.op_type == "RMSNormalization"]
    assert any("1 ai.onnx.RMSNormalization" in note for note in report.notes)
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.dtype("float32" if kind == "float" else "float16"))
    expected = ReferenceEvaluator(onnx.parser.parse_model(text)).run(None, {"x": x})[0]
    np.testing.assert_allclose(run(model, {"x": x})["out"], expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("attributes", "ep"), [("stash_type = 10", "openvino"), ("", "coreml"), ("", "cpu")])
def test_a_norm_of_roots_stays_where_it_is_computed_otherwise_or_nothing_is_known(attributes: str, ep: str) -> None:
    text = RMS.replace("<ATTRIBUTES>", f"<{attributes}>" if attributes else "").replace("TYPE", "float").replace("SIZES", "4")
    model, _ = written(onnx.parser.parse_model(text), ep, verify="none")
    assert [node.op_type for node in model.graph.node] == ["RMSNormalization"]


GROUPS = """<ir_version: 10, opset_import: ["" : OPSET]>
norm (TYPE[b, 6, SIZES] x) => (TYPE[b, 6, SIZES] out)
<TYPE[6] w = {1, 2, 3, 4, 5, 6}, TYPE[6] shift = {6, 5, 4, 3, 2, 1}, TYPE[2] w_each = {1, 2}, TYPE[2] shift_each = {3, 4}>
{
    out = GroupNormalization<ATTRIBUTES>(x, FACTORS)
}"""


def _groups(opset: int, kind: str, sizes: str, attributes: str, factors: str) -> onnx.ModelProto:
    text = GROUPS.replace("OPSET", str(opset)).replace("TYPE", kind).replace("SIZES", sizes)
    return onnx.parser.parse_model(text.replace("ATTRIBUTES", attributes).replace("FACTORS", factors))


@pytest.mark.parametrize(("kind", "tolerance"), [("float", 1e-5), ("float16", 8e-3)])
@pytest.mark.parametrize("sizes", ["t", "h, 3"], ids=["three axes", "four axes"])
@pytest.mark.parametrize("attributes", ["num_groups = 2", "num_groups = 6, epsilon = 0.1"])
def test_a_norm_of_groups_is_spelled_out_where_it_is_wrong(attributes: str, sizes: str, kind: str, tolerance: float) -> None:
    source = _groups(21, kind, sizes, attributes, "w, shift")
    model, report = written(source, "qnn")
    assert "GroupNormalization" not in [node.op_type for node in model.graph.node]
    assert any("1 ai.onnx.GroupNormalization" in note for note in report.notes)
    shape = (2, 6, 5) if sizes == "t" else (2, 6, 4, 3)
    x = (3 * np.random.default_rng(0).standard_normal(shape) + 1).astype(np.dtype("float32" if kind == "float" else "float16"))
    expected = ReferenceEvaluator(source).run(None, {"x": x})[0]
    np.testing.assert_allclose(run(model, {"x": x})["out"], expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("opset", "attributes", "factors", "ep"),
    [
        pytest.param(18, "num_groups = 2", "w_each, shift_each", "qnn", id="factors for groups"),
        pytest.param(21, "num_groups = 2, stash_type = 10", "w, shift", "qnn", id="computed in float16"),
        pytest.param(21, "num_groups = 2", "w, shift", "openvino", id="where it is right"),
    ],
)
def test_a_norm_of_groups_stays_where_it_means_something_else_or_is_right(
    opset: int, attributes: str, factors: str, ep: str
) -> None:
    model, _ = written(_groups(opset, "float", "t", attributes, factors), ep, verify="none")
    assert [node.op_type for node in model.graph.node] == ["GroupNormalization"]
