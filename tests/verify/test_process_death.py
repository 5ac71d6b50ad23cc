"""What ends ONNX Runtime's process is refused first, or run in another process, whose death costs the site alone."""

from __future__ import annotations

import pathlib

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

import onnx_attnfuse
from onnx_attnfuse import ModelError
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.verify import subprocess_runner
from onnx_attnfuse.verify.equivalence import EquivalenceChecker
from onnx_attnfuse.verify.runtime import RuntimeRefusal, is_dangerous
from onnx_attnfuse.verify.shape_solver import Values
from onnx_attnfuse_cli.main import main
from tests.support.small_models import parsed, written

HEADS = """<ir_version: 10, opset_import: ["" : 18]>
heads (float[b, s, 8] q, float[b, s, 8] k, float[b, s, 8] v) => (float[b, n, s, 8] out)
<int64[1] one = {{1}}, int64[{count}] chosen = {{{chosen}}}>
{{
    q4 = Unsqueeze(q, one)
    k4 = Unsqueeze(k, one)
    v4 = Unsqueeze(v, one)
    kn = Gather<axis = 1>(k4, chosen)
    vn = Gather<axis = 1>(v4, chosen)
    kt = Transpose<perm = [0, 1, 3, 2]>(kn)
    scores = MatMul(q4, kt)
    [softmax] weights = Softmax<axis = -1>(scores)
    out = MatMul(weights, vn)
}}"""
SIZES = """<ir_version: 10, opset_import: ["" : 18]>
sizes (float[{b}, {n}, {s}, {d}] q, float[{b}, {n}, {t}, {d}] k, float[{b}, {n}, {t}, {v}] v) => (float[a, b, c, d] out)
{{
    kt = Transpose<perm = [0, 1, 3, 2]>(k)
    scores = MatMul(q, kt)
    [softmax] weights = Softmax<axis = -1>(scores)
    out = MatMul(weights, v)
}}"""
DIVIDED = """<ir_version: 10, opset_import: ["" : 18]>
divided (float[b, s] x, int64[b, s] n) => (int64[b, s] old, int64[b, s] new)
<int64 two = {{2}}, int64 three = {{3}}, int64 lowest = {{-9223372036854775808}}>
{{
    whole = Cast<to = 7>(x)
    same = Sub(whole, whole)
    low = Add(same, lowest)
    {divisor}
    old = Div(low, d)
    new = Div(low, d)
}}"""
MINUS_ONE, ONE = "zero = Sub(n, n) less = Sub(two, three) d = Add(zero, less)", "d = Sub(three, two)"


@pytest.mark.parametrize(("count", "chosen", "fused"), [(0, "", 0), (2, "0, 0", 1)])
def test_an_attention_without_heads_is_refused(count: int, chosen: str, fused: int) -> None:
    """Known of the constant that picks the heads; ONNX Runtime divides by their number."""
    model = parsed(HEADS.format(count=count, chosen=chosen))
    report = onnx_attnfuse.optimize(model, always=True).report
    assert (report.fused, report.failures) == (fused, ())
    assert [reason.code for reason in report.sites[0].reasons] == ([] if fused else ["empty-axis"])


PLAIN = {"b": 2, "n": 2, "s": 3, "t": 5, "d": 4, "v": 4}


@pytest.mark.parametrize("empty", [None, *PLAIN])
@pytest.mark.parametrize("verify", ["none", "sites"])
def test_an_axis_that_is_empty_is_refused(empty: str | None, verify: str) -> None:
    sizes = PLAIN if empty is None else {**PLAIN, empty: 0}
    report = onnx_attnfuse.optimize(parsed(SIZES.format(**sizes)), always=True, verify=verify).report
    codes = [reason.code for site in report.sites for reason in site.reasons]
    assert (report.fused, codes) == ((1, []) if empty is None else (0, ["empty-axis"]))


@pytest.mark.parametrize("verify", ["sites", "model"])
def test_scores_that_fill_no_memory_are_judged_shorter(verify: str) -> None:
    huge = SIZES.format(b=1, n=32, s=65536, t=65536, d=64, v=64)
    report = onnx_attnfuse.optimize(parsed(huge), verify=verify).report
    assert (report.fused, report.sites[0].reasons) == (1, ())
    assert all("too large to run" in note for note in report.notes)
    assert len(report.notes) == (verify == "model")


def test_scores_that_fill_no_memory_in_axes_that_are_short_are_not_run() -> None:
    report = onnx_attnfuse.optimize(parsed(SIZES.format(b=200, n=200, s=200, t=200, d=4, v=4))).report
    assert [reason.code for reason in report.sites[0].reasons] == ["unverified"]
    assert "shorter axes do not make it small enough" in report.sites[0].reasons[0].message


def judged(divisor: str) -> tuple[bool, str]:
    graph = ir.from_proto(parsed(DIVIDED.format(divisor=divisor))).graph
    old, new = graph.outputs
    verdict = EquivalenceChecker().check([(old, new)], [graph.inputs[0]], Facts(graph), {"": 18})
    return verdict.equal, verdict.detail


@pytest.mark.exhaustive
def test_a_piece_that_ends_its_process_is_undecided() -> None:
    assert judged(MINUS_ONE) == (False, "undecided: running it in ONNX Runtime ended the process with SIGFPE")


def test_a_piece_that_divides_by_one_is_judged_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess_runner, "run", None)
    equal, detail = judged(ONE)
    assert equal, detail


def test_a_piece_that_may_end_its_process_and_does_not_is_judged() -> None:
    equal, detail = judged("two_more = Add(two, three) m = Mul(n, n) d = Add(m, two_more)")
    assert equal, detail


EMPTY = """<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]>
empty (float[b, s, d] q, float[b, 2, p, 4] past) => (float[b, s, d] out)
{{
    {node}
}}"""
NODES = {
    "out = com.microsoft.MultiHeadAttention<num_heads = 2>(q, q, q)": {"d": True, "s": True, "p": False},
    "out, k, v = com.microsoft.MultiHeadAttention<num_heads = 2>(q, q, q, , , , past, past)": {"d": True, "p": False},
    "out = Einsum<equation = 'bsd,bsd->bsd'>(q, q)": {"d": True, "p": False},
    "out = Add(q, q)": {"d": False, "s": False},
}


@pytest.mark.parametrize("node", NODES)
def test_empty_operands_are_a_danger_to_some_operators_and_an_empty_past_is_none(node: str) -> None:
    graph = ir.from_proto(onnx.parser.parse_model(EMPTY.format(node=node.replace("'bsd", '"bsd').replace("bsd'", 'bsd"')))).graph
    facts = Facts(graph)
    for name, dangerous in NODES[node].items():
        values = Values(lambda root: root, 3)
        values[name] = 0
        assert is_dangerous(graph, facts, values) == dangerous, name
    assert not is_dangerous(graph, facts, Values(lambda root: root, 3))


LOOP = """<ir_version: 10, opset_import: ["" : 18]>
forever (int64 n, bool go) => (int64 last)
{
    last = Loop(n, go, n) <body = body (int64 i, bool c, int64 a) => (bool d, int64 e) { d = Identity(c) e = Add(a, i) }>
}"""


def test_a_model_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two to the 62 rounds; two of them end, in the next child."""
    monkeypatch.setattr(subprocess_runner, "LIMIT", 1.0)
    model = parsed(LOOP).SerializeToString()
    feeds = {"n": np.asarray(1 << 62), "go": np.asarray(True)}
    with pytest.raises(subprocess_runner.ProcessDied, match="did not end within 1 s"):
        subprocess_runner.run(model, None, ["last"], feeds)
    monkeypatch.undo()
    assert subprocess_runner.run(model, None, ["last"], {**feeds, "n": np.asarray(2)}) == [3]


def test_an_error_of_the_runtime_in_the_child_is_an_error_here() -> None:
    with pytest.raises(RuntimeRefusal, match="Required inputs"):
        subprocess_runner.run(parsed(LOOP).SerializeToString(), None, None, {})


WHOLE = """<ir_version: 10, opset_import: ["" : 18]>
whole (int64[s] ids, int64[s] n) => (int64[s] out)
<int64 lowest = {-9223372036854775808}, int64 less = {-1}>
{
    zero = Sub(n, n)
    low = Add(zero, lowest)
    minus = Add(zero, less)
    out = Div(low, minus)
}"""


def test_a_whole_model_that_ends_the_process_is_told(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(written(WHOLE, tmp_path / "whole.onnx"))
    with pytest.raises(ModelError, match="ended the process with SIGFPE; repair it first"):
        onnx_attnfuse.verify_models(path, path)
    assert main(["verify", path, path]) == 2
    message = "a model cannot be compared: running it in ONNX Runtime ended the process with SIGFPE; repair it first"
    assert capsys.readouterr().err == f"Error: {message}\n"
