"""Scores that are shifted where a condition says so, as scores with a mask added.

    where(hidden, scores - 1e9, scores)    # keras.layers.Attention; a reader of sums wants scores - where(hidden, 1e9, 0)

tf2onnx writes such a choice as a sum of products with the condition and its opposite as numbers.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.assumptions import AssumptionName
from onnx_attnfuse.attention.match.contraction import read_contraction
from onnx_attnfuse.fusion.enabling.rule import EnablingChange
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import constant_array, is_constant, is_standard
from onnx_attnfuse.graph.dtypes import FLOATS
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import CASTS, REARRANGES

_Branches = tuple[ir.Value, ir.Value, ir.Value]
"""A condition, what is taken where it holds, and what is taken elsewhere."""

_SCALING = REARRANGES | CASTS | {"Div", "Mul", "Tanh"}
_REACHES = _SCALING | {"Add", "Max", "Min", "Sub", "Where"}
"""Operators that may stand between the product and the choice; masks may have made scores infinite by those but the scaling."""


def as_added_mask(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """A choice between scores and the scores with something added or subtracted, as one Add or Sub of a choice.

    Of a mask the same choice stays, for one who reads masks knows it as what it says.
    """
    facts = builder.facts
    branches, assumes = _choice(node, facts)
    if branches is None or facts.dtype(node.outputs[0]) not in FLOATS or not facts.assumed.names.issuperset(assumes):
        return None
    condition, *values = branches
    for shifted, plain in ((0, 1), (1, 0)):
        base, step = values[plain], values[shifted].producer()
        if step is None or not is_standard(step, "Add", "Sub") or base not in step.inputs[: 2 if step.op_type == "Add" else 1]:
            continue
        shift = step.inputs[1] if step.inputs[0] is base else step.inputs[0]
        dtype, dims = facts.dtype(base), facts.dims(node.outputs[0])
        if shift is None or dims is None or dims != facts.dims(base):
            continue
        if not _is_of_a_product(base, _SCALING if assumes else _REACHES, facts) or (assumes and not _is_finite(shift)):
            continue
        nothing = builder.scalar(-0.0 if step.op_type == "Add" else 0.0, dtype)  # either leaves every number as it is
        chosen = builder.elementwise("Where", [condition, *((shift, nothing) if shifted == 0 else (nothing, shift))], dtype)
        result = builder.node(step.op_type, [base, chosen], dims=dims, dtype=dtype, hint=f"{node.name}/masked")
        return EnablingChange(((node.outputs[0], result),), (base, shift, condition), assumes)
    return None


def _is_finite(value: ir.Value) -> bool:
    """Whether a tensor is known, and holds neither infinities nor NaN: 0 times either is no 0."""
    array = constant_array(value)
    return array is not None and bool(np.isfinite(array).all())


def _is_of_a_product(value: ir.Value, reaches: frozenset[str], facts: Facts) -> bool:
    """Whether a tensor is a product of two computed ones, behind which there are operators that it `reaches` through."""
    left, seen = [value], {value}
    while left:
        node = left.pop().producer()
        if node is None:
            continue
        product = read_contraction(node, facts)
        if product is not None and not any(map(is_constant, product.operands)):
            return True
        above = [value for value in node.inputs if value is not None and value not in seen and node.op_type in reaches]
        left += above
        seen.update(above)
    return False


def _choice(node: ir.Node, facts: Facts) -> tuple[_Branches | None, tuple[AssumptionName, ...]]:
    """The branches of a Where, or of `c · x + (1 - c) · y`, which is one where what is not taken is finite."""
    if is_standard(node, "Where"):
        condition, chosen, other = node.inputs
        return None if condition is None or chosen is None or other is None else (condition, chosen, other), ()
    factors = [_factors(value, facts) for value in node.inputs] if is_standard(node, "Add") else []
    for condition, holds, chosen in factors[0] if len(factors) == 2 else []:
        for same, opposite, other in factors[1]:
            if condition is same and holds is not opposite:
                return (condition, chosen, other) if holds else (condition, other, chosen), ("bounded-scores",)
    return None, ()


def _factors(product: ir.Value | None, facts: Facts) -> list[tuple[ir.Value, bool, ir.Value]]:
    """Truth values that a product is multiplied by as numbers: the value, whether it counts as it is, and the other factor."""
    node = None if product is None else product.producer()
    if node is None or not is_standard(node, "Mul"):
        return []
    found: list[tuple[ir.Value, bool, ir.Value]] = []
    for number, other in ((node.inputs[0], node.inputs[1]), (node.inputs[1], node.inputs[0])):
        cast = None if number is None else number.producer()
        truth, holds = None if cast is None or not is_standard(cast, "Cast") else cast.inputs[0], True
        while truth is not None and (inner := truth.producer()) is not None and is_standard(inner, "Not"):
            truth, holds = inner.inputs[0], not holds
        if truth is not None and other is not None and facts.dtype(truth) == ir.DataType.BOOL:
            found.append((truth, holds, other))
    return found
