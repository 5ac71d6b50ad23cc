"""Patterns that fail, are wrong, or make attention worse: each costs its place, and is told with its name, file and line."""

from __future__ import annotations

import json
import math
import pathlib

import numpy as np
import onnx_ir as ir
import pytest

import onnx_attnfuse
from onnx_attnfuse.errors import VerificationError
from onnx_attnfuse.language import Tensor, concat, equation, exp, pattern, softmax
from onnx_attnfuse.language import sum as total
from onnx_attnfuse.verify.verifier import Verifier
from onnx_attnfuse_cli.main import main
from tests.support.bundled import run_in, session
from tests.support.small_models import ATTENTION, parsed, written

GATED = ATTENTION.replace("float[b, 2, t, 4] v)", "float[b, 2, t, 4] v, float[b, 2, s, t] g)").replace(
    "MatMul(weights, v)", "MatMul(gated, v)"
)
SOFTMAX = "[softmax] weights = Softmax<axis = -1>(scaled)"


@pattern
def gated(scores: Tensor, g: Tensor, v: Tensor):
    return equation(written=(softmax(scores) * g) @ v, meaning=softmax(scores) @ (g.T * v))


@pattern
def summed(scores: Tensor, g: Tensor, v: Tensor):
    return equation(written=(softmax(scores) * g) @ v, meaning=softmax(scores) @ v * total(g))


@pattern
def beside(scores: Tensor, g: Tensor, v: Tensor):
    return equation(written=(softmax(scores) * g) @ v, meaning=softmax(concat(scores, g)) @ v)


@pytest.mark.parametrize("found", [gated, summed, beside])
def test_a_factor_that_the_graph_leaves_out_is_no_failure(found: object) -> None:
    """It is 1: a number, which is its own transpose and has no rows and columns."""
    report = onnx_attnfuse.optimize(parsed(ATTENTION), patterns=(found,)).report
    assert (report.fused, report.failures, report.differing) == (1, (), 0)
    assert report.sites[0].pattern is None


def test_a_factor_that_the_graph_has_is_transposed_as_written() -> None:
    """A gate for each score is no gate for each value; the two differ, or do not even fit."""
    text = GATED.replace(SOFTMAX, f"{SOFTMAX}\n    [gating] gated = Mul(weights, g)")
    report = onnx_attnfuse.optimize(parsed(text), patterns=(gated,)).report
    assert (report.fused, report.failures) == (0, ())


@pattern
def doubled(scores: Tensor, v: Tensor):
    return equation(written=softmax(scores) @ v, meaning=(softmax(scores) @ (v * 2)) * 0.5)


@pattern
def simpler(scores: Tensor, zero: Tensor, v: Tensor):
    return equation(written=softmax(scores + (zero - zero)) @ v, meaning=softmax(scores) @ v)


def test_a_pattern_that_makes_plain_attention_worse_is_put_back() -> None:
    plain = onnx_attnfuse.optimize(parsed(ATTENTION))
    result = onnx_attnfuse.optimize(parsed(ATTENTION), patterns=(doubled,))
    assert result.report.notes == ("pattern 'doubled' at softmax: put back, plain attention is fused without it",)
    assert (result.report.fused, result.report.sites[0].pattern) == (1, None)
    assert dict(result.report.ops_after) == dict(plain.report.ops_after)


def test_a_pattern_that_makes_plain_attention_simpler_is_kept() -> None:
    text = ATTENTION.replace("Softmax<axis = -1>(scaled)", "Softmax<axis = -1>(same)").replace(
        SOFTMAX.replace("scaled", "same"), "erf = Erf(scaled) none = Sub(erf, erf) same = Add(scaled, none)\n    " + SOFTMAX
    )
    text = text.replace("Softmax<axis = -1>(scaled)", "Softmax<axis = -1>(same)")
    report = onnx_attnfuse.optimize(parsed(text), patterns=(simpler,)).report
    assert (report.fused, report.sites[0].pattern, report.sites[0].mask) == (1, "simpler", "no_mask")


@pattern
def twice(scores: Tensor, v: Tensor):
    return equation(written=softmax(scores) @ v, meaning=softmax(2 * scores) @ v)


@pytest.mark.parametrize("verify", ["none", "sites"])
def test_a_pattern_that_is_wrong_is_not_taken_whatever_is_verified(verify: str) -> None:
    report = onnx_attnfuse.optimize(parsed(ATTENTION), patterns=(twice,), verify=verify).report
    assert (report.fused, report.differing, report.sites[0].scale) == (1, 1, 0.5)
    assert (report.sites[0].verified is None) == (verify == "none")
    (note,) = report.notes
    assert note.startswith("pattern 'twice': at [")


@pattern
def with_column(scores: Tensor, v: Tensor):
    return equation(written=exp(scores) / (total(exp(scores)) + 1e-6) @ v, meaning=softmax(scores, sink=math.log(1e-6)) @ v)


@pattern
def without_column(scores: Tensor, v: Tensor):
    return equation(written=exp(scores) / (total(exp(scores)) + 1e-6) @ v, meaning=softmax(scores) @ v)


DIVIDED = ATTENTION.replace("float scale", "float little = {0.000001}, int64[1] last = {-1}, float scale").replace(
    SOFTMAX, "raised = Exp(scaled) sums = ReduceSum(raised, last) more = Add(sums, little) [softmax] weights = Div(raised, more)"
)


def test_a_pattern_that_forgets_a_small_number_is_taken_back_and_named() -> None:
    report = onnx_attnfuse.optimize(parsed(DIVIDED), patterns=(without_column,)).report
    assert (report.fused, report.differing) == (0, 1)
    assert [reason.code for reason in report.sites[0].reasons][:1] == ["differs"]
    assert report.sites[0].reasons[0].message.startswith("pattern 'without_column': at [")


def test_the_error_of_a_pattern_is_a_part_of_that_of_the_attention() -> None:
    result = onnx_attnfuse.optimize(parsed(DIVIDED), patterns=(with_column,))
    (site,) = result.report.sites
    assert (result.report.fused, site.pattern, result.report.differing) == (1, "with_column", 0)
    assert site.verified is not None
    assert 0 < site.verified.max_abs_error < 1e-4
    random = np.random.default_rng(0)
    fed = {name: random.standard_normal((2, 2, 5, 4)).astype(np.float32) for name in "kv"}
    fed |= {"q": -4 * np.ones((2, 2, 3, 4), np.float32)}
    before, after = (run_in(session(model), fed)["out"] for model in (parsed(DIVIDED), result.model))
    np.testing.assert_allclose(after, before, atol=1e-5)


def test_models_that_differ_name_the_patterns_that_had_a_part_in_it(tmp_path: pathlib.Path) -> None:
    verifier = Verifier(onnx_attnfuse.Options(verify="model", evidence=tmp_path))
    before, after = (ir.from_proto(parsed(text)) for text in (ATTENTION, ATTENTION.replace("{0.5}", "{0.25}")))
    with pytest.raises(VerificationError, match="look into the patterns that had a part in it, 'halved', with the evidence"):
        verifier.check_model(before, after, ["halved"])
    with pytest.raises(VerificationError, match="; report it, with the evidence"):
        verifier.check_model(before, after)


READER = '''
from onnx_attnfuse import steps
from onnx_attnfuse.language import score_step


@score_step("Sign")
def nothing(node, facts):
    """{what}."""
    return [steps.Passed(node.inputs[0])]
'''
SIGNED = ATTENTION.replace("Softmax<axis = -1>(scaled)", "Softmax<axis = -1>(signs)").replace(
    "    [softmax]", "    [signing] signs = Sign(scaled)\n    [softmax]"
)


@pytest.mark.parametrize("verify", ["none", "sites"])
def test_what_a_reader_makes_of_a_site_is_verified_whatever_is_verified(verify: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "reader.py"
    path.write_text(READER.format(what="Wrong: a sign is not what it is the sign of"), encoding="utf-8")
    report = onnx_attnfuse.optimize(parsed(SIGNED), patterns=(path,), verify=verify).report
    assert (report.fused, report.differing) == (0, 1)
    assert [reason.code for reason in report.sites[0].reasons][:1] == ["differs"]


def test_where_nothing_can_verify_it_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnx_attnfuse.verify.verifier.available", lambda: False)
    line = "rewrites by user patterns are not verified: onnxruntime is not installed"
    report = onnx_attnfuse.optimize(parsed(ATTENTION), patterns=(doubled,), verify="none").report
    assert line in report.notes
    assert line not in onnx_attnfuse.optimize(parsed(ATTENTION), verify="none").report.notes


FAILING = {
    "reader": (
        "from onnx_attnfuse.language import score_step\n\n\n@score_step('Sign')\ndef fails(node, facts):\n    return [][0]\n",
        "score step 'fails.fails' of {file}, line 6: IndexError: list index out of range, at signing; left as it was there",
    ),
    "definition": (
        "from onnx_attnfuse.language import operator\n\n\n@operator('acme::Attn')\ndef attn(q, k, v):\n    return {}['x']\n",
        "operator 'acme::Attn' of {file}, line 6: KeyError: 'x', at attn; left as it was there",
    ),
    "rule": (
        "from onnxscript.rewriter import pattern\n\n\nclass Fails(pattern.RewriteRuleClassBase):\n"
        "    def pattern(self, op, x):\n        return op.Sign(x)\n\n"
        "    def rewrite(self, op, x):\n        return 1 / 0\n",
        "onnxscript rule 'Fails' of {file}, line 9: ZeroDivisionError: division by zero, at signing; left as it was there",
    ),
}
BOTH = SIGNED.replace('["" : 18]', '["" : 18, "acme" : 1]').replace(
    "[values] out = MatMul(weights, v)", "[values] o = MatMul(weights, v)\n    [attn] out = acme.Attn(o, k, v)"
)


@pytest.mark.parametrize("what", FAILING)
def test_a_pattern_that_fails_ends_in_three_and_is_told_once_with_its_line(
    what: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    content, line = FAILING[what]
    pathlib.Path("fails.py").write_text(content, encoding="utf-8")
    written(BOTH, pathlib.Path("model.onnx"))
    assert main(["optimize", "model.onnx", "--patterns", "fails.py", "--report", "report.json"]) == 3
    out, err = capsys.readouterr()
    told = line.format(file=tmp_path / "fails.py")
    assert told in out.splitlines()
    assert err.splitlines() == ["wrote model.attnfuse.onnx", f"Error: {told.partition(' of ')[0]} failed; the rest is done"]
    assert not list(tmp_path.glob("attnfuse-error-*"))
    (failure,) = json.loads(pathlib.Path("report.json").read_text())["failures"]
    assert (failure["kind"], failure["file"], failure["line"]) == (
        "pattern",
        str(tmp_path / "fails.py"),
        int(told.split("line ")[1][0]),
    )
    assert main(["explain", "model.onnx", "--patterns", "fails.py"]) == 3


@pytest.mark.parametrize("what", FAILING)
def test_a_pattern_that_would_fail_elsewhere_costs_nothing_here(what: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "fails.py"
    path.write_text(FAILING[what][0], encoding="utf-8")
    report = onnx_attnfuse.optimize(parsed(ATTENTION), patterns=(path,)).report
    assert (report.fused, report.failures) == (1, ())


def test_a_file_that_is_named_as_it_lies_here_is_told_with_its_line(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    written(ATTENTION, pathlib.Path("model.onnx"))
    pathlib.Path("bad.py").write_text("import numpy\n\nnumpy.nothing()\n", encoding="utf-8")
    assert main(["optimize", "model.onnx", "--patterns", "bad.py"]) == 2
    message = "Error: bad.py:3: AttributeError: module 'numpy' has no attribute 'nothing'; correct the file\n"
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(("what", "status"), [("reader", 3), ("rule", 3), ("nothing", 1)])
def test_a_pattern_that_fails_is_told_where_patterns_are_checked(
    what: str, status: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    content, line = FAILING.get(what, (READER.format(what="Never asked"), ""))
    pathlib.Path("fails.py").write_text(content.replace("Sign", "Sign" if line else "Atan"), encoding="utf-8")
    written(BOTH, pathlib.Path("model.onnx"))
    assert main(["patterns", "check", "fails.py", "model.onnx"]) == status
    out, err = capsys.readouterr()
    assert (line.format(file=tmp_path / "fails.py") in out) == bool(status)
    assert err == (f"Error: model.onnx: {line.partition(' of ')[0]} failed; the rest is done\n" if line else "")


def test_a_model_in_python_that_fails_is_no_defect_of_ours(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fails.py").write_text(READER.format(what="Never asked"), encoding="utf-8")
    (tmp_path / "code.py").write_text("1 / 0\n", encoding="utf-8")
    assert main(["patterns", "check", str(tmp_path / "fails.py"), f"{tmp_path / 'code.py'}:f"]) == 2
    line = f"Error: {tmp_path / 'code.py'} cannot be run: ZeroDivisionError: division by zero; correct the file\n"
    assert capsys.readouterr().err == line
