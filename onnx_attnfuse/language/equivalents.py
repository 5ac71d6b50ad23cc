"""Formulas that are the same in other operators: one node written out as several, and the reverse.

    log(sum(exp(x)))                   ReduceLogSumExp, or with the maximum taken out: max(x) + log(sum(exp(x - max(x))))
    log(sum(x))                        ReduceLogSum
    sum(x * x), sqrt(sum(x * x))       ReduceSumSquare, ReduceL2
    sum(absolute(x))                   ReduceL1

An author writes one of them, and every graph is found that has any.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

from onnx_attnfuse.language.normal_form import FactorProduct, Form, Op, Slotted, parts

_Rewrite: TypeAlias = Callable[[Form], Form]
_Chosen: TypeAlias = Mapping[str, _Rewrite]


def equivalents(form: Form) -> Iterator[Form]:
    """The formula in every form, the author's among them; a term that occurs several times is written alike everywhere."""
    gathered = _changed(form, _gathered)
    found = sorted({part.op for part in parts(gathered) if isinstance(part, Op) and part.op in _EQUIVALENTS})
    for choice in itertools.product(*(_EQUIVALENTS[op] for op in found)):
        yield _changed(gathered, functools.partial(_written_out, dict(zip(found, choice, strict=True))))


def _changed(form: Form, change: Callable[[Op], Form]) -> Form:
    """The formula with each operator changed, the innermost first."""
    if isinstance(form, Op):
        return change(dataclasses.replace(form, args=tuple(_changed(arg, change) for arg in form.args)))
    if isinstance(form, (FactorProduct, Slotted)):
        return dataclasses.replace(form, core=_changed(form.core, change))
    return form


def _written_out(chosen: _Chosen, form: Op) -> Form:
    return chosen[form.op](form.args[0]) if form.op in chosen else form


def _op(op: str, *args: Form) -> Op:
    return Op(op, (), args)


def _gathered(form: Op) -> Form:
    """The one operator that computes what a few operators do, or the formula as it is."""
    inner = form.args[0] if form.args else None
    if form.op == "Add":
        return next((whole for one, other in _both(form) if (whole := _without_maximum(one, other)) is not None), form)
    if not isinstance(inner, Op) or form.op not in _GATHERED:
        return form
    for below, whole in _GATHERED[form.op]:
        if inner.op == below and (below != "Mul" or inner.args[0] == inner.args[1]):
            return _gathered(_op(whole, inner.args[0]))
    return form


def _both(form: Op) -> tuple[tuple[Form, Form], tuple[Form, Form]]:
    one, other = form.args
    return (one, other), (other, one)


def _without_maximum(largest: Form, rest: Form) -> Form | None:
    """`x` under one logarithm of a sum, if that is what `max(x)` and the logarithm of the rest make."""
    if not isinstance(largest, Op) or largest.op != "ReduceMax" or not isinstance(rest, Op) or rest.op != "ReduceLogSumExp":
        return None
    (x,) = largest.args
    return _op("ReduceLogSumExp", x) if rest.args == (_op("Sub", x, largest),) else None


def _shifted(x: Form) -> Form:
    largest = _op("ReduceMax", x)
    return _op("Add", largest, _logarithm(_op("Sub", x, largest)))


def _logarithm(x: Form) -> Form:
    return _op("Log", _op("ReduceSum", _op("Exp", x)))


def _square(x: Form) -> Form:
    return _op("ReduceSum", _op("Mul", x, x))


_GATHERED: Mapping[str, tuple[tuple[str, str], ...]] = {
    "Log": (("ReduceSum", "ReduceLogSum"),),
    "ReduceLogSum": (("Exp", "ReduceLogSumExp"),),
    "ReduceSum": (("Abs", "ReduceL1"), ("Mul", "ReduceSumSquare")),
    "Sqrt": (("ReduceSumSquare", "ReduceL2"),),
}
"""By operator: the one before it, and the operator that equals both."""
_EQUIVALENTS: Mapping[str, tuple[_Rewrite, ...]] = {
    "ReduceL1": (lambda x: _op("ReduceL1", x), lambda x: _op("ReduceSum", _op("Abs", x))),
    "ReduceL2": (
        lambda x: _op("ReduceL2", x),
        lambda x: _op("Sqrt", _op("ReduceSumSquare", x)),
        lambda x: _op("Sqrt", _square(x)),
    ),
    "ReduceLogSum": (lambda x: _op("ReduceLogSum", x), lambda x: _op("Log", _op("ReduceSum", x))),
    "ReduceLogSumExp": (
        lambda x: _op("ReduceLogSumExp", x),
        lambda x: _op("ReduceLogSum", _op("Exp", x)),
        _logarithm,
        _shifted,
    ),
    "ReduceSumSquare": (lambda x: _op("ReduceSumSquare", x), _square),
}
REDUCTIONS = frozenset(_EQUIVALENTS)
"""Operators that a formula may have although no author writes them."""
