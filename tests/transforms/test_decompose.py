"""Fused operators spelled out: held against their NumPy references, judged, fused again, and refused with a reason."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

import onnx_attnfuse
from onnx_attnfuse.verify.model_session import in_front
from onnx_attnfuse.verify.runtime import PieceSession
from onnx_attnfuse.verify.verdict import LOOSE, TIGHT, compare
from tests.support.bundled import BUNDLED, Array, name_of, run
from tests.support.bundled import cases as recorded_cases
from tests.support.drawing import Case
from tests.support.kernel_cases import DTYPES, by_reference, cases_of, feeds_of, model_of

FUSED = {"Attention", "GroupQueryAttention", "MultiHeadAttention", "RotaryEmbedding"}
UNFUSED = (
    "ai.onnx.Attention",
    "ai.onnx.RotaryEmbedding",
    "com.microsoft.Attention",
    "com.microsoft.GroupQueryAttention",
    "com.microsoft.MultiHeadAttention",
    "com.microsoft.RotaryEmbedding",
)
PACKED = ("PackedAttention", "PackedMultiHeadAttention", "RemovePadding", "RestorePadding")


def cases(*, every: int = 1, runs: bool = False) -> list[Any]:
    """Cases of all operators that are spelled out, those of a GPU alone included; `runs`: the runtime must have them."""
    found = [case for operator in UNFUSED for case in cases_of(operator, every=every)]
    found += [case for case in cases_of("com.microsoft.MultiHeadAttention", "cuda") if "packed" in case.name]
    newest = [pytest.mark.newest]
    marks = [newest if runs and "counted rows" in case.name else () for case in found]
    return [pytest.param(case, id=f"{case.operator} {case.name}", marks=mark) for case, mark in zip(found, marks, strict=True)]


def nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """All nodes, of nested graphs and functions too."""
    found: list[onnx.NodeProto] = []
    pending: list[onnx.GraphProto | onnx.FunctionProto] = [*model.functions, model.graph]
    while pending:
        for node in pending.pop().node:
            found.append(node)
            pending += [item.g for item in node.attribute if item.HasField("g")]
    return found


def fused_ops(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in nodes(model) if node.op_type in FUSED]


def defined(array: Array, where: Array | None) -> Array:
    """The array with zeros where the operator leaves it open."""
    if where is None:
        return array
    return np.where(where.reshape(*where.shape, *[1] * (array.ndim - where.ndim)), array, 0)


def spelled_out(model: onnx.ModelProto, **choices: Any) -> onnx.ModelProto:
    """The model without its one fused operator."""
    result = onnx_attnfuse.unfuse(model, **choices)
    assert [site.status for site in result.report.sites] == ["unfused"], result.report.sites
    assert not fused_ops(result.model)
    return result.model


def check(case: Case, dtype: str, **choices: Any) -> None:
    """Holds what is spelled out against the operator in NumPy."""
    inputs = case.inputs(DTYPES[dtype])
    spelled = spelled_out(model_of(case, inputs), **choices)
    results = PieceSession(spelled.SerializeToString()).run(None, feeds_of(inputs))
    places = [*case.where(inputs), *[None] * len(results)]
    for place, (expected, result) in enumerate(zip(by_reference(case, dtype), results, strict=True)):
        old, new = (defined(array, places[place]) for array in (expected, result))
        comparison = compare(old, new, TIGHT if dtype == "float32" else LOOSE)
        assert comparison.equal, f"output {place}: {comparison.detail}"


@pytest.mark.sampled
@pytest.mark.parametrize("case", cases())
def test_is_what_the_operator_computes(case: Case) -> None:
    check(case, "float32", verify="none")


@pytest.mark.sampled
@pytest.mark.parametrize("case", cases(every=5))
def test_half_precision_is_as_close_as_its_type(case: Case) -> None:
    check(case, "float16", verify="none")


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("case", cases(every=9, runs=True))
def test_is_judged_before_it_takes_the_place(case: Case, tmp_path: pathlib.Path) -> None:
    inputs = case.inputs(np.float32)
    report = onnx_attnfuse.unfuse(model_of(case, inputs), verify="sites", evidence=tmp_path).report
    assert report.unfused == 1, report.sites
    assert report.sites[0].verified is not None
    assert report.sites[0].verified.cases > 0


@pytest.mark.parametrize("operator", PACKED)
def test_packed_operators_stay(operator: str) -> None:
    case = cases_of(f"com.microsoft.{operator}", "cuda")[0]
    model = model_of(case, case.inputs(np.float32))
    report = onnx_attnfuse.unfuse(model).report
    assert [(site.status, site.reason and site.reason.code) for site in report.sites] == [("kept", "packed")]
    assert report.ops_before == report.ops_after


CHOICES: list[dict[str, Any]] = [
    {},
    {"target": "Attention"},
    {"target": "GroupQueryAttention", "padding": "guarded"},
    {"target": "onnx.Attention"},
    {"ep": "cuda", "arch": "sm90", "padding": "guarded"},
]
"""Under the last of these every attention that has a mask is an If around two operators."""


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("choices", CHOICES, ids=str)
@pytest.mark.parametrize("path", BUNDLED, ids=name_of)
def test_what_is_spelled_out_is_fused_again(path: pathlib.Path, choices: dict[str, Any]) -> None:
    first = onnx_attnfuse.optimize(onnx.load(path), verify="none", **choices)
    spelled = onnx_attnfuse.unfuse(first.model)
    assert not spelled.report.kept, spelled.report.sites
    assert not fused_ops(spelled.model)
    assert len(spelled.report.sites) == len(fused_ops(first.model))
    again = onnx_attnfuse.optimize(spelled.model, **choices)
    assert again.report.fused >= first.report.fused
    for feeds in recorded_cases(path).values():
        expected = run(first.model, feeds)
        for model in (spelled.model, again.model):
            for name, result in run(model, feeds).items():
                assert compare(expected[name], result, 1e-3).equal, name


DECODER = """<ir_version: 10, opset_import: ["" : 18, "com.microsoft" : 1]>
step (float[b, s, 64] q, float[b, s, 32] k, float[b, s, 32] v, float[b, 2, p, 16] past_key, float[b, 2, p, 16] past_value,
      int64[b, t] attention_mask, float[m, 8] cos, float[m, 8] sin)
    => (float[b, s, 64] out, float[b, 2, t, 16] key, float[b, 2, t, 16] value)
<int64[1] one = {1}, int64 second = {1}>
{
    count = ReduceSum<keepdims = 0>(attention_mask, one)
    place = Sub(count, one)
    last = Cast<to = 6>(place)
    shape = Shape(attention_mask)
    length = Gather(shape, second)
    total = Cast<to = 6>(length)
    out, key, value = com.microsoft.GroupQueryAttention<num_heads = 4, kv_num_heads = 2, do_rotary = 1, rotary_interleaved = 0>
        (q, k, v, past_key, past_value, last, total, cos, sin)
}"""
"""The form in which generating runtimes have it: lengths from a mask that is an input."""


@pytest.mark.parametrize(
    ("rows", "past", "lengths"),
    [(1, 5, (6, 6)), (1, 5, (6, 3)), (6, 0, (6, 6)), (6, 0, (6, 2)), (3, 4, (7,)), (1, 9, (4, 7))],
    ids=str,
)
def test_lengths_of_a_mask_are_told_apart_by_entry(rows: int, past: int, lengths: tuple[int, ...]) -> None:
    model = onnx.parser.parse_model(DECODER)
    spelled = spelled_out(model)
    rng, batch, total = np.random.default_rng(0), len(lengths), max(lengths)
    angles = np.arange(16)[:, None] / 100 ** (np.arange(8) / 8)
    feeds = {
        name: rng.standard_normal((batch, rows, size)).astype(np.float32) for name, size in (("q", 64), ("k", 32), ("v", 32))
    }
    feeds |= {name: rng.standard_normal((batch, 2, past, 16)).astype(np.float32) for name in ("past_key", "past_value")}
    feeds["attention_mask"] = (np.arange(total) < np.asarray(lengths)[:, None]).astype(np.int64)
    feeds |= {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
    old, new = run(model, feeds), run(spelled, feeds)
    for entry, end in enumerate(lengths):
        shown = min(rows, end)
        assert compare(old["out"][entry, :shown], new["out"][entry, :shown], TIGHT).equal
        for name in ("key", "value"):
            assert old[name].shape == new[name].shape
            assert compare(old[name][entry, :, :end], new[name][entry, :, :end], TIGHT).equal


def test_heads_that_an_operator_normalizes_are_normalized_in_front() -> None:
    factors = "float[16] for_q, float[16] for_k)"
    model = onnx.parser.parse_model(
        DECODER.replace("sin)\n    =>", f"sin, {factors}\n    =>")
        .replace("rotary_interleaved = 0>", "rotary_interleaved = 0, qk_norm_epsilon = 0.1>")
        .replace("cos, sin)\n}", "cos, sin, , , , , , for_q, for_k)\n}")
    )
    rng = np.random.default_rng(0)
    spelled = spelled_out(model)
    feeds = {name: rng.standard_normal((2, 4, size)).astype(np.float32) for name, size in (("q", 64), ("k", 32), ("v", 32))}
    feeds |= {name: np.zeros((2, 2, 0, 16), np.float32) for name in ("past_key", "past_value")}
    feeds |= {name: rng.standard_normal(16).astype(np.float32) for name in ("for_q", "for_k")}
    feeds |= {"attention_mask": np.ones((2, 4), np.int64)}
    feeds |= {name: rng.standard_normal((4, 8)).astype(np.float32) for name in ("cos", "sin")}
    old, new = run(ir.to_proto(in_front(ir.from_proto(model))), feeds), run(spelled, feeds)
    for name, array in old.items():
        assert compare(array, new[name], TIGHT).equal


LAYERS = """<ir_version: 10, opset_import: ["" : 18, "com.microsoft" : 1]>
g (int32[b, s] ids, int32[b, s] mask, float[16, 32] table, float[16, 32] places, float[32] gain, float[32] shift,
   float[32, 96] w, float[96] c) => (float[b, s, 32] out)
{
    embedded, count = com.microsoft.EmbedLayerNormalization(ids, , table, places, , gain, shift, mask)
    first = com.microsoft.Attention<num_heads = 2>(embedded, w, c, count)
    between = com.microsoft.SkipLayerNormalization(first, embedded, gain, shift)
    out = com.microsoft.Attention<num_heads = 2, qkv_hidden_sizes = [32, 32, 32]>(between, w, c, mask)
}"""
"""As ONNX Runtime's own tools leave a BERT: nothing says what shape inner values have."""


def test_layers_behind_fused_embeddings() -> None:
    model = onnx.parser.parse_model(LAYERS)
    result = onnx_attnfuse.unfuse(model)
    assert [site.status for site in result.report.sites] == ["unfused"] * 2, result.report.sites
    assert onnx_attnfuse.verify_models(model, result.model).equal


HEADER = '<ir_version: 10, opset_import: ["" : 18, "com.microsoft" : 1, "own" : 1]>'
CROSS = """{header}
g (float[b, {s}, 32] q, float[b, t, 32] k, float[b, t, 32] v, int32[1] length) => (float[b, {s}, 32] out)
{{ [attention] out = com.microsoft.MultiHeadAttention<num_heads = 2 {attributes}>(q, k, v {inputs}) }}"""
LOWEST = "3.4028234663852886e38"
FUNCTION = """{header}
g (float[b, s, 32] q, float[b, s, 32] k, float[b, s, 32] v) => (float[b, s, 32] out)
{{ out = own.attend{call}(q, k, v) }}
<domain: "own", opset_import: ["com.microsoft" : 1]>
attend {parameters} (x, y, z) => (w) {{ [inner] w = com.microsoft.MultiHeadAttention<num_heads = 2 {attributes}>(x, y, z) }}"""


@pytest.mark.parametrize(
    ("attributes", "inputs", "s", "code"),
    [
        ("", "", "s", None),
        (", unidirectional = 1", "", "s", "kernels-disagree"),
        (", unidirectional = 1", "", "t", None),
        (", unidirectional = 1", "", "1", None),
        ("", ", , , , , , length", "t", "unread-part"),
    ],
    ids=str,
)
def test_refuses_what_it_cannot_say_exactly(attributes: str, inputs: str, s: str, code: str | None) -> None:
    model = onnx.parser.parse_model(CROSS.format(header=HEADER, attributes=attributes, inputs=inputs, s=s))
    report = onnx_attnfuse.unfuse(model).report
    assert [(site.name, site.reason and site.reason.code) for site in report.sites] == [("attention", code)]


@pytest.mark.parametrize(("bias", "seen"), [(1.5, False), (-1.5, False), (15.0, False), (20.0, True), (32.0, True)])
def test_the_lowest_half_masks_although_a_cpu_leaves_the_sum_unrounded(bias: float, seen: bool) -> None:
    source = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 23]>
        g (float16[b, 2, s, 4] q, float16[b, 2, s, 4] k, float16[b, 2, s, 4] v, float16[b, 2, s, s] bias, float16 lowest)
          => (float16[b, 2, s, 4] out)
        { mask = Add(bias, lowest)
          out = Attention(q, k, v, mask) }""")
    rng = np.random.default_rng(2)
    feeds = {name: rng.standard_normal((2, 2, 3, 4)).astype(np.float16) for name in "qkv"}
    feeds["bias"] = np.full((2, 2, 3, 3), bias, np.float16)
    feeds["lowest"] = np.asarray(np.finfo(np.float16).min)
    right, found = (run(model, feeds)["out"] for model in (source, onnx_attnfuse.unfuse(source, verify="none").model))
    assert bool(right.any()) == bool(found.any()) == seen


@pytest.mark.parametrize(("fill", "code"), [("inf", "nan-fill"), ("1000", None)])
def test_a_mask_that_is_nan_where_it_masks_nothing_is_left(fill: str, code: str | None) -> None:
    text = f"""<ir_version: 10, opset_import: ["" : 23]>
        g (float[b, 2, s, 4] q, float[b, 2, s, 4] k, float[b, 2, s, 4] v, bool[s, s] seen) => (float[b, 2, s, 4] out)
        <float one = {{1}}, float fill = {{-{fill}}}>
        {{ kept = Cast<to = 1>(seen)
           lost = Sub(one, kept)
           mask = Mul(lost, fill)
           [attention] out = Attention(q, k, v, mask) }}"""
    report = onnx_attnfuse.unfuse(onnx.parser.parse_model(text)).report
    assert [site.reason and site.reason.code for site in report.sites] == [code]


@pytest.mark.parametrize(
    ("parameters", "call", "attributes", "code"),
    [("", "", "", None), ("<causal>", "<causal = 1>", ", unidirectional: int = @causal", "function-attribute")],
    ids=["plain", "parameter"],
)
def test_operators_in_functions(parameters: str, call: str, attributes: str, code: str | None) -> None:
    text = FUNCTION.format(header=HEADER, parameters=parameters, call=call, attributes=attributes)
    result = onnx_attnfuse.unfuse(onnx.parser.parse_model(text))
    assert [(site.graph, site.reason and site.reason.code) for site in result.report.sites] == [("own::attend", code)]
    assert bool(fused_ops(result.model)) == (code is not None)
    onnx.checker.check_model(result.model)


def test_an_old_opset_is_told() -> None:
    model = onnx.parser.parse_model(CROSS.format(header=HEADER.replace("18", "10"), attributes="", inputs="", s="s"))
    report = onnx_attnfuse.unfuse(model).report
    assert [site.reason and site.reason.code for site in report.sites] == ["old-opset"]


def test_imports_what_is_left_only() -> None:
    model = onnx.parser.parse_model(CROSS.format(header=HEADER, attributes="", inputs="", s="s"))
    assert "com.microsoft" not in {entry.domain for entry in spelled_out(model).opset_import}


SCORES = """<ir_version: 10, opset_import: ["" : 23]>
g (float[b, 4, s, 16] q, float[b, 4, s, 16] k, float[b, 4, s, 16] v, {mask}[s, s] m)
=> (float[b, 4, s, 16] y, float[b, 4, s, s] qk)
{{ [attention] y, , , qk = Attention<qk_matmul_output_mode = {mode}, is_causal = {causal}>(q, k, v, m) }}"""


@pytest.mark.parametrize("mode", range(4))
@pytest.mark.parametrize(("mask", "causal"), [("float", 0), ("float", 1), ("bool", 1)])
@pytest.mark.parametrize("wrong", [False, True])
def test_scores_that_are_given_out_are_judged_with_the_result(
    mode: int, mask: str, causal: int, wrong: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    from onnx_attnfuse.bodies import core

    if wrong:
        monkeypatch.setattr(core, "_times", lambda build, value, factor, dtype: value)
    result = onnx_attnfuse.unfuse(onnx.parser.parse_model(SCORES.format(mode=mode, mask=mask, causal=causal)), evidence=tmp_path)
    codes = [site.reason and site.reason.code for site in result.report.sites]
    assert codes == ["differs" if wrong else None], result.report.sites


def test_what_differs_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    from onnx_attnfuse.bodies import core

    monkeypatch.setattr(core, "_times", lambda build, value, factor, dtype: value)
    model = onnx.parser.parse_model(CROSS.format(header=HEADER, attributes="", inputs="", s="s"))
    result = onnx_attnfuse.unfuse(model, evidence=tmp_path)
    assert [(site.status, site.reason and site.reason.code) for site in result.report.sites] == [("kept", "differs")]
    assert result.report.differing == 1
    assert [node.op_type for node in result.model.graph.node] == ["MultiHeadAttention"]
    assert list(tmp_path.glob("*.npz"))


@pytest.mark.parametrize(
    ("opset", "fill", "code"),
    [(24, LOWEST, None)]
    + [
        pytest.param(25, *item, marks=pytest.mark.newest) for item in ((LOWEST, "kernels-disagree"), ("inf", None), ("1e9", None))
    ],
)
def test_what_versions_of_the_runtime_disagree_on_is_left(opset: int, fill: str, code: str | None) -> None:
    text = f"""<ir_version: 10, opset_import: ["" : {opset}]>
        g (float[b, 2, s, 4] q, float[b, 2, s, 4] k, float[b, 2, s, 4] v, bool[s, s] seen) => (float[b, 2, s, 4] out)
        <float none = {{0}}, float fill = {{-{fill}}}>
        {{ mask = Where(seen, none, fill)
           [attention] out = Attention(q, k, v, mask) }}"""
    model = onnx.parser.parse_model(text)
    spelled, fused = onnx_attnfuse.unfuse(model, verify="none").report, onnx_attnfuse.optimize(model, verify="none").report
    assert [site.reason and site.reason.code for site in spelled.sites] == [code]
    assert [[reason.code for reason in site.reasons] for site in fused.sites] == [[] if code is None else [code]]


def test_a_model_goes_on_importing_what_its_functions_do() -> None:
    model = onnx.parser.parse_model(f"""{HEADER} g (float[b, s, 16] q) => (float[b, s, 16] y) {{
        x = com.microsoft.MultiHeadAttention <num_heads = 2> (q, q, q) y = own.kept (x)
    }}
    <domain: "own", opset_import: ["" : 18, "com.microsoft" : 1]> kept (a) => (b) {{
        b = com.microsoft.FusedGemm <activation = "Relu"> (a, a)
    }}""")
    result = onnx_attnfuse.unfuse(model, verify="none").model
    assert [node.op_type for node in result.graph.node if node.domain == "com.microsoft"] == []
    assert ("com.microsoft", 1) in [(item.domain, item.version) for item in result.opset_import]
    del model.functions[0].node[:]
    model.functions[0].node.append(onnx.helper.make_node("Relu", ["a"], ["b"]))
    alone = onnx_attnfuse.unfuse(model, verify="none").model
    assert "com.microsoft" not in [item.domain for item in alone.opset_import]
