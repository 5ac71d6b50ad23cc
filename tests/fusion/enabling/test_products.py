"""Products that are written for CUDA: kept apart from their bias, and cut by their weights; what stays, and what both compute."""

from __future__ import annotations

import collections
import pathlib

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import numpy_helper

import onnx_attnfuse
from onnx_attnfuse.certify.certificate import certify
from tests.support.bundled import BUNDLED, run
from tests.support.rewrites import counts, optimized

_TEXT = """<ir_version: 9, opset_import: ["" : 20, "com.microsoft" : 1]>
model ({type}[{sizes}, 8] x{inputs}) => ({type}[{sizes}, 8] seen, {outputs})
<int64[1] none = {{0}}, int64[1] middle = {{6}}, int64[1] early = {{5}}, int64[1] end = {{99}}, int64[1] last = {{-1}},
 int64[1] rows = {{1}}, int64[1] most = {{4}}, int64[1] third = {{2}},
 int64[4] parts = {{0, 0, 2, 6}}, int64[2] flat = {{-1, 12}}>
{{ kt = Transpose<perm = [0, 2, 1]>(x) qk = MatMul(x, kt) small = Mul(qk, scale) weights = Softmax<axis = -1>(small)
   seen = MatMul(weights, x) {nodes} }}"""
_KINDS = {"float": np.float32, "float16": np.float16}


def model_of(nodes: str, outputs: str, *, sizes: str = "b, s", kind: str = "float", inputs: str = "") -> onnx.ModelProto:
    """An attention, and what is done with its result and a weight `w` of 12 columns."""
    text = _TEXT.format(type=kind, sizes=sizes, nodes=nodes, inputs=inputs, outputs=outputs)
    model = onnx.parser.parse_model(text)
    weight = np.random.default_rng(0).standard_normal((8, 12))
    given = {"bias": np.arange(12), "half": np.arange(6), "scale": np.asarray(0.35), "w": weight}
    for name, array in given.items():
        if name not in {entry.name for entry in model.graph.input}:
            model.graph.initializer.append(numpy_helper.from_array(array.astype(_KINDS[kind]), name))
    return model


def same(before: onnx.ModelProto, after: onnx.ModelProto) -> None:
    """Holds results against those of the source, both without optimisations."""
    (entry,) = before.graph.input
    x = (
        np.random.default_rng(1)
        .standard_normal((2, 3, 8))
        .astype(onnx.helper.tensor_dtype_to_np_dtype(entry.type.tensor_type.elem_type))
    )
    wanted, found = run(before, {"x": x}), run(after, {"x": x})
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name].astype(np.float32), array.astype(np.float32), rtol=2e-3, atol=2e-3)


_BIASED = "product = MatMul(seen, w) y = Add(product, bias)"


@pytest.mark.parametrize("kind", ["float", "float16"])
def test_a_product_of_numbers_as_sizes_is_kept_apart_from_its_bias(kind: str) -> None:
    model = model_of(_BIASED, f"{kind}[2, 3, 12] y", sizes="2, 3", kind=kind)
    after = optimized(model)
    assert (counts(after)["FusedMatMul"], counts(after)["Add"]) == (1, 1)
    same(model, after)
    assert counts(onnx_attnfuse.optimize(after, ep="cuda").model) == counts(after)
    assert certify(ir.from_proto(model), ir.from_proto(after)).is_complete


def test_matrices_are_kept_apart_from_their_bias_whatever_their_sizes() -> None:
    nodes = "first = Gather<axis = 1>(seen, none0) product = MatMul(first, w) y = Add(product, bias)"
    model = model_of(nodes, "float[b, 12] y")
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(0), "none0"))
    after = optimized(model)
    assert counts(after)["FusedMatMul"] == 1
    same(model, after)


@pytest.mark.parametrize(
    ("nodes", "outputs", "sizes", "ep"),
    [
        pytest.param(_BIASED, "float[b, s, 12] y", "b, s", "cuda", id="sizes are symbols"),
        pytest.param(_BIASED, "float[2, 3, 12] y", "2, 3", "cpu", id="a CPU"),
        pytest.param(_BIASED, "float[2, 3, 12] y, float[2, 3, 12] product", "2, 3", "cuda", id="the product is an output"),
        pytest.param(
            f"{_BIASED} z = Neg(product)", "float[2, 3, 12] y, float[2, 3, 12] z", "2, 3", "cuda", id="it is read twice"
        ),
        pytest.param("y = MatMul(seen, w)", "float[2, 3, 12] y", "2, 3", "cuda", id="nothing is added"),
        pytest.param(
            "product = MatMul(seen, w) other = Neg(product) p = MatMul(x, w) y = Add(p, other)",
            "float[2, 3, 12] y",
            "2, 3",
            "cuda",
            id="what is added is no bias",
        ),
    ],
)
def test_products_that_onnxruntime_leaves_stay(nodes: str, outputs: str, sizes: str, ep: str) -> None:
    assert counts(optimized(model_of(nodes, outputs, sizes=sizes), ep))["FusedMatMul"] == 0


def operators_of_onnxruntime(model: onnx.ModelProto, folder: pathlib.Path) -> collections.Counter[str]:
    """What ONNX Runtime makes of a model when a session starts."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(folder / "optimised.onnx")
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return counts(onnx.load(options.optimized_model_filepath))


def test_onnxruntime_finds_its_own_fusions_in_what_is_written(tmp_path: pathlib.Path) -> None:
    nodes = (
        f"{_BIASED} z = Gelu(y) "
        + "p = MatMul(z, back) o = Add(p, scale8) t = Add(o, seen) out = LayerNormalization(t, scale8, scale8)"
    )
    model = model_of(nodes, "float[2, 3, 8] out", sizes="2, 3")
    values = {"back": np.ones((12, 8), np.float32), "scale8": np.arange(8, dtype=np.float32)}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in values.items())
    after = optimized(model)
    same(model, after)
    source, found = (operators_of_onnxruntime(item, tmp_path) for item in (model, after))
    assert (source["Gemm"], source["BiasGelu"]) == (2, 0)
    assert (found["Gemm"], found["BiasGelu"], found["SkipLayerNormalization"]) == (0, 1, 1)


def test_a_model_to_be_captured_is_kept_apart_from_its_biases_in_all_layers(tmp_path: pathlib.Path) -> None:
    model = onnx.load(next(path for path in BUNDLED if path.stem == "bert__dyn18__sdpa"))
    result = onnx_attnfuse.optimize(model, ep="cuda", cuda_graph=True, dim={"batch": 2, "seq": 16}, verify="model").model
    found = operators_of_onnxruntime(result, tmp_path)
    assert (found["Gemm"], found["FusedMatMul"], found["SkipLayerNormalization"]) == (0, 6, 4)


_PIECES = "float[b, s, 6] left, float[b, s, 6] right"
_HALVES = "wide = MatMul(seen, w) a, c = Split<axis = -1, num_outputs = 2>(wide) left = Neg(a) right = Neg(c)"


@pytest.mark.parametrize(
    ("nodes", "products", "outputs"),
    [
        pytest.param(_HALVES, 2, _PIECES, id="Split"),
        pytest.param(
            "product = MatMul(seen, w) wide = Add(bias, product) left, right = Split<axis = 2, num_outputs = 2>(wide)",
            2,
            _PIECES,
            id="with a bias",
        ),
        pytest.param(
            "wide = MatMul(seen, w) left = Slice(wide, none, middle, last) right = Slice(wide, middle, end, last)",
            2,
            _PIECES,
            id="Slices",
        ),
        pytest.param(
            "a = MatMul(seen, w) p = Reshape(a, parts) left = Slice(p, none, rows, third) right = Slice(p, rows, end, third)",
            2,
            "float[b, s, 1, 6] left, float[b, s, 1, 6] right",
            id="parts of columns",
        ),
        pytest.param(
            "a = MatMul(seen, w) p = Reshape(a, parts) left = Slice(p, none, rows, last) right = Slice(p, rows, end, last)",
            1,
            "float[b, s, 2, 1] left, float[b, s, 2, 5] right",
            id="inside of parts",
        ),
        pytest.param(
            "a = MatMul(seen, w) p = Reshape(a, flat) left = Slice(p, none, middle, last) right = Slice(p, middle, end, last)",
            2,
            "float[t, 6] left, float[t, 6] right",
            id="rows are moved before",
        ),
        pytest.param(
            "wide = MatMul(seen, w) left = Slice(wide, none, middle, last) right = Slice(wide, early, end, last)",
            1,
            "float[b, s, 6] left, float[b, s, 7] right",
            id="pieces overlap",
        ),
        pytest.param(
            "wide = MatMul(seen, w) left = Slice(wide, none, most, rows) right = Slice(wide, rows, end, rows)",
            1,
            "float[b, t, 12] left, float[b, u, 12] right",
            id="rows are cut",
        ),
        pytest.param(f"{_HALVES} y = Neg(wide)", 1, f"{_PIECES}, float[b, s, 12] y", id="the whole is read too"),
        pytest.param(f"{_HALVES} z = MatMul(x, w)", 2, f"{_PIECES}, float[b, s, 12] z", id="the weight is read too"),
        pytest.param(
            f"more = Neg(half) {_HALVES.replace('left = Neg(a)', 'left = Add(a, more)')}", 2, _PIECES, id="what is added behind"
        ),
    ],
)
def test_a_product_that_is_cut_into_pieces_becomes_one_for_each(nodes: str, products: int, outputs: str) -> None:
    model = model_of(nodes, outputs)
    after = optimized(model)
    assert sum(node.op_type == "MatMul" for node in after.graph.node) == products
    assert (counts(after)["Split"] + counts(after)["Slice"] == 0) == (products == 2 and "z =" not in nodes)
    same(model, after)


def test_what_is_computed_as_a_weight_stays_whole() -> None:
    model = model_of(_HALVES, _PIECES, inputs=", float[8, 12] w")
    assert counts(optimized(model))["Split"] == 1


def test_pieces_of_a_product_are_proved_equal() -> None:
    model = model_of(_HALVES, _PIECES)
    assert certify(ir.from_proto(model), ir.from_proto(optimized(model))).is_complete
