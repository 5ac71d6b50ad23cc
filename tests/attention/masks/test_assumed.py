"""Each assumption: a model that rests on it is fused and told so, and refused, or read as less, once it is taken back."""

from __future__ import annotations

import onnx
import onnx.parser
import pytest

import onnx_attnfuse
from onnx_attnfuse.graph.assumptions import ASSUMPTIONS

OPERANDS = "float[b, 2, s, 4] q, float[b, 2, t, 4] k, float[b, 2, t, 4] v"


def model(inputs: str, body: str, constants: str = "") -> onnx.ModelProto:
    """An attention over `masked`, which `body` makes of `scores`."""
    named = f"<{constants}>" if constants else ""
    return onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 18]>
        attention ({OPERANDS}{inputs}) => (float[b, 2, s, 4] out) {named} {{
            kt = Transpose<perm = [0, 1, 3, 2]>(k)
            scores = MatMul(q, kt)
            {body}
            out = MatMul(weights, v)
        }}"""
    )


SOFTMAX = "weights = Softmax<axis = -1>(masked)"
WHERE = model(", bool[b, 1, 1, t] mask", f"masked = Where(mask, scores, fill) {SOFTMAX}", "float fill = {-10000}")
CEILING = model("", f"masked = Min(scores, high) {SOFTMAX}", "float high = {50000}")
EXPONENTIALS = model(
    "",
    "powers = Exp(scores) last = Constant<value_ints = [3]>() total = ReduceSum(powers, last) weights = Div(powers, total)",
)
DIVIDED = model(
    ", bool[b, 1, 1, t] mask",
    "every = Softmax<axis = -1>(scores) seen = Cast<to = 1>(mask) left = Mul(every, seen) last = Constant<value_ints = [3]>() "
    "total = ReduceSum(left, last) weights = Div(left, total)",
)
GIVEN = ", float[b, 1, 1, t] mask, float[b, 1, s, t] other"
IN_STEPS = model(GIVEN, f"first = Add(scores, mask) masked = Add(first, other) {SOFTMAX}")
SUMMED = model(GIVEN, f"both = Add(mask, other) masked = Add(scores, both) {SOFTMAX}")
OWN_BATCH = model(", bool[m, 1, s, t] mask", f"masked = Where(mask, scores, fill) {SOFTMAX}", "float fill = {-inf}")
PICKED = model(
    ", bool[b, t] keep, int64[t] places",
    f"picked = Gather<axis = 1>(keep, places) at = Constant<value_ints = [1, 2]>() mask = Unsqueeze(picked, at) "
    f"masked = Where(mask, scores, fill) {SOFTMAX}",
    "float fill = {-inf}",
)
TWICE = model(
    ", bool[b, 1, 1, t] mask, bool[s, t] seen",
    "lost = Where(mask, zero, fill) first = Add(scores, lost) unseen = Where(seen, zero, fill) "
    f"masked = Add(first, unseen) {SOFTMAX}",
    "float zero = {0}, float fill = {-1e9}",
)
REFUSED = {
    "large-fills": (WHERE, "soft-fill"),
    "bounded-scores": (CEILING, "unreadable-score-step"),
    "level-rows": (TWICE, "rounded-mask"),
    "nonempty-axes": (WHERE, "empty-axis"),
    "masks-fit": (OWN_BATCH, "wide-mask"),
    "kept-weights": (DIVIDED, "vanishing-weights"),
    "finite-exponentials": (EXPONENTIALS, "unshifted-exponentials"),
}


def site(source: onnx.ModelProto, *, without: str | None = None) -> onnx_attnfuse.SiteReport:
    """The report on the attention of a model, one assumption taken back."""
    kept = tuple(name for name in ASSUMPTIONS if name != without) if without else ()
    (found,) = onnx_attnfuse.optimize(source, assume=kept).report.sites
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_what_rests_on_an_assumption_is_left_where_it_is_taken_back(name: str) -> None:
    source, code = REFUSED[name]
    assert site(source).status == "fused"
    refused = site(source, without=name)
    assert (refused.status, refused.reasons[0].code) == ("skipped", code)
    other = next(item for item in ASSUMPTIONS if item not in {name, "nonempty-axes", "large-fills", "bounded-scores"})
    assert site(source, without=other).status == "fused"


@pytest.mark.parametrize(
    ("source", "names"),
    [
        (WHERE, {"large-fills", "bounded-scores", "named-sizes", "nonempty-axes"}),
        (TWICE, {"large-fills", "bounded-scores", "level-rows", "named-sizes", "nonempty-axes"}),
        (IN_STEPS, {"bounded-scores", "level-rows", "named-sizes", "nonempty-axes"}),
        (SUMMED, {"bounded-scores", "named-sizes", "nonempty-axes"}),
        (OWN_BATCH, {"named-sizes", "nonempty-axes", "masks-fit"}),
        (EXPONENTIALS, {"named-sizes", "nonempty-axes", "finite-exponentials"}),
        (PICKED, {"named-sizes", "nonempty-axes", "indices-in-range"}),
    ],
)
def test_a_site_tells_what_it_rests_on(source: onnx.ModelProto, names: set[str]) -> None:
    assert set(site(source).assumptions) == names


def test_a_mask_read_through_indices_has_no_name_without_their_range() -> None:
    assert site(PICKED).mask == "padding"
    assert site(PICKED, without="indices-in-range").mask == "padding"
    assert site(PICKED).mask_text != site(PICKED, without="indices-in-range").mask_text


def test_sizes_of_one_name_are_each_a_size_of_their_own_without_that_assumption() -> None:
    assert "named-sizes" not in site(WHERE, without="named-sizes").assumptions


def test_none_takes_nothing_for_granted() -> None:
    (found,) = onnx_attnfuse.optimize(WHERE, assume=("none",)).report.sites
    assert found.status == "skipped"
    assert found.assumptions == ()


def test_there_is_no_such_assumption() -> None:
    with pytest.raises(onnx_attnfuse.OptionError, match="no assumption 'luck'; choose none, default, large-fills"):
        onnx_attnfuse.optimize(WHERE, assume=("luck",))


def stepwise(fill: float, *, summed: bool = False) -> onnx.ModelProto:
    """An attention whose scores have a bias and then a mask number added, or both summed first."""
    steps = (
        "both = Add(bias, lost) masked = Add(scores, both)" if summed else "first = Add(scores, bias) masked = Add(first, lost)"
    )
    body = f"lost = Where(mask, zero, fill) {steps} {SOFTMAX}"
    constants = f"float zero = {{0}}, float fill = {{{fill}}}, float[2, 1, 1] bias = {{0.5, 0.25}}"
    return model(", bool[b, 1, 1, t] mask", body, constants)


@pytest.mark.parametrize("without", [None, "large-fills"])
def test_what_a_number_rounds_it_rounds_whether_it_is_taken_to_mask_or_not(without: str | None) -> None:
    refused = site(stepwise(-1e4), without=without)
    assert (refused.status, refused.reasons[0].code) == ("skipped", "rounded-mask")
    assert site(stepwise(-1e4, summed=True), without=without).status == "fused"
    assert site(stepwise(-1.5e3), without=without).status == "fused"


HALF = """<ir_version: 10, opset_import: ["" : 18]>
attention (float16[b, 2, s, 4] q, float16[b, 2, t, 4] k, float16[b, 2, t, 4] v, bool[b, 1, 1, t] mask)
    => (float16[b, 2, s, 4] out)
<float zero32 = {0}, float fill32 = {%s}>
{ zero = Cast<to = 10>(zero32) fill = Cast<to = 10>(fill32) kt = Transpose<perm = [0, 1, 3, 2]>(k) scores = MatMul(q, kt)
  lost = Where(mask, zero, fill) masked = Add(scores, lost) weights = Softmax<axis = -1>(masked) out = MatMul(weights, v) }"""


@pytest.mark.parametrize(
    ("ep", "fill", "level"),
    [
        pytest.param("cuda", "-10000", True, id="rounded to float16 on a GPU"),
        pytest.param("cpu", "-10000", False, id="added in float32 on a CPU"),
        pytest.param("cuda", "-inf", False, id="nothing is left whatever the score"),
    ],
)
def test_rows_are_level_where_the_device_rounds_scores_beside_a_mask(ep: str, fill: str, level: bool) -> None:
    source = onnx.parser.parse_model(HALF % fill)
    (found,) = onnx_attnfuse.optimize(source, ep=ep, verify="none").report.sites
    assert (found.status, "level-rows" in found.assumptions) == ("fused", level)
    kept = tuple(name for name in ASSUMPTIONS if name != "level-rows")
    (without,) = onnx_attnfuse.optimize(source, ep=ep, assume=kept, verify="none").report.sites
    assert [reason.code for reason in without.reasons][:1] == (["rounded-mask"] if level else [])


@pytest.mark.parametrize(("factor", "status"), [("1000000", "skipped"), ("1e30", "fused")])
def test_a_factor_of_unread_numbers_rounds_scores_as_a_mask_of_it_does(factor: str, status: str) -> None:
    constants = f"float one = {{1}}, float factor = {{{factor}}}, float[2, 1, 1] bias = {{0.5, 0.25}}"
    least = "turned = Neg(mask) most = MaxPool<kernel_shape = [1, 1]>(turned) least = Neg(most)"
    lost = f"{least} left = Sub(one, least) large = Mul(left, factor)"
    source = model(
        ", float[b, 1, 1, t] mask", f"{lost} first = Add(scores, bias) masked = Sub(first, large) {SOFTMAX}", constants
    )
    found = site(source)
    assert (found.status, [reason.code for reason in found.reasons][:1]) == (status, ["rounded-mask"] * (status == "skipped"))
