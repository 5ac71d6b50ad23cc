"""Formulas as authors write them, and what is refused when a pattern is registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from onnx_attnfuse import OptionError
from onnx_attnfuse.language import (
    Tensor,
    any_of,
    concat,
    equation,
    exp,
    max,  # noqa: A004
    mix_heads,
    operator,
    pattern,
    refusal,
    rows,
    sigmoid,
    softmax,
    sum,  # noqa: A004
    tanh,
    where,
)
from onnx_attnfuse.language.expression import number, variable
from onnx_attnfuse.language.normal_form import FactorProduct, Op, Slotted, Var, normal, variants

Q, K, V, SCALE, MASK, CAP = map(variable, "q k v scale mask cap".split())


def test_a_formula_is_written_as_its_author_would() -> None:
    scores = CAP * tanh(SCALE * (Q @ K.T) / CAP)
    assert str(softmax(scores + MASK, sink=0) @ V) == "softmax(cap * tanh(scale * (q @ k.T) / cap) + mask, sink=0) @ v"
    assert str((1 - Q) * -K) == "(1 - q) * -k"
    assert str(any_of("form", one=Q / 2, two=max(Q) ** 2)) == "(one: q / 2 | two: max(q) ** 2)"


def test_transposing_twice_is_nothing() -> None:
    assert Q.T.T is Q


def test_a_formula_has_no_truth_value() -> None:
    with pytest.raises(OptionError, match=r"write where\(condition, a, b\)"):
        bool(Q < K)


def test_what_is_no_formula_is_named() -> None:
    with pytest.raises(OptionError, match=r"Add is given \[1\]"):
        Q + [1]  # type: ignore[operator] # noqa: RUF005


def test_scale_and_mask_become_one_slot_in_any_arrangement() -> None:
    wanted = Slotted(("scale", "mask"), Op("MatMul", (), (Var("q"), Op("T", (), (Var("k"),)))))
    assert normal(SCALE * (Q @ K.T) + MASK) == normal(MASK + (Q @ K.T) * SCALE) == wanted


def test_factors_are_gathered() -> None:
    assert normal(SCALE * tanh(Q) / CAP * 2) == FactorProduct("scale", (("cap", -1),), 2.0, Op("Tanh", (), (Var("q"),)))
    assert normal(-tanh(Q) / 4) == FactorProduct(None, (), -0.25, Op("Tanh", (), (Var("q"),)))


def test_a_quotient_of_two_formulas_stays_one() -> None:
    assert normal(exp(Q) / sum(exp(Q))) == Op("Div", (), (normal(exp(Q)), normal(sum(exp(Q)))))


def test_a_choice_that_stands_twice_is_the_same_in_both_places() -> None:
    def features(x: Tensor) -> Tensor:
        return any_of("features", square=x * x, cube=x * x * x)

    found = [str(formula) for _, formula in variants(features(Q) @ features(K).T)]
    assert found == ["q * q @ (k * k).T", "q * q * q @ (k * k * k).T"]


def test_a_plain_formula_restates() -> None:
    @pattern
    def attention(q: Tensor, k: Tensor, v: Tensor, scale: Tensor, mask: Tensor) -> Tensor:
        """One line.

        More.
        """
        return softmax(scale * (q @ k.T) + mask) @ v

    assert (attention.name, attention.operands, attention.restates) == ("attention", ("q", "k", "v", "scale", "mask"), True)
    assert attention.doc.startswith("One line.")
    assert attention.home.endswith("attention")


def test_name_and_priority_are_the_authors() -> None:
    named = pattern(name="other", priority=3)(lambda q, k, v: softmax(q @ k.T) @ v)
    assert (named.name, named.priority) == ("other", 3)


def attention_of(*, written: Callable[..., Any], meaning: Callable[..., Any] | None = None) -> Callable[..., Any]:
    return lambda q, k, v: equation(written(q, k, v), (meaning or written)(q, k, v))


BAD: dict[str, tuple[Any, str]] = {
    "nothing returned": (lambda q, k, v: None, r"returns None; return a formula, equation\(\.\.\.\) or refusal"),
    "no operands": (lambda: softmax(number(1)), "has other parameters than operands"),
    "default": (lambda q, k=1: q, "has other parameters than operands; write each as a plain name, with =None if graphs may"),
    "optional and unused": (
        lambda q, k, v, gate=None: softmax(q @ k.T) @ v,
        "the operand 'gate' is not in the written formula if gate is given; use it or remove it",
    ),
    "optional and not asked for": (
        lambda q, k, v, gate=None: softmax(q @ k.T + gate) @ v,
        "Add is given an operand that may be None",
    ),
    "optional mask": (
        lambda q, k, v, mask=None: softmax(q @ k.T if mask is None else q @ k.T + mask) @ v,
        "'mask' is always optional; write it without =None",
    ),
    "optional and an alternative": (
        lambda q, k, v, g=None: softmax(any_of("g", x=q @ k.T, y=exp(q) @ k.T) * (1 if g is None else g)) @ v,
        r"any_of\('g'\) occurs twice with other alternatives",
    ),
    "two kinds": (
        lambda q, k, v, g=None: (
            softmax(q @ k.T) @ v if g is None else equation(softmax(q @ k.T) * g @ v, softmax(q @ k.T) @ v * g)
        ),
        "returns one thing with 'g' and another kind of thing without; return the same kind",
    ),
    "many optional": (
        lambda q, k, v, a=None, b=None, c=None, d=None, e=None, f=None, g=None: softmax(q @ k.T) @ v,
        "has 7 operands that may be None, and 6 at most; make two patterns",
    ),
    "unused operand": (
        lambda q, k, v, bias: softmax(q @ k.T) @ v,
        "the operand 'bias' is not in the written formula; use it or remove",
    ),
    "unused in an alternative": (
        lambda q, k, v, g: any_of("gate", on=softmax(q @ k.T * g) @ v, off=softmax(q @ k.T) @ v),
        "the operand 'g' is not in the written formula if gate is off",
    ),
    "choice named like an operand": (
        lambda q, k, v, mask: any_of("mask", on=softmax(q @ k.T + mask) @ v, off=softmax(q @ k.T) @ v),
        r"any_of\('mask'\) has the name of an operand",
    ),
    "choice twice": (
        lambda q, k, v: any_of("a", x=exp(q), y=q * 2) @ softmax(any_of("a", x=k.T @ v, z=k.T @ exp(v))),
        r"any_of\('a'\) occurs twice with other alternatives",
    ),
    "equal alternatives": (lambda q, k, v: softmax(any_of("a", x=q @ k.T, y=q @ k.T)) @ v, "has two equal alternatives"),
    "only an operand": (lambda q: q, "it can never be found: q is no operator; write what computes it"),
    "infinite": (lambda q, k, v: softmax(where(q < 0, float("-inf"), q @ k.T)) @ v, "a number in it is not finite"),
    "arithmetic": (lambda q, k, v: softmax(q @ k.T * exp(number(2))) @ v, r"exp\(2\) is a number, which graphs hold as such"),
    "itself": (lambda q, v: softmax(q @ q) @ v, "q @ q multiplies rows with rows of the same tensor"),
    "scale added": (lambda q, k, v, scale: softmax(q @ k.T + exp(scale)) @ v, "'scale' names factors"),
    "mask multiplied": (lambda q, k, v, mask: softmax((q @ k.T) * exp(mask)) @ v, "'mask' names masks: add it"),
    "slots apart": (
        lambda q, k, v, scale, mask: softmax(scale * (q @ k.T) + mask) @ v + softmax(scale * (k @ q.T)) @ v,
        "is with other slots in two places; number one of them",
    ),
    "index": (lambda q, k, v: softmax(where(rows(q) < 3, q @ k.T, 0)) @ v, "rows is for definitions of operators"),
    "sink written": (lambda q, k, v: softmax(q @ k.T, sink=0) @ v, "a sink is for the meaning"),
    "means no attention": (lambda q, k, v: sigmoid(q @ k.T) @ v, r"it means sigmoid\(q @ k\.T\) @ v, which is no attention"),
    "meaning from nowhere": (
        lambda q, k, v, w: equation(
            any_of("a", x=exp(q @ k.T * w) @ v, y=sigmoid(q @ k.T * w) @ v), softmax(q @ k.T) @ variable("z")
        ),
        "the meaning has the operand 'z', which is not in the written formula",
    ),
    "slot from nowhere": (
        lambda q, k, v, scale, mask: equation(exp(scale * (q @ k.T) + mask) @ v, softmax(scale * (q @ k.T)) @ v),
        "'scale' are together in the meaning and not in the written formula",
    ),
    "mixed heads meant": (
        lambda q, k, v, w: softmax(mix_heads(q @ k.T, w)) @ v,
        r"heads that are mixed are no attention of theirs; return refusal",
    ),
    "too many": (
        lambda q, k, v: (
            softmax(
                any_of("a", x=exp(q), y=tanh(q), z=q * q)
                @ any_of("b", x=exp(k), y=tanh(k), z=k * k).T
                @ any_of("c", x=exp(k), y=tanh(k), z=k * k)
                @ any_of("d", x=exp(k), y=tanh(k), z=k * k).T
            )
            @ v
        ),
        "combine to more than 64 formulas",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_pattern_that_cannot_serve_is_refused_with_one_line(name: str) -> None:
    function, message = BAD[name]
    with pytest.raises(OptionError, match=message) as error:
        pattern(name="bad")(function)
    assert str(error.value).startswith("pattern 'bad'") or "may be None" in str(error.value)
    assert "\n" not in str(error.value)


def test_alternatives_are_two_or_more() -> None:
    with pytest.raises(OptionError, match=r"any_of\('form'\) has 1 alternative"):
        any_of("form", only=Q)


def test_a_refusal_need_not_mean_anything() -> None:
    made = pattern(name="linear")(lambda q, k, v: refusal(exp(q) @ (exp(k).T @ v), "linear", "it is linear"))
    assert made.meaning is None
    assert made.refused is not None
    assert made.refused.code == "linear"


@pytest.mark.parametrize("name", ["Attn", "::Attn", "ai.onnx::Attn"])
def test_a_definition_is_for_an_operator_of_another_domain(name: str) -> None:
    with pytest.raises(OptionError, match="write domain::Operator"):
        operator(name)


def test_a_definition_takes_inputs_by_position_and_attributes_by_name() -> None:
    @operator("acme::Half")
    def half(x: Tensor, y: Tensor | None = None, *, alpha: float = 0.5) -> Tensor:
        return x * alpha if y is None else x * y

    assert (half.domain, half.op, half.inputs, dict(half.attributes)) == ("acme", "Half", ("x", "y"), {"alpha": 0.5})
    with pytest.raises(OptionError, match=r"the definition of acme::Half takes its inputs by position"):
        operator("acme::Half")(lambda *inputs: concat(inputs[0], inputs[1]))


def test_an_operand_that_may_be_none_is_asked_for_with_and_without() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, gate: Tensor | None = None) -> Tensor:
        weights = softmax(q @ k.T if bias is None else q @ k.T - bias)
        return (weights if gate is None else weights * gate) @ v

    made = pattern(function)
    written = {tuple(choices.items()): str(formula) for choices, formula in variants(made.written)}
    assert written == {
        (("bias", "given"), ("gate", "given")): "softmax(q @ k.T - bias) * gate @ v",
        (("bias", "given"), ("gate", "none")): "softmax(q @ k.T - bias) @ v",
        (("bias", "none"), ("gate", "given")): "softmax(q @ k.T) * gate @ v",
        (("bias", "none"), ("gate", "none")): "softmax(q @ k.T) @ v",
    }
    assert made.restates
    assert made.operands == ("q", "k", "v", "bias", "gate")


def test_a_refusal_may_have_operands_that_may_be_none() -> None:
    made = pattern(name="linear")(
        lambda q, k, v, w=None: refusal(exp(q if w is None else q * w) @ (exp(k).T @ v), "linear", "it is linear")
    )
    assert [dict(choices) for choices, _ in variants(made.written)] == [{"w": "given"}, {"w": "none"}]
    assert made.meaning is None
