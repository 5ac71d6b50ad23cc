"""Attention spelled as an execution provider wants it: exactly, once, and only where the spelling differs."""

from __future__ import annotations

import dataclasses
import pathlib
from collections import Counter
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

import onnx_attnfuse
from onnx_attnfuse.kernels import providers
from onnx_attnfuse.kernels.execution_provider import ExecutionProvider, UnfusedForm
from tests.support.bundled import BUNDLED, cases, run
from tests.support.environment_table import SITES
from tests.support.small_models import parsed

NAMES = ("bert__dyn18__sdpa", "llama_past__dyn18__sdpa", "whisper_decoder__dyn18__sdpa", "gpt2__ts17__eager", "t5__dyn18__eager")
PATHS = [path for path in BUNDLED if path.stem in NAMES]
FUSING = [record.name for record in providers.every() if record.unfused_form is not None]
TEXT = """<ir_version: 9, opset_import: ["" : 18]>
attention (float[b, 2, s, 4] q, float[b, 2, t, 4] k, float[b, 2, t, 4] v, bool[b, 1, s, t] seen, float[b, 1, s, t] bias)
    => (float[b, 2, s, 4] out)
<float scale = {0.5}, float low = {-3e38}, float zero = {0}, float ninf = {-inf}, float ten = {10}>
{
    kt = Transpose<perm = [0, 1, 3, 2]>(k)
    BODY
    out = MatMul(kept, v)
}"""
WANTED = """qk = MatMul(q, kt)
    scaled = Mul(qk, scale)
    masked = Add(scaled, bias)
    kept = Softmax<axis = -1>(masked)"""
WHERE = WANTED.replace("Add(scaled, bias)", "Where(seen, scaled, low)")
LOWERED = WANTED.replace("masked =", "lowered = Where(seen, zero, low)\n    masked =").replace("bias", "lowered")
EARLY = """qs = Mul(q, scale)
    qk = MatMul(qs, kt)
    masked = Add(qk, bias)
    kept = Softmax<axis = -1>(masked)"""
GUARDED = """qk = MatMul(q, kt)
    scaled = Mul(qk, scale)
    masked = Where(seen, scaled, ninf)
    weights = Softmax<axis = -1>(masked)
    lost = IsNaN(weights)
    kept = Where(lost, zero, weights)"""
CAPPED = """qk = MatMul(q, kt)
    small = Div(qk, ten)
    bent = Tanh(small)
    scaled = Mul(bent, ten)
    masked = Where(seen, scaled, low)
    kept = Softmax<axis = -1>(masked)"""
SCALED = WHERE.replace("Mul(qk, scale)", "Mul(qk, row)").replace("qk = ", "row = ReduceMax<keepdims = 1>(q)\n    qk = ")


def written(body: str, ep: str = "qnn", low: float = -3e38) -> tuple[onnx.ModelProto, onnx.ModelProto, onnx_attnfuse.SiteReport]:
    """A source, what is written for a provider, and the report on its attention."""
    text = TEXT.replace("BODY", body).replace("-3e38", repr(low))
    result = onnx_attnfuse.optimize(parsed(text), ep=ep, verify="sites")
    (site,) = result.report.sites
    return parsed(text), result.model, site


def hostile() -> dict[str, np.ndarray]:
    """Inputs with a row that sees nothing."""
    numbers = np.random.default_rng(0)
    feeds = {name: numbers.standard_normal((2, 2, 5, 4)).astype(np.float32) for name in "qkv"}
    seen = numbers.random((2, 1, 5, 5)) < 0.6
    seen[0, 0, 1] = False
    return {**feeds, "seen": seen, "bias": np.where(seen, 0, -1e9).astype(np.float32)}


def check_equal(source: onnx.ModelProto, model: onnx.ModelProto) -> None:
    """Checks that both give the same, the row that sees nothing included."""
    feeds = hostile()
    np.testing.assert_allclose(run(model, feeds)["out"], run(source, feeds)["out"], atol=1e-5)


def chain(model: onnx.ModelProto) -> list[str]:
    """The operators from the product of queries and keys to the product with the values."""
    made = {name: node for node in model.graph.node for name in node.output}
    (softmax,) = (node for node in model.graph.node if node.op_type == "Softmax")
    above, node = list[str](), made.get(softmax.input[0])
    while node is not None and node.op_type in {"Add", "Mul", "Div", "Where", "MatMul", "Tanh"}:
        above.append(node.op_type)
        node = None if node.op_type == "MatMul" else next((made[name] for name in node.input if name in made), None)
    below = [user.op_type for user in model.graph.node if softmax.output[0] in user.input]
    return [*reversed(above), "Softmax", *below]


@pytest.mark.parametrize("ep", FUSING)
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_real_export_is_spelled_as_the_provider_wants_it_and_gives_the_same(path: pathlib.Path, ep: str) -> None:
    result = onnx_attnfuse.optimize(onnx.load(path), ep=ep, verify="none")
    assert {site.status for site in result.report.sites} == {"decomposed"}
    assert not [node for node in result.model.graph.node if node.domain or node.op_type in {"If", "IsNaN", "Attention"}]
    for feeds in cases(path).values():
        expected, found = run(onnx.load(path), feeds), run(result.model, feeds)
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, atol=2e-4, rtol=2e-4, err_msg=name)
    again = onnx_attnfuse.optimize(result.model, ep=ep, verify="none")
    assert {reason.code for site in again.report.sites for reason in site.reasons} == {"provider-form"}
    assert Counter(node.op_type for node in again.model.graph.node) == Counter(node.op_type for node in result.model.graph.node)


@pytest.mark.parametrize(
    ("body", "ep"), [(WANTED, "openvino"), (EARLY, "tensorrt"), (WANTED.replace("= Mul(", "= Div("), "coreml")]
)
def test_what_is_spelled_as_wanted_stays_untouched(body: str, ep: str) -> None:
    source, model, site = written(body, ep)
    assert (site.status, [reason.code for reason in site.reasons]) == ("decomposed", ["provider-form"])
    assert [node.op_type for node in model.graph.node] == [node.op_type for node in source.graph.node]


@pytest.mark.parametrize(
    ("body", "ep", "spelled"),
    [
        (WANTED, "tensorrt", "Mul, MatMul, Add b 1 s t, Softmax, MatMul"),
        (EARLY, "qnn", "MatMul, Mul, Add b 1 s t, Softmax, MatMul"),
        (WHERE, "openvino", "MatMul, Mul, Add b 1 s t, Softmax, MatMul"),
        (GUARDED, "coreml", "MatMul, Mul, Add b 1 s t, Softmax, MatMul"),
    ],
)
def test_another_spelling_becomes_the_wanted_one(body: str, ep: str, spelled: str) -> None:
    source, model, site = written(body, ep)
    assert (site.status, site.mask_form, site.op) == ("decomposed", spelled, None)
    assert site.verified is not None
    ops = [part.split()[0] for part in spelled.split(", ")]
    assert chain(model) == (ops[1:] if ops[0] == "Mul" else ops)
    check_equal(source, model)


def test_rows_without_a_key_are_told_apart_where_a_provider_computes_in_float16() -> None:
    source, model, _ = written(GUARDED)
    before = [onnx.numpy_helper.to_array(item) for item in model.graph.initializer]
    for item, array in zip(model.graph.initializer, before, strict=True):
        if array.dtype == np.float32:
            with np.errstate(over="ignore"):
                narrow = array.astype(np.float16).astype(np.float32)
            item.CopyFrom(onnx.numpy_helper.from_array(narrow, item.name))
    assert any(np.isinf(array).any() for array in before if array.dtype == np.float32)
    check_equal(source, model)


def half(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model all of whose floats are float16."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    assert not [node for node in model.graph.node if node.op_type in {"Constant", "ConstantOfShape"}]
    for item in model.graph.initializer:
        if item.data_type == onnx.TensorProto.FLOAT:
            with np.errstate(over="ignore"):
                item.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(item).astype(np.float16), item.name))
    for attribute in (item for node in model.graph.node if node.op_type == "Cast" for item in node.attribute):
        attribute.i = onnx.TensorProto.FLOAT16 if attribute.i == onnx.TensorProto.FLOAT else attribute.i
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    return model


def in_half(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> np.ndarray:
    """The output of a model all of whose floats are float16, added and multiplied as NumPy does it."""
    with np.errstate(all="ignore"):
        outputs: list[Any] = list(ReferenceEvaluator(half(model)).run(None, narrow(feeds)))
    return np.asarray(outputs[0], np.float32)


def narrow(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Inputs in float16."""
    with np.errstate(over="ignore"):
        return {name: array.astype(np.float16) if array.dtype == np.float32 else array for name, array in feeds.items()}


@pytest.mark.parametrize("body", [WHERE, LOWERED], ids=["replaced", "added"])
@pytest.mark.parametrize("low", [-3.4028234663852886e38, -1e15])
def test_rows_without_a_key_are_those_of_float32_where_a_provider_computes_in_float16(body: str, low: float) -> None:
    feeds = hostile()
    feeds["q"] *= 9
    source, model, site = written(body, low=low)
    assert (site.status, site.mask_form) == ("decomposed", "MatMul, Mul, Add b 1 s t, Softmax, MatMul")
    expected = run(source, feeds)["out"]
    np.testing.assert_allclose(run(model, feeds)["out"], expected, atol=1e-4)
    np.testing.assert_allclose(in_half(model, feeds), expected, atol=3e-2)
    unedited = written(body, "coreml", low)[1]
    assert not np.allclose(in_half(unedited, feeds)[0, :, 1], expected[0, :, 1], atol=3e-2, equal_nan=False)
    (again,) = onnx_attnfuse.explain(model, ep="qnn", verify="none").sites
    assert [reason.code for reason in again.reasons] == ["provider-form"]


def test_rows_without_a_key_of_half_models_are_those_of_the_cpu_where_a_provider_computes_in_float16() -> None:
    source = half(parsed(TEXT.replace("BODY", LOWERED).replace("-3e38", "-65504.0")))
    feeds = hostile()
    feeds["q"] *= 9
    model = onnx_attnfuse.optimize(half(source), ep="qnn", verify="sites").model
    expected = run(source, narrow(feeds))["out"].astype(np.float32)
    np.testing.assert_allclose(in_half(model, feeds), expected, atol=3e-2)
    assert not np.allclose(in_half(source, feeds)[0, :, 1], expected[0, :, 1], atol=3e-2)
    (again,) = onnx_attnfuse.explain(model, ep="qnn", verify="none").sites
    assert [reason.code for reason in again.reasons] == ["provider-form"]


@pytest.mark.parametrize(("body", "code"), [(CAPPED, "no-softcap"), (SCALED, "scale-at-run-time")])
def test_what_the_spelling_has_no_place_for_stays_as_it_is(body: str, code: str) -> None:
    source, model, site = written(body)
    assert site.status == "skipped"
    assert code in {reason.code for reason in site.reasons}
    assert [node.op_type for node in model.graph.node] == [node.op_type for node in source.graph.node]


def test_a_provider_is_one_file_and_its_spelling_is_data(monkeypatch: pytest.MonkeyPatch) -> None:
    floats = frozenset([ir.DataType.FLOAT])
    for scale, first in (("queries", "Mul, MatMul"), ("scores", "MatMul, Mul")):
        made_up = ExecutionProvider(
            name="npu",
            ort_name="NPUExecutionProvider",
            distribution="onnxruntime-npu",
            known_from="made up",
            operators={},
            unfused_form=UnfusedForm("made up", floats, scale),
            keeps_nan_rows=True,
        )
        monkeypatch.setitem(providers._records, "npu", made_up)
        assert (written(WHERE, "npu")[2].mask_form or "").startswith(first)
    monkeypatch.setitem(providers._records, "npu", dataclasses.replace(made_up, unfused_form=None))
    assert written(WHERE, "npu")[2].status == "skipped"


def test_half_precision_is_left_alone_where_nobody_knows_how_it_is_rounded() -> None:
    half = next(site for site in SITES if site.name == "padding")
    (site,) = onnx_attnfuse.explain(half.model(), ep="coreml", verify="none").sites
    assert (site.status, {reason.code for reason in site.reasons} >= {"no-kernel-for-type"}) == ("skipped", True)
