"""Masks as programs: nested tuples of words and numbers, which a captured graph can hold and a kernel can inline.

    j - i <= 0 and mask[b, j] != 0

    ("and", ("le", ("j",), ("i",)), ("nonzero", ("read", 0, ("b",), ("j",))))

A program runs on index tensors `b`, `n`, `i`, `j`: single numbers inside of flex attention, ranges elsewhere. Millions of pairs
are held against it at each step, so that `j <= i` is one comparison of 32 bits and no difference of 64.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import onnx_ir as ir
import torch

from onnx_attnfuse.attention.axes.factors import Factor, leaves, length
from onnx_attnfuse.attention.masks.mask_terms import (
    bare,
    compared,
    constant_of,
    factor_of,
    is_comparison,
    linear,
    nonzero,
    parts_of,
    value_of,
)
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.certify.terms import Term
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.graph.thresholds import MASKS
from onnx_attnfuse.reasons import Refused

if TYPE_CHECKING:
    from torch import Tensor

Program: TypeAlias = "tuple[Any, ...]"
_LETTERS = "bnij"
_WIDE = frozenset([torch.int32, torch.int64])
_Parts: TypeAlias = "Sequence[tuple[Term, Dim]]"


class Compiler:
    """Turns the terms of one attention into programs."""

    def __init__(self, spec: AttentionSpec) -> None:
        axes = spec.axes
        self._places: dict[Factor, tuple[str, Dim, Dim]] = {}
        for letter, axis in zip(_LETTERS, axes.scores, strict=True):
            stride: Dim = 1
            for leaf in reversed(leaves(axis)):
                self._places[leaf] = letter, stride, leaf.size
                stride = stride * leaf.size
        self._lengths = {letter: length(axis) for letter, axis in zip(_LETTERS, axes.scores, strict=True)}
        self.values: list[ir.Value] = []
        """The tensors that programs read, by number."""

    def program(self, part: Term) -> Program:
        """The program of a term.

        Raises:
            Refused: It applies an operator that programs lack, or a length that operands do not tell.
        """
        value, read = constant_of(part), nonzero(part)
        if value is not None or part.op == "const":
            return ("number", value if part.sort == "Real" else part.data)
        if read is not None:
            return ("nonzero", self._atom(read))
        if is_comparison(part):
            left, right = _sides(compared(part))
            return ("eq" if part.op == "eq0" else "le", self._sum(*left), self._sum(*right))
        if part.op == "eq0":
            inner = self.program(part.args[0])
            return ("not", ("nonzero", inner)) if part.args[0].op == "element" else ("Equal", inner, ("number", 0.0))
        if part.op == "apply" and part.data not in _APPLIED:
            raise Refused("unreadable-mask", f"the mask applies {part.data}, which has no program")
        if parts_of(part):
            return ({"apply": part.data, "ite": "where"}.get(part.op, part.op), *map(self.program, parts_of(part)))
        return self._atom(part) if part.op == "element" else self._sum(*linear(bare(part)))

    def _sum(self, parts: _Parts, rest: Dim) -> Program:
        if rest == 0 and [(atom.op, factor) for atom, factor in parts] == [("index", 1)]:
            return self._atom(parts[0][0])
        return ("sum", self._length(rest), *((self._length(factor), self._atom(atom)) for atom, factor in parts))

    def _atom(self, atom: Term) -> Program:
        if atom.op == "element":
            return ("read", self._number(value_of(atom)), *map(self.program, atom.args))
        if parts_of(atom):
            return self.program(atom)
        if atom.op != "index":
            raise Refused("unreadable-mask", f"the mask has a {atom.op} of integers, which has no program")
        place = self._places.get(factor_of(atom))
        if place is None:
            raise Refused("foreign-axis", "the mask has an axis that the attention does not have")
        letter, stride, size = place
        if self._lengths[letter] == size:
            return (letter,)
        return ("part", letter, self._length(stride), self._length(size))

    def _number(self, value: ir.Value) -> int:
        if value not in self.values:
            self.values.append(value)
        return self.values.index(value)

    def _length(self, dim: Dim) -> Any:
        """A length: a number, the name of an axis, or a sum or product of these."""
        if isinstance(dim, int):
            return dim
        for letter, known in self._lengths.items():
            if dim == known:
                return f"length {letter}"
        factors: list[Any] = [dim.factor] if dim.factor != 1 or not dim.atoms else []
        for atom in dim.atoms:
            alone = sizes.symbol(atom.key)
            if not atom.parts and alone != dim:
                factors.append(self._length(alone))
            elif atom.evaluate is sum:
                factors.append(("sum", *map(self._length, atom.parts)))
            else:
                raise Refused("unknown-length", f"the mask counts with '{atom.key}', which is no length of the operands")
        return factors[0] if len(factors) == 1 else ("product", *factors)


def _sides(form: tuple[_Parts, Dim]) -> tuple[tuple[_Parts, Dim], tuple[_Parts, Dim]]:
    """A form that is compared with 0 as two that are compared with each other, without terms that are certainly negative."""
    parts, rest = form
    right = [(atom, -factor) for atom, factor in parts if isinstance(factor, int) and factor < 0]
    left = [(atom, factor) for atom, factor in parts if not isinstance(factor, int) or factor >= 0]
    return ((left, 0), (right, -rest)) if isinstance(rest, int) else ((left, rest), (right, 0))


def uses(program: Any, letter: str) -> bool:
    """Whether a program depends on an axis."""
    if not isinstance(program, tuple):
        return False
    items = cast("Program", program)
    return items[:1] == (letter,) or items[:2] == ("part", letter) or any(uses(item, letter) for item in items)


def number_of(length: Any, lengths: Mapping[str, int]) -> int:
    """A length that a program has, from the lengths of axes by their letters."""
    if isinstance(length, str):
        return lengths[length.removeprefix("length ")]
    if not isinstance(length, tuple):
        return length
    name, *items = cast("Program", length)
    numbers = [number_of(item, lengths) for item in items]
    return sum(numbers) if name == "sum" else math.prod(numbers)


def run(program: Program, at: Mapping[str, Tensor], tensors: Sequence[Tensor], lengths: Mapping[str, int]) -> Any:
    """The result of a program: a tensor, or a plain number.

    Args:
        program: The program.
        at: The index tensors by their letters.
        tensors: The tensors that it reads, by number.
        lengths: The lengths of the axes by their letters.
    """
    name: str = program[0]
    inside: Sequence[Any] = program[1:]
    if name in _LETTERS:
        return at[name]
    if name == "number":
        return inside[0]
    if name == "part":
        letter, stride, size = inside
        return at[letter] // number_of(stride, lengths) % number_of(size, lengths)
    if name == "sum":
        total: Any = number_of(inside[0], lengths)
        for factor, atom in inside[1:]:
            term, times = _wide(run(atom, at, tensors, lengths)), number_of(factor, lengths)
            total = total + (term if times == 1 else term.to(torch.int64) * times)
        return total
    if name == "read":
        number, *places = inside
        found = tensors[int(number)]
        return found[tuple(_index(run(place, at, tensors, lengths), at) for place in places)]
    if name in {"eq", "le"}:
        return _APPLIED[name](*(_wide(run(item, at, tensors, lengths)) for item in inside))
    return _APPLIED[name](*(run(item, at, tensors, lengths) for item in inside))


def _index(place: Any, at: Mapping[str, Tensor]) -> Any:
    return torch.zeros_like(at["j"]) + place if isinstance(place, int) else place


def _tensor(item: Any) -> Any:
    return item if isinstance(item, torch.Tensor) else torch.tensor(item)


def _where(condition: Any, chosen: Any, other: Any) -> Any:
    return torch.where(_tensor(condition), chosen, other)


def _all(first: Any, *others: Any) -> Any:
    for other in others:
        first = first & other
    return first


def _any(first: Any, *others: Any) -> Any:
    for other in others:
        first = first | other
    return first


def _wide(item: Any) -> Any:
    """An integer in a type that no number beside it is cut to."""
    return item.to(torch.int64) if isinstance(item, torch.Tensor) and item.dtype not in _WIDE else item


def _nonzero(item: Any) -> Any:
    return item if item.dtype == torch.bool else item != 0


def _opposite(item: Any) -> Any:
    return _tensor(item).logical_not()


def _unmasked(item: Any) -> Any:
    return item > MASKS


def _divided(one: Any, other: Any) -> Any:
    """A quotient; integers are divided where nothing remains, as graphs have it."""
    floating = any(isinstance(item, float) or getattr(item, "is_floating_point", bool)() for item in (one, other))
    return one / other if floating else one // other


_APPLIED: dict[str, Callable[..., Any]] = {
    "Abs": torch.abs,
    "Add": operator.add,
    "Div": _divided,
    "Equal": operator.eq,
    "Exp": torch.exp,
    "Greater": operator.gt,
    "GreaterOrEqual": operator.ge,
    "Less": operator.lt,
    "LessOrEqual": operator.le,
    "Mod": operator.mod,
    "Mul": operator.mul,
    "Neg": operator.neg,
    "Sub": operator.sub,
    "Unmasked": _unmasked,
    "and": _all,
    "eq": operator.eq,
    "le": operator.le,
    "nonzero": _nonzero,
    "not": _opposite,
    "or": _any,
    "where": _where,
}
