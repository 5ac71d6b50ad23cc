"""Whether a test holds anywhere in a tensor, by a sum: `Cast(ReduceMax(Cast(test)))` as `ReduceSum(test) > 0`.

    Cast(float32) ─ IsInf ─ Cast(int64) ─ ReduceMax ─ Cast(bool)      T5 in float16 asks before each clamp whether x overflows
    IsInf ─ Cast(float16) ─ ReduceSum ─ Greater(0)

CUDA's kernel for a maximum of integers computes in float64. A sum of ones and zeros is above 0, also where it overflows, exactly
where there is a one.
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.fusion.enabling.rule import EnablingChange, enabling
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attribute, given, is_standard
from onnx_attnfuse.graph.dtypes import HALVES
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.rules.reading import axes_of

_COUNTED = ir.DataType.FLOAT16
_TAKES_HALVES = 20
"""The opset from which on IsInf takes half precision."""


@enabling("tests for any true element computed by ReduceSum", "ReduceMax", "any-by-sum")
def as_sum(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """The maximum of truth values, which are only asked whether one is true, as a sum that is above 0."""
    facts = builder.facts
    data, result = given(node, 0), node.outputs[0]
    counted = None if data is None else data.producer()
    if not is_standard(counted, "Cast") or "nonempty-axes" not in facts.assumed.names:
        return None
    test, asked = counted.inputs[0], [user for user, _ in result.uses()]
    rank = None if test is None else facts.rank(test)
    if test is None or rank is None or facts.dtype(test) != ir.DataType.BOOL or result.is_graph_output() or not asked:
        return None
    if not all(is_standard(user, "Cast") and attribute(user, "to") == ir.DataType.BOOL for user in asked):
        return None
    axes = axes_of(node, 1, rank, facts)
    if axes is None and (given(node, 1) is not None or attribute(node, "axes") is not None):
        return None
    if not axes and attribute(node, "noop_with_empty_axes", 0):
        return None
    own = _without_cast(test, builder)
    keep = bool(attribute(node, "keepdims", 1))
    count = builder.reduce("ReduceSum", builder.cast(own, _COUNTED), axes or range(rank), keep=keep)
    holds = builder.elementwise("Greater", [count, builder.scalar(0.0, _COUNTED)])
    pairs = tuple((user.outputs[0], holds) for user in asked)
    return EnablingChange(pairs, (_asked_of(test, facts),), ("nonempty-axes",))


def _asked_of(test: ir.Value, facts: Facts) -> ir.Value:
    """The half-precision number that IsInf is asked of in a wider type; the truth value itself where there is none."""
    node = test.producer()
    wide = node.inputs[0] if is_standard(node, "IsInf") else None
    cast = None if wide is None else wide.producer()
    narrow = cast.inputs[0] if is_standard(cast, "Cast") else None
    is_wider = wide is not None and facts.dtype(wide) in {ir.DataType.FLOAT, ir.DataType.DOUBLE}
    return narrow if narrow is not None and is_wider and facts.dtype(narrow) in HALVES else test


def _without_cast(test: ir.Value, builder: Builder) -> ir.Value:
    """Whether numbers are infinite, asked of them in their own type, which is the same."""
    narrow, node = _asked_of(test, builder.facts), test.producer()
    if narrow is test or node is None or builder.opset < _TAKES_HALVES:
        return test
    kept = {name: attribute(node, name) for name in node.attributes}
    return builder.node("IsInf", [narrow], kept)
