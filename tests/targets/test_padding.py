"""Padding as lengths behind a test at run time: right for every batch, and the faster forms really run where they may."""

from __future__ import annotations

import functools
from collections import Counter

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import onnxruntime
import pytest

import onnx_attnfuse
from onnx_attnfuse.fusion import site

LENGTH = 6
_LAYER = """
    qs{n} = Reshape({x}, split) qt{n} = Transpose<perm=[0, 2, 1, 3]>(qs{n}) kt{n} = Transpose<perm=[0, 2, 3, 1]>(qs{n})
    qk{n} = MatMul(qt{n}, kt{n})
    scaled{n} = Mul(qk{n}, scale) masked{n} = Add(scaled{n}, m)
    weights{n} = Softmax<axis=-1>(masked{n})
    {guard}
    out{n} = MatMul(kept{n}, qt{n}) back{n} = Transpose<perm=[0, 2, 1, 3]>(out{n}) y{n} = Reshape(back{n}, flat)
"""
_GUARDS = {
    "plain": "kept{n} = Identity(weights{n})",
    "nan": "bad{n} = IsNaN(weights{n}) kept{n} = Where(bad{n}, nothing, weights{n})",
}
_TRIANGLE = """
    shape = Shape<start=1, end=2>(x) s = Squeeze(shape) i1 = Range(zero, s, one) last = Constant<value_ints=[-1]>()
    i = Unsqueeze(i1, last) c = LessOrEqual(i1, i) k = And(c, k0)
"""
_MASKS = {
    "padding": "k = Identity(k0)",
    "padding_causal": _TRIANGLE,
}
_PADDING = "x1 = Cast<to=9>(mask) a12 = Constant<value_ints=[1, 2]>() k0 = Unsqueeze(x1, a12)"
PATTERNS = ["full", "right", "left", "holes", "dead"]


def _model(mask: str, fill: str, guard: str, dtype: str = "float") -> onnx.ModelProto:
    layers = [_LAYER.format(n=n, x=x, guard=_GUARDS[guard].format(n=n)) for n, x in enumerate(("x", "y0"))]
    number = 10 if dtype == "float16" else 1
    text = f"""<ir_version: 9, opset_import: ["" : 18]>
    model ({dtype}[b, s, 16] x, int64[b, s] mask) => ({dtype}[b, s, 16] y1)
    <int64[4] split = {{0, 0, 2, 8}}, int64[3] flat = {{0, 0, 16}}, float scale32 = {{0.5}}, int64 zero = {{0}},
     int64 one = {{1}}, float nothing32 = {{0}}, float fill32 = {{{fill}}}>
    {{ scale = Cast<to={number}>(scale32) nothing = Cast<to={number}>(nothing32) fill = Cast<to={number}>(fill32)
       {_PADDING} {_MASKS[mask]} m = Where(k, nothing, fill) {"".join(layers)} }}"""
    return onnx.parser.parse_model(text)


def _padded(pattern: str) -> npt.NDArray[np.int64]:
    mask = np.ones((3, LENGTH), np.int64)
    if pattern == "right":
        mask[1, 4:] = mask[2, 1:] = 0
    elif pattern == "left":
        mask[1, :2] = 0
    elif pattern == "holes":
        mask[2, 3] = 0
    elif pattern == "dead":
        mask[1, :] = 0
    return mask


def _run(model: onnx.ModelProto, mask: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    kind = np.float16 if "float16" in session.get_inputs()[0].type else np.float32
    x = np.random.default_rng(0).standard_normal((3, LENGTH, 16)).astype(kind) * kind(2)
    return np.asarray(session.run(None, {"x": x, "mask": mask})[0], np.float64)


def _operators(graph: onnx.GraphProto) -> Counter[str]:
    found = Counter(node.op_type for node in graph.node)
    for node in graph.node:
        for attribute in node.attribute:
            found += _operators(attribute.g)
    return found


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the faster forms run at any size, so that small inputs reach them."""
    monkeypatch.setattr(site, "FASTER_FROM", {})
    monkeypatch.setattr(site, "LONG", 0)


guarded = functools.partial(onnx_attnfuse.optimize, ep="cuda", arch="sm90", padding="guarded")


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("mask", _MASKS)
@pytest.mark.parametrize(("fill", "guard"), [("-3.4028234663852886e38", "plain"), ("-inf", "nan"), ("-10000", "plain")])
def test_every_batch_comes_out_right(mask: str, fill: str, guard: str) -> None:
    model = _model(mask, fill, guard)
    result = guarded(model)
    assert [site.status for site in result.report.sites] == ["fused"] * 2
    assert all(", else attention_bias" in (site.mask_form or "") for site in result.report.sites)
    for pattern in PATTERNS:
        np.testing.assert_allclose(
            _run(result.model, _padded(pattern)), _run(model, _padded(pattern)), atol=2e-6, err_msg=pattern
        )


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize(("arch", "operators"), [("sm90", 2), ("sm80", 3)])
def test_in_float16_there_is_a_branch_for_each_faster_kernel(arch: str, operators: int) -> None:
    model = _model("padding", "-65504", "plain", "float16")
    result = guarded(model, arch=arch)
    assert _operators(result.model.graph)["MultiHeadAttention"] == 2 * operators
    for pattern in PATTERNS[:-1]:  # without a key, float16 rows are as on a GPU (decision 0003)
        np.testing.assert_allclose(
            _run(result.model, _padded(pattern)), _run(model, _padded(pattern)), atol=6e-3, err_msg=pattern
        )


@pytest.mark.usefixtures("any_size")
def test_the_faster_form_is_what_runs_on_right_padding() -> None:
    """With the faster form broken on purpose, batches of its kind come out wrong, and no others."""
    model = _model("padding", "-10000", "plain")
    result = guarded(model)
    for node in result.model.graph.node:
        if node.op_type == "If" and "bias" not in node.name:
            node.attribute[0].g.node[0].attribute[0].i = 4
    wrong = [
        pattern
        for pattern in PATTERNS
        if not np.allclose(_run(result.model, _padded(pattern)), _run(model, _padded(pattern)), atol=1e-3)
    ]
    assert wrong == ["full", "right"]


def test_what_only_the_exact_form_needs_is_computed_under_the_test() -> None:
    result = guarded(_model("padding_causal", "-10000", "plain"))
    outside = Counter(node.op_type for node in result.model.graph.node)
    assert outside["If"] == 3
    assert not outside["Where"]
    assert not outside["LessOrEqual"]


def test_a_second_run_changes_nothing() -> None:
    once = guarded(_model("padding", "-10000", "plain")).model
    twice = guarded(once)
    assert twice.report.fused == 0
    assert _operators(twice.model.graph) == _operators(once.graph)


@pytest.mark.parametrize(
    ("choices", "forms"),
    [
        ({"padding": "exact"}, {"attention_bias b 1 1 t"}),
        ({"padding": "assume-right"}, {"key_padding_mask 3b+2, else attention_bias b 1 1 t"}),
        ({"padding": "assume-right", "dim": {"s": 512}}, {"key_padding_mask 3b+2, else attention_bias b 1 1 t"}),
        ({"padding": "auto", "dim": {"b": 4, "s": 64}}, {"attention_bias b 1 1 t"}),
        ({"padding": "auto", "dim": {"b": 16, "s": 4096}}, {"attention_bias b 1 1 t"}),
        ({"padding": "auto", "dim": {"b": 16, "s": 16384}}, {"key_padding_mask 3b+2, else attention_bias b 1 1 t"}),
        ({"padding": "auto", "ep": "cpu", "arch": None}, {"attention_bias b 1 1 t"}),
    ],
)
def test_what_is_said_of_padding_decides_the_forms_of_a_mask(choices: dict[str, object], forms: set[str]) -> None:
    report = guarded(_model("padding", "-10000", "plain"), **choices).report
    assert {site.mask_form for site in report.sites} == forms


def test_lengths_that_are_assumed_are_judged_where_the_assumption_holds() -> None:
    model = _model("padding", "-65504", "plain", "float16")
    result = guarded(model, padding="assume-right")
    assert {site.mask_form for site in result.report.sites} == {"key_padding_mask b"}
    for pattern in ("full", "right"):
        np.testing.assert_allclose(
            _run(result.model, _padded(pattern)), _run(model, _padded(pattern)), atol=6e-3, err_msg=pattern
        )
    assert not np.allclose(_run(result.model, _padded("left")), _run(model, _padded("left")), atol=1e-2)


def test_a_window_besides_padding_is_no_padding() -> None:
    model = _model("padding_causal", "-10000", "plain")
    text = onnx.printer.to_text(model).replace("c = LessOrEqual (i1, i)", "c = Less (i1, i)")
    report = guarded(onnx.parser.parse_model(text)).report
    assert {site.mask_form for site in report.sites} == {"attention_bias b 1 s t"}


_LARGE = {"b": 8, "s": 2048}


@pytest.mark.parametrize(
    ("choices", "status"),
    [
        ({}, "fused"),
        ({"dim": {"b": 1, "s": 64}}, "fused"),
        ({"dim": _LARGE}, "skipped"),
        ({"dim": _LARGE, "always": True}, "fused"),
        ({"dim": _LARGE, "ep": "cpu", "arch": None}, "fused"),
        ({"dim": _LARGE, "arch": "sm75"}, "fused"),
    ],
)
def test_in_float32_on_a_gpu_large_attentions_without_a_mask_stay_as_they_are(choices: dict[str, object], status: str) -> None:
    """TensorFloat32 makes what is spelled out faster than the kernel in float32."""
    model = _model("padding", "-10000", "plain")
    text = onnx.printer.to_text(model).replace("masked0 = Add (scaled0, m)", "masked0 = Identity (scaled0)")
    site = guarded(onnx.parser.parse_model(text), **choices).report.sites[0]
    assert site.status == status
    assert [reason.code for reason in site.reasons] == (
        ["unfused-faster", "no-kernel-for-type", "old-opset", "not-projected"] if status == "skipped" else []
    )


@pytest.mark.parametrize(
    ("choices", "message"), [({"padding": "left"}, "padding is 'left'"), ({"dim": {"s": 0}}, "dim 's' is 0")]
)
def test_choices_that_do_not_exist(choices: dict[str, object], message: str) -> None:
    with pytest.raises(onnx_attnfuse.OptionError, match=message):
        guarded(_model("padding", "-10000", "plain"), **choices)


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("length", ["6", "s"])
def test_a_mask_of_two_parts(length: str) -> None:
    """Each part is shorter than the keys are many, so that neither can be read at every key."""
    text = onnx.printer.to_text(_model("padding", "-10000", "plain"))
    text = text.replace("int64[b,s] mask", "int64[b,4] first, int64[b,2] second").replace("[b,s,16]", f"[b,{length},16]")
    text = text.replace(
        "x1 = Cast <to: int = 9> (mask)", "mask = Concat <axis: int = 1> (first, second) x1 = Cast <to: int = 9> (mask)"
    )
    model = onnx.parser.parse_model(text)
    result = guarded(model)
    assert [site.status for site in result.report.sites] == ["fused"] * 2
    x = np.random.default_rng(0).standard_normal((3, LENGTH, 16), np.float32)
    for pattern in PATTERNS:
        first, second = np.split(_padded(pattern), [4], axis=1)
        feeds = {"x": x, "first": first, "second": second}
        old, new = (onnxruntime.InferenceSession(item.SerializeToString()).run(None, feeds)[0] for item in (model, result.model))
        np.testing.assert_allclose(new, old, atol=2e-6, err_msg=pattern)


def test_in_an_opset_without_less_or_equal_the_guard_uses_what_there_is() -> None:
    model = _model("padding", "-10000", "plain")
    del model.opset_import[:]
    model.opset_import.append(onnx.helper.make_opsetid("", 11))
    result = onnx_attnfuse.optimize(model, ep="cuda", arch="sm90", padding="guarded", verify="none")
    used = {node.op_type for node in result.model.graph.node}
    assert not {"LessOrEqual", "GreaterOrEqual"} & used
