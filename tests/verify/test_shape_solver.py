"""Sizes of trial inputs: masks that are long enough for what is read of them, and lengths that a caller tells."""

from __future__ import annotations

import onnx.parser
import pytest

import onnx_attnfuse
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.verify.shape_solver import PROFILES, Equalities

pytest.importorskip("onnxruntime")

_LAST = 300
"""An index that no input is long enough for unless a caller says so."""
_FAR = f"""<ir_version: 8, opset_import: ["" : 18]>
g (float[b,2,s,8] q, float[b,2,t,8] k, float[b,2,t,8] v, float[n] more) => (float[b,2,s,8] o)
<int64 last = {{{_LAST}}}, float half = {{0.35}}> {{
  added = Gather(more, last)
  turned = Transpose<perm=[0,1,3,2]>(k) product = MatMul(q, turned) scaled = Mul(product, half) scores = Add(scaled, added)
  weights = Softmax<axis=-1>(scores) o = MatMul(weights, v) }}"""


@pytest.mark.parametrize(("told", "status"), [({}, "skipped"), ({"n": _LAST}, "skipped"), ({"n": _LAST + 1}, "fused")])
def test_lengths_that_a_caller_tells_are_tried(told: dict[str, int], status: str) -> None:
    (site,) = onnx_attnfuse.optimize(onnx.parser.parse_model(_FAR), ep="cpu", dim=told).report.sites
    assert site.status == status
    assert [reason.code for reason in site.reasons] == (["unverified"] if status == "skipped" else [])


def test_rows_of_a_length_of_their_own_become_long_enough_for_all_else() -> None:
    b, s, p, m, n, other = (sizes.symbol(name) for name in ("b", "s", "p", "m", "n", "other"))
    equalities = Equalities([(other, p + s)])
    shapes = [(b, 2, s, 8), (b, 2, p, 8), (m, n), (b, other)]
    for profile in PROFILES:
        (values,) = equalities.assignments(shapes, [profile])
        assert values["m"] == values["b"] == profile.batch
        assert values["other"] == values["p"] + values["s"]
        assert not profile.whole or values["n"] >= values["p"] + values["s"]
    assert any(profile.whole for profile in PROFILES)


def test_what_several_lengths_come_to_agrees_with_each_of_them() -> None:
    a, b, c = (sizes.symbol(name) for name in "abc")
    equalities = Equalities([(4 * sizes.maximum(a, b), 4 * c)])
    assert equalities.root("a") != equalities.root("c")
    equalities = Equalities([(sizes.maximum(a, b), c), (8 * a, 8 * b)])
    assert equalities.root("a") == equalities.root("b") == equalities.root("c")


@pytest.mark.parametrize(("patch", "tokens", "size"), [(8, 17, 32), (14, 257, 224), (16, 1025, 512), (16, 20, None)])
def test_a_size_is_found_whose_patches_are_as_many_as_a_table_has_rows(patch: int, tokens: int, size: int | None) -> None:
    side = sizes.floor_quotient(sizes.symbol("h"), patch)
    (values,) = Equalities([(side * side + 1, tokens)]).assignments([(sizes.symbol("b"), 3, sizes.symbol("h"), 4)], PROFILES[:1])
    assert (values["h"] == size) == (size is not None)
