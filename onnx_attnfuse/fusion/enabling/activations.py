"""Activations: Gelus as ONNX Runtime's operators for them, and tests whether any of them overflows.

    Cast(float32) ─ IsInf ─ Cast(int64) ─ ReduceMax ─ Cast(bool)      T5 in float16 asks before each clamp whether x overflows
    IsInf ─ Cast(float16) ─ ReduceSum ─ Greater(0)

CUDA's kernel for a maximum of integers computes in float64. A sum of ones and zeros is above 0, also where it overflows, exactly
where there is a one.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.fusion.enabling.rule import EnablingChange, added_bias, enabling, halves, only_use
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attribute, given, is_standard
from onnx_attnfuse.graph.dtypes import HALVES
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import CONTRIB
from onnx_attnfuse.graph.rules.reading import axes_of
from onnx_attnfuse.graph.uses import only_reader, origin, producer_of, viewers
from onnx_attnfuse.kernels.operators.bias_split_gelu import INFO, WIDTHS
from onnx_attnfuse.language.expression import Tensor, erf
from onnx_attnfuse.language.matcher.formula import Formula


@enabling("half-precision Gelus fused with their bias, or zeros", "Erf Gelu com.microsoft.Gelu", "half-gelu")
def as_gelu(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """A Gelu, or the one that an Erf is a part of, as BiasGelu.

    ONNX Runtime's own fusion compares the constants with float32's and finds none in float16, so that the widest tensor of every
    layer goes through five kernels. A bias that is added before comes along.

    It gets zeros where it has no bias: the kernel of Gelu reads one number at a time.
    """
    facts, found = builder.facts, _read_gelu(node, builder.facts)
    if found is None or facts.dtype(node.outputs[0]) not in HALVES:
        return None
    builder.at(producer_of(found.result))
    return _biased(found.x, found.result, added_bias(found.x, facts), f"{node.name}/BiasGelu", builder)


def _biased(
    x: ir.Value, result: ir.Value, added: tuple[ir.Value, ir.Value] | None, hint: str, builder: Builder
) -> EnablingChange | None:
    """BiasGelu of a value, or of what it is with a bias; None where neither a bias nor how many zeros it takes is known."""
    dims, dtype = builder.facts.dims(x), builder.facts.dtype(x)
    if added is None:
        if not dims or not isinstance(dims[-1], int) or dtype is None:
            return None
        added = x, builder.constant(np.zeros([dims[-1]], dtype.numpy()))
    new = builder.node("BiasGelu", added, domain=CONTRIB, hint=hint)
    return EnablingChange(((result, new),), (added[0],))


@dataclasses.dataclass(frozen=True)
class _Gelu:
    """A Gelu with the error function."""

    x: ir.Value
    result: ir.Value
    nodes: tuple[ir.Node, ...]


@Formula
def _gelu(x: Tensor) -> Tensor:
    return x * (1 + erf(x / math.sqrt(2))) / 2


_MOST_STEPS = 4
"""Nodes from an error function to the result."""


def _read_gelu(node: ir.Node, facts: Facts) -> _Gelu | None:
    """The Gelu that an operator is, or of which an Erf is a part; None if there is none."""
    value = node.outputs[0]
    if not is_standard(node, "Erf"):
        x = given(node, 0)
        return None if x is None or attribute(node, "approximate", "none") != "none" else _Gelu(x, value, (node,))
    for _ in range(_MOST_STEPS):
        reader = only_reader(value)
        if reader is None:
            break
        value = reader.outputs[0]
        found = _gelu.at(value, facts)
        if found is not None:
            return _Gelu(found.values["x"], value, found.nodes)
    return None


_TYPES = frozenset([ir.DataType.FLOAT, ir.DataType.FLOAT16])
_RANK = 3


@enabling("products gated by their own Gelu fused to BiasSplitGelu", "Erf Gelu com.microsoft.Gelu", "split-gelu")
def as_split_gelu(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """The product of one half with the Gelu of the other, from the node that the Gelu starts from.

        MatMul ── Add ── Split ── l ─────────── Mul     becomes     MatMul ── BiasSplitGelu
                           └───── r ── Gelu ──── ┘

    So the gate of a diffusion model's MLP, the widest tensor of each of its layers, is read once and written once. The kernel
    knows three widths, and the Gelu with the error function; it gates the left half by the right one.
    """
    facts = builder.facts
    found = _read_gelu(node, facts)
    multiplied = None if found is None else only_use(found.result, "Mul")
    if found is None or multiplied is None:
        return None
    left, right = next((value for value in multiplied.inputs if value is not found.result), None), found.x
    whole = None if left is None else halves(left, right, facts)
    if left is None or whole is None or any(value.is_graph_output() for value in (left, right)):
        return None
    if not {*viewers(left), *viewers(right)} <= {multiplied, *found.nodes}:
        return None
    dims, dtype = facts.dims(whole), facts.dtype(whole)
    if dims is None or len(dims) != _RANK or dtype is None or dtype not in _TYPES:
        return None
    width = dims[-1]
    if not isinstance(width, int) or width not in WIDTHS:
        return None
    if "nonempty-axes" not in facts.assumed.names and not all(isinstance(dim, int) and dim for dim in dims):
        return None
    is_cut_only = set(viewers(whole)) == {left.producer(), right.producer()} and not whole.is_graph_output()
    biased = added_bias(whole, facts) if is_cut_only else None
    builder.at(multiplied)
    x, bias = (whole, builder.constant(np.zeros(width, dtype.numpy()))) if biased is None else biased
    fused = builder.node(INFO.name, [x, bias], domain=CONTRIB, hint=f"{node.name}/{INFO.name}")
    return EnablingChange(((multiplied.outputs[0], fused),), (x,))


_COUNTED = ir.DataType.FLOAT16
_TAKES_HALVES = 20
"""The opset from which on IsInf takes half precision."""


@enabling("tests for any true element computed by ReduceSum", "ReduceMax", "any-by-sum")
def as_sum(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """The maximum of truth values, which are only asked whether one is true, as a sum that is above 0."""
    facts = builder.facts
    test, result = origin(given(node, 0), "Cast"), node.outputs[0]
    asked, rank = [user for user, _ in result.uses()], facts.rank(test)
    if "nonempty-axes" not in facts.assumed.names:
        return None
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
    wide = origin(test, "IsInf")
    narrow = origin(wide, "Cast")
    is_wider = wide is not None and facts.dtype(wide) in {ir.DataType.FLOAT, ir.DataType.DOUBLE}
    return narrow if narrow is not None and is_wider and facts.dtype(narrow) in HALVES else test


def _without_cast(test: ir.Value, builder: Builder) -> ir.Value:
    """Whether numbers are infinite, asked of them in their own type, which is the same."""
    narrow, node = _asked_of(test, builder.facts), test.producer()
    if narrow is test or node is None or builder.opset < _TAKES_HALVES:
        return test
    kept = {name: attribute(node, name) for name in node.attributes}
    return builder.node("IsInf", [narrow], kept)
