"""A small decoder of two layers as ONNX text, each of its traits to be chosen."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser

PROJECTED = "q{i} = MatMul({x}, wq{i}) k{i} = MatMul({x}, wk{i}) v{i} = MatMul({x}, wv{i})"
_LAYER = """
   {projected}
   q4{i} = Reshape(q{i}, queries) k4{i} = Reshape(k{i}, groups) v4{i} = Reshape(v{i}, others)
   qt{i} = Transpose<perm=[0, 2, 1, 3]>(q4{i}) kt{i} = Transpose<perm=[0, 2, 1, 3]>(k4{i})
   vt{i} = Transpose<perm=[0, 2, 1, 3]>(v4{i}) {rotated}
   present_key_{i} = Concat<axis=2>(past_key_{i}, kr{i}) present_value_{i} = Concat<axis=2>(past_value_{i}, vt{i})
   ku{i} = Unsqueeze(present_key_{i}, second) ke{i} = Expand(ku{i}, shares) kj{i} = Reshape(ke{i}, joined)
   kx{i} = Transpose<perm=[0, 1, 3, 2]>(kj{i})
   vu{i} = Unsqueeze(present_value_{i}, second) ve{i} = Expand(vu{i}, parts) vj{i} = Reshape(ve{i}, joined)
   qk{i} = MatMul(qr{i}, kx{i}) scaled{i} = Mul(qk{i}, scale) masked{i} = Add(scaled{i}, bias) {more}
   weights{i} = Softmax<axis=-1>({scores}) {after} mixed{i} = MatMul({weights}, vj{i})
   back{i} = Transpose<perm=[0, 2, 1, 3]>(mixed{i}) flat{i} = Reshape(back{i}, wide) out{i} = MatMul(flat{i}, wo{i})
   y{i} = Add({x}, out{i})
"""
_TURNED = """
   {t}c{i} = Mul({t}t{i}, cos) {t}a{i} = Slice({t}t{i}, zeros, half, last) {t}b{i} = Slice({t}t{i}, half, far, last)
   {t}n{i} = Neg({t}b{i}) {t}h{i} = Concat<axis=-1>({t}n{i}, {t}a{i}) {t}s{i} = Mul({t}h{i}, sin) {t}r{i} = Add({t}c{i}, {t}s{i})
"""
_ANGLES = """
   pf = Cast<to=1>({positions}) pu = Unsqueeze(pf, last) angles = Mul(pu, frequencies) both = Concat<axis=-1>(angles, angles)
   cf = Cos(both) sf = Sin(both) c2 = Cast<to={number}>(cf) s2 = Cast<to={number}>(sf)
   cos = Unsqueeze(c2, first) sin = Unsqueeze(s2, first)
"""
_TEXT = """<ir_version: 9, opset_import: ["" : 18]>
decoder ({tokens}{inputs},
         {t}[b, {keys}, past, {h}] past_key_0, {t}[b, {values}, past, {h}] past_value_0,
         {t}[b, {keys}, {other}, {h}] past_key_1, {t}[b, {values}, {other}, {h}] past_value_1)
     => ({t}[b, s, 99] logits, {t}[b, {keys}, total, {h}] present_key_0, {t}[b, {values}, total, {h}] present_value_0,
         {t}[b, {keys}, total1, {h}] present_key_1, {t}[b, {values}, total1, {h}] present_value_1{outputs})
<int64[4] queries = {{0, 0, 4, {h}}}, int64[4] groups = {{0, 0, {keys}, {h}}}, int64[4] others = {{0, 0, {values}, {h}}},
 int64[5] shares = {{1, 1, {key_shares}, 1, 1}}, int64[5] parts = {{1, 1, {value_shares}, 1, 1}},
 int64[4] joined = {{0, 4, -1, {h}}}, int64[3] wide = {{0, 0, {width}}}, float scale32 = {{0.35}}, float nothing32 = {{0}},
 float fill32 = {{-60000}}, int64 zero = {{0}}, int64 one = {{1}}, int64 reach = {{3}}, int64[1] zeros = {{0}},
 int64[1] first = {{1}}, int64[1] second = {{2}}, int64[1] last = {{-1}}, int64[2] middle = {{1, 2}},
 int64[1] half = {{{half}}}, int64[1] far = {{9223372036854775807}}>
{{ scale = Cast<to={number}>(scale32) nothing = Cast<to={number}>(nothing32) fill = Cast<to={number}>(fill32)
   ps = Shape<start=2, end=3>(past_key_0) p1 = Squeeze(ps) ns = Shape<start=1, end=2>({first}) n1 = Squeeze(ns)
   t1 = Add(p1, n1) rows = Range(p1, t1, one) i = Unsqueeze(rows, last) j = Range(zero, t1, one)
   causal = {causal} {seen} bias = Where(allowed, nothing, fill)
   x = {embedded} {angles} {layers}
   {end} }}"""
PADDED = "kept = Cast<to=9>(attention_mask) row = Unsqueeze(kept, middle) allowed = And(causal, row)"
UNPADDED = "allowed = Identity(causal)"
WINDOWED = """back = Sub(i, j) near = LessOrEqual(back, reach) seen = And(causal, near)
   kept = Cast<to=9>(attention_mask) row = Unsqueeze(kept, middle) allowed = And(seen, row)"""
SINKS = {
    "more": """bs{i} = Shape<start=0, end=1>(masked{i}) ls{i} = Shape<start=2, end=3>(masked{i})
       beside{i} = Concat<axis=0>(bs{i}, first, ls{i}, first) wide_sink{i} = Expand(sinks, beside{i})
       both{i} = Concat<axis=-1>(masked{i}, wide_sink{i})""",
    "scores": "both{i}",
    "after": "kept_weights{i} = Slice(weights{i}, zeros, last, last)",
    "weights": "kept_weights{i}",
}
"""A score without a value for each head; `sinks` are (1, 4, 1, 1)."""
LOGITS = "logits = MatMul(y1, head)"


def decoder(
    *,
    seen: str = PADDED,
    causal: str = "LessOrEqual(j, i)",
    size: int = 16,
    heads: tuple[int, int] = (2, 2),
    projected: str = PROJECTED,
    rotated: bool = True,
    given: bool = True,
    dtype: str = "float",
    other: str = "past",
    more: str = "",
    scores: str = "masked{i}",
    after: str = "",
    weights: str = "weights{i}",
    embedded: bool = False,
    between: str = "next = Identity(y0)",
    end: str = LOGITS,
    inputs: str = "",
    outputs: str = "",
) -> onnx.ModelProto:
    """A decoder with peaky weights.

    Args:
        seen: What makes of `causal` which keys are `allowed`.
        causal: The triangle.
        size: Channels of a head.
        heads: Heads of keys and of values, where there are 4 of queries.
        projected: What makes queries, keys and values of the input of a layer, each (b, s, heads · channels).
        rotated: Queries and keys are rotated.
        given: Positions are an input; else they are counted from the past on.
        dtype: Its element type.
        other: What the length of the second layer's past is called.
        more: What is done to the masked scores of a layer.
        scores: What goes into its Softmax.
        after: What is done to its weights.
        weights: What the values are multiplied with.
        embedded: Tokens are given as embeddings.
        between: What makes `next`, that the second layer reads, of `y0`, that the first gives.
        end: What makes the outputs.
        inputs: More inputs.
        outputs: More outputs.
    """
    number = {"float": 1, "float16": 10}[dtype]
    turned = (
        "".join(_TURNED.replace("{t}", letter) for letter in "qk")
        if rotated
        else "qr{i} = Identity(qt{i}) kr{i} = Identity(kt{i})"
    )
    layer = (
        _LAYER.replace("{projected}", projected).replace("{rotated}", turned).replace("{more}", more).replace("{scores}", scores)
    )
    layer = layer.replace("{after}", after).replace("{weights}", weights)
    layers = layer.format(i=0, x="x") + between + layer.format(i=1, x="next")
    counted = "" if given else "rows1 = Unsqueeze(rows, zeros)"
    angles = counted + _ANGLES.format(positions="position_ids" if given else "rows1", number=number) if rotated else ""
    inputs += ", int64[b, total] attention_mask" if "attention_mask" in seen else ""
    inputs += ", int64[b, s] position_ids" if rotated and given else ""
    text = _TEXT.format(
        t=dtype,
        h=size,
        keys=heads[0],
        values=heads[1],
        key_shares=4 // heads[0],
        value_shares=4 // heads[1],
        half=size // 2,
        width=4 * size,
        number=number,
        causal=causal,
        seen=seen,
        angles=angles,
        layers=layers,
        other=other,
        end=end,
        tokens=f"{dtype}[b, s, {4 * size}] inputs_embeds" if embedded else "int64[b, s] input_ids",
        first="inputs_embeds" if embedded else "input_ids",
        embedded="Identity(inputs_embeds)" if embedded else "Gather(table, input_ids)",
        inputs=inputs,
        outputs=outputs,
    )
    model = onnx.parser.parse_model(text.replace("total1", "total" if other == "past" else "total1"))
    for name, array in _weights(size, *heads).items():
        wanted = np.float32 if dtype == "float" or name == "frequencies" else np.float16
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(wanted), name))
    return model


def _weights(size: int, keys: int, values: int) -> dict[str, np.ndarray]:
    """Weights by name; matrices keep the variance of what they are multiplied with, and a little more."""
    rng, width = np.random.default_rng(3), 4 * size
    shapes = {"head": (width, 99)}
    for i in range(2):
        shapes |= {f"wq{i}": (width, width), f"wk{i}": (width, keys * size)}
        shapes |= {f"wv{i}": (width, values * size), f"wo{i}": (width, width)}
    found = {name: 1.3 * rng.standard_normal(shape) / shape[0] ** 0.5 for name, shape in shapes.items()}
    found |= {"table": 1.3 * rng.standard_normal((99, width)), "sinks": rng.standard_normal((1, 4, 1, 1))}
    return found | {"frequencies": 0.3 ** np.arange(size // 2)}
