"""Rewrite rules of onnxscript, unchanged: applied where they are right, undone where they are not, reported like our own."""

from __future__ import annotations

import pathlib

import pytest
from onnxscript.rewriter import RewriteRule, RewriteRuleSet
from onnxscript.rewriter.pattern import RewriteRuleClassBase

import onnx_attnfuse
from onnx_attnfuse import OptionError
from onnx_attnfuse.testing import as_model, assert_fuses

TEXT = """<ir_version: 10, opset_import: ["" : 18]>
g (float[b, 2, s, 8] q, float[b, 2, t, 8] k, float[b, 2, t, 8] v) => (float[b, 2, s, 8] out)
<float two = {2}, float half = {0.5}>
{
    kt = Transpose<perm = [0, 1, 3, 2]>(k)
    scores = MatMul(q, kt)
    erf = Erf(scores)
    nothing = Sub(erf, erf)
    same = Add(scores, nothing)
    [softmax] w = Softmax<axis = -1>(same)
    [product] o = MatMul(w, v)
    [last] out = Tanh(o)
}"""
FILE = '''"""As onnxscript's documentation writes rules."""
import onnxscript
from onnxscript.rewriter import pattern


class AddOfNothing(pattern.RewriteRuleClassBase):
    """x + (y - y) is x."""

    def pattern(self, op, x, y):
        return op.Add(x, op.Sub(y, y))

    def check(self, context, x, y):
        result = pattern.MatchResult()
        if x.dtype is not None and not x.dtype.is_floating_point():
            return result.fail("not a float", x)
        return result

    def rewrite(self, op, x, y):
        return op.Identity(x)


def double_neg(op, x):
    return op.Neg(op.Neg(x))


def just_x(op, x):
    return op.Identity(x)


double_negation_rule = pattern.RewriteRule(double_neg, just_x)
rules = pattern.RewriteRuleSet([AddOfNothing.rule(), double_negation_rule])
'''


class AddOfNothing(RewriteRuleClassBase):
    def pattern(self, op, x, y):
        return op.Add(x, op.Sub(y, y))

    def rewrite(self, op, x, y):
        return op.Identity(x)


class Wrong(RewriteRuleClassBase):
    def pattern(self, op, x):
        return op.Tanh(x)

    def rewrite(self, op, x):
        return op.Sigmoid(x)


class Failing(Wrong):
    def rewrite(self, op, x):
        raise ZeroDivisionError("on purpose")


class Foreign(Wrong):
    def rewrite(self, op, x):
        return op.Gone(x, _domain="acme", _version=3)


def hits(report: onnx_attnfuse.Report) -> dict[str, int]:
    return {pattern.name: pattern.hits for pattern in report.patterns if pattern.kind == "onnxscript rule"}


FORMS = [AddOfNothing, AddOfNothing(), AddOfNothing.rule(), RewriteRuleSet([AddOfNothing.rule()], commute=True)]


@pytest.mark.parametrize("form", FORMS)
def test_rules_in_every_form_are_taken(form: object) -> None:
    result = assert_fuses(TEXT, form, sites=1)
    assert sum(hits(result.report).values()) == 1
    assert {node.op_type for node in result.model.graph}.isdisjoint({"Erf", "Sub", "Softmax"})


def test_without_the_rule_what_it_removes_is_in_the_way() -> None:
    report = onnx_attnfuse.explain(as_model(TEXT))
    assert report.sites[0].mask != "no_mask"


def test_a_file_of_rules_is_taken_unchanged(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rules.py"
    path.write_text(FILE)
    report = onnx_attnfuse.explain(as_model(TEXT), patterns=(path,))
    assert hits(report) == {"AddOfNothing": 1, "double_negation_rule": 0}
    assert report.sites[0].mask == "no_mask"


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Wrong, "rule 'Wrong': at ["),
        (Failing, "test_onnxscript_rules.py, line 80: ZeroDivisionError: on purpose, at last"),
        (Foreign, "rule 'Foreign': the new nodes do not run"),
    ],
)
def test_a_rule_that_is_wrong_is_undone_and_told(rule: type[RewriteRuleClassBase], message: str) -> None:
    before = as_model(TEXT)
    result = onnx_attnfuse.optimize(before, patterns=(rule,))
    assert message in str(result.report.notes)
    assert hits(result.report) == {rule.__name__: 0}
    assert [node.op_type for node in result.model.graph][-1] == "Tanh"
    assert "acme" not in result.model.opset_imports


def test_a_rule_that_makes_functions_is_refused() -> None:
    rule = RewriteRule(lambda op, x: op.Tanh(x), lambda op, x: op.Mine(x, _domain="acme"), name="Mine", as_function=True)
    with pytest.raises(OptionError, match="onnxscript rule 'Mine' has as_function=True, which is not supported"):
        onnx_attnfuse.explain(as_model(TEXT), patterns=(rule,))
