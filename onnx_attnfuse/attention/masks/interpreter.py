"""Evaluating mask expressions on numbers, to hold them against the graph they were read from."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Factor
from onnx_attnfuse.attention.masks import expression as ex
from onnx_attnfuse.attention.masks.expression import Element, Expression, Index
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.thresholds import MASKS

Array = npt.NDArray[Any]


class NotEvaluated(Exception):
    """The expression applies an operator that has no meaning here."""


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Numbers for all that expressions are made of."""

    lengths: Mapping[str, int]
    """By symbol."""
    indices: Mapping[Factor, Array]
    """The index variables, shaped to broadcast against each other."""
    values: Mapping[ir.Value, Array]
    """The values that elements are read from."""

    def evaluate(self, part: Expression) -> Array:
        """The expression at all indices.

        Raises:
            NotEvaluated: It cannot be evaluated.
        """
        match part:
            case ex.Linear():
                return self._linear(part)
            case Element():
                return self._element(part)
            case ex.Number(value) | ex.Truth(value):
                return np.asarray(value)
            case ex.Compare(form, equal):
                return self._linear(form) == 0 if equal else self._linear(form) <= 0
            case ex.NonZero(element):
                return self._element(element) != 0
            case ex.Not(inner):
                return ~self.evaluate(inner)
            case ex.And(parts):
                return functools.reduce(np.logical_and, map(self.evaluate, parts))
            case ex.Or(parts):
                return functools.reduce(np.logical_or, map(self.evaluate, parts))
            case ex.Choice(condition, chosen, other):
                return np.where(self.evaluate(condition), self.evaluate(chosen), self.evaluate(other))
            case ex.Apply():
                return self._applied(part)

    def _linear(self, form: ex.Linear) -> Array:
        total = np.asarray(sizes.evaluate(form.offset, self.lengths))
        for atom, coefficient in form.terms:
            value = self.indices[atom.factor] if isinstance(atom, Index) else self._element(atom)
            with np.errstate(invalid="ignore"):  # NaN becomes some integer, as it does in the model
                total = total + value.astype(np.int64) * sizes.evaluate(coefficient, self.lengths)
        return total

    def _element(self, element: Element) -> Array:
        """Places outside of the value are those of branches that are not taken."""
        value = self.values[element.value]
        places = [self.evaluate(item) for item in element.at]
        inside = tuple(
            np.clip(place, -length, length - 1).astype(np.int64) for place, length in zip(places, value.shape, strict=True)
        )
        return np.asarray(value[inside])

    def _applied(self, part: ex.Apply) -> Array:
        function = _FUNCTIONS.get(part.op)
        if function is None:
            raise NotEvaluated(part.op)
        with np.errstate(all="ignore"):
            return np.asarray(function(*(self.evaluate(item) for item in part.arguments)))


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Abs": np.abs,
    "Add": np.add,
    "Complement": functools.partial(np.subtract, 1),
    "Equal": np.equal,
    "Exp": np.exp,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "Max": np.maximum,
    "Min": np.minimum,
    "Mul": np.multiply,
    "Neg": np.negative,
    "Sub": np.subtract,
    "Unmasked": functools.partial(np.less, MASKS),
}
