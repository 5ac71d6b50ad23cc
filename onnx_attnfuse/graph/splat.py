"""Values that are one number throughout: constants, values broadcast from them, and values computed from these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.graph.constants import attribute, constant_array
from onnx_attnfuse.graph.dtypes import FLOATS, within
from onnx_attnfuse.graph.facts_view import Known
from onnx_attnfuse.graph.ops import CASTS, REARRANGES, REPEATS, SLICES, is_standard
from onnx_attnfuse.graph.rounding import ROUNDS, dequantized_number, dequantizes, quantized_number, quantizes
from onnx_attnfuse.graph.uses import origin

_SPREADS = REARRANGES | REPEATS | SLICES
_COMPUTES: Mapping[str, Any] = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide, "Neg": np.negative}
_READ = frozenset([*_SPREADS, *CASTS, *_COMPUTES, "ConstantOfShape", *ROUNDS])
_DEPTH = 6
"""Operators on numbers that are looked through, in sequence: a sum may have all of a model before it."""


def number(value: ir.Value, facts: Known, depth: int = _DEPTH) -> float | None:
    """The number that every element of a value is, as its type holds it; None if that is not known."""
    content = facts.content(value)
    if isinstance(content, tuple) and len(content) == 1:
        (content,) = content
    if isinstance(content, (int, float)):
        return float(content)
    array = constant_array(value)
    if array is None:
        node = value.producer()
        return None if node is None or node.op_type not in _READ else _filled(node, facts, depth)
    if array.size == 0:
        return None
    first = array.reshape(-1)[:1]
    return float(first[0]) if bool((array == first).all()) else None


def _filled(node: ir.Node, facts: Known, depth: int) -> float | None:
    """The number that a node fills its result with."""
    if quantizes(node) or dequantizes(node):
        return _rounded(node, facts)
    if not is_standard(node) or depth == 0:
        return None
    if node.op_type == "ConstantOfShape":
        fill = attribute(node, "value")
        return 0.0 if fill is None else float(fill.numpy().flat[0])
    first = node.inputs[0] if node.inputs else None
    if first is None:
        return None
    if node.op_type in _SPREADS:
        return number(first, facts, depth)
    if node.op_type in CASTS:
        return _in_type(number(first, facts, depth), facts.dtype(first), facts.dtype(node.outputs[0]))
    compute, dtype = _COMPUTES.get(node.op_type), facts.dtype(node.outputs[0])
    if compute is None or dtype is None or not dtype.is_floating_point():
        return None
    numbers = list[float | None]()
    for value in node.inputs:
        numbers += [None if value is None else number(value, facts, depth - 1)]
        if numbers[-1] is None and node.op_type != "Mul":
            return None
    if node.op_type == "Mul" and 0 in numbers and any(_was_truth(value, facts) for value in node.inputs):
        return 0.0
    if None in numbers:
        return None
    with np.errstate(all="ignore"):
        return float(compute(*(np.asarray(item).astype(dtype.numpy()) for item in numbers)))


def _was_truth(value: ir.Value | None, facts: Known) -> bool:
    """Whether a value was cast from truth values, and so is neither infinite nor NaN."""
    source = origin(value, *CASTS, *_SPREADS)
    return source is not None and (facts.dtype(source) == ir.DataType.BOOL or _was_truth(source, facts))


def _in_type(known: float | None, old: ir.DataType | None, new: ir.DataType | None) -> float | None:
    """A number that is cast."""
    if known is None or old is None or new is None:
        return None
    if new in FLOATS:
        return within(known, new)
    with np.errstate(all="ignore"):
        return float(np.asarray(known).astype(old.numpy()).astype(new.numpy()))


def _rounded(node: ir.Node, facts: Known) -> float | None:
    """The number that one half of a rounding makes of a number."""
    known = [None if value is None else number(value, facts) for value in node.inputs[:3]]
    if len(known) < 2:
        return None
    code, scale, point = (*known, 0.0)[:3]
    if dequantizes(node):
        return dequantized_number(code, scale, point)
    return quantized_number(node, code, scale, point, facts)
