"""Attentions read from ONNX text and planned, with nothing built: what the planner chooses, in a line."""

from __future__ import annotations

import onnx
import onnx.parser
import onnx_ir as ir

from onnx_attnfuse.attention.masks.classify import Meaning, understand
from onnx_attnfuse.attention.masks.index_reader import Reader
from onnx_attnfuse.attention.masks.intervals import Bounds
from onnx_attnfuse.attention.match.candidates import anchor_of, find_candidates
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.fusion.plan import Lowering, Plan
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.opset import Opset
from onnx_attnfuse.graph.scopes import all_names, scopes
from onnx_attnfuse.kernels.device import Device
from onnx_attnfuse.language.registry.discovery import load
from onnx_attnfuse.options import Options
from onnx_attnfuse.targets import name_of
from onnx_attnfuse.targets.base import BuildContext

_TEXT = """<ir_version: 9, opset_import: ["" : {opset}]>
attention ({kind}[b, 8, s, 64] q, {kind}[b, {heads}, {keys}, 64] k, {kind}[b, {heads}, {keys}, 64] v{given})
    => ({kind}[b, 8, s, 64] out)
<float eighth = {{0.125}}, float nothing = {{0}}, float least = {{{lowest}}}, int64 zero = {{0}}, int64 one = {{1}},
 int64[1] last = {{1}}, int64[1] second = {{2}}, int64[2] inner = {{1, 2}}, int64[5] four = {{1, 1, 4, 1, 1}},
 int64[4] joined = {{0, 8, -1, 64}}>
{{
    scale = Cast<to = {number}>(eighth)
    none = Cast<to = {number}>(nothing)
    lowest = Cast<to = {number}>(least)
    {keys_and_values}
    kt = Transpose<perm = [0, 1, 3, 2]>(ks)
    qk = MatMul(q, kt)
    scaled = Mul(qk, scale)
    {masked}
    [softmax] weights = Softmax<axis = -1>(masked)
    out = MatMul(weights, vs)
}}"""
_AS_THEY_ARE = "ks = Identity(k) vs = Identity(v)"
_APPENDED = "ks = Concat<axis = 2>(past_k, k) vs = Concat<axis = 2>(past_v, v)"
_REPEATED = """
    ku = Unsqueeze(k, second) ke = Expand(ku, four) ks = Reshape(ke, joined)
    vu = Unsqueeze(v, second) ve = Expand(vu, four) vs = Reshape(ve, joined)
"""
_PLAIN = "masked = Identity(scaled)"
_PADDED = """
    kept = Cast<to = 9>(mask) seen = Unsqueeze(kept, inner)
    bias = Where(seen, none, lowest) masked = Add(scaled, bias)
"""
_CAUSAL = """
    length = Shape<start = 2, end = 3>(q) count = Squeeze(length) places = Range(zero, count, one)
    rows = Unsqueeze(places, last) seen = GreaterOrEqual(rows, places)
    bias = Where(seen, none, lowest) masked = Add(scaled, bias)
"""
_BIASED = "masked = Add(scaled, given)"
_KINDS = {
    "plain": (_AS_THEY_ARE, _PLAIN, ""),
    "padded": (_AS_THEY_ARE, _PADDED, ", int64[b, {keys}] mask"),
    "causal": (_AS_THEY_ARE, _CAUSAL, ""),
    "biased": (_AS_THEY_ARE, _BIASED, ", {kind}[b, 8, s, {keys}] given"),
    "cached": (_APPENDED, _PLAIN, ", {kind}[b, 8, p, 64] past_k, {kind}[b, 8, p, 64] past_v"),
    "grouped": (_REPEATED, _CAUSAL, ""),
}
"""Keys and values, what is done to the scores, and further inputs, by kind of attention."""


def model_of(kind: str, dtype: str = "float", *, keys: str = "s", opset: int = 18) -> onnx.ModelProto:
    """A model with one attention of eight heads of 64 channels, as an exporter spells it.

    Args:
        kind: `plain`, `padded`, `causal`, `biased`, `cached` or `grouped`, the latter with a triangle too.
        dtype: Its element type, `float`, `float16` or `bfloat16`.
        keys: The symbol for the number of keys.
        opset: The version of the standard operators.
    """
    keys_and_values, masked, given = _KINDS[kind]
    text = _TEXT.format(
        opset=opset,
        kind=dtype,
        number=onnx.TensorProto.DataType.Value(dtype.upper()),
        lowest="-65504" if dtype == "float16" else "-3.4028234663852886e38",
        heads=2 if kind == "grouped" else 8,
        keys=keys,
        given=given.format(kind=dtype, keys=keys),
        keys_and_values=keys_and_values,
        masked=masked,
    )
    return onnx.parser.parse_model(text)


def read(proto: onnx.ModelProto, device: Device) -> tuple[AttentionSpec, Meaning, BuildContext]:
    """The only attention of a model as its reader understands it, and a context to plan it with."""
    model = ir.from_proto(proto)
    (scope,) = scopes(model)
    builder, reader = Builder(scope.graph, scope.facts, scope.opset, all_names(model)), Reader(scope.facts)
    (candidate,) = find_candidates(scope, load(Options()).readers, keep_outputs=False)
    assert candidate.spec is not None
    builder.at(anchor_of(candidate.spec))
    context = BuildContext(builder, Bounds(scope.facts), reader, device, Opset(model, asked=False))
    return candidate.spec, understand(candidate.spec, reader), context


def said(plan: Plan) -> str:
    """The operators and encodings of a plan, the fastest first: `MultiHeadAttention lengths if right_padded, else ... bias`."""
    return ", else ".join(_one(item) for item in (*plan.faster, plan.main))


def _one(item: Lowering) -> str:
    encoding = item.encoding
    words = [name_of(item.target), encoding.mask]
    words += [word for word in ("causal", "windowed", "cached", "single") if getattr(encoding, word)]
    words += [] if encoding.when == "always" else [f"if {encoding.when}"]
    return " ".join(words)
