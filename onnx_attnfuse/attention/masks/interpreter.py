"""Evaluating masks on numbers, to hold them against the graph they were read from."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Factor
from onnx_attnfuse.attention.masks.mask_terms import bare, constant_of, factor_of, linear, value_of
from onnx_attnfuse.attention.masks.operators import NUMBERS, RELATIONS
from onnx_attnfuse.certify.terms import Term
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.thresholds import MASKS

Array = npt.NDArray[Any]


class NotEvaluated(Exception):
    """The term applies an operator that has no meaning here."""


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Numbers for all that masks are made of."""

    lengths: Mapping[str, int]
    """By symbol."""
    indices: Mapping[Factor, Array]
    """The indices, shaped to broadcast against each other."""
    values: Mapping[ir.Value, Array]
    """The values that elements are read from."""

    def evaluate(self, part: Term) -> Array:
        """The term at all indices.

        Raises:
            NotEvaluated: It cannot be evaluated.
        """
        value = constant_of(part)
        if value is not None:
            return np.asarray(value if part.sort == "Real" else part.data)
        match part.op:
            case "const":
                return np.asarray(part.data)
            case "index":
                return self.indices[factor_of(part)]
            case "element":
                return self._element(part)
            case "apply" | "and" | "or" | "not" | "ite" | "eq0" | "le0":
                return self._applied(part.data if part.op == "apply" else part.op, *map(self.evaluate, part.args))
            case _:
                return self._sum(bare(part))

    def _sum(self, form: Term) -> Array:
        parts, rest = linear(form)
        total = np.asarray(sizes.evaluate(rest, self.lengths))
        for atom, coefficient in parts:
            with np.errstate(invalid="ignore"):  # NaN becomes some integer, as it does in the model
                total = total + self.evaluate(atom).astype(np.int64) * sizes.evaluate(coefficient, self.lengths)
        return total

    def _element(self, element: Term) -> Array:
        """Places outside of the value are those of branches that are not taken."""
        value = self.values[value_of(element)]
        places = [self.evaluate(item) for item in element.args]
        inside = tuple(
            np.clip(place, -length, length - 1).astype(np.int64) for place, length in zip(places, value.shape, strict=True)
        )
        return np.asarray(value[inside])

    def _applied(self, op: str, *items: Array) -> Array:
        function = _FUNCTIONS.get(op)
        if function is None:
            raise NotEvaluated(op)
        with np.errstate(all="ignore"):
            return np.asarray(function(*items))


def _all(*items: Array) -> Array:
    return functools.reduce(np.logical_and, items)


def _any(*items: Array) -> Array:
    return functools.reduce(np.logical_or, items)


def _quotient(one: Array, other: Array) -> Array:
    """ONNX's Div, which rounds integers to zero."""
    found = np.divide(one, other)
    return np.trunc(found) if np.issubdtype(np.result_type(one, other), np.integer) else found


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **NUMBERS,
    **{op: function for op, (function, _) in RELATIONS.items()},
    "Abs": np.abs,
    "Complement": functools.partial(np.subtract, 1),
    "Div": _quotient,
    "Exp": np.exp,
    "Neg": np.negative,
    "Unmasked": functools.partial(np.less, MASKS),
    "and": _all,
    "eq0": np.logical_not,
    "ite": np.where,
    "le0": functools.partial(np.greater_equal, 0),
    "not": np.logical_not,
    "or": _any,
}
