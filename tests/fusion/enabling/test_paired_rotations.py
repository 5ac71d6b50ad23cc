"""Rotations with the channels of a pair side by side: the same attention, and where they stay as they are."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import numpy_helper

import onnx_attnfuse
from onnx_attnfuse.certify.certificate import certify
from tests.support.bundled import Array, run

_HEADS, _SIZE, _LENGTH = 4, 8, 6
_WIDTH = _HEADS * _SIZE
_TURNED = "{name}r = com.microsoft.RotaryEmbedding<num_heads = 4{more}>({name}b, places, {name}cos, {name}sin)"
_ATTENTION = "out = com.microsoft.MultiHeadAttention<num_heads = 4>({query}, {key}, vb)"


def _side(name: str, more: str = "") -> str:
    return f"{name}p = MatMul(x, w{name}) {name}b = Add({name}p, b{name}) " + _TURNED.format(name=name, more=more)


def _model(
    query: str = _side("q"), key: str = _side("k"), attention: str = _ATTENTION, outputs: str = "", heads: int = _HEADS
) -> onnx.ModelProto:
    """An attention of four heads, or of one, with tables of their own for queries and keys."""
    nodes = f"{query} {key} vp = MatMul(x, wv) vb = Add(vp, bv) {attention.format(query='qr', key='kr')}"
    text = f"""<ir_version: 9, opset_import: ["" : 20, "com.microsoft" : 1]>
    main (float[b, {_LENGTH}, {_WIDTH}] x, int64[b, {_LENGTH}] places) => (float[b, {_LENGTH}, {_WIDTH}] out{outputs})
    {{ {nodes} }}""".replace("num_heads = 4", f"num_heads = {heads}")
    model = onnx.parser.parse_model(text)
    numbers = np.random.default_rng(0)
    shapes = {f"{part}{name}": (_WIDTH, _WIDTH)[part == "b" :] for part in "wb" for name in "qkv"}
    shapes |= {f"{name}{table}": (_LENGTH, _WIDTH // heads // 2) for name in "qk" for table in ("cos", "sin")}
    for name, shape in shapes.items():
        model.graph.initializer.append(numpy_helper.from_array(numbers.standard_normal(shape).astype(np.float32) / 2, name))
    return model


def _optimized(model: onnx.ModelProto, ep: str = "cuda") -> onnx.ModelProto:
    arch = {"arch": "sm90"} if ep == "cuda" else {}
    return onnx_attnfuse.optimize(model, ep=ep, **arch).model


def _outputs(model: onnx.ModelProto) -> list[Array]:
    numbers = np.random.default_rng(1)
    places = numbers.integers(0, _LENGTH, (2, _LENGTH))
    x = numbers.standard_normal((2, _LENGTH, _WIDTH)).astype(np.float32)
    return list(run(model, {"x": x, "places": places}).values())


def _rotations(model: onnx.ModelProto) -> list[dict[str, int]]:
    nodes = [node for node in model.graph.node if node.op_type == "RotaryEmbedding"]
    return [{item.name: item.i for item in node.attribute} for node in nodes]


@pytest.mark.parametrize("biased", [True, False])
def test_pairs_stand_side_by_side_and_heads_are_one(biased: bool) -> None:
    model = _model() if biased else _model(*(_side(name).replace("Add", "Identity").replace(f", b{name})", ")") for name in "qk"))
    optimized = _optimized(model)
    assert _rotations(optimized) == [{"num_heads": 1, "interleaved": 1}] * 2
    assert [node.op_type for node in optimized.graph.node].count("Tile") == 4
    assert not {item.name for item in optimized.graph.initializer} & {"wq", "wk"}
    np.testing.assert_allclose(_outputs(optimized)[0], _outputs(model)[0], atol=2e-5)
    assert _rotations(_optimized(optimized)) == _rotations(optimized)


def test_tables_are_repeated_once_for_all_who_read_them() -> None:
    model = _model(key=_side("k").replace("kcos, ksin", "qcos, qsin"))
    optimized = _optimized(model)
    assert [node.op_type for node in optimized.graph.node].count("Tile") == 2
    np.testing.assert_allclose(_outputs(optimized)[0], _outputs(model)[0], atol=2e-5)


def test_rows_that_are_moved_in_between_are_moved_all_the_same() -> None:
    key = _side("k").replace("kp = MatMul(x, wk)", "flat = Reshape(x, rows) kf = MatMul(flat, wk) kp = Reshape(kf, back)")
    model = _model(key=key)
    for name, shape in {"rows": [-1, _WIDTH], "back": [-1, _LENGTH, _WIDTH]}.items():
        model.graph.initializer.append(numpy_helper.from_array(np.array(shape), name))
    kept = _rotations(_optimized(model))
    assert kept == [{"num_heads": 4}] * 2  # a bias behind rows that were moved is none of the product
    model = _model(key=key.replace("kb = Add(kp, bk)", "kb = Identity(kp)"))
    for name, shape in {"rows": [-1, _WIDTH], "back": [-1, _LENGTH, _WIDTH]}.items():
        model.graph.initializer.append(numpy_helper.from_array(np.array(shape), name))
    optimized = _optimized(model)
    assert _rotations(optimized) == [{"num_heads": 1, "interleaved": 1}] * 2
    np.testing.assert_allclose(_outputs(optimized)[0], _outputs(model)[0], atol=2e-5)


@pytest.mark.parametrize(
    "changed",
    [
        {"key": _side("k", ", interleaved = 1")},
        {"key": _side("k").replace("kr = com", "ko = com") + " kr = Neg(ko)"},
        {"key": _side("k") + " other = Neg(kr)", "outputs": f", float[b, {_LENGTH}, {_WIDTH}] other"},
        {"key": _side("k") + " other = Neg(kp)", "outputs": f", float[b, {_LENGTH}, {_WIDTH}] other"},
        {"key": _side("k").replace("kb = Add(kp, bk)", "kb = Tanh(kp)")},
        {"attention": "out, present, values = com.microsoft.MultiHeadAttention<num_heads = 4>({query}, {key}, vb)",
         "outputs": f", float[b, 4, {_LENGTH}, 8] present"},
        {"heads": 1, "query": _side("q"), "key": _side("k")},
    ],
    ids=["other pairs", "not the keys", "keys are read", "the product is read", "no product", "a cache", "one head"],
)  # fmt: skip
def test_rotations_stay_where(changed: dict[str, str]) -> None:
    model = _model(**changed)
    kept = _rotations(model)
    optimized = _optimized(model)
    assert _rotations(optimized) == kept
    np.testing.assert_allclose(_outputs(optimized)[0], _outputs(model)[0], atol=2e-5)


@pytest.mark.parametrize("swapped", [False, True])
def test_the_order_of_channels_is_proved_and_another_is_not(swapped: bool) -> None:
    model, optimized = _model(), _optimized(_model())
    if swapped:
        (rotary,) = (node for node in optimized.graph.node if node.op_type == "RotaryEmbedding" and "k" in node.name)
        made = {name: node for node in optimized.graph.node for name in node.output}
        product = made[made[rotary.input[0]].input[0]]
        (weight,) = (item for item in optimized.graph.initializer if item.name == product.input[1])
        array = numpy_helper.to_array(weight).copy()
        array[:, [0, 2]] = array[:, [2, 0]]
        weight.CopyFrom(numpy_helper.from_array(array, weight.name))
    assert certify(ir.from_proto(model), ir.from_proto(optimized)).is_complete == (not swapped)


def test_it_is_for_cuda() -> None:
    assert all("interleaved" not in item or not item["interleaved"] for item in _rotations(_optimized(_model(), "cpu")))
