"""Operators of the standard by their effect on elements, and the domains that operators are in.

A node is known by its name only where all of it is understood (`graph.schemas`).

Whoever needs several classes joins them where they are needed, `REARRANGES | CASTS`, and says there why one is left out.
"""

from __future__ import annotations

import typing

from onnx_attnfuse.graph.schemas import STANDARD, why_unknown

if typing.TYPE_CHECKING:
    import onnx_ir as ir

CONTRIB = "com.microsoft"
"""The domain of ONNX Runtime's own operators."""
_UNKNOWN = "?"
"""The domain that operators are in of which a part is unknown: no reader has one there."""

RESHAPES = frozenset(["Flatten", "Reshape", "Squeeze", "Unsqueeze"])
"""All elements in their order, in another shape."""
REARRANGES = RESHAPES | {"Identity", "Transpose"}
"""Every element of the first input once."""
REPEATS = frozenset(["Expand", "Tile"])
"""Every element of the first input, perhaps more than once."""
SLICES = frozenset(["Slice", "Split"])
"""Ranges of the first input along its axes."""
GATHERS = frozenset(["Gather", "GatherElements", "GatherND"])
"""Elements of the first input at indices that the second has."""
CASTS = frozenset(["Cast"])
"""Every element in the type that an attribute names. CastLike is left out: its type depends on another value."""
ASKS_SHAPE = frozenset(["Shape", "Size"])
"""Results that depend on the shape of the input and on no element of it."""

COMPARES = frozenset(["Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"])
"""Truth values, from one number of each of two inputs."""
LOGICAL = frozenset(["And", "Not", "Or", "Xor"])
"""Truth values, from one truth value of each input."""
ELEMENTWISE = (
    COMPARES
    | LOGICAL
    | frozenset(["BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor"])
    | frozenset("Abs Add Ceil Clip Div Floor Max Mean Min Mod Mul Neg Pow Reciprocal Round Sign Sqrt Sub Sum Where".split())
    | frozenset("Cos Erf Exp IsInf IsNaN Log Relu Sigmoid Sin Tanh".split())
)
"""Each element computed from one element of each input, broadcast over each other."""
REDUCTIONS = frozenset(
    "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare".split()
)
"""One element for all along some axes."""
RANDOM = frozenset("Bernoulli Dropout Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike".split())
"""Operators that may give other elements each time they run."""
CONTROL_FLOW = frozenset(["If", "Loop", "Scan"])
"""Operators that run a graph of their own."""

_OPERATORS = STANDARD | {CONTRIB, "ai.onnx.preview"}
_NO_SOFTMAX = frozenset(["LinearAttention"])
"""Operators of com.microsoft that are called attention and have no softmax."""


def is_standard(node: ir.Node | None, *ops: str) -> typing.TypeGuard[ir.Node]:
    """Whether there is a node, it is one of the standard's operators, of `ops` or whichever, and nothing of it is unknown."""
    return node is not None and (not ops or node.op_type in ops) and node.domain in STANDARD and why_unknown(node) is None


def is_contrib(node: ir.Node | None, *ops: str) -> typing.TypeGuard[ir.Node]:
    """Whether there is a node, it is one of com.microsoft's operators, of `ops` or whichever, and nothing of it is unknown."""
    return node is not None and (not ops or node.op_type in ops) and node.domain == CONTRIB and why_unknown(node) is None


def plain_domain(domain: str) -> str:
    """The domain with the standard's two names made one, the empty one."""
    return "" if domain in STANDARD else domain


def read_as(node: ir.Node) -> tuple[str, str]:
    """Domain, the standard's as the empty one, and operator that a reader may take a node for; of no domain if it is unknown."""
    return (plain_domain(node.domain) if why_unknown(node) is None else _UNKNOWN), node.op_type


def is_attention(node: ir.Node) -> bool:
    """Whether the node is an attention by itself; com.microsoft calls all of its own so, those to come included."""
    if node.domain == CONTRIB:
        return node.op_type.endswith("Attention") and node.op_type not in _NO_SOFTMAX
    return node.domain in STANDARD and node.op_type == "Attention"


def is_other_attention(node: ir.Node) -> bool:
    """Whether the node is called attention and is none that is read: without a softmax, or with a formula of its own."""
    return node.op_type.endswith("Attention") and node.domain in _OPERATORS and not is_attention(node)
