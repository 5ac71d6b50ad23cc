"""Encoders on packed tokens: padding removed once, restored once, the same numbers at every token that is no padding."""

from __future__ import annotations

import collections
import pathlib
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx.reference
import onnxruntime
import pytest

import onnx_attnfuse
from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.fusion.packing.min_cut import least_cut
from onnx_attnfuse.kernels.device import resolve
from onnx_attnfuse.verify.references import OPERATORS

_LAYER = """
   q{i} = MatMul({x}, wq) k{i} = MatMul({x}, wk) v{i} = MatMul({x}, wv) qb{i} = Add(q{i}, bq)
   q4{i} = Reshape(qb{i}, heads) k4{i} = Reshape({k}, heads) v4{i} = Reshape(v{i}, heads)
   qt{i} = Transpose<perm=[0, 2, 1, 3]>(q4{i}) kt{i} = Transpose<perm=[0, 2, 3, 1]>(k4{i})
   vt{i} = Transpose<perm=[0, 2, 1, 3]>(v4{i}) qk{i} = MatMul(qt{i}, kt{i})
   scaled{i} = Mul(qk{i}, scale) masked{i} = Add(scaled{i}, bias)
   weights{i} = Softmax<axis=-1>(masked{i}) mixed{i} = MatMul(weights{i}, vt{i})
   back{i} = Transpose<perm=[0, 2, 1, 3]>(mixed{i}) flat{i} = Reshape(back{i}, joined)
   wide{i} = MatMul(flat{i}, wo) sum{i} = Add(wide{i}, {x}) {between}
   mean{i} = ReduceMean<keepdims=1>({s}, channels) centred{i} = Sub({s}, mean{i}) square{i} = Mul(centred{i}, centred{i})
   var{i} = ReduceMean<keepdims=1>(square{i}, channels) safe{i} = Add(var{i}, epsilon) root{i} = Sqrt(safe{i})
   unit{i} = Div(centred{i}, root{i}) y{i} = Mul(unit{i}, gamma)
"""
_TEXT = """<ir_version: 9, opset_import: ["" : 18]>
encoder (int64[b, s] ids, int64[b, s] mask{more}) => (float[b, s, 16] out{outputs})
<int64[4] heads = {{0, 0, 4, 4}}, int64[3] joined = {{0, 0, 16}},
 int64[1] channels = {{-1}}, int64[1] positions = {{1}}, int64[2] middle = {{1, 2}}, int64[1] zero = {{0}}, int64 first = {{0}},
 int64[1] last = {{9223372036854775807}}, float scale = {{0.5}}, float open = {{0}}, float closed = {{-3.4028234663852886e38}},
 float epsilon = {{0.00001}}>
{{ embedded = Gather(table, ids) length = Shape<start=1, end=2>(ids) near = Slice(places, zero, length, zero)
   x = Add(embedded, near) seen = Cast<to=9>(mask) row = Unsqueeze(seen, middle) {bias} {layers} {end} }}"""
_SQUARE = (16, 16)
_WEIGHTS = {"table": (20, 16), "places": (9, 16), "wq": _SQUARE, "wk": _SQUARE, "wv": _SQUARE, "wo": _SQUARE}
_WEIGHTS |= {"bq": (16,), "gamma": (16,), "kernel": (16, 16, 3)}
_PADDING = "bias = Where(row, open, closed)"
_CAUSAL = """
   count = Squeeze(length) rows = Range(first, count, one) i = Unsqueeze(rows, positions) j = Unsqueeze(rows, zero)
   past = LessOrEqual(j, i) both = And(row, past) bias = Where(both, open, closed)"""
_SLOPED = """
   count = Squeeze(length) rows = Range(first, count, one) i = Unsqueeze(rows, positions) j = Unsqueeze(rows, zero)
   behind = Sub(i, j) slope = Cast<to=1>(behind) padded = Where(row, open, closed) bias = Add(padded, slope)"""
_GIVEN = "padded = Where(row, open, closed) bias = Add(padded, given)"
_OUT = "out = Identity(y1)"


def _model(
    *,
    bias: str = _PADDING,
    between: str = "",
    after: str = "sum{i}",
    end: str = _OUT,
    more: str = "",
    outputs: str = "",
    keys: str = "",
) -> onnx.ModelProto:
    """Two layers."""
    layers = ""
    for index, x in enumerate(("x", "y0")):
        own = {"i": index, "x": x, "k": f"k{index}" if index or not keys else keys, "s": after.format(i=index)}
        layers += _LAYER.format(**own, between=between.format(i=index))
    text = _TEXT.format(bias=bias, layers=layers, end=end, more=more, outputs=outputs).replace(
        "int64 first", "int64 one = {1}, int64 first"
    )
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    for name, shape in _WEIGHTS.items():
        array = rng.standard_normal(shape).astype(np.float32) * 0.5
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def _pack(model: Any, padding: str = "assume-right", **choices: Any) -> onnx_attnfuse.Result:
    return onnx_attnfuse.optimize(model, **{"ep": "cuda", "arch": "sm90", "target": "packed", "padding": padding, **choices})


def _ops(model: onnx.ModelProto) -> collections.Counter[str]:
    """Operators, those in branches too."""
    found: collections.Counter[str] = collections.Counter()
    pending = [model.graph]
    while pending:
        graph = pending.pop()
        for node in graph.node:
            found[node.op_type] += 1
            pending += [item.g for item in node.attribute if item.HasField("g")]
    return found


def _feeds(mask: np.ndarray) -> dict[str, np.ndarray]:
    return {"ids": np.random.default_rng(1).integers(0, 20, mask.shape), "mask": mask}


def _right() -> np.ndarray:
    return np.array([[1, 1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]])


def _before(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return list(onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, feeds))


def _after(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    return list(onnx.reference.ReferenceEvaluator(model, new_ops=list(OPERATORS)).run(None, feeds))


def _assert_same_tokens(model: onnx.ModelProto, packed: onnx.ModelProto) -> None:
    feeds = _feeds(_right())
    kept = feeds["mask"].astype(bool)
    for old, new in zip(_before(model, feeds), _after(packed, feeds), strict=True):
        if old.shape[:2] != kept.shape:
            np.testing.assert_allclose(new, old, atol=2e-5)
            continue
        np.testing.assert_allclose(new[kept], old[kept], atol=2e-5)
        assert not new[~kept].any()


def _codes(result: onnx_attnfuse.Result) -> set[str]:
    return {reason.code for site in result.report.sites for reason in site.reasons}


def test_padding_is_removed_once_and_restored_once() -> None:
    model = _model()
    result = _pack(model)
    ops = _ops(result.model)
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
    (node,) = [node for node in _pack(_model()).model.graph.node if node.op_type == "RemovePadding"]
    assert node.input[0] == "x"


def test_a_pooled_output_stays_what_it_was() -> None:
    model = _model(end=f"{_OUT} token = Gather<axis=1>(y1, first) pooled = Tanh(token)", outputs=", float[b, 16] pooled")
    result = _pack(model)
    assert _ops(result.model)["RestorePadding"] == 1
    _assert_same_tokens(model, result.model)


def test_a_mean_over_positions_sees_zeros() -> None:
    """Documented: it is another mean without the mask, and the same with it."""
    end = f"{_OUT} kept = Cast<to=1>(seen) some = Unsqueeze(kept, channels) few = Mul(y1, some) "
    model = _model(end=end + "mean = ReduceSum<keepdims=0>(few, positions)", outputs=", float[b, 16] mean")
    _assert_same_tokens(model, _pack(model).model)
    plain = _model(end=f"{_OUT} mean = ReduceSum<keepdims=0>(y1, positions)", outputs=", float[b, 16] mean")
    feeds = _feeds(_right())
    old, new = _before(plain, feeds), _after(_pack(plain).model, feeds)
    kept = feeds["mask"].astype(bool)[..., None]
    np.testing.assert_allclose(new[1], (old[0] * kept).sum(1), atol=2e-5)


def test_what_is_added_to_the_scores_besides_is_handed_over() -> None:
    model = _model(bias=_SLOPED)
    result = _pack(model)
    assert _ops(result.model)["PackedMultiHeadAttention"] == 2
    assert all(len(node.input) == 7 for node in result.model.graph.node if node.op_type == "PackedMultiHeadAttention")
    assert result.report.sites[0].mask_form == "packed + attention_bias"
    _assert_same_tokens(model, result.model)


_ROTATED = """
   count = Squeeze(length) rows = Range(first, count, one) turns = Cast<to=1>(rows) angle = Unsqueeze(turns, channels)
   angles = Expand(angle, four) cosine = Cos(angles) sine = Sin(angles) bias = Where(row, open, closed)"""


def test_what_differs_by_position_is_removed_from_once_for_all_layers() -> None:
    """Cosines and sines as rotary embeddings have them, (s, h), on queries of (b, n, s, h)."""
    model = _model(bias=_ROTATED)
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
    ops = _ops(result.model)
    assert (ops["RemovePadding"], ops["RestorePadding"], ops["PackedMultiHeadAttention"]) == (3, 1, 2)
    _assert_same_tokens(model, result.model)


def test_every_hidden_state_that_is_an_output_is_restored() -> None:
    model = _model(end=f"{_OUT} hidden = Identity(y0)", outputs=", float[b, s, 16] hidden")
    result = _pack(model)
    assert (_ops(result.model)["RemovePadding"], _ops(result.model)["RestorePadding"]) == (1, 2)
    _assert_same_tokens(model, result.model)


@pytest.mark.parametrize("padding", ["auto", "guarded"])
def test_behind_a_test_any_padding_is_right(padding: str) -> None:
    model = _model()
    result = _pack(model, padding)
    ops = _ops(result.model)
    assert (ops["If"], ops["RemovePadding"], ops["PackedMultiHeadAttention"], ops["MultiHeadAttention"]) == (1, 1, 2, 2)
    assert result.report.sites[0].mask_form == "packed, else attention_bias b 1 1 t"
    (fork,) = [node for node in result.model.graph.node if node.op_type == "If"]
    outside = {node.op_type for node in result.model.graph.node}
    assert not outside & {"MatMul", "RemovePadding", "MultiHeadAttention"}
    assert len(fork.attribute) == 2
    _assert_same_tokens(model, result.model)
    for mask in (_right()[:, ::-1].copy(), np.array([[1, 0, 1, 1], [0, 1, 1, 0]]), np.array([[1, 1, 1], [0, 0, 0]])):
        feeds = _feeds(mask)
        np.testing.assert_allclose(_after(result.model, feeds)[0], _before(model, feeds)[0], atol=2e-5)


def test_a_second_run_finds_nothing_to_do() -> None:
    once = _pack(_model()).model
    again = _pack(once)
    assert (again.report.fused, again.report.already_fused) == (0, 2)
    assert _ops(again.model) == _ops(once)


_CONVOLVED = """
   turned{i} = Transpose<perm=[0, 2, 1]>(sum{i}) local{i} = Conv<pads=[1, 1]>(turned{i}, kernel)
   other{i} = Transpose<perm=[0, 2, 1]>(local{i})"""
_ACROSS = "other{i} = Softmax<axis=1>(sum{i})"
_MEAN = "all{i} = ReduceMean<keepdims=1>(sum{i}, positions) other{i} = Add(sum{i}, all{i})"


@pytest.mark.parametrize(
    ("model", "code"),
    [
        (_model(bias=_CAUSAL), "not-padding-only"),
        (_model(bias=_GIVEN, more=", float[s, s] given"), "not-padding-only"),
        (_model(bias="bias = Identity(open)"), "nothing-to-remove"),
        (_model(between=_CONVOLVED, after="other{i}"), "operator-between"),
        (_model(between=_ACROSS, after="other{i}"), "operator-between"),
        (_model(between=_MEAN, after="other{i}"), "operator-between"),
        (_model(keys="memory", more=", float[b, s, 16] memory"), "cross-attention"),
    ],
)
def test_near_misses_stay_as_they_are(model: onnx.ModelProto, code: str) -> None:
    result = _pack(model)
    packed = _ops(result.model)["PackedMultiHeadAttention"]
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
    result = _pack(_model(between=_CONVOLVED, after="other{i}"))
    (reason,) = result.report.sites[0].reasons
    assert "Conv" in reason.message or "Transpose" in reason.message or "Conv" in (reason.node or "")
    assert result.report.fused == 0


def test_left_padding_is_not_what_assume_right_is_for() -> None:
    """The twin of padding on the right: nothing is promised, and it is indeed another result."""
    model, feeds = _model(), _feeds(_right()[:, ::-1].copy())
    kept = feeds["mask"].astype(bool)
    assert np.abs(_after(_pack(model).model, feeds)[0][kept] - _before(model, feeds)[0][kept]).max() > 1e-2


@pytest.mark.parametrize(
    ("choices", "code"),
    [({"padding": "exact"}, "not-every-batch"), ({"ep": "cpu", "arch": None}, "no-kernel-for-device")],
)
def test_where_it_cannot_be(choices: dict[str, Any], code: str) -> None:
    result = _pack(_model(), **choices)
    assert _codes(result) == {code}
    assert _ops(result.model) == _ops(_model())


def test_auto_never_packs() -> None:
    assert _ops(_pack(_model(), target="auto").model)["PackedMultiHeadAttention"] == 0


def test_whole_models_are_not_held_against_each_other() -> None:
    assert any("was not verified" in note for note in _pack(_model(), verify="model").report.notes)


def test_a_target_must_exist() -> None:
    with pytest.raises(OptionError, match="packed"):
        _pack(_model(), target="unpacked")


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
    model = _model()
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
    result = _pack(_model())
    onnx.save(result.model, tmp_path / "packed.onnx")
    report = onnx_attnfuse.explain(tmp_path / "packed.onnx")
    assert (report.already_fused, report.sites[0].name) == (2, "weights0/PackedMultiHeadAttention")
