"""Graphs that hold an attention twice, spelled out as `old` and fused as `new`, written as ONNX text."""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.verify.equivalence import EquivalenceChecker
from onnx_attnfuse.verify.verdict import Verdict

_TEXT = """
<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]>
g ({inputs}) => (old, new)
<int64[4] split = {{0, 0, 4, 8}}, int64[3] flat = {{0, 0, 32}}, int64[2] axes = {{1, 2}}, int64[1] one = {{1}},
 int64 none = {{0}}, float scale32 = {{0.25}}, float open32 = {{0}}, float closed32 = {{{closed}}}, float negative = {{-1}}>
{{
    scale = Cast<to = {number}>(scale32)
    open = Cast<to = {number}>(open32)
    {closing}
{nodes}
}}"""

UNFUSED = """
    qs = Reshape(q, split)
    ks = Reshape(k, split)
    vs = Reshape(v, split)
    qh = Transpose<perm = [0, 2, 1, 3]>(qs)
    kh = Transpose<perm = [0, 2, 3, 1]>(ks)
    vh = Transpose<perm = [0, 2, 1, 3]>(vs)
    qk = MatMul(qh, kh)
    scaled = Mul(qk, scale)
    {mask}
    weights = Softmax<axis = -1>(masked)
    {guard}
    mixed = MatMul(guarded, vh)
    back = Transpose<perm = [0, 2, 1, 3]>(mixed)
    old = Reshape(back, flat)
"""
PLAIN = UNFUSED.format(mask="masked = Identity(scaled)", guard="guarded = Identity(weights)")
PLAIN_FUSED = "new = com.microsoft.MultiHeadAttention<num_heads = 4, scale = 0.25>(q, k, v)"

PADDING = """
    kept = Greater(mask, none)
    row = Unsqueeze(kept, axes)
    bias = Where(row, open, closed)
"""
PADDED = PADDING + UNFUSED.format(mask="masked = Add(scaled, bias)", guard="guarded = Identity(weights)")
PADDED_FUSED = """
    length = Shape<start = 1, end = 2>(q)
    whole = Concat<axis = 0>(one, one, length, one)
    full = Expand(bias, whole)
    new = com.microsoft.MultiHeadAttention<num_heads = 4, scale = 0.25>(q, k, v, , , full)
"""
GUARDED = PADDING + UNFUSED.format(
    mask="masked = Add(scaled, bias)", guard="lost = IsNaN(weights)\n    guarded = Where(lost, open, weights)"
)
GUARDED_FUSED = PADDED_FUSED.replace("new =", "fused =") + "\n    bad = IsNaN(fused)\n    new = Where(bad, open, fused)"

LOWEST = "-3.4028234663852886e38"
SEPARATE = "{type}[b, s, 32] q, {type}[b, t, 32] k, {type}[b, t, 32] v"
MASKED = SEPARATE + ", int64[b, t] mask"


def graph(nodes: str, *, inputs: str = SEPARATE, dtype: str = "float", closed: str = LOWEST, opset: int = 18) -> ir.Model:
    """The model; `closed` is what the mask adds to a score that does not count, `inf` for the negative infinity."""
    number = {"float": 1, "float16": 10, "bfloat16": 16}[dtype]
    infinite = closed == "inf"
    text = _TEXT.format(
        opset=opset,
        inputs=inputs.format(type=dtype),
        closed="0" if infinite else closed,
        number=number,
        closing="closed = Div(negative, open)" if infinite else f"closed = Cast<to = {number}>(closed32)",
        nodes=nodes,
    )
    return ir.from_onnx_text(text.replace("(old, new)\n<", f"({dtype}[x, y, 32] old, {dtype}[x, y, 32] new)\n<"))


def values(model: ir.Model) -> dict[str, ir.Value]:
    """All values by name."""
    found = {value.name or "": value for value in model.graph.inputs}
    found |= {value.name or "": value for node in model.graph for value in node.outputs}
    return found | dict(model.graph.initializers.items())


def judged(
    model: ir.Model, frontier: tuple[str, ...] = ("q", "k", "v"), checker: EquivalenceChecker | None = None, **results: str
) -> Verdict:
    """The verdict on `new`, or on two values named by `old` and `new`, where the value named by `given` holds."""
    named = values(model)
    old, new = named[results.get("old", "old")], named[results.get("new", "new")]
    given = named.get(results.get("given", ""))
    return (checker or EquivalenceChecker()).check(
        [(old, new)], [named[stop] for stop in frontier], Facts(model.graph), model.opset_imports, given=given
    )
