"""Kinds of biases added to the scores of keys that are seen: ALiBi, relative positions, tables; ALiBi's slopes recovered.

The field's names: alibi, relative_position (a table over heads, rows and columns), relative_position_buckets (T5: a table that a
function of the distance is looked up in), decomposed_relative_position (rows and columns of an image apart), table (a constant),
constant_bias, computed_bias.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnx_attnfuse.attention.masks.mask_terms import bare, elements_of, factors_of, value_of
from onnx_attnfuse.attention.spec import Axes4
from onnx_attnfuse.certify.terms import Term
from onnx_attnfuse.graph.constants import constant_array, is_constant
from onnx_attnfuse.graph.ops import CASTS, REARRANGES

_VIEWS = REARRANGES | CASTS | {"Expand", "Slice"}
_TABLE = 1 << 22
_MAX_SHOWN_SLOPES = 3


def bias_kinds(biases: Sequence[Term], axes: Axes4) -> list[str]:
    """The names of several added terms."""
    kinds = [_kind(bias, axes) for bias in biases]
    if len(biases) == 2 and kinds == ["computed_bias"] * 2 and _part_columns(biases, axes):
        return ["decomposed_relative_position"]
    return kinds


def with_slopes(bias: Term, axes: Axes4) -> str:
    """ALiBi's slopes as words to follow a formula; empty where there are none."""
    slopes = _slopes(bias, axes)
    if slopes is None:
        return ""
    shown = [f"{slope:.4g}" for slope in slopes]
    words = shown if len(shown) <= _MAX_SHOWN_SLOPES else [*shown[: _MAX_SHOWN_SLOPES - 1], "...", shown[-1]]
    return f" (slopes {', '.join(words)})"


def _kind(bias: Term, axes: Axes4) -> str:
    elements = elements_of(bias)
    if not elements:
        return "alibi" if factors_of(bias) else "constant_bias"
    if _slope_element(bias, axes) is not None or _slopes(bias, axes) is not None:
        return "alibi"
    if factors_of(bias) <= {*axes.i, *axes.j, *axes.n}:
        buckets = any(_is_looked_up(value_of(element)) for element in elements)
        return "relative_position_buckets" if buckets else "relative_position"
    return "table" if all(is_constant(value_of(element)) for element in elements) else "computed_bias"


def _slope_element(bias: Term, axes: Axes4) -> Term | None:
    """The factor that differs by head, where the others do not and say something of positions."""
    factors = _multiplied(bias)
    slopes = [item for item in factors if item.op == "element" and factors_of(item) and factors_of(item) <= {*axes.n}]
    rest = [item for item in factors if item not in slopes]
    places = {factor for item in rest for factor in factors_of(item)}
    if len(slopes) != 1 or not places & {*axes.j} or places & {*axes.n}:
        return None
    return slopes[0]


def _multiplied(part: Term) -> list[Term]:
    if part.op == "apply" and part.data in {"Mul", "Neg"}:
        return [factor for argument in part.args for factor in _multiplied(argument)]
    return [bare(part)]


def _slopes(bias: Term, axes: Axes4) -> npt.NDArray[np.float64] | None:
    """The slope for each head: the growth of the bias from key to key."""
    element = _slope_element(bias, axes)
    if element is not None:
        array = _viewed_constant(value_of(element))
        return None if array is None or array.size != axes.num_heads else np.abs(array.reshape(-1))
    if bare(bias).op != "element" or not factors_of(bias) <= {*axes.i, *axes.j, *axes.n}:
        return None
    table = _viewed_constant(value_of(bare(bias)))
    if table is None or table.ndim < 2 or table.size != axes.num_heads * table.shape[-1] or table.shape[-1] < _MAX_SHOWN_SLOPES:
        return None
    steps = np.diff(table.reshape(axes.num_heads, -1), axis=1)
    return steps[:, 0] if np.allclose(steps, steps[:, :1], rtol=1e-3) and steps.any() else None


def _origin(value: ir.Value | None) -> ir.Value | None:
    """The value that others are views of, followed up to a constant or an operator that computes."""
    while value is not None and not is_constant(value):
        node = value.producer()
        if node is None or node.op_type not in _VIEWS:
            break
        value = node.inputs[0]
    return value


def _viewed_constant(value: ir.Value | None) -> npt.NDArray[np.float64] | None:
    """The constant that a value is a view of."""
    array = constant_array(_origin(value), limit=_TABLE)
    return None if array is None else np.asarray(array, np.float64)


def _is_looked_up(value: ir.Value) -> bool:
    """Whether the value is rows of a constant table at places that are computed."""
    origin = _origin(value)
    node = None if origin is None else origin.producer()
    if node is None or node.op_type != "Gather":
        return False
    return is_constant(node.inputs[0]) and _viewed_constant(node.inputs[1]) is None


def _part_columns(biases: Sequence[Term], axes: Axes4) -> bool:
    """Whether each reads at a part of the key's place only, and all of them together at the whole."""
    parts = [factors_of(bias) & {*axes.j} for bias in biases]
    return all(parts) and not parts[0] & parts[1] and parts[0] | parts[1] == {*axes.j}
