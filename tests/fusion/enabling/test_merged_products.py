"""Products of one input as one: gated MLPs, and queries, keys and values; where they are, and what they compute."""

from __future__ import annotations

import dataclasses
import pathlib
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import numpy_helper

import onnx_attnfuse
from onnx_attnfuse.fusion.enabling import merged_products
from onnx_attnfuse.graph import constants, folding
from onnx_attnfuse.kernels import providers
from onnx_attnfuse.kernels.execution_provider import Paying
from tests.support.bundled import cases, run
from tests.support.decoders import PROJECTED, UNPADDED, decoder
from tests.support.small_models import point_to

Array = npt.NDArray[Any]
C, N = 16, 24
_BUNDLED = pathlib.Path(__file__).parents[3] / "models" / "bundled"
_EXPORTS = pathlib.Path(__file__).parents[1] / "shared_cache" / "exports"
_ATTENTION = """kt = Transpose<perm = [0, 2, 1]>(x) qk = MatMul(x, kt) small = Mul(qk, scale)
   weights = Softmax<axis = -1>(small) seen = MatMul(weights, x)"""
_TEXT = """<ir_version: 9, opset_import: ["" : {opset}, "com.microsoft" : 1]>
model (float[b, s, {c}] x{inputs}) => ({outputs}) {{ {attention} {nodes} }}"""
_SHOWN = {
    "gated-products": "gated MLPs",
    "split-projections": "attentions whose queries",
    "merged-projections": "GroupQueryAttention handed",
}


@pytest.fixture(autouse=True)
def _pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on providers where all of it pays."""
    more: frozenset[Paying] = frozenset(["gated-products", "split-projections", "merged-projections"])
    for name in ("cpu", "cuda"):
        record = providers.provider(name)
        changed = dataclasses.replace(record, pays=record.pays | more, unmeasured=frozenset())
        monkeypatch.setitem(providers._records, name, changed)


def model_of(nodes: str, *, inputs: str = "", outputs: str = "", opset: int = 18, **more: Array) -> onnx.ModelProto:
    """A model with an attention, whose result `seen` (b, s, c) goes into `nodes` with weights and biases."""
    text = _TEXT.format(
        c=C, nodes=nodes, inputs=inputs, attention=_ATTENTION, opset=opset, outputs=outputs or f"float[b, s, {N}] y"
    )
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    shapes = {"wg": (C, N), "wu": (C, N), "tg": (N, C), "bg": (N,), "bu": (1, 1, N), "narrow": (C, 1), "scale": ()}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) / 2 for name, shape in shapes.items()} | more
    given = {entry.name for entry in model.graph.input}
    read = {name for node in model.graph.node for name in node.input}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items() if name in read - given)
    return model


def optimized(model: onnx.ModelProto, what: Paying, **choices: Any) -> tuple[onnx.ModelProto, int]:
    """The model as we fuse it, judged, and how often a rule was applied."""
    result = onnx_attnfuse.optimize(model, **{"ep": "cpu", "verify": "sites", **choices})
    assert not result.report.failures
    assert not result.report.differing
    notes = [note for note in result.report.notes if _SHOWN[what] in note]
    return result.model, int(notes[0].split()[0]) if notes else 0


def count(model: onnx.ModelProto, *ops: str) -> int:
    return sum(node.op_type in ops for node in model.graph.node)


def same(before: onnx.ModelProto, after: onnx.ModelProto) -> None:
    x = np.random.default_rng(1).standard_normal((2, 3, C)).astype(np.float32)
    wanted, found = run(before, {"x": x}), run(after, {"x": x})
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5)


_SILU = "s = Sigmoid(g) a = Mul(g, s)"
_APART = "g = MatMul(seen, wg) u = MatMul(seen, wu)"
_BIASED = "gp = MatMul(seen, wg) g = Add(gp, bg) up = MatMul(seen, wu) u = Add(bu, up)"
_ONE_BIAS = "gp = MatMul(seen, wg) g = Add(bg, gp) u = MatMul(seen, wu)"
_TURNED = "t = Transpose<perm = [1, 0]>(tg) g = MatMul(seen, t) u = MatMul(seen, wu)"
_FLAT = """flat = Reshape(seen, two) gf = Gemm<transB = 1>(flat, tg, bg) uf = Gemm(flat, wu) s = Sigmoid(gf) a = Mul(gf, s)
   m = Mul(a, uf) y = Reshape(m, three)"""
_SIZES = {"two": np.asarray([-1, C]), "three": np.asarray([2, -1, N])}
_SPELLED_GELU = """third = Mul(g, g) cube = Mul(third, g) part = Mul(cube, scale) sum = Add(g, part) h = Tanh(sum)
   more = Add(h, scale) a = Mul(g, more)"""


@pytest.mark.parametrize(
    "nodes",
    [
        f"{_APART} {_SILU} y = Mul(a, u)",
        f"{_APART} {_SILU} y = Mul(u, a)",
        f"{_BIASED} {_SILU} y = Mul(a, u)",
        f"{_ONE_BIAS} {_SILU} y = Mul(a, u)",
        f"{_TURNED} {_SILU} y = Mul(a, u)",
        f"{_APART} a = Relu(g) y = Mul(a, u)",
        f"{_APART} a = com.microsoft.QuickGelu(g) y = Mul(a, u)",
        f"{_APART} {_SPELLED_GELU} y = Mul(a, u)",
        f"{_APART} y = Mul(g, u)",
        _FLAT,
    ],
    ids=["SiLU", "other order", "biases", "one bias", "transposed", "ReLU", "one operator", "spelled", "bilinear", "Gemm"],
)
def test_the_two_products_of_a_gated_mlp_become_parts_of_one(nodes: str) -> None:
    before = model_of(nodes, **(_SIZES if nodes is _FLAT else {}))
    after, times = optimized(before, "gated-products")
    assert times == 1
    assert count(after, "Split") == 1
    assert count(after, "MatMul", "Gemm") == count(before, "MatMul", "Gemm") - 3  # two of them were the attention
    (split,) = (node for node in after.graph.node if node.op_type == "Split")
    sizes = next(numpy_helper.to_array(item).tolist() for item in after.graph.initializer if item.name == split.input[1])
    assert sizes == [N, N]
    assert not {"wg", "wu", "tg"} & {item.name for item in after.graph.initializer}
    same(before, after)


def test_the_parts_are_the_same_to_the_bit_where_sums_are_exact() -> None:
    rng = np.random.default_rng(3)
    exact = {name: rng.integers(-2, 3, (C, N)).astype(np.float32) for name in ("wg", "wu")}
    nodes = "g = MatMul(x, wg) u = MatMul(x, wu) a = Relu(g) y = Mul(a, u)"
    before = model_of(nodes, outputs=f"float[b, s, {N}] y, float[b, s, {C}] seen", **exact)
    after, times = optimized(before, "gated-products")
    assert times == 1
    x = rng.integers(-2, 3, (2, 3, C)).astype(np.float32)
    np.testing.assert_array_equal(run(after, {"x": x})["y"], np.maximum(x @ exact["wg"], 0) * (x @ exact["wu"]))


def test_a_product_that_is_an_output_too_is_given_out_as_a_part() -> None:
    before = model_of(f"{_APART} {_SILU} y = Mul(a, u)", outputs=f"float[b, s, {N}] y, float[b, s, {N}] g")
    after, times = optimized(before, "gated-products")
    assert times == 1
    assert [entry.name for entry in after.graph.output] == ["y", "g"]
    same(before, after)


_OUTPUT = f"float[b, s, {N}] y, float[{C}, {N}] z"
_DYNAMIC = f", float[{C}, {N}] wg"
_QUANTISED = """wf = DequantizeLinear(wq, one, nought) g = MatMul(seen, wf) u = MatMul(seen, wu) a = Relu(g) y = Mul(a, u)"""
_INT8 = {"wq": np.ones((C, N), np.int8), "one": np.asarray(0.1, np.float32), "nought": np.asarray(0, np.int8)}


@pytest.mark.parametrize(
    ("nodes", "choices"),
    [
        ("g = MatMul(seen, wg) u = MatMul(x, wu) a = Relu(g) y = Mul(a, u)", {}),
        ("g = MatMul(seen, wg) a = Relu(g) y = Mul(a, g)", {}),
        (f"{_APART} a = Softmax(g) y = Mul(a, u)", {}),
        (f"{_APART} a = ReduceMax<axes = [-1]>(g) y = Mul(a, u)", {"opset": 13}),
        (f"{_APART} both = Add(g, u) a = Relu(both) y = Mul(a, u)", {}),
        ("n = MatMul(seen, narrow) u = MatMul(seen, wu) a = Sigmoid(n) y = Mul(a, u)", {}),
        ("g = MatMul(seen, wg) u = MatMul(seen, wg) a = Relu(g) y = Mul(a, u)", {}),
        (f"{_APART} a = Relu(g) y = Mul(a, u) z = Neg(wg)", {"outputs": _OUTPUT}),
        (f"{_APART} a = Relu(g) y = Mul(a, u)", {"inputs": _DYNAMIC}),
        ("c = Abs(wg) g = MatMul(seen, c) u = MatMul(seen, wu) a = Relu(g) y = Mul(a, u)", {}),
        (_QUANTISED, _INT8),
        (_FLAT.replace("transB = 1", "transB = 1, alpha = 0.5"), _SIZES),
        (f"{_APART} a = Relu(g) y = Add(a, u)", {}),
        (f"{_APART} a = Relu(g) y = Mul(a, u)", {"opset": 12}),
    ],
    ids=[
        "another input",
        "gated by itself",
        "not element by element",
        "a row's number",
        "both in the gate",
        "a gate of one column",
        "one weight twice",
        "a weight that is read elsewhere",
        "a weight that is given",
        "a weight that is computed",
        "a quantised weight",
        "a Gemm with a factor",
        "a sum",
        "an old Split",
    ],
)
def test_what_is_left_as_it_is(nodes: str, choices: dict[str, Any]) -> None:
    before = model_of(nodes, **choices)
    after, times = optimized(before, "gated-products")
    assert times == 0
    products = "MatMul", "Gemm"
    assert count(after, *products) == count(before, *products) - 2
    assert count(after, "Split") == 0


def test_a_wrong_order_of_the_parts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    made = merged_products.merged

    def swapped(products: Any, *rest: Any) -> Any:
        return made(products[::-1], *rest)

    monkeypatch.setattr(merged_products, "merged", swapped)
    result = onnx_attnfuse.optimize(model_of(f"{_APART} {_SILU} y = Mul(a, u)"), ep="cpu", verify="sites")
    assert not [note for note in result.report.notes if _SHOWN["gated-products"] in note]
    assert any("differs" in note for note in result.report.notes) or result.report.differing
    assert count(result.model, "Split") == 0


def test_weights_in_a_data_file_are_not_read_until_the_model_is_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = model_of(f"{_APART} {_SILU} y = Mul(a, u)")
    apart = onnx.ModelProto()
    apart.CopyFrom(before)
    (tensor,) = (item for item in apart.graph.initializer if item.name == "wg")
    (tmp_path / "weights.bin").write_bytes(tensor.raw_data)
    point_to(tensor, "weights.bin", offset=0, length=4 * C * N)
    (tmp_path / "model.onnx").write_bytes(apart.SerializeToString())
    read, seen = constants.read_tensor, list[str | None]()

    def noted(tensor: ir.TensorProtocol) -> constants.Array | None:
        seen.append(tensor.name)
        return read(tensor)

    monkeypatch.setattr(folding, "read_tensor", noted)
    result = onnx_attnfuse.optimize(tmp_path / "model.onnx", ep="cpu", verify="none")
    assert not seen
    result.save(tmp_path / "fused.onnx")
    assert {"wg", "wu"} <= set(seen)
    after = onnx.load(tmp_path / "fused.onnx")
    assert count(after, "Split") == 1
    same(before, after)


def test_an_export_of_llama_has_both_kinds() -> None:
    model = onnx.load(_BUNDLED / "llama_past__dyn18__sdpa.onnx")
    after, times = optimized(model, "gated-products")
    assert times == 2
    assert count(after, "Split") == 2


@pytest.mark.parametrize("stem", ["bert__ts17__eager", "vit__dyn18__sdpa", "t5__dyn18__eager"])
def test_queries_keys_and_values_become_parts_of_one_product(stem: str) -> None:
    model = onnx.load(_BUNDLED / f"{stem}.onnx")
    after, times = optimized(model, "split-projections")
    assert times == count(after, "Split") == {"t5__dyn18__eager": 4}.get(stem, 2)
    feeds = cases(_BUNDLED / f"{stem}.onnx")["example"]
    wanted, found = run(model, feeds), run(after, feeds)
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-3, atol=1e-4)


def test_cross_attention_whose_queries_are_of_another_input_keeps_its_products() -> None:
    model = onnx.load(_BUNDLED / "t5__dyn18__eager.onnx")
    after, _ = optimized(model, "split-projections")
    attentions = [node for node in after.graph.node if node.op_type == "MultiHeadAttention"]
    split = {output for node in after.graph.node if node.op_type == "Split" for output in node.output}
    assert Counter(node.input[0] in split for node in attentions) == {True: 4, False: 2}


def _grouped(projected: str = PROJECTED, **choices: Any) -> onnx.ModelProto:
    return decoder(projected=projected, **{"seen": UNPADDED, "rotated": False, **choices})


def _packed(model: onnx.ModelProto) -> list[bool]:
    return [not node.input[1] for node in model.graph.node if node.op_type == "GroupQueryAttention"]


_GROUPED = {"target": "GroupQueryAttention", "padding": "assume-none"}


def test_grouped_heads_with_a_cache_that_grows_are_handed_over_as_one_product() -> None:
    before = _grouped()
    after, times = optimized(before, "merged-projections", **_GROUPED)
    assert times == 2
    assert _packed(after) == [True, True]
    assert count(after, "Split") == 0
    made = {output for node in after.graph.node for output in node.output}
    assert not made & {node.input[1] for node in after.graph.node if node.op_type == "MatMul"}
    rng = np.random.default_rng(2)
    for past, new in ((5, 1), (0, 4), (3, 2)):
        feeds: dict[str, Array] = {before.graph.input[0].name: rng.integers(0, 99, (1, new))}
        feeds |= {
            f"past_{part}_{layer}": rng.standard_normal((1, 2, past, 16)).astype(np.float32)
            for part in ("key", "value")
            for layer in (0, 1)
        }
        wanted, found = run(before, feeds), run(after, feeds)
        for name, array in wanted.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-3, atol=1e-4)


def test_a_device_that_rotates_each_token_itself_rotates_packed_ones() -> None:
    before = _grouped(rotated=True, dtype="float16")
    after, times = optimized(before, "merged-projections", ep="cuda", arch="sm90", **_GROUPED)
    assert times == 2
    assert _packed(after) == [True, True]


def test_an_export_of_opt_is_packed_and_one_of_gpt2_hands_over_what_it_split() -> None:
    opt = onnx.load(_EXPORTS / "opt_past__ts17__sdpa.onnx")
    after, times = optimized(opt, "merged-projections", **_GROUPED)
    assert (times, _packed(after)) == (2, [True, True])
    gpt2 = onnx.load(_EXPORTS / "gpt2_past__ts17__eager.onnx")
    after, times = optimized(gpt2, "merged-projections", **_GROUPED)
    assert (times, _packed(after)) == (0, [True, True])
    assert count(after, "Split") == 0


_OTHER = "past_x{i} = Tanh({x}) q{i} = MatMul({x}, wq{i}) k{i} = MatMul({x}, wk{i}) v{i} = MatMul(past_x{i}, wv{i})"
_SCALED = "q{i} = MatMul({x}, wq{i}) k{i} = MatMul({x}, wk{i}) vp{i} = MatMul({x}, wv{i}) v{i} = Tanh(vp{i})"


@pytest.mark.parametrize(
    ("projected", "end"),
    [
        (_OTHER, ""),
        (_SCALED, ""),
        (PROJECTED, "mean = ReduceMean<keepdims=1>(v1, last) more = Add(y1, mean) logits = MatMul(more, head)"),
    ],
    ids=["another input", "changed after it was projected", "read elsewhere"],
)
def test_near_misses_are_handed_over_as_three(projected: str, end: str) -> None:
    before = _grouped(projected, **({"end": end} if end else {}))
    after, times = optimized(before, "merged-projections", **_GROUPED)
    assert (times, _packed(after)) == ((1, [True, False]) if end else (0, [False, False]))


@pytest.mark.parametrize("what", sorted(_SHOWN))
def test_none_of_it_pays_on_a_cpu_and_what_is_not_measured_is_not_done_on_cuda(
    what: Paying, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    assert what not in providers.provider("cpu").pays
    cuda = providers.provider("cuda")
    assert (what in cuda.pays) != (what in cuda.unmeasured)
    before = model_of(f"{_APART} {_SILU} y = Mul(a, u)")
    assert optimized(before, "gated-products")[1] == 0
