"""Products with padded columns: where they are, what they compute, and that no weight is kept twice."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, numpy_helper

import onnx_attnfuse
from onnx_attnfuse.certify.certificate import certify
from onnx_attnfuse.fusion.enabling import products
from onnx_attnfuse.graph import io
from onnx_attnfuse.graph.assumptions import ASSUMPTIONS, ON_REQUEST
from onnx_attnfuse.kernels import providers
from tests.support.bundled import run
from tests.support.small_models import point_to

K, N = 256, 4099
WIDE = 4160
_ATTENTION = """kt = Transpose<perm = [0, 2, 1]>(x) qk = MatMul(x, kt) small = Mul(qk, scale)
   weights = Softmax<axis = -1>(small) seen = MatMul(weights, x)"""
_TEXT = """<ir_version: 9, opset_import: ["" : 18]>
model ({type}[b, s, {k}] x{inputs}) => ({outputs}) {{ {attention} {nodes} }}"""
Array = npt.NDArray[Any]


@pytest.fixture(autouse=True)
def _pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding pays on CUDA, as it will once it is measured."""
    record = providers.provider("cuda")
    monkeypatch.setitem(providers._records, "cuda", dataclasses.replace(record, pays=record.pays | {"padded-columns"}))


def model_of(
    nodes: str,
    *,
    n: int = N,
    k: int = K,
    dtype: str = "float16",
    inputs: str = "",
    outputs: str = "",
    turned: bool = False,
    **more: Array,
) -> onnx.ModelProto:
    """A model with an attention, whose result `seen` (b, s, k) goes into `nodes` with a weight `w`, (n, k) if `turned`."""
    text = _TEXT.format(
        type=dtype, k=k, nodes=nodes, inputs=inputs, attention=_ATTENTION, outputs=outputs or f"{dtype}[b, s, {n}] y"
    )
    model = onnx.parser.parse_model(text)
    kind = {"float16": np.float16, "float": np.float32}[dtype]
    weight = (np.random.default_rng(0).standard_normal((n, k) if turned else (k, n)) / 16).astype(kind)
    for name, array in {"scale": np.asarray(0.06, kind), "w": weight, **more}.items():
        if not any(entry.name == name for entry in model.graph.input):
            model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def optimized(model: onnx.ModelProto, ep: str = "cuda", without: str = "") -> tuple[onnx.ModelProto, int]:
    """The model as we fuse it for a GPU, judged, and how many products were padded; `without` an assumption."""
    assume = tuple(name for name in ASSUMPTIONS if name not in {without, *ON_REQUEST}) if without else ()
    result = onnx_attnfuse.optimize(model, ep=ep, verify="sites", assume=assume)
    assert result.report.fused == 1
    assert not result.report.failures
    notes = [note for note in result.report.notes if "multiple of 64 columns" in note]
    return result.model, int(notes[0].split()[0]) if notes else 0


def in_float32(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with all of float16 in float32, as ONNX Runtime's UnfoldTensor for the CPU takes no float16."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for item in copy.graph.initializer:
        if item.data_type == TensorProto.FLOAT16:
            item.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(item).astype(np.float32), item.name))
    for entry in (*copy.graph.input, *copy.graph.output, *copy.graph.value_info):
        if entry.type.tensor_type.elem_type == TensorProto.FLOAT16:
            entry.type.tensor_type.elem_type = TensorProto.FLOAT
    return copy


def shape_of(model: onnx.ModelProto, node: onnx.NodeProto, place: int) -> list[int]:
    return next(list(item.dims) for item in model.graph.initializer if item.name == node.input[place])


def same(before: onnx.ModelProto, after: onnx.ModelProto, **more: Array) -> None:
    """Holds the results against those of the export: within what another order of float16 sums may come to."""
    (kind,) = (entry.type.tensor_type.elem_type for entry in before.graph.input if entry.name == "x")
    x = np.random.default_rng(1).standard_normal((2, 3, K)).astype(onnx.helper.tensor_dtype_to_np_dtype(kind))
    wanted, found = run(before, {"x": x, **more}), run(after, {"x": x, **more})
    for name, array in wanted.items():
        assert found[name].shape == array.shape
        assert found[name].dtype == array.dtype
        np.testing.assert_allclose(found[name].astype(np.float32), array.astype(np.float32), rtol=0.01, atol=0.02)


def test_a_product_is_padded_and_its_result_which_is_an_output_keeps_its_columns() -> None:
    before = model_of("y = MatMul(seen, w)")
    after, count = optimized(before)
    assert count == 1
    (product,) = (node for node in after.graph.node if node.op_type == "MatMul")
    assert shape_of(after, product, 1) == [K, WIDE]
    assert [node.op_type for node in after.graph.node][-2:] == ["MatMul", "Slice"]
    assert [entry.name for entry in after.graph.output] == ["y"]
    assert "w" not in {item.name for item in after.graph.initializer}
    same(before, after)


def test_columns_that_are_left_are_the_same_to_the_bit_where_sums_are_exact() -> None:
    weight = np.random.default_rng(0).integers(-2, 3, (K, N)).astype(np.float16)
    before = model_of("y = MatMul(x, w)", w=weight, outputs=f"float16[b, s, {N}] y, float16[b, s, {K}] seen")
    after, count = optimized(before)
    assert count == 1
    product = next(
        node for node in after.graph.node if node.input[0] == "x" and node.op_type == "MatMul" and node.input[1] != "w"
    )
    (padded,) = (numpy_helper.to_array(item) for item in after.graph.initializer if item.name == product.input[1])
    np.testing.assert_array_equal(padded[:, :N], weight)
    assert not padded[:, N:].any()
    x = np.random.default_rng(1).integers(-2, 3, (2, 3, K)).astype(np.float16)
    np.testing.assert_array_equal(run(after, {"x": x})["y"], x @ weight)


def test_the_transpose_of_a_weight_that_nothing_else_reads_is_padded_as_one_constant() -> None:
    before = model_of("t = Transpose<perm = [1, 0]>(w) y = MatMul(seen, t)", turned=True)
    after, count = optimized(before)
    assert count == 1
    (product,) = (node for node in after.graph.node if node.op_type == "MatMul")
    assert shape_of(after, product, 1) == [K, WIDE]
    assert "Transpose" not in {node.op_type for node in after.graph.node}
    same(before, after)


def test_a_tied_embedding_is_padded_where_it_is_turned_and_no_second_one_is_written(tmp_path: pathlib.Path) -> None:
    nodes = "t = Transpose<perm = [1, 0]>(w) y = MatMul(seen, t) rows = Gather(w, ids)"
    outputs = f"float16[b, s, {N}] y, float16[c, {K}] rows"
    before = model_of(nodes, inputs=", int64[c] ids", outputs=outputs, turned=True)
    after, count = optimized(before)
    assert count == 1
    assert sorted(list(item.dims) for item in after.graph.initializer if len(item.dims) == 2) == [[WIDE - N, K], [N, K]]
    same(before, after, ids=np.asarray([0, -1, N - 1, -N]))
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    onnxruntime.InferenceSession(after.SerializeToString(), options, providers=["CPUExecutionProvider"])
    started = onnx.load(options.optimized_model_filepath)
    assert [K, WIDE] in [list(item.dims) for item in started.graph.initializer]
    assert not {"Concat", "Transpose"} & {node.op_type for node in started.graph.node if "weights" not in node.output}


def test_a_tied_embedding_that_onnxruntime_would_pad_in_every_run_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = "t = Transpose<perm = [1, 0]>(w) y = MatMul(seen, t) rows = Gather(w, ids)"
    outputs = f"float16[b, s, {N}] y, float16[c, {K}] rows"
    model = model_of(nodes, inputs=", int64[c] ids", outputs=outputs, turned=True)
    monkeypatch.setattr(products, "_MOST_FOLDED", 2 * K * WIDE - 1)
    assert optimized(model)[1] == 0
    monkeypatch.setattr(products, "_MOST_FOLDED", 2 * K * WIDE)
    assert optimized(model)[1] == 1


_FLAT = "flat = Reshape(seen, two) y = Gemm{attributes}(flat, w{bias})"
_TWO = np.asarray([-1, K])


@pytest.mark.parametrize(
    ("attributes", "turned", "bias"),
    [
        ("", False, None),
        ("<transB = 1>", True, None),
        ("<transB = 1, alpha = 0.5, beta = 2.0>", True, (N,)),
        ("<alpha = 0.5>", False, (1, N)),
        ("", False, (1,)),
    ],
    ids=["plain", "turned", "a bias", "a row", "a number"],
)
def test_a_gemm_is_padded_with_its_bias(attributes: str, turned: bool, bias: tuple[int, ...] | None) -> None:
    more = {} if bias is None else {"c": np.random.default_rng(2).standard_normal(bias).astype(np.float16)}
    nodes = _FLAT.format(attributes=attributes, bias="" if bias is None else ", c")
    before = model_of(nodes, outputs=f"float16[t, {N}] y", turned=turned, two=_TWO, **more)
    after, count = optimized(before)
    assert count == 1
    (product,) = (node for node in after.graph.node if node.op_type == "Gemm")
    assert shape_of(after, product, 1) == ([WIDE, K] if turned else [K, WIDE])
    same(before, after)


@pytest.mark.parametrize(
    ("nodes", "choices"),
    [
        ("y = MatMul(seen, w)", {"n": 4104}),
        ("y = MatMul(seen, w)", {"dtype": "float"}),
        ("y = MatMul(seen, w)", {"n": 4091}),
        ("y = MatMul(seen, w)", {"k": 255}),
        ("y = MatMul(seen, w)", {"inputs": f", float16[{K}, {N}] w"}),
        ("g = Abs(w) y = MatMul(seen, g)", {}),
        ("y = MatMul(seen, w) z = Neg(w)", {"outputs": f"float16[b, s, {N}] y, float16[{K}, {N}] z"}),
        (
            _FLAT.format(attributes="<transB = 1>", bias="") + " z = Gather(w, ids)",
            {"turned": True, "two": _TWO, "inputs": ", int64[c] ids", "outputs": f"float16[t, {N}] y, float16[c, {K}] z"},
        ),
        (_FLAT.format(attributes="", bias=", c"), {"two": _TWO, "inputs": f", float16[{N}] c", "outputs": f"float16[t, {N}] y"}),
    ],
    ids=[
        "a multiple of 8",
        "float32",
        "few columns",
        "few rows",
        "an input",
        "computed",
        "read twice",
        "tied, not turned",
        "a bias that is given",
    ],
)
def test_what_is_left_as_it_is(nodes: str, choices: dict[str, Any]) -> None:
    before = model_of(nodes, **choices)
    after, count = optimized(before)
    assert count == 0
    products = [
        [node.op_type for node in model.graph.node if node.op_type in {"MatMul", "Gemm", "Slice"}] for model in (before, after)
    ]
    assert products[1] == products[0][2:]


def test_padding_does_not_pay_on_a_cpu() -> None:
    assert optimized(model_of("y = MatMul(seen, w)"), ep="cpu")[1] == 0


def cut_of(model: onnx.ModelProto) -> str:
    """The operator that gives the result `y`."""
    return next(node.op_type for node in model.graph.node if "y" in node.output)


@pytest.mark.parametrize("rows", ["[b, s", "[t"], ids=["entries", "tokens"])
def test_where_a_slice_may_fail_columns_are_cut_at_any_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, rows: str
) -> None:
    monkeypatch.setattr(products, "_SURELY_SLICED", N - 1)
    flat = rows == "[t"
    nodes = _FLAT.format(attributes="", bias="") if flat else "y = MatMul(seen, w)"
    before = model_of(nodes, outputs=f"float16{rows}, {N}] y", **({"two": _TWO} if flat else {}))
    after, count = optimized(before)
    assert (count, cut_of(after)) == (1, "UnfoldTensor")
    onnx.save(before, tmp_path / "before.onnx")
    onnx.save(after, tmp_path / "after.onnx")
    assert certify(tmp_path / "before.onnx", tmp_path / "after.onnx").is_complete
    same(in_float32(before), in_float32(after))


def test_without_the_assumption_columns_are_cut_at_any_size() -> None:
    model = model_of("y = MatMul(seen, w)")
    assert cut_of(optimized(model, without="small-results")[0]) == "UnfoldTensor"
    monkeyed = onnx_attnfuse.optimize(model, ep="cuda", verify="none").report
    assert any("multiple of 64 columns" in note and note.endswith("assumes small-results") for note in monkeyed.notes)


@pytest.mark.parametrize(("rows", "cut"), [(2, "Slice"), (2**31 // N // 3 + 1, "UnfoldTensor")], ids=["small", "large"])
def test_sizes_that_are_numbers_decide(rows: int, cut: str) -> None:
    model = model_of("y = MatMul(seen, w)")
    result = onnx_attnfuse.optimize(model, ep="cuda", verify="none", cuda_graph=True, dim={"b": rows, "s": 3})
    assert cut_of(result.model) == cut
    assert not any("assumes" in note for note in result.report.notes)


def test_a_weight_in_a_data_file_is_not_read_until_the_model_is_written(tmp_path: pathlib.Path) -> None:
    before = model_of("y = MatMul(seen, w)")
    (tensor,) = (item for item in before.graph.initializer if item.name == "w")
    (tmp_path / "weights.bin").write_bytes(tensor.raw_data)
    apart = onnx.ModelProto()
    apart.CopyFrom(before)
    point_to(next(item for item in apart.graph.initializer if item.name == "w"), "weights.bin", offset=0, length=2 * K * N)
    (tmp_path / "model.onnx").write_bytes(apart.SerializeToString())
    model = io.load(tmp_path / "model.onnx")
    (tmp_path / "weights.bin").rename(tmp_path / "gone.bin")
    result = onnx_attnfuse.optimize(model, ep="cuda", verify="none")
    (tmp_path / "gone.bin").rename(tmp_path / "weights.bin")
    result.save(tmp_path / "fused.onnx")
    assert (tmp_path / "fused.onnx").stat().st_size < 20_000
    assert (tmp_path / "fused.onnx.data").stat().st_size >= 2 * K * WIDE
    same(before, onnx.load(tmp_path / "fused.onnx"))


def test_a_bfloat16_product_is_padded() -> None:
    model = ir.from_proto(model_of("y = MatMul(seen, w)"))
    proto = ir.to_proto(model)
    for item in (*proto.graph.input, *proto.graph.output):
        item.type.tensor_type.elem_type = TensorProto.BFLOAT16
    for item in proto.graph.initializer:
        item.data_type = TensorProto.BFLOAT16
    for entry in proto.graph.value_info:
        entry.type.tensor_type.elem_type = TensorProto.BFLOAT16
    after, count = optimized(proto)
    assert count == 1
    assert after.graph.output[0].type.tensor_type.elem_type == TensorProto.BFLOAT16
