"""Encoders on packed tokens: padding removed once, restored once, the same numbers at every token that is no padding."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx.reference
import pytest

import onnx_attnfuse
from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.fusion.packing.min_cut import least_cut
from onnx_attnfuse.kernels.device import resolve
from onnx_attnfuse.verify.references import OPERATORS
from tests.fusion.packing.encoders import (
    ACROSS,
    CAUSAL,
    CONVOLVED,
    GIVEN,
    MEAN,
    OUT,
    SLOPED,
    encoder,
    feeds_for,
    operators,
    padded_right,
    run_source,
)


def _pack(model: Any, padding: str = "assume-right", **choices: Any) -> onnx_attnfuse.Result:
    return onnx_attnfuse.optimize(model, **{"ep": "cuda", "arch": "sm90", "target": "packed", "padding": padding, **choices})


def _after(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    return list(onnx.reference.ReferenceEvaluator(model, new_ops=list(OPERATORS)).run(None, feeds))


def _assert_same_tokens(model: onnx.ModelProto, packed: onnx.ModelProto) -> None:
    feeds = feeds_for(padded_right())
    kept = feeds["mask"].astype(bool)
    for old, new in zip(run_source(model, feeds), _after(packed, feeds), strict=True):
        if old.shape[:2] != kept.shape:
            np.testing.assert_allclose(new, old, atol=2e-5)
            continue
        np.testing.assert_allclose(new[kept], old[kept], atol=2e-5)
        assert not new[~kept].any()


def _codes(result: onnx_attnfuse.Result) -> set[str]:
    return {reason.code for site in result.report.sites for reason in site.reasons}


def test_padding_is_removed_once_and_restored_once() -> None:
    model = encoder()
    result = _pack(model)
    ops = operators(result.model)
    assert (ops["RemovePadding"], ops["RestorePadding"], ops["PackedMultiHeadAttention"]) == (1, 1, 2)
    assert ops["Softmax"] == ops["If"] == ops["Where"] == 0
    onnx.checker.check_model(result.model)
    _assert_same_tokens(model, result.model)
    site = result.report.sites[0]
    assert (site.status, site.op, site.mask_form) == ("fused", "PackedMultiHeadAttention", "packed")
    assert site.verified is not None
    assert site.kernel is not None
    assert site.kernel.when is not None
    assert "padding is on the right" in site.kernel.when
    assert any("restored as 0 in 'out'" in note for note in result.report.notes)


def test_padding_is_removed_after_the_positions_were_added() -> None:
    (node,) = [node for node in _pack(encoder()).model.graph.node if node.op_type == "RemovePadding"]
    assert node.input[0] == "x"


def test_a_pooled_output_stays_what_it_was() -> None:
    model = encoder(end=f"{OUT} token = Gather<axis=1>(y1, first) pooled = Tanh(token)", outputs=", float[b, 16] pooled")
    result = _pack(model)
    assert operators(result.model)["RestorePadding"] == 1
    _assert_same_tokens(model, result.model)


def test_a_mean_over_positions_sees_zeros() -> None:
    """Documented: it is another mean without the mask, and the same with it."""
    end = f"{OUT} kept = Cast<to=1>(seen) some = Unsqueeze(kept, channels) few = Mul(y1, some) "
    model = encoder(end=end + "mean = ReduceSum<keepdims=0>(few, positions)", outputs=", float[b, 16] mean")
    _assert_same_tokens(model, _pack(model).model)
    plain = encoder(end=f"{OUT} mean = ReduceSum<keepdims=0>(y1, positions)", outputs=", float[b, 16] mean")
    feeds = feeds_for(padded_right())
    old, new = run_source(plain, feeds), _after(_pack(plain).model, feeds)
    kept = feeds["mask"].astype(bool)[..., None]
    np.testing.assert_allclose(new[1], (old[0] * kept).sum(1), atol=2e-5)


def test_what_is_added_to_the_scores_besides_is_handed_over() -> None:
    model = encoder(bias=SLOPED)
    result = _pack(model)
    assert operators(result.model)["PackedMultiHeadAttention"] == 2
    assert all(len(node.input) == 7 for node in result.model.graph.node if node.op_type == "PackedMultiHeadAttention")
    assert result.report.sites[0].mask_form == "packed + attention_bias"
    _assert_same_tokens(model, result.model)


_ROTATED = """
   count = Squeeze(length) rows = Range(first, count, one) turns = Cast<to=1>(rows) angle = Unsqueeze(turns, channels)
   angles = Expand(angle, four) cosine = Cos(angles) sine = Sin(angles) bias = Where(row, open, closed)"""


def test_what_differs_by_position_is_removed_from_once_for_all_layers() -> None:
    """Cosines and sines as rotary embeddings have them, (s, h), on queries of (b, n, s, h)."""
    model = encoder(bias=_ROTATED)
    graph = model.graph
    for index in range(2):
        (place,) = [at for at, node in enumerate(graph.node) if node.output[0] == f"qk{index}"]
        product = graph.node[place]
        turning = [
            onnx.helper.make_node("Neg", [f"qt{index}"], [f"negative{index}"]),
            onnx.helper.make_node("Mul", [f"qt{index}", "cosine"], [f"along{index}"]),
            onnx.helper.make_node("Mul", [f"negative{index}", "sine"], [f"across{index}"]),
            onnx.helper.make_node("Add", [f"along{index}", f"across{index}"], [f"turned{index}"]),
        ]
        product.input[0] = f"turned{index}"
        nodes = [*graph.node[:place], *turning, *graph.node[place:]]
        del graph.node[:]
        graph.node.extend(nodes)
    graph.initializer.append(onnx.numpy_helper.from_array(np.array([1, 4]), "four"))
    result = _pack(model)
    ops = operators(result.model)
    assert (ops["RemovePadding"], ops["RestorePadding"], ops["PackedMultiHeadAttention"]) == (3, 1, 2)
    _assert_same_tokens(model, result.model)


def test_every_hidden_state_that_is_an_output_is_restored() -> None:
    model = encoder(end=f"{OUT} hidden = Identity(y0)", outputs=", float[b, s, 16] hidden")
    result = _pack(model)
    assert (operators(result.model)["RemovePadding"], operators(result.model)["RestorePadding"]) == (1, 2)
    _assert_same_tokens(model, result.model)


@pytest.mark.parametrize("padding", ["auto", "guarded"])
def test_behind_a_test_any_padding_is_right(padding: str) -> None:
    model = encoder()
    result = _pack(model, padding)
    ops = operators(result.model)
    assert (ops["If"], ops["RemovePadding"], ops["PackedMultiHeadAttention"], ops["MultiHeadAttention"]) == (1, 1, 2, 2)
    assert result.report.sites[0].mask_form == "packed, else attention_bias b 1 1 t"
    (fork,) = [node for node in result.model.graph.node if node.op_type == "If"]
    outside = {node.op_type for node in result.model.graph.node}
    assert not outside & {"MatMul", "RemovePadding", "MultiHeadAttention"}
    assert len(fork.attribute) == 2
    _assert_same_tokens(model, result.model)
    for mask in (padded_right()[:, ::-1].copy(), np.array([[1, 0, 1, 1], [0, 1, 1, 0]]), np.array([[1, 1, 1], [0, 0, 0]])):
        feeds = feeds_for(mask)
        np.testing.assert_allclose(_after(result.model, feeds)[0], run_source(model, feeds)[0], atol=2e-5)


def test_a_second_run_finds_nothing_to_do() -> None:
    once = _pack(encoder()).model
    again = _pack(once)
    assert (again.report.fused, again.report.already_fused) == (0, 2)
    assert operators(again.model) == operators(once)


@pytest.mark.parametrize(
    ("model", "code"),
    [
        (encoder(bias=CAUSAL), "not-padding-only"),
        (encoder(bias=GIVEN, more=", float[s, s] given"), "not-padding-only"),
        (encoder(bias="bias = Identity(open)"), "nothing-to-remove"),
        (encoder(between=CONVOLVED, after="other{i}"), "operator-between"),
        (encoder(between=ACROSS, after="other{i}"), "operator-between"),
        (encoder(between=MEAN, after="other{i}"), "operator-between"),
        (encoder(keys="memory", more=", float[b, s, 16] memory"), "cross-attention"),
    ],
)
def test_near_misses_stay_as_they_are(model: onnx.ModelProto, code: str) -> None:
    result = _pack(model)
    packed = operators(result.model)["PackedMultiHeadAttention"]
    assert code in _codes(result)
    assert packed == result.report.fused <= 1


_ONE_ROW = """<ir_version: 9, opset_import: ["" : 18]>
row (float[1, 4, n, 8] q, float[1, 4, n, 8] k, float[1, 4, n, 8] v, int64[n] given) => (float[1, 4, n, 8] y)
<int64[1] rows = {{1}}, int64[1] columns = {{0}}, int64 none = {{0}}, float open = {{0}}, float closed = {{-10000}}>
{{ i = Unsqueeze(given, rows) j = Unsqueeze(given, columns) seen = {seen}
   bias = Where(seen, open, closed) turned = Transpose<perm=[0, 1, 3, 2]>(k) s = MatMul(q, turned) a = Add(s, bias)
   w = Softmax<axis=-1>(a) y = MatMul(w, v) }}"""


@pytest.mark.parametrize(
    ("seen", "said"), [("Equal(i, j)", "the mask is segments"), ("Greater(j, none)", "the same keys in every entry")]
)
def test_segments_and_padding_of_all_entries_alike_are_told_apart(seen: str, said: str) -> None:
    (site,) = _pack(onnx.parser.parse_model(_ONE_ROW.format(seen=seen))).report.sites
    assert [reason.code for reason in site.reasons] == ["not-padding-only"]
    assert said in site.reasons[0].message


def test_the_operator_in_the_way_is_named() -> None:
    result = _pack(encoder(between=CONVOLVED, after="other{i}"))
    (reason,) = result.report.sites[0].reasons
    assert "Conv" in reason.message or "Transpose" in reason.message or "Conv" in (reason.node or "")
    assert result.report.fused == 0


def test_left_padding_is_not_what_assume_right_is_for() -> None:
    """The twin of padding on the right: nothing is promised, and it is indeed another result."""
    model, feeds = encoder(), feeds_for(padded_right()[:, ::-1].copy())
    kept = feeds["mask"].astype(bool)
    assert np.abs(_after(_pack(model).model, feeds)[0][kept] - run_source(model, feeds)[0][kept]).max() > 1e-2


@pytest.mark.parametrize(
    ("choices", "code"),
    [({"padding": "exact"}, "not-every-batch"), ({"ep": "webgpu", "arch": None}, "no-kernel-for-device")],
)
def test_where_it_cannot_be(choices: dict[str, Any], code: str) -> None:
    result = _pack(encoder(), **choices)
    assert _codes(result) == {code}
    assert operators(result.model) == operators(encoder())


def test_auto_never_packs() -> None:
    assert operators(_pack(encoder(), target="auto").model)["PackedMultiHeadAttention"] == 0


def test_whole_models_are_not_held_against_each_other() -> None:
    assert any("was not verified" in note for note in _pack(encoder(), verify="model").report.notes)


def test_a_target_must_exist() -> None:
    with pytest.raises(OptionError, match="packed"):
        _pack(encoder(), target="unpacked")


@pytest.mark.parametrize(
    ("arch", "kernel"), [("sm90", "FLASH_ATTENTION"), ("sm80", "FLASH_ATTENTION"), ("sm75", "TRT_FUSED_ATTENTION")]
)
def test_packed_attention_has_a_kernel_on_each_architecture(arch: str, kernel: str) -> None:
    import onnx_ir as ir

    from onnx_attnfuse.graph import sizes
    from onnx_attnfuse.kernels.conditions import AttentionParams
    from onnx_attnfuse.kernels.forecast import forecast

    params = AttentionParams(ir.DataType.FLOAT16, sizes.symbol("b"), 12, 512, 512, 64, 64, "none", op="PackedMultiHeadAttention")
    assert forecast(params, resolve("cuda", arch)).kernel == kernel


def _with_heads(count: int) -> onnx.ModelProto:
    model = encoder()
    heads = next(item for item in model.graph.initializer if item.name == "heads")
    heads.CopyFrom(onnx.numpy_helper.from_array(np.asarray([0, 0, count, 16 // count]), "heads"))
    return model


@pytest.mark.parametrize(
    ("heads", "policy", "codes"),
    [
        (2, onnx_attnfuse.Policy(efficient=True), []),
        (2, onnx_attnfuse.Policy(flash=True, efficient=True), []),
        (4, onnx_attnfuse.Policy(efficient=True), ["head-size"]),
        (2, onnx_attnfuse.Policy(flash=True), ["not-float16"]),
        (2, onnx_attnfuse.Policy(sdpa_fallback=True), ["masked"]),
        (2, onnx_attnfuse.Policy(efficient=False), ["unsafe-switch"]),
    ],
)
def test_a_policy_is_asked_for_packed_attention_too(heads: int, policy: onnx_attnfuse.Policy, codes: list[str]) -> None:
    """Heads of 8 are what the memory-efficient kernel takes, heads of 4 are not; both in float32."""
    report = _pack(_with_heads(heads), policy=policy, padding="assume-right").report
    assert [[reason.code for reason in site.reasons] for site in report.sites] == [codes] * 2
    assert {site.op for site in report.sites} == ({None} if codes else {"PackedMultiHeadAttention"})


def test_the_fewest_values() -> None:
    import onnx_ir as ir

    a, b, c, d, e = (ir.Value(name=name) for name in "abcde")
    ahead = {a: [c], b: [c], c: [d, e]}
    assert least_cut(ahead, [a, b], [d, e], {a, b, c, d, e}, latest=False) == {c}
    assert least_cut(ahead, [a, b], [d, e], {a, b, d, e}, latest=False) == {a, b}
    assert least_cut(ahead, [a, b], [d, e], {a, b, d, e}, latest=True) == {d, e}
    assert least_cut(ahead, [a, b], [d], set(), latest=True) is None


def test_it_can_be_written_and_read(tmp_path: pathlib.Path) -> None:
    """Written and read again, the model is valid."""
    result = _pack(encoder())
    onnx.save(result.model, tmp_path / "packed.onnx")
    report = onnx_attnfuse.explain(tmp_path / "packed.onnx")
    assert (report.already_fused, report.sites[0].name) == (2, "weights0/PackedMultiHeadAttention")
