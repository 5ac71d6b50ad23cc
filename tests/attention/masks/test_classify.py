"""What masks are recognised as: the same rule in several spellings, each with a near miss that means something else."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest

import onnx_attnfuse
from onnx_attnfuse.attention.masks.classify import Meaning, understand
from onnx_attnfuse.attention.masks.index_reader import Reader
from onnx_attnfuse.attention.masks.mask_terms import negation
from onnx_attnfuse.attention.match.candidates import find_candidates
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.certify.arithmetic import at_most_zero
from onnx_attnfuse.certify.terms import ONE, TRUE, add
from onnx_attnfuse.fusion import site as site_module
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.scopes import scopes
from onnx_attnfuse.language.registry.discovery import load
from onnx_attnfuse.verify.mask_check import refute

LOWEST = "-3.4028234663852886e38"

INVERTED = f"away = Cast<to=9>(hidden) fill = Constant<value=float {{{LOWEST}}}>() m = Where(away, fill, hidden)"
"""A mask of ones where nothing is seen, filled where it is not 0, as transformers inverts it."""

POSITIONS = """
    shape = Shape(q) two = Constant<value_ints=[2]>() three = Constant<value_ints=[3]>()
    zero = Constant<value_int=0>() one = Constant<value_int=1>() axis = Constant<value_ints=[0]>()
    s1 = Slice(shape, two, three) s = Squeeze(s1, axis)
    i1 = Range(zero, s, one) last = Constant<value_ints=[-1]>() i = Unsqueeze(i1, last) j = Unsqueeze(i1, axis)
"""
FILL = f"nothing = Constant<value=float {{0.0}}>() fill = Constant<value=float {{{LOWEST}}}>()"
TRIANGLE = f"{POSITIONS} c = LessOrEqual(j, i) {FILL} m = Where(c, nothing, fill)"
KEYS = "a1 = Constant<value_ints=[1]>() a2 = Constant<value_ints=[2]>()"

COUNTED = f"""{POSITIONS} axis1 = Constant<value_ints=[1]>() d = Concat<axis=0>(axis1, s1)
    ones = ConstantOfShape<value=int64[1] {{1}}>(d) sums = CumSum(ones, one) at = Sub(sums, one) k0 = Constant<value_ints=[2]>()
    rows = Unsqueeze(at, k0) columns = Unsqueeze(at, axis1) c = LessOrEqual(columns, rows) {FILL}"""
"""Positions as running sums of ones."""
DIVIDED = f"""{POSITIONS} d = Concat<axis=0>(s1, s1) square = Mul(s1, s1) ones = Expand(one, square)
    flat = CumSum<exclusive=1>(ones, zero) places = Reshape(flat, d) columns = Mod(places, s1) rows = Div(places, s1)
    ahead = Sub(columns, rows) later = Greater(ahead, zero) c = Not(later) {FILL}"""
"""Rows and columns as quotients and remainders of all places, as tf2onnx writes a band of a matrix."""
FLOATS = f"""shape = Shape(q) a0 = Constant<value_ints=[0]>() a2 = Constant<value_ints=[2]>() a3 = Constant<value_ints=[3]>()
    s1 = Slice(shape, a2, a3) s0 = Squeeze(s1, a0) s = Cast<to=1>(s0) f0 = Constant<value_float=0.0>()
    f1 = Constant<value_float=1.0>() at = Range(f0, s, f1) last = Constant<value_ints=[-1]>() i = Unsqueeze(at, last)
    j = Unsqueeze(at, a0) c = LessOrEqual(j, i) {FILL}"""
"""Positions as floats."""
PACKED = f"""a1 = Constant<value_ints=[1]>() a2 = Constant<value_ints=[2]>() end = Constant<value_ints=[9223372036854775807]>()
    first = Gather<axis=1>(places, axis) before = Sub(first, one) all = Concat<axis=1>(before, places)
    left = Slice(all, axis, s1, a1) right = Slice(all, a1, end, a1) steps = Sub(right, left) next = Equal(steps, one)
    breaks = Not(next) marks = Cast<to=7>(breaks) number = CumSum(marks, one)
    rows = Unsqueeze(number, a2) columns = Unsqueeze(number, a1) same = Equal(rows, columns)
    c1 = LessOrEqual(j, i) c0 = And(c1, same) c = Unsqueeze(c0, a1) {FILL} m = Where(c, nothing, fill)"""
"""Documents begin where positions do not go on, as transformers finds them."""

CASES: dict[str, tuple[str, str, str, str]] = {
    "range and compare": ("", TRIANGLE, "causal", "j <= i"),
    "twice the positions": (
        "",
        TRIANGLE.replace("LessOrEqual(j, i)", "LessOrEqual(j2, i2)").replace("c =", "j2 = Add(j, j) i2 = Add(i, i) c =", 1),
        "causal",
        "j <= i",
    ),
    "twice the positions, and two more": (
        "",
        TRIANGLE.replace("LessOrEqual(j, i)", "LessOrEqual(j2, i2)").replace(
            "c =", "j2 = Add(j, j) i1_ = Add(i, one) i2 = Add(i1_, i1_) c =", 1
        ),
        "causal_shifted",
        "j <= i + 1",
    ),
    "a distance of two at most": (
        "",
        f"""{POSITIONS} w = Constant<value_int=2>() d = Sub(i, j) far = Abs(d) c = LessOrEqual(far, w)
            {FILL} m = Where(c, nothing, fill)""",
        "two_sided_window",
        "i <= j + 2 and j <= i + 2",
    ),
    "a distance of more than two": (
        "",
        f"""{POSITIONS} w = Constant<value_int=2>() d = Sub(i, j) far = Abs(d) c = Greater(far, w)
            {FILL} m = Where(c, nothing, fill)""",
        "arbitrary",
        "j <= i - 3 or i <= j - 3",
    ),
    "the larger of both positions": (
        "",
        TRIANGLE.replace("LessOrEqual(j, i)", "LessOrEqual(most, i)").replace("c =", "most = Max(i, j) c =", 1),
        "causal",
        "j <= i",
    ),
    "the smaller of both positions": (
        "",
        TRIANGLE.replace("LessOrEqual(j, i)", "LessOrEqual(least, i)").replace("c =", "least = Min(i, j) c =", 1),
        "no_mask",
        "",
    ),
    "strictly less misses the diagonal": ("", TRIANGLE.replace("LessOrEqual", "Less"), "causal_shifted", "j < i"),
    "trilu of a full matrix": (
        "",
        f"""{POSITIONS} d = Concat<axis=0>(s1, s1) full = ConstantOfShape<value=float[1] {{{LOWEST}}}>(d)
            m = Trilu<upper=1>(full, one)""",
        "causal",
        "j <= i",
    ),
    "trilu below": (
        "",
        f"""{POSITIONS} d = Concat<axis=0>(s1, s1) full = ConstantOfShape<value=float[1] {{{LOWEST}}}>(d)
            m = Trilu<upper=0>(full, zero)""",
        "anticausal",
        "i < j",
    ),
    "a window behind": (
        "",
        f"""{POSITIONS} w = Constant<value_int=3>() c1 = LessOrEqual(j, i) d = Sub(i, j) c2 = Less(d, w) c = And(c1, c2)
            {FILL} m = Where(c, nothing, fill)""",
        "sliding_window + causal",
        "j <= i and i <= j + 2",
    ),
    "a window on both sides": (
        "",
        f"""{POSITIONS} w = Constant<value_int=2>() d = Sub(i, j) e = Sub(j, i) c1 = LessOrEqual(d, w) c2 = LessOrEqual(e, w)
            c = And(c1, c2) {FILL} m = Where(c, nothing, fill)""",
        "two_sided_window",
        "i <= j + 2 and j <= i + 2",
    ),
    "padding, any name": (
        ", int64[b, t] whatever",
        f"{KEYS} x1 = Cast<to=9>(whatever) x2 = Unsqueeze(x1, a1) x = Unsqueeze(x2, a2) {FILL} m = Where(x, nothing, fill)",
        "padding",
        "whatever[b, j]",
    ),
    "one minus the mask, times the lowest": (
        ", int64[b, t] keep",
        f"""{KEYS} x1 = Cast<to=1>(keep) x2 = Unsqueeze(x1, a1) x = Unsqueeze(x2, a2)
            unit = Constant<value=float {{1.0}}>() u = Sub(unit, x) f = Constant<value=float {{{LOWEST}}}>() m = Mul(u, f)""",
        "padding",
        "keep[b, j]",
    ),
    "padding of the queries": (
        ", bool[b, s] rows",
        f"""{KEYS} a3 = Constant<value_ints=[3]>() x1 = Unsqueeze(rows, a1) x = Unsqueeze(x1, a3)
            {FILL} m = Where(x, nothing, fill)""",
        "query_padding",
        "rows[b, i]",
    ),
    "a prefix that all rows see": (
        ", int64[b, 1] count",
        f"""{POSITIONS} c1 = LessOrEqual(j, i) p0 = Less(j, count) {KEYS} p1 = Unsqueeze(p0, a1) c = Or(c1, p1) {FILL}
            m0 = Where(c, nothing, fill) m = Unsqueeze(m0, a1)""",
        "prefix",
        "j <= i or j < count[b, 0]",
    ),
    "segments": (
        ", int64[b, s] document",
        f"""{KEYS} x1 = Unsqueeze(document, a1) row0 = Unsqueeze(document, a2) x = Unsqueeze(x1, a1) y1 = Unsqueeze(row0, a1)
            c = Equal(x, y1) {FILL} m = Where(c, nothing, fill)""",
        "segments",
        "document[b, j] == document[b, i]",
    ),
    "running sums of ones": ("", f"{COUNTED} m = Where(c, nothing, fill)", "causal", "j <= i"),
    "running sums that begin one later": (
        "",
        f"{COUNTED} m = Where(c, nothing, fill)".replace(
            "rows = Unsqueeze(at", "late = CumSum<exclusive=1>(ones, one) rows = Unsqueeze(late"
        ).replace("at = Sub(sums, one)", "at = Identity(sums)"),
        "causal_shifted",
        "j < i",
    ),
    "running sums from the end": (
        "",
        f"{COUNTED} m = Where(c, nothing, fill)".replace("CumSum(", "CumSum<reverse=1>("),
        "anticausal",
        "i <= j",
    ),
    "documents at positions that are known to go on": (
        "",
        f"{POSITIONS} places = Unsqueeze(i1, axis) {PACKED}",
        "causal",
        "j <= i",
    ),
    "documents, the first position cut out": (
        "",
        f"{POSITIONS} places = Unsqueeze(i1, axis) {PACKED}".replace(
            "Gather<axis=1>(places, axis)", "Slice(places, axis, a1, a1)"
        ),
        "causal",
        "j <= i",
    ),
    "documents, another position cut out": (
        "",
        f"{POSITIONS} places = Unsqueeze(i1, axis) {PACKED}".replace("Gather<axis=1>(places, axis)", "Slice(places, a1, a2, a1)"),
        "causal + segments",
        "j <= i and number",
    ),
    "documents at positions that are given": (
        ", int64[b, s] places",
        f"{POSITIONS} {PACKED}",
        "causal + segments",
        "j <= i and number",
    ),
    "quotients and remainders": ("", f"{DIVIDED} m = Where(c, nothing, fill)", "causal", "j <= i"),
    "positions as floats": ("", f"{FLOATS} m = Where(c, nothing, fill)", "causal", "j <= i"),
    "the lesser of padding and a triangle": (
        ", int64[b, t] keep",
        f"""{TRIANGLE.replace("m = Where", "old = Where")} {KEYS} row = Unsqueeze(keep, a1) n0 = Constant<value_int=0>()
            n1 = Constant<value_int=1>() seen = Where(c, n1, n0) least = Min(row, seen) kept0 = Greater(least, n0)
            kept = Unsqueeze(kept0, a1) m = Where(kept, nothing, fill)""",
        "padding_causal",
        "j <= i and 0 < keep[b, j]",
    ),
    "filled where it is not 0": (", float[b, 1, 1, t] hidden", INVERTED, "padding", "not hidden[b, 0, 0, j]"),
    "filled where one minus it is not 0": (
        ", int64[b, t] keep",
        f"""{KEYS} x1 = Cast<to=1>(keep) x2 = Unsqueeze(x1, a1) x = Unsqueeze(x2, a2) unit = Constant<value=float {{1.0}}>()
            hidden = Sub(unit, x) {INVERTED}""",
        "padding",
        "equal(complement(keep[b, j]), 0)",
    ),
    "filled where a choice is not 0": (
        "",
        f"""{TRIANGLE.replace("m = Where", "m0 = Where")} unit = Constant<value=float {{1.0}}>()
            hidden = Where(c, nothing, unit) {INVERTED.replace("fill =", "low =").replace("(away, fill", "(away, low")}""",
        "causal",
        "j <= i",
    ),
    "a bias": (", float[b, 4, s, t] bias", "m = Identity(bias)", "computed_bias", "+ bias"),
    "zeros": ("", "z = Constant<value=float[1, 1, 1, 1] {0.0}>() m = Identity(z)", "no_mask", ""),
}


def _alternating(count: int) -> tuple[str, str]:
    """Inputs and a mask with as many exclusive alternatives, each of which has the ones before twice."""
    each = " ".join(f"y{n + 1} = Xor(y{n}, kept{n % 2})" for n in range(count))
    mask = f"{KEYS} kept0 = Unsqueeze(one, a1) kept1 = Unsqueeze(other, a1) y0 = Identity(kept0) {each}"
    mask = f"{mask} c = Unsqueeze(y{count}, a1) {FILL}"
    return ", bool[b, t] one, bool[b, t] other", f"{mask} m = Where(c, nothing, fill)"


@pytest.mark.parametrize("count", [2, 40])
def test_an_expression_that_grows_with_each_step_is_looked_into_so_far(count: int) -> None:
    (site,) = onnx_attnfuse.explain(_model(*_alternating(count)), verify="sites").sites
    assert (site.status, site.mask) == ("fused", "padding")
    assert len(site.mask_text or "") < 4000


def _model(inputs: str, mask: str) -> onnx.ModelProto:
    text = f"""<ir_version: 9, opset_import: ["": 17]>
        g (float[b, 4, s, 8] q, float[b, 4, s, 8] k, float[b, 4, s, 8] v{inputs}) => (float[b, 4, s, 8] y) {{
            {mask}
            kt = Transpose<perm=[0, 1, 3, 2]>(k) x0 = MatMul(q, kt) scores = Add(x0, m)
            p = Softmax<axis=-1>(scores) y = MatMul(p, v)
        }}"""
    return onnx.parser.parse_model(text)


@pytest.mark.parametrize("name", CASES)
def test_a_mask_that_exporters_write_is_called_by_its_name(name: str) -> None:
    inputs, mask, kind, text = CASES[name]
    (site,) = onnx_attnfuse.explain(_model(inputs, mask), verify="sites").sites
    assert (site.status, site.reasons) == ("fused", ())
    assert site.mask == kind
    assert (site.mask_text or "").startswith(text)
    assert bool(site.mask_text) == bool(text)


@pytest.mark.parametrize("branches", ["fill, other", "hidden, fill", "other, fill"])
def test_what_is_filled_elsewhere_keeps_a_number_that_may_not_be_0(branches: str) -> None:
    mask = INVERTED.replace("fill, hidden", branches)
    (site,) = onnx_attnfuse.explain(_model(", float[b, 1, 1, t] hidden, float[b, 1, 1, t] other", mask), verify="sites").sites
    assert (site.status, site.mask) == ("fused", "padding + computed_bias")


def test_a_proven_triangle_is_an_attribute() -> None:
    result = onnx_attnfuse.optimize(_model("", TRIANGLE), verify="sites")
    (node,) = [node for node in result.model.graph.node if node.op_type == "MultiHeadAttention"]
    assert {item.name: item.i for item in node.attribute if item.name == "unidirectional"} == {"unidirectional": 1}
    assert list(node.input) == [*node.input[:3]]
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 4, 5, 8), np.float32)
    outputs = [
        onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"q": q, "k": k, "v": v})[0]
        for model in (_model("", TRIANGLE), result.model)
    ]
    np.testing.assert_allclose(outputs[1], outputs[0], atol=1e-6)


def test_an_unproven_triangle_stays_a_bias() -> None:
    """With keys of a length of their own nothing says that there are as many as queries."""
    text = onnx.printer.to_text(_model("", TRIANGLE)).replace("[b,4,s,8] k", "[b,4,t,8] k").replace("[b,4,s,8] v", "[b,4,t,8] v")
    (site,) = onnx_attnfuse.explain(onnx.parser.parse_model(text), verify="none").sites
    assert site.mask_form == "attention_bias 1 1 s t"


def _read(name: str) -> tuple[AttentionSpec, Meaning, Facts, ir.Model]:
    inputs, mask, *_ = CASES[name]
    model = ir.from_proto(_model(inputs, mask))
    (scope,) = scopes(model)
    (candidate,) = find_candidates(scope, load(onnx_attnfuse.Options()).readers, keep_outputs=False)
    assert candidate.spec is not None
    return candidate.spec, understand(candidate.spec, Reader(scope.facts)), scope.facts, model


@pytest.mark.parametrize("name", CASES)
def test_what_is_read_is_what_the_mask_is(name: str) -> None:
    spec, meaning, facts, model = _read(name)
    assert refute(spec, meaning, facts, model.opset_imports, {}) is None


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"a bias", "zeros", "the smaller of both positions"}))
def test_what_is_misread_is_noticed(name: str) -> None:
    spec, meaning, facts, model = _read(name)
    wrong = dataclasses.replace(meaning, allowed=negation(meaning.allowed))
    assert refute(spec, wrong, facts, model.opset_imports, {}) is not None
    assert refute(spec, dataclasses.replace(meaning, allowed=TRUE), facts, model.opset_imports, {}) is not None


def test_a_triangle_that_is_one_off_is_noticed() -> None:
    spec, meaning, facts, model = _read("range and compare")
    assert meaning.allowed.op == "le0"
    shifted = at_most_zero(add(meaning.allowed.args[0], ONE))
    refutation = refute(spec, dataclasses.replace(meaning, allowed=shifted), facts, model.opset_imports, {})
    assert refutation is not None
    assert "was read as not seen" in refutation


def test_a_misread_mask_is_handed_over_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def misread(spec: AttentionSpec, reader: Reader) -> Meaning:
        return dataclasses.replace(understand(spec, reader), allowed=TRUE, predicates=(), kind="no_mask")

    monkeypatch.setattr(site_module, "understand", misread)
    (site,) = onnx_attnfuse.optimize(_model("", TRIANGLE), verify="sites").report.sites
    assert (site.status, site.mask, site.mask_form) == ("fused", "arbitrary", "attention_bias 1 1 s t")
    assert "the mask is" in (site.mask_text or "")


TOKENS = """one = Constant<value_int=1>() a1 = Constant<value_ints=[1]>() a2 = Constant<value_ints=[2]>()
    sums = CumSum(counts, one) before = Sub(sums, one) place = Mul(before, counts) key = Unsqueeze(place, a1)"""
"""The number of each token among those that count, 0 for one that does not: a product of two tensors of integers."""

_SIXTEEN = ", ".join(str(n / 8) for n in range(16))
_BIASES = {
    "slopes times a distance": (
        "",
        f"""{POSITIONS} d = Sub(j, i) distance = Cast<to=1>(d)
            slopes = Constant<value=float[4, 1, 1] {{0.5, 0.25, 0.125, 0.0625}}>() m = Mul(distance, slopes)""",
        "alibi",
        "(slopes 0.5, 0.25, ..., 0.0625)",
    ),
    "slopes times the number of a token": (
        ", int64[b, s] counts",
        f"""{TOKENS} keys = Unsqueeze(key, a1) numbers = Cast<to=1>(keys)
            slopes = Constant<value=float[4, 1, 1] {{0.5, 0.25, 0.125, 0.0625}}>() m = Mul(numbers, slopes)""",
        "alibi",
        "mul(mul(sums[b, j] - 1, counts[b, j]), slopes[n, 0, 0]) (slopes 0.5, 0.25, ..., 0.0625)",
    ),
    "a number for each head is no slope": (
        "",
        """slopes = Constant<value=float[4, 1, 1] {0.5, 0.25, 0.125, 0.0625}>() m = Identity(slopes)""",
        "relative_position",
        "",
    ),
    "a table that distances are looked up in": (
        "",
        f"""{POSITIONS} d = Sub(j, i) far = Abs(d) most = Constant<value_int=3>() bucket = Min(far, most)
            table = Constant<value=float[4, 4] {{{_SIXTEEN}}}>()
            m0 = Gather(table, bucket) m = Transpose<perm=[2, 0, 1]>(m0)""",
        "relative_position_buckets",
        "",
    ),
}


@pytest.mark.parametrize("name", _BIASES)
def test_biases_are_named(name: str) -> None:
    inputs, mask, kind, words = _BIASES[name]
    (site,) = onnx_attnfuse.explain(_model(inputs, mask), verify="none").sites
    assert (site.status, site.mask) == ("fused", kind)
    assert words in (site.mask_text or "")


_ROWS = "row = Unsqueeze(place, a2)"


@pytest.mark.parametrize(
    ("condition", "text"),
    [
        (
            f"{_ROWS} c = LessOrEqual(key, row)",
            "lessorequal(mul(sums[b, j] - 1, counts[b, j]), mul(sums[b, i] - 1, counts[b, i]))",
        ),
        (f"{_ROWS} far = Mul(key, row) c = LessOrEqual(far, one)", "lessorequal(mul(mul("),
        (f"{_ROWS} d = Sub(key, row) c = Equal(d, one)", "equal(sub(mul("),
        (f"{_ROWS} three = Constant<value_int=3>() half = Div(key, three) c = Less(half, row)", "less(div(mul("),
    ],
)
def test_products_of_integers_are_read(condition: str, text: str) -> None:
    model = _model(", int64[b, s] counts", f"{TOKENS} {condition} {FILL} u = Unsqueeze(c, a1) m = Where(u, nothing, fill)")
    (site,) = onnx_attnfuse.optimize(model, verify="sites").report.sites
    assert (site.status, site.mask, site.reasons) == ("fused", "arbitrary", ())
    assert (site.mask_text or "").startswith(text)
    assert "was read as" not in (site.mask_text or "")


def test_rows_and_columns_of_an_image_apart() -> None:
    text = """<ir_version: 9, opset_import: ["": 17]>
        g (float[b, 4, 6, 8] q, float[b, 4, 6, 8] k, float[b, 4, 6, 8] v, float[b, 4, 6, 2] tall, float[b, 4, 6, 3] wide)
        => (float[b, 4, 6, 8] y) {
            last = Constant<value_ints=[4]>() row = Constant<value_ints=[3]>() image = Constant<value_ints=[0, 0, 0, 2, 3]>()
            flat = Constant<value_ints=[0, 0, 0, 6]>() kt = Transpose<perm=[0, 1, 3, 2]>(k) x0 = MatMul(q, kt)
            x1 = Reshape(x0, image) a = Unsqueeze(tall, last) c = Unsqueeze(wide, row) x2 = Add(x1, a) x3 = Add(x2, c)
            scores = Reshape(x3, flat) p = Softmax<axis=-1>(scores) y = MatMul(p, v)
        }"""
    (site,) = onnx_attnfuse.explain(onnx.parser.parse_model(text), verify="none").sites
    assert (site.status, site.mask) == ("fused", "decomposed_relative_position")


def _over_six_keys(inputs: str, mask: str) -> str | None:
    """What is read of a mask over keys of a fixed number, as those of a static cache are."""
    text = onnx.printer.to_text(_model(inputs, mask)).replace("[b,4,s,8] k", "[b,4,6,8] k").replace("[b,4,s,8] v", "[b,4,6,8] v")
    (site,) = onnx_attnfuse.explain(onnx.parser.parse_model(text), verify="sites").sites
    assert (site.status, site.reasons) == ("fused", ())
    return site.mask_text


@pytest.mark.parametrize(
    ("numbers", "read"),
    [
        ("0, 1, 2, 3, 4, 5", "j <= rows[0, 0, i, 0]"),
        ("1, 2, 3, 4, 5, 6", "j < rows[0, 0, i, 0]"),
        ("0, 1, 2, 3, 5, 4", "columns[j] <= rows[0, 0, i, 0]"),
    ],
)
def test_a_constant_that_counts_is_the_position_of_its_elements(numbers: str, read: str) -> None:
    mask = f"columns = Constant<value=int64[6] {{{numbers}}}>() c = LessOrEqual(columns, rows) {FILL} m = Where(c, nothing, fill)"
    assert _over_six_keys(", int64[1, 1, s, 1] rows", mask) == read


@pytest.mark.parametrize(
    ("shift", "read"),
    [(0, "j <= i + 2"), (1, "j <= i + 3"), (-2, "j <= 1 or j <= i")],
    ids=["as far as the row", "one further", "two less, which leaves more than a triangle"],
)
def test_a_triangle_behind_earlier_positions_is_a_triangle(shift: int, read: str) -> None:
    mask = f"""{POSITIONS} m1 = Constant<value_int={shift}>() moved = Add(i, m1) own = LessOrEqual(j, moved)
        c1 = Constant<value_ints=[2]>() d = Concat<axis=0>(s1, c1) ones = ConstantOfShape<value=bool[1] {{1}}>(d)
        c = Concat<axis=1>(ones, own) {FILL} m = Where(c, nothing, fill)"""
    assert _over_six_keys("", mask) == read


@pytest.mark.parametrize(
    ("front", "mode", "read"),
    [
        (0, "constant", "j <= t - 1 and mask[b, j]"),
        (1, "constant", "j <= t and 0 < j and mask[b, j - 1]"),
        (1, "edge", "padded[b, j]"),
    ],
    ids=["zeros behind", "zeros on both sides", "copies on both sides"],
)
def test_a_padded_mask_is_itself_where_it_is(front: int, mode: str, read: str) -> None:
    mask = f"""six = Constant<value_ints=[{6 - front}]>() sizes = Shape(mask) one = Constant<value_ints=[1]>()
        two = Constant<value_ints=[2]>() length = Slice(sizes, one, two) behind = Sub(six, length)
        first = Constant<value_ints=[0, {front}, 0]>() pads = Concat<axis=0>(first, behind)
        padded = Pad<mode="{mode}">(mask, pads) truth = Cast<to=9>(padded) middle = Constant<value_ints=[1, 2]>()
        c = Unsqueeze(truth, middle) {FILL} m = Where(c, nothing, fill)"""
    assert _over_six_keys(", int64[b, t] mask", mask) == read
