"""Lengths of different names that meet where operands broadcast: any of them may be 1 when the model runs."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest

import onnx_attnfuse
from onnx_attnfuse.attention.match.candidates import find_candidates
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.scopes import scopes
from onnx_attnfuse.language.registry.discovery import load

_FULL = {"B": 3, "C": 3, "D": 3, "H": 2, "I": 2, "J": 2, "S": 4, "R": 4, "T": 5, "U": 5, "V": 5}
"""Batches, heads, rows and columns, each under several names."""
_MASKED = {
    "added": "a = Add(c, m)",
    "added to": "a = Add(m, c)",
    "chosen by": "t = Cast<to=9>(m) a = Where(t, c, low)",
    "a factor": "a = Mul(c, m)",
}


def _model(query: str, key: str, value: str, mask: str = "B,1,S,T", how: str = "added", tail: str = "") -> onnx.ModelProto:
    """An attention of operands of these shapes."""
    tail = tail or "y = Identity(o)"
    return onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 18]>
    g (float[{query},8] q, float[{key},8] k, float[{value},8] v, float[{mask}] m) => (float y)
    <float half = {{0.5}}, float low = {{-3.4028235e38}}, int64[3] flat = {{0, 0, 16}}> {{
      t0 = Transpose<perm=[0, 1, 3, 2]>(k) s = MatMul(q, t0) c = Mul(s, half) {_MASKED[how]}
      w = Softmax<axis=-1>(a) o = MatMul(w, v) {tail} }}""")


def _session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def _same(before: onnx.ModelProto, after: onnx.ModelProto, numbers: dict[str, int]) -> None:
    original, fused = _session(before), _session(after)
    rng = np.random.default_rng(sum(numbers.values()))
    feeds = {
        item.name: rng.standard_normal([dim if isinstance(dim, int) else numbers[dim] for dim in item.shape], np.float32)
        for item in original.get_inputs()
    }
    feeds["m"] = np.where(feeds["m"] > -1, feeds["m"], np.float32(0))
    (old,), (new,) = original.run(None, feeds), fused.run(None, feeds)
    assert old.shape == new.shape
    np.testing.assert_allclose(new, old, atol=1e-5)


def _ops(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


@pytest.mark.parametrize("target", ["MultiHeadAttention", "onnx.Attention"])
@pytest.mark.parametrize(
    ("query", "key", "value", "ones"),
    [
        ("B,2,S", "C,2,T", "B,2,T", ["B", "C", "BC"]),
        ("B,2,S", "B,2,T", "C,2,T", ["B", "C"]),
        ("B,2,S", "C,2,T", "D,2,T", ["B", "C", "D", "BC", "BD", "CD", "BCD"]),
        ("B,2,S", "B,H,T", "B,2,T", ["H"]),
        ("B,H,S", "B,2,T", "B,I,T", ["H", "I", "HI"]),
        ("B,2,S", "B,2,T", "B,2,U", ["T", "TUV"]),
    ],
)
def test_operands_that_may_be_one_are_repeated(query: str, key: str, value: str, ones: list[str], target: str) -> None:
    model = _model(query, key, value, "1,1,S,V")
    result = onnx_attnfuse.optimize(model, ep="cpu", target=target, verify="sites")
    assert [site.status for site in result.report.sites] == ["fused"]
    assert "Softmax" not in _ops(result.model)
    for names in ["", *ones]:
        _same(model, result.model, _FULL | dict.fromkeys(names, 1))


def test_operands_of_one_name_are_not_repeated() -> None:
    result = onnx_attnfuse.optimize(_model("B,2,S", "B,2,T", "B,2,T", "B,1,S,T"), ep="cpu", verify="sites")
    assert [site.op for site in result.report.sites] == ["MultiHeadAttention"]
    assert "Expand" not in _ops(result.model)


@pytest.mark.parametrize("how", _MASKED)
@pytest.mark.parametrize("mask", ["D,1,S,T", "B,J,S,T", "B,1,R,T", "D,J,R,1", "J,R,1", "D,1,1,1"])
def test_a_mask_or_factor_of_its_own_lengths_may_be_one_anywhere(mask: str, how: str) -> None:
    model = _model("B,2,S", "B,2,T", "B,2,T", mask if how != "a factor" else mask.replace("T", "1"), how)
    result = onnx_attnfuse.optimize(model, ep="cpu", verify="none")
    assert [site.status for site in result.report.sites] == ["fused"]
    for names in ["", *[name for name in "DJR" if name in mask]]:
        _same(model, result.model, _FULL | dict.fromkeys(names, 1))


def test_a_mask_of_its_own_length_along_the_keys_is_no_longer_than_they_are_many() -> None:
    model = _model("B,2,S", "B,2,T", "B,2,T", "B,1,1,V")
    result = onnx_attnfuse.optimize(model, ep="cpu", verify="sites")
    for names in ("", "V", "TV"):
        _same(model, result.model, _FULL | dict.fromkeys(names, 1))


def test_what_follows_has_the_lengths_that_the_products_come_to() -> None:
    tail = "x = Transpose<perm=[0, 2, 1, 3]>(o) y = Reshape(x, flat)"
    model = _model("B,2,S", "C,2,T", "B,2,T", "1,1,S,T", tail=tail)
    result = onnx_attnfuse.optimize(model, ep="cpu", verify="sites")
    for names in ("", "B", "C"):
        _same(model, result.model, _FULL | dict.fromkeys(names, 1))


@pytest.mark.parametrize(("mask", "wider"), [("D,1,R,V", {("B", "D"), ("S", "R")}), ("B,1,S,V", set()), ("1,1,1,T", set())])
def test_that_a_mask_does_not_repeat_the_scores_is_written_down(mask: str, wider: set[tuple[str, str]]) -> None:
    model = ir.serde.deserialize_model(_model("B,2,S", "B,2,T", "B,2,T", mask))
    (scope,) = scopes(model)
    (candidate,) = find_candidates(scope, load(onnx_attnfuse.Options()).readers, keep_outputs=False)
    assert candidate.spec is not None
    assert {(str(one), str(other)) for one, other in candidate.spec.wider} == wider


@pytest.mark.newest  # MultiHeadAttention of onnxruntime 1.28 divides by an empty axis, which ends the process
@pytest.mark.parametrize("empty", ["B", "S", "T", "ST"])
def test_axes_that_turn_out_to_be_empty_give_what_the_source_gives(empty: str) -> None:
    model = _model("B,2,S", "B,2,T", "B,2,T", "B,1,S,T")
    result = onnx_attnfuse.optimize(model, ep="cpu", target="MultiHeadAttention", verify="sites")
    assert [site.op for site in result.report.sites] == ["MultiHeadAttention"]
    _same(model, result.model, _FULL | dict.fromkeys(empty, 0))


@pytest.mark.parametrize("shapes", [("0,2,S", "0,2,T"), ("B,0,S", "B,0,T"), ("B,2,0", "B,2,T"), ("B,2,S", "B,2,0")])
def test_axes_that_are_known_to_be_empty_are_left_alone(shapes: tuple[str, str]) -> None:
    query, key = shapes
    result = onnx_attnfuse.optimize(_model(query, key, key, "1,1,1,1"), ep="cpu", verify="sites")
    (site,) = result.report.sites
    assert (site.status, [reason.code for reason in site.reasons]) == ("skipped", ["empty-axis"])


def test_the_length_that_several_come_to() -> None:
    b, c = sizes.symbol("b"), sizes.symbol("c")
    either = sizes.broadcast((b, c))
    assert sizes.broadcast((c, either, b, 1)) == sizes.broadcast((c, b)) == either
    assert (sizes.broadcast((b, 1, b)), sizes.broadcast((b, 4)), sizes.broadcast(())) == (b, 4, 1)
    assert [sizes.evaluate(either, {"b": one, "c": other}) for one, other in ((1, 3), (3, 1), (2, 2))] == [3, 3, 2]


def test_lengths_that_an_operator_enforces_to_be_equal_are() -> None:
    text = """<ir_version: 10, opset_import: ["" : 18]>
    g (float[p,2] past, float[b,2] new, float[c,2] other) => (float y, float z)
    { y = Concat<axis=1>(past, new) z = Add(new, other) }"""
    facts = Facts(ir.serde.deserialize_model(onnx.parser.parse_model(text)).graph)
    p, b, c = (sizes.symbol(name) for name in "pbc")
    assert facts.same(p, b)
    assert not facts.same(b, c)
    assert facts.shorter(p) == {c}
