"""The least work of a model: small graphs worked out by hand, torch's own counter on a BERT, and what a device takes for it."""

from __future__ import annotations

import io as streams
import pathlib
import warnings

import onnx
import onnx.parser
import onnx_ir as ir
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from onnx_attnfuse import optimize
from onnx_attnfuse.bench.process import sample
from onnx_attnfuse.bench.roofline import Limit, Work, limit, share_in_words, work
from onnx_attnfuse.bench.run import device_limits
from onnx_attnfuse.graph import io
from onnx_attnfuse.kernels.gpus import DeviceLimits, limits_of
from tests.bench.test_doctor import fake_driver
from tests.support import small_models
from tests.support.bundled import BUNDLED, name_of

_HEADER = '<ir_version: 9, opset_import: ["" : 18, "com.microsoft" : 1]>'


def counted(body: str, **shapes: tuple[int, ...]) -> Work:
    """The work of a graph in ONNX text, after a header."""
    return work(ir.from_proto(onnx.parser.parse_model(_HEADER + body)), shapes)


def weight(name: str, *shape: int, dtype: str = "float") -> str:
    """A weight in ONNX text, filled with ones."""
    return f"{dtype}[{','.join(map(str, shape))}] {name} = {{{','.join(['1'] * torch.Size(shape).numel())}}}"


def test_a_product_with_a_weight_and_what_it_reads_and_writes() -> None:
    body = f"g (float[b, 3, 4] x) => (float[b, 3, 5] y) <{weight('w', 4, 5)}> {{ y = MatMul(x, w) }}"
    assert counted(body, x=(7, 3, 4)) == Work(
        weights=4 * 4 * 5, inputs=4 * 7 * 3 * 4, outputs=4 * 7 * 3 * 5, operations={"float32": 2 * 7 * 3 * 4 * 5}
    )


def test_a_weight_that_is_used_twice_is_read_once_and_two_are_read_twice() -> None:
    graph = "g (float[b, 4] x) => (float[b, 4] y) <{weights}> {{ h = MatMul(x, w) y = MatMul(h, {second}) }}"
    once = counted(graph.format(weights=weight("w", 4, 4), second="w"), x=(2, 4))
    both = counted(graph.format(weights=f"{weight('w', 4, 4)}, {weight('v', 4, 4)}", second="v"), x=(2, 4))
    assert (once.weights, both.weights) == (64, 128)
    assert once.operations == both.operations == {"float32": 2 * (2 * 2 * 4 * 4)}


def test_a_weight_and_its_transpose_are_one_weight() -> None:
    body = f"""g (float[b, 4] x) => (float[b, 4] y) <{weight("w", 4, 4)}>
    {{ t = Transpose<perm = [1, 0]>(w) h = MatMul(x, w) y = MatMul(h, t) }}"""
    assert counted(body, x=(2, 4)).weights == 64


@pytest.mark.parametrize(("tied", "read"), [(False, 4 * 3 * 8), (True, 4 * 100 * 8)], ids=["rows", "the whole table"])
def test_of_an_embedding_the_rows_are_read_and_all_of_it_where_a_product_takes_it_too(tied: bool, read: int) -> None:
    last = "t = Transpose<perm = [1, 0]>(table) y = MatMul(rows, t)" if tied else "y = Identity(rows)"
    body = f"g (int64[b] ids) => (float[b, n] y) <{weight('table', 100, 8)}> {{ rows = Gather(table, ids) {last} }}"
    found = counted(body, ids=(3,))
    assert found.weights == read
    assert found.inputs == 3 * 8


def test_of_few_rows_no_more_is_read_than_there_is() -> None:
    body = f"g (int64[b] ids) => (float[b, 8] y) <{weight('table', 4, 8)}> {{ y = Gather(table, ids) }}"
    assert counted(body, ids=(1000,)).weights == 4 * 4 * 8


def test_an_input_that_is_asked_for_its_shape_only_is_not_read() -> None:
    graph = "g (float[b, 4] x, float[b, 9] z) => (float[b, 4] y, {out}) {{ y = Neg(x) {node} }}"
    asked = counted(graph.format(out="int64[2] s", node="s = Shape(z)"), x=(2, 4), z=(2, 9))
    looked = counted(graph.format(out="float[b, 9] s", node="s = Neg(z)"), x=(2, 4), z=(2, 9))
    assert (asked.inputs, looked.inputs) == (4 * 8, 4 * 8 + 4 * 18)


def test_weights_are_converted_once_and_inputs_in_every_run() -> None:
    body = f"""g (int64[b, 4] x) => (float16[b, 4] y) <{weight("w", 4, 4)}>
    {{ a = Cast<to = 10>(x) c = Cast<to = 10>(w) y = MatMul(a, c) }}"""
    found = counted(body, x=(2, 4))
    assert (found.weights, found.inputs, found.outputs) == (2 * 16, 8 * 8, 2 * 8)
    assert found.operations == {"float16": 2 * 2 * 4 * 4}


@pytest.mark.parametrize(
    ("node", "shapes", "operations"),
    [
        ("y = Gemm<transA = 1, transB = 1>(x, z)", {"x": (4, 3), "z": (5, 4)}, 2 * 3 * 4 * 5),
        ("y = com.microsoft.FusedMatMul<transA = 1>(x, z)", {"x": (2, 4, 3), "z": (2, 4, 5)}, 2 * 2 * 3 * 4 * 5),
        ("y = com.microsoft.FusedMatMul<transA = 1, transBatchA = 1>(x, z)", {"x": (4, 2, 3), "z": (2, 4, 5)}, 2 * 2 * 3 * 4 * 5),
        ('y = Einsum<equation = "bsnh,btnh->bnst">(x, z)', {"x": (2, 3, 4, 5), "z": (2, 7, 4, 5)}, 2 * 2 * 4 * 3 * 7 * 5),
        ("y = Conv<group = 2, pads = [1, 1, 1, 1], strides = [2, 2]>(x, z)", {"x": (2, 4, 8, 8), "z": (6, 2, 3, 3)}, None),
        ("y = ConvTranspose(x, z)", {"x": (2, 4, 5), "z": (4, 6, 3)}, 2 * 2 * 4 * 5 * 6 * 3),
    ],
    ids=["Gemm", "FusedMatMul", "batch turned", "Einsum", "Conv", "ConvTranspose"],
)
def test_every_product_by_hand(node: str, shapes: dict[str, tuple[int, ...]], operations: int | None) -> None:
    given = ", ".join(
        f"float[{','.join(f'{name}{axis}' for axis in range(len(shape)))}] {name}" for name, shape in shapes.items()
    )
    found = counted(f"g ({given}) => (float[a, b] y) {{ {node} }}", **shapes)
    assert found.operations == {"float32": operations or 2 * (2 * 6 * 4 * 4) * 2 * 3 * 3}


def attention(op: str, parameters: str, more: str = "", inputs: str = "") -> str:
    return f"""g (float16[b, s, 64] q, float16[b, t, 64] k, float16[b, t, 64] v{inputs}) => (float16[b, s, 64] y)
    {{ y = com.microsoft.{op}<num_heads = 4{parameters}>(q, k, v{more}) }}"""


@pytest.mark.parametrize(
    ("op", "parameters", "pairs"),
    [
        ("MultiHeadAttention", "", 10 * 10),
        ("MultiHeadAttention", ", unidirectional = 1", 55),
        ("GroupQueryAttention", ", kv_num_heads = 4", 55),
        ("GroupQueryAttention", ", kv_num_heads = 4, local_window_size = 3", 1 + 2 + 8 * 3),
    ],
    ids=["all", "causal", "grouped", "a window"],
)
def test_an_attention_has_two_products_for_every_pair_that_its_attributes_leave(op: str, parameters: str, pairs: int) -> None:
    found = counted(attention(op, parameters), q=(2, 10, 64), k=(2, 10, 64), v=(2, 10, 64))
    assert found.operations == {"float16": 2 * 2 * 2 * 64 * pairs}


def test_queries_keys_and_values_in_one_tensor_are_counted_as_three() -> None:
    body = """g (float16[b, s, 128] q) => (float16[b, s, 64] y)
    { y = com.microsoft.GroupQueryAttention<num_heads = 4, kv_num_heads = 2>(q) }"""
    assert counted(body, q=(2, 10, 128)).operations == {"float16": 2 * 2 * 2 * 64 * 55}


def test_an_attention_with_its_projections_inside_has_their_product_too() -> None:
    body = f"""g (float[b, s, 8] x) => (float[b, s, 8] y) <{weight("w", 8, 24)}, {weight("c", 24)}>
    {{ y = com.microsoft.Attention<num_heads = 2>(x, w, c) }}"""
    assert counted(body, x=(3, 5, 8)).operations == {"float32": 2 * 3 * 5 * 8 * 24 + 2 * 2 * 3 * 5 * 5 * 8}


def test_a_cache_is_read_and_attended_to_and_what_nothing_tells_the_size_of_is_named() -> None:
    cache = "float16[b, 4, p, 16]"
    body = f"""g (float16[b, s, 64] q, float16[b, s, 64] k, float16[b, s, 64] v, {cache} pk, {cache} pv)
    => (float16[b, s, 64] y, float16[b, 4, n, 16] nk, float16[b, 4, n, 16] nv)
    {{ y, nk, nv = com.microsoft.MultiHeadAttention<num_heads = 4>(q, k, v, , , , pk, pv) }}"""
    new, past = (2, 3, 64), (2, 4, 20, 16)
    found = counted(body, q=new, k=new, v=new, pk=past, pv=past)
    assert found.inputs == 2 * (3 * 2 * 3 * 64 + 2 * 2 * 4 * 20 * 16)
    assert found.operations == {"float16": 2 * 2 * 2 * 64 * 3 * 23}
    assert found.outputs == 2 * 2 * 3 * 64
    assert found.left_out == ("the output 'nk'", "the output 'nv'")


@pytest.mark.parametrize("present", [20, 23], ids=["one buffer", "appended"])
def test_of_a_cache_in_one_buffer_nobody_knows_how_much_is_in_use(present: int) -> None:
    cache, given, row = "float16[2, 4, 20, 16]", f"float16[2, 4, {present}, 16]", "float16[b, s, 64]"
    body = f"""g ({row} q, {row} k, {row} v, {cache} pk, {cache} pv, int32[b] last, int32 total)
    => ({row} y, {given} nk, {given} nv)
    {{ y, nk, nv = com.microsoft.GroupQueryAttention<num_heads = 4, kv_num_heads = 4>(q, k, v, pk, pv, last, total) }}"""
    new, past = (2, 3, 64), (2, 4, 20, 16)
    found = counted(body, q=new, k=new, v=new, pk=past, pv=past, last=(2,), total=())
    tokens, keys = 2 * 2 * 3 * 64, 2 * 2 * 4 * 16
    if present == 20:
        assert (found.inputs, found.outputs) == (3 * tokens + 12, tokens)
        assert found.operations == {"float16": 2 * 2 * 2 * 64 * (1 + 2 + 3)}
        assert found.left_out == ("what a cache in one buffer holds",)
    else:
        assert (found.inputs, found.outputs) == (3 * tokens + 12 + 2 * keys * 20, tokens + 2 * keys * 23)
        assert found.operations == {"float16": 2 * 2 * 2 * 64 * (21 + 22 + 23)}
        assert found.left_out == ()


def test_a_sum_that_a_normalization_gives_out_too_is_known() -> None:
    row = "float[b, s, 8]"
    body = f"""g ({row} x, {row} z) => ({row} y, {row} n) <{weight("w", 8, 8)}, {weight("c", 8)}>
    {{ n, mean, deviation, total = com.microsoft.SkipLayerNormalization(x, z, c) y = MatMul(total, w) }}"""
    found = counted(body, x=(3, 5, 8), z=(3, 5, 8))
    assert found.operations == {"float32": 2 * 3 * 5 * 8 * 8}
    assert found.left_out == ()


def test_of_two_branches_the_one_that_does_less_counts() -> None:
    body = f"""g (bool test, float[b, 4] x) => (float[b, 4] y) <{weight("w", 4, 4)}, {weight("v", 4, 4)}>
    {{ y = If(test) <
        then_branch = one () => (float[b, 4] a) {{ h = MatMul(x, w) a = MatMul(h, v) }},
        else_branch = two () => (float[b, 4] c) {{ c = MatMul(x, w) }}> }}"""
    found = counted(body, x=(2, 4), test=())
    assert found.weights == 64
    assert found.operations == {"float32": 2 * 2 * 4 * 4}


def test_a_function_counts_once_for_each_call() -> None:
    body = f"""g (float[b, 4] x) => (float[b, 4] y) <{weight("w", 4, 4)}> {{ h = local.twice(x, w) y = local.twice(h, w) }}
    <domain: "local", opset_import: ["" : 18]> twice (a, c) => (e) {{ d = MatMul(a, c) e = MatMul(d, c) }}"""
    header = _HEADER.replace("]>", ', "local" : 1]>')
    found = work(ir.from_proto(onnx.parser.parse_model(header + body)), {"x": (2, 4)})
    assert found.weights == 64
    assert found.operations == {"float32": 4 * 2 * 2 * 4 * 4}


def test_what_is_not_counted_is_told() -> None:
    body = f"""g (float[s, b, 4] x, float[b, 4] z) => (float[s, d, b, 2] y, float[n, m] p)
    <{weight("w", 1, 8, 4)}, {weight("r", 1, 8, 2)}> {{ y = LSTM<hidden_size = 2>(x, w, r) a = NonZero(z) f = Cast<to = 1>(a)
    p = MatMul(f, z) }}"""
    found = counted(body, x=(3, 2, 4), z=(2, 4))
    assert found.left_out[:2] == ("LSTM", "MatMul")
    assert not found.operations
    assert found.weights == 4 * 8 * 6


def test_operands_that_no_product_takes_are_not_counted() -> None:
    found = counted("g (float[a] x, float[b] z) => (float[a, b] y) { y = Gemm(x, z) }", x=(3,), z=(3,))
    assert found.left_out[0] == "Gemm"


class Bert(torch.nn.Module):
    """Embeddings, layers of attention spelled out and of two products, and scores of all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = torch.nn.Embedding(99, 32), torch.nn.Embedding(64, 32)
        self.layers = torch.nn.ModuleList(torch.nn.ModuleList(map(self._linear, (32, 32, 32, 32, 48))) for _ in range(2))
        self.down = torch.nn.ModuleList(torch.nn.Linear(48, 32) for _ in range(2))
        self.head = torch.nn.Linear(32, 99)

    @staticmethod
    def _linear(width: int) -> torch.nn.Linear:
        return torch.nn.Linear(32, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for (query, key, value, out, up), down in zip(self.layers, self.down, strict=True):
            q, k, v = (part(x).view(*ids.shape, 4, 8).transpose(1, 2) for part in (query, key, value))
            weights = (q @ k.transpose(2, 3) / 8**0.5).softmax(-1)
            x = x + out((weights @ v).transpose(1, 2).reshape(x.shape))
            x = torch.nn.functional.layer_norm(x + down(torch.nn.functional.gelu(up(x))), (32,))
        return self.head(x)


def test_a_bert_does_what_the_counter_of_torch_counts() -> None:
    module, ids = Bert().eval(), torch.ones(3, 17, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        module(ids)
    file, given = streams.BytesIO(), {"input_names": ["ids"], "dynamic_axes": {"ids": {0: "batch", 1: "seq"}}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, (ids[:2, :9],), file, dynamo=False, opset_version=17, **given)
    model = ir.from_proto(onnx.load_from_string(file.getvalue()))
    found = work(model, {"ids": (3, 17)})
    assert found.operations == {"float32": counter.get_total_flops()}
    assert found.left_out == ()
    assert found.outputs == 4 * 3 * 17 * 99
    layers = sum(item.numel() for name, item in module.named_parameters() if not name.startswith(("tokens", "places")))
    assert 0 <= found.weights - 4 * (layers + 3 * 17 * 32 + 17 * 32) < 2000


def test_data_of_weights_is_not_read(tmp_path: pathlib.Path) -> None:
    model = io.load(small_models.linear_with_data(tmp_path))
    (tmp_path / "weights.bin").unlink()
    assert work(model, {"x": (3, 2)}) == Work(24, 24, 24, {"float32": 2 * 3 * 2 * 2})


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("path", BUNDLED, ids=name_of)
def test_a_fused_model_is_counted_in_full_and_does_no_more_than_the_export(path: pathlib.Path) -> None:
    model = io.load(path)
    shapes = {name: array.shape for name, array in sample(model).feeds.items()}
    before, after = work(model, shapes), work(optimize(model, ep="cuda", verify="none").model, shapes)
    assert before.left_out == after.left_out == ()
    assert (before.inputs, before.outputs) == (after.inputs, after.outputs)
    assert before.operations["float32"] * 0.7 < after.operations["float32"] <= before.operations["float32"]
    assert after.weights == pytest.approx(before.weights, rel=0.01)


SLOW = DeviceLimits("Slow", 1e9, {"float16": 1e12}, "a test")


def test_the_longer_of_reading_and_multiplying_is_the_limit() -> None:
    assert limit(Work(10**6, 0, 10**6, {"float16": 10**9}), SLOW) == Limit(2.0, "memory", "Slow")
    assert limit(Work(10**6, 0, 10**6, {"float16": 4 * 10**9}), SLOW) == Limit(4.0, "products", "Slow")
    assert limit(Work(10**6, 0, 0, {"int8": 10**15}), SLOW).ms == 1.0


def test_the_share_in_words() -> None:
    read = Work(2_208_000_000, 1000, 1000, {"float16": 10**9})
    found = limits_of("NVIDIA H200")
    assert found is not None
    assert share_in_words(read, limit(read, found), 1.12) == "share of the limit: 41 % (0.46 ms of 1.12 ms: weights 2.21 GB)"
    multiplied = Work(1000, 0, 0, {"float16": 989 * 10**9})
    assert (
        share_in_words(multiplied, limit(multiplied, found), 2) == "share of the limit: 50 % (1 ms of 2 ms: 989 GFLOP in float16)"
    )
    assert share_in_words(read, None, 1000) == "limit of this device unknown; reached 1 GFLOP/s in float16, 2.21 GB/s"


def test_the_limits_are_those_of_the_gpu_here(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_driver(tmp_path, "NVIDIA H100 80GB HBM3, 9.0, 580.65.06, 81559 MiB", monkeypatch)
    found = device_limits("cuda")
    assert found is not None
    assert (found.bandwidth, found.peaks["bfloat16"], found.peaks["float32"]) == (3.35e12, 989e12, 494e12)
    assert device_limits("cpu") is None


def test_a_gpu_that_is_not_recorded_has_no_limits(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_driver(tmp_path, "NVIDIA H200 NVL, 9.0, 580.65.06, 143771 MiB", monkeypatch)
    assert device_limits("cuda") is None
