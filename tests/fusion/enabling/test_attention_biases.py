"""Biases of an attention on CUDA: which are left, where they are added, and that nothing else changes."""

from __future__ import annotations

import collections

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

import onnx_attnfuse
from tests.support.bundled import Array, run

_TEXT = """<ir_version: 9, opset_import: ["" : 18]>
model (float[b, s, 16] x, {mask}{inputs}) => (float[b, s, 16] out{outputs})
<int64[4] split = {{0, 0, 2, 8}},
 int64[3] flat = {{0, 0, 16}}>
{{
    {projections}
    kt = Transpose<perm = [0, 2, 3, 1]>(k4) q = Transpose<perm = [0, 2, 1, 3]>(q4) v = Transpose<perm = [0, 2, 1, 3]>(v4)
    qk = MatMul(q, kt) scores = Mul(qk, scale) {masked}
    weights = Softmax<axis = -1>(seen) heads = MatMul(weights, v) turned = Transpose<perm = [0, 2, 1, 3]>(heads)
    mixed = Reshape(turned, flat) {behind}
}}"""
_BOOLEAN = "bias = Where(mask, zero, low) seen = Add(scores, bias)"
_FILLED = "not_mask = Not(mask) seen = Where(not_mask, low, scores)"
_FILLED_AND_BIASED = "kept = Where(mask, scores, low) seen = Add(kept, more)"
_BEHIND = "product = MatMul(mixed, wo) out = Add(product, bo)"


def _projected(name: str, *, bias: bool = True) -> str:
    added = f"{name}_b = Add({name}_p, b{name})" if bias else f"{name}_b = Identity({name}_p)"
    return f"{name}_p = MatMul(x, w{name}) {added} {name}4 = Reshape({name}_b, split)"


def model_of(
    masked: str = _BOOLEAN,
    behind: str = _BEHIND,
    biased: str = "qkv",
    mask: str = "bool[b, 1, s, s] mask",
    outputs: str = "",
    inputs: str = "",
    kind: str = "float",
    low: float | None = None,
) -> onnx.ModelProto:
    """Two heads of 8 channels, with biases of the projections in `biased`, in numbers of a kind."""
    dtype = {"float": np.float32, "float16": np.float16}[kind]
    projections = " ".join(_projected(name, bias=name in biased) for name in "qkv")
    text = _TEXT.format(projections=projections, masked=masked, behind=behind, mask=mask, outputs=outputs, inputs=inputs)
    model = onnx.parser.parse_model(text.replace("float[", f"{kind}["))
    constants = {"scale": 0.35, "zero": 0.0, "low": np.finfo(dtype).min if low is None else low, "more": [[[1]], [[2]]]}
    for name, number in constants.items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(number, dtype), name))
    numbers = np.random.default_rng(0)
    given = {item.name for item in model.graph.input}
    for name in ("wq", "wk", "wv", "wo", "bq", "bk", "bv", "bo"):
        if name in given:
            continue
        array = numbers.standard_normal((16, 16) if name[0] == "w" else 16).astype(dtype)
        model.graph.initializer.append(numpy_helper.from_array(array / (4 if name[0] == "w" else 1), name))
    return model


def fused(model: onnx.ModelProto, ep: str = "cuda") -> onnx.ModelProto:
    """What is written for it, verified."""
    result = onnx_attnfuse.optimize(model, ep=ep, arch="sm90" if ep == "cuda" else None, verify="sites")
    assert result.report.fused == 1
    return result.model


def attention(model: onnx.ModelProto) -> onnx.NodeProto:
    """Its one MultiHeadAttention."""
    (node,) = (node for node in model.graph.node if node.op_type == "MultiHeadAttention")
    return node


def count(model: onnx.ModelProto, op: str) -> int:
    """How often an operator stands in it."""
    return collections.Counter(node.op_type for node in model.graph.node)[op]


def outputs_of(model: onnx.ModelProto, *, level: bool) -> list[Array]:
    """What ONNX Runtime gives, without optimizations of its own; `level`: the mask has a row without a key."""
    numbers = np.random.default_rng(1)
    kept = numbers.random((2, 1, 5, 5)) < 0.6
    kept[:, :, :, 0] = True
    kept[0, 0, 3] = not level
    given = {"x": numbers.standard_normal((2, 5, 16)).astype(np.float32), "mask": kept}
    return list(run(model, given | {"wo": numbers.standard_normal((16, 16)).astype(np.float32)}).values())


@pytest.mark.parametrize("level", [False, True])
@pytest.mark.parametrize("masked", [_FILLED_AND_BIASED, "seen = Identity(scores)"], ids=["queries are 0", "no mask"])
def test_the_bias_of_queries_is_left_and_that_of_values_is_in_the_next_product(masked: str, level: bool) -> None:
    model = model_of(masked, low=-10000)
    result = fused(model)
    assert len(attention(result).input) < 4 or attention(result).input[3] == ""
    (reader,) = (node for node in result.graph.node if attention(result).output[0] in node.input)
    assert reader.op_type == "MatMul"
    assert not {"bk", "bv"} & {item.name for item in result.graph.initializer}
    for wanted, found in zip(outputs_of(model, level=level), outputs_of(result, level=level), strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-5)


@pytest.mark.parametrize("low", [-1e5, None])
def test_biases_stay_where_rows_of_an_added_mask_may_be_rounded(low: float | None) -> None:
    model = model_of(_BOOLEAN, low=low)
    result = fused(model)
    assert attention(result).input[3] == "attnfuse/projection_bias"
    np.testing.assert_allclose(outputs_of(result, level=True)[0], outputs_of(model, level=True)[0], atol=2e-3)


def test_rows_without_a_key_get_a_plain_zero_by_a_condition_of_their_size() -> None:
    result = onnx.shape_inference.infer_shapes(fused(model_of(_FILLED, kind="float16")))
    (chosen,) = (node for node in result.graph.node if node.op_type == "Where" and node.output[0] == attention(result).input[0])
    zero = next(item for item in result.graph.initializer if item.name == chosen.input[1])
    assert (list(zero.dims), float(numpy_helper.to_array(zero))) == ([], 0)
    (made,) = (node for node in result.graph.node if node.output[0] == chosen.input[0])
    assert made.op_type == "Expand"


@pytest.mark.parametrize("biased", ["qkv", "kv"], ids=["queries have a bias", "queries have none"])
def test_rows_that_a_mask_is_added_to_are_emptied_by_a_product_that_keeps_nan(biased: str) -> None:
    model = model_of(_BOOLEAN, biased=biased, kind="float16")
    result = onnx.shape_inference.infer_shapes(fused(model))
    assert attention(result).input[3] == ""
    made = {name: node for node in result.graph.node for name in node.output}
    product = made[attention(result).input[0]]
    kept = made[made[product.input[1]].input[0]]
    assert (product.op_type, kept.op_type, made[kept.input[0]].op_type) == ("Mul", "Not", "Expand")


@pytest.mark.parametrize(
    ("behind", "outputs"),
    [
        ("product = MatMul(mixed, wo) out = Add(product, bo) twice = Add(mixed, mixed)", ", float[b, s, 16] twice"),
        ("product = MatMul(mixed, wo) out = Tanh(product)", ""),
        ("product = MatMul(mixed, wo) out = Add(product, x)", ""),
    ],
    ids=["the result is used twice", "no bias", "a residual"],
)
def test_the_bias_of_values_is_added_behind_where_no_product_takes_it(behind: str, outputs: str) -> None:
    model = model_of(_FILLED_AND_BIASED, behind, outputs=outputs, low=-10000)
    result = fused(model)
    (added,) = (node for node in result.graph.node if attention(result).output[0] in node.input)
    assert added.op_type == "Add"
    for wanted, found in zip(outputs_of(model, level=True), outputs_of(result, level=True), strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_the_bias_behind_an_attention_goes_into_the_sum_with_its_normalization() -> None:
    behind = "product = MatMul(mixed, wo) biased = Add(product, bo) total = Add(biased, x) {} out = Add(total, normal)"
    model = model_of(_FILLED_AND_BIASED, behind.format("normal = LayerNormalization(total, bv, bq)"), low=-10000)
    result = fused(model)
    (normalized,) = (node for node in result.graph.node if node.op_type == "SkipLayerNormalization")
    (product,) = (node for node in result.graph.node if normalized.input[0] in node.output)
    assert (product.op_type, len(normalized.input)) == ("MatMul", 5)
    for wanted, found in zip(outputs_of(model, level=True), outputs_of(result, level=True), strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_a_weight_that_is_an_input_takes_no_bias() -> None:
    model = model_of(_FILLED_AND_BIASED, inputs=", float[16, 16] wo", low=-10000)
    result = fused(model)
    (added,) = (node for node in result.graph.node if attention(result).output[0] in node.input)
    assert added.op_type == "Add"
    np.testing.assert_allclose(outputs_of(result, level=False)[0], outputs_of(model, level=False)[0], atol=2e-5)


def test_keys_that_are_an_output_keep_their_bias() -> None:
    model = model_of(outputs=", float[b, s, 16] k_b")
    result = fused(model)
    for wanted, found in zip(outputs_of(model, level=False), outputs_of(result, level=False), strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_on_a_cpu_nothing_is_moved() -> None:
    result = fused(model_of(), ep="cpu")
    assert count(result, "Add") == 4


_ALONE = """<ir_version: 9, opset_import: ["" : 20, "com.microsoft" : 1]>
model (float[2, 5, 16] x{inputs}) => (float[2, 5, 16] out)
{{ q = MatMul(x, wq) kp = MatMul(x, wk) vp = MatMul(x, wv) k = Add(kp, bk) v = Add(vp, bv)
   qn = Tanh(q) kn = {keys} mixed = com.microsoft.MultiHeadAttention<num_heads = 2>(qn, kn, v{mask})
   product = MatMul(mixed, wo) out = Add(product, bo) }}"""


@pytest.mark.parametrize(
    ("keys", "mask", "left"),
    [("Identity(k)", "", set()), ("Tanh(k)", "", {"bk"}), ("Identity(k)", ", , , mask", {"bk", "bv"})],
    ids=["no mask", "keys are changed", "a mask"],
)
def test_biases_that_are_added_before_an_attention_without_a_mask_leave_it(keys: str, mask: str, left: set[str]) -> None:
    model = onnx.parser.parse_model(_ALONE.format(keys=keys, mask=mask, inputs=", float[2, 2, 5, 5] mask" if mask else ""))
    numbers = np.random.default_rng(0)
    for name in ("wq", "wk", "wv", "wo", "bk", "bv", "bo"):
        array = numbers.standard_normal((16, 16) if name[0] == "w" else 16).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array / 4, name))
    result = onnx_attnfuse.optimize(model, ep="cuda", arch="sm90").model
    assert {item.name for item in result.graph.initializer} & {"bk", "bv"} == left
    feeds = {"x": numbers.standard_normal((2, 5, 16)).astype(np.float32)}
    feeds |= {"mask": numbers.standard_normal((2, 2, 5, 5)).astype(np.float32)} if mask else {}
    for wanted, found in zip(run(model, feeds).values(), run(result, feeds).values(), strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-5)
