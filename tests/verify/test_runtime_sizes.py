"""Lengths that only running a model tells, whatever its values call them."""

from __future__ import annotations

import onnx.parser
import pytest

import onnx_attnfuse
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.verify.shape_solver import are_at_least

pytest.importorskip("onnxruntime")


def _padded(noted: str, multiple: int, more: str = "Mod(gap, multiple)") -> onnx.ModelProto:
    """Attention over rows that are padded up to a multiple, with a bias that is made in groups of as many."""
    return onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 18]>
        g (float[b,n,8] x, float[8,8] weight, int64 extra) => (float[b,k,8] o)
        <int64 one = {{1}}, int64 zero = {{0}}, int64 multiple = {{{multiple}}}, int64[1] first = {{0}},
         int64[4] front = {{0, 0, 0, 0}},
         int64[1] behind = {{0}}, int64[2] groups = {{-1, {multiple}}}, int64[1] flat = {{-1}}, float tenth = {{0.1}},
         float[b,{noted},8] padded> {{
          shape = Shape(x) n = Gather(shape, one) rest = Mod(n, multiple) gap = Sub(multiple, rest) more0 = {more}
          more = Unsqueeze(more0, first) pads = Concat<axis=0>(front, more, behind) padded = Pad(x, pads)
          q = MatMul(padded, weight)
          whole = Shape(padded) m = Gather(whole, one) at = Range(zero, m, one) grouped = Reshape(at, groups)
          places = Reshape(grouped, flat) floats = Cast<to=1>(places) bias = Mul(floats, tenth)
          turned = Transpose<perm=[0,2,1]>(q) product = MatMul(q, turned) scores = Add(product, bias)
          weights = Softmax<axis=-1>(scores) o = MatMul(weights, q) }}""")


@pytest.mark.parametrize("noted", ["padded_rows", "unk__7", "n"])
def test_a_length_that_a_node_makes_is_what_it_makes_under_any_name(noted: str) -> None:
    (site,) = onnx_attnfuse.optimize(_padded(noted, 11), ep="cpu").report.sites
    assert (site.status, [reason.code for reason in site.reasons]) == ("fused", [])


def test_a_length_of_an_input_is_not_that_of_what_is_padded() -> None:
    """A wrong note: rows that are padded by as many as are asked for are called n, so that lengths would have to be multiples."""
    (site,) = onnx_attnfuse.optimize(_padded("n", 11, "Identity(extra)"), ep="cpu").report.sites
    assert (site.status, [reason.code for reason in site.reasons]) == ("skipped", ["unverified"])


def test_a_length_that_is_given_as_a_number_is_one_of_the_lengths() -> None:
    """Functions are given lengths so; with other numbers it refuses nearly every case, rows without a key among them."""
    (site,) = onnx_attnfuse.optimize(
        onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 18]>
            g (float[b,2,s,4] q, float[b,2,s,4] k, float[b,2,s,4] v, float[b,1,1,s] bias, int64 length) => (float[b,2,s,4] o)
              <int64[1] first = {0}, int64[2] ones = {1, 1}, float half = {0.5}> {
              n = Unsqueeze(length, first) shape = Concat<axis=0>(ones, n, n) mask = Expand(bias, shape)
              turned = Transpose<perm=[0,1,3,2]>(k) product = MatMul(q, turned) scaled = Mul(product, half)
              scores = Add(scaled, mask) weights = Softmax<axis=-1>(scores) o = MatMul(weights, v) }"""),
        ep="cpu",
    ).report.sites
    assert site.verified is not None
    assert site.verified.cases > 10


@pytest.mark.parametrize("past", ["0", "p"])
def test_a_length_that_the_model_fixes_to_0_is_run_with(past: str) -> None:
    """A memory without positions; one of any length is tried with some, unless the attention may have an empty past."""
    result = onnx_attnfuse.optimize(
        onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 18]>
            g (float[b,2,s,4] q, float[b,2,t,4] k, float[b,2,t,4] v, float[b,2,{past},4] none) => (float[b,2,s,4] o) {{
              keys = Concat<axis=2>(none, k) values = Concat<axis=2>(none, v) turned = Transpose<perm=[0,1,3,2]>(keys)
              scores = MatMul(q, turned) weights = Softmax<axis=-1>(scores) o = MatMul(weights, values) }}"""),
        ep="cpu",
        verify="model",
    )
    (site,) = result.report.sites
    assert site.verified is not None
    assert any("whole model verified on" in note for note in result.report.notes)


def test_of_free_lengths_none_is_0() -> None:
    free, fixed = sizes.symbol("p"), 0
    assert are_at_least(1, [(2, fixed), (free,)], [(2, 0), (1,)])
    assert not are_at_least(1, [(2, fixed), (free,)], [(2, 0), (0,)])
    assert are_at_least(0, [(free,)], [(0,)])
