"""Queries, keys and values passed as one tensor: what one product makes, or what was one tensor before it was split."""

from __future__ import annotations

import itertools
import pathlib
from collections import Counter

import numpy as np
import onnx
import onnx.numpy_helper
import onnx_ir as ir
import pytest

import onnx_attnfuse
from onnx_attnfuse.graph import constants, folding
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.targets import group_query_attention, operand_products
from tests.support.decoder_loops import assert_same_at_tokens, buffered, grown, steps
from tests.support.decoders import PROJECTED, UNPADDED, decoder

_EXPORTS = pathlib.Path(__file__).parent / "exports"
_PADDINGS = [[[1] * 6] * 2, [[0, 0, 1, 1, 1, 1], [1] * 6], [[1, 0, 1, 1, 0, 1], [0, 1, 1, 0, 1, 1]]]
_QUERIES, _GROUPS = 64, 32
"""Channels of all query heads, and of all heads of keys, in `decoder`."""

_BIASED = """qp{i} = MatMul({x}, wq{i}) q{i} = Add(qp{i}, bq) kp{i} = MatMul({x}, wk{i}) k{i} = Add(bk, kp{i})
   vp{i} = MatMul({x}, wv{i}) v{i} = Add(vp{i}, bv)"""
_ONE_BIAS = "qp{i} = MatMul({x}, wq{i}) q{i} = Add(qp{i}, bq) k{i} = MatMul({x}, wk{i}) v{i} = MatMul({x}, wv{i})"
_TURNED = """tq{i} = Transpose<perm=[1, 0]>(wq{i}) q{i} = MatMul({x}, tq{i}) k{i} = MatMul({x}, wk{i})
   v{i} = MatMul({x}, wv{i})"""
_SPLIT = "all{i} = MatMul({x}, w_all) q{i}, k{i}, v{i} = Split<axis=-1>(all{i}, widths)"
_SLICED = """all{i} = MatMul({x}, w_all) q{i} = Slice(all{i}, zeros, to_keys, last) k{i} = Slice(all{i}, to_keys, to_values, last)
   v{i} = Slice(all{i}, to_values, far, last)"""


def _weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    found = {name: rng.standard_normal(width) for name, width in {"bq": _QUERIES, "bk": _GROUPS, "bv": _GROUPS}.items()}
    return found | {"w_all": rng.standard_normal((64, 128)) / 6, "w_flat": rng.standard_normal((64, _GROUPS)) / 6}


_NUMBERS = {"widths": [_QUERIES, _GROUPS, _GROUPS], "to_keys": [_QUERIES], "to_values": [_QUERIES + _GROUPS], "near": [16]}


def _decoder(projected: str, **choices: object) -> onnx.ModelProto:
    """A decoder with grouped heads whose queries, keys and values are `projected`."""
    model = decoder(**{"rotated": False, "projected": projected, **choices})
    dtype = np.float16 if choices.get("dtype") == "float16" else np.float32
    arrays = {name: array.astype(dtype) for name, array in _weights().items()}
    arrays |= {name: np.array(numbers) for name, numbers in _NUMBERS.items()}
    for name, array in arrays.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


@pytest.fixture
def merging(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a provider where it pays to merge products, to be run on the CPU, where it does not."""
    monkeypatch.setattr(group_query_attention, "merges_projections", lambda context: True)


def _shared(model: onnx.ModelProto, **choices: object) -> onnx_attnfuse.Result:
    result = onnx_attnfuse.optimize(model, **{"ep": "cpu", "cache": "shared", **choices})
    assert result.report.decoder is not None, result.report.notes
    return result


def _assert_serves(model: onnx.ModelProto, result: onnx_attnfuse.Result) -> None:
    found = result.report.decoder
    assert found is not None
    for padding in _PADDINGS:
        fed = steps(padding, (1, 1, 1))
        assert_same_at_tokens(grown(model, found, fed), buffered(result.model, found, fed), fed)


def _packed(result: onnx_attnfuse.Result) -> list[bool]:
    """Whether each operator is handed one tensor, as the model and the report say it."""
    nodes = [node for node in result.model.graph.node if node.op_type == "GroupQueryAttention"]
    assert all(bool(node.input[1]) == bool(node.input[2]) for node in nodes)
    told = [", packed qkv" in (site.mask_form or "") for site in result.report.sites]
    assert told == [not node.input[1] for node in nodes]
    return told


def _products(result: onnx_attnfuse.Result) -> int:
    return Counter(node.op_type for node in result.model.graph.node)["MatMul"]


@pytest.mark.usefixtures("merging")
@pytest.mark.parametrize("projected", [PROJECTED, _BIASED, _ONE_BIAS, _TURNED], ids=["plain", "biases", "one bias", "transposed"])
def test_three_projections_of_one_value_become_one_product_of_constants(projected: str) -> None:
    model = _decoder(projected)
    result = _shared(model)
    assert _packed(result) == [True, True]
    assert _products(result) == 5
    made = {output for node in result.model.graph.node for output in node.output}
    weights = [node.input[1] for node in result.model.graph.node if node.op_type == "MatMul"]
    assert not made & set(weights)
    _assert_serves(model, result)


@pytest.mark.parametrize("projected", [_SPLIT, _SLICED], ids=["split", "slices"])
def test_what_was_split_is_handed_over_whole(projected: str) -> None:
    model = _decoder(projected)
    result = _shared(model)
    assert _packed(result) == [True, True]
    assert not {"Split", "Concat"} & {node.op_type for node in result.model.graph.node if "w_all" in node.input}
    assert "Split" not in {node.op_type for node in result.model.graph.node}
    _assert_serves(model, result)


@pytest.mark.usefixtures("merging")
def test_gpt2_hands_over_its_product_and_opt_makes_one() -> None:
    for stem in ("gpt2_past__ts17__eager", "opt_past__ts17__sdpa"):
        model = onnx.load(_EXPORTS / f"{stem}.onnx")
        result = _shared(model)
        assert _packed(result) == [True, True]
        _assert_serves(model, result)


def test_on_a_cpu_a_tensor_that_is_there_is_handed_over_and_none_is_made() -> None:
    assert _packed(_shared(onnx.load(_EXPORTS / "gpt2_past__ts17__eager.onnx"))) == [True, True]
    result = _shared(_decoder(_BIASED))
    assert _packed(result) == [False, False]
    assert _products(result) == 9


@pytest.mark.usefixtures("merging")
def test_weights_in_a_file_are_merged_when_the_model_is_written(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _decoder(_BIASED)
    source, target = tmp_path / "model.onnx", tmp_path / "fused" / "model.onnx"
    target.parent.mkdir()
    onnx.save(_decoder(_BIASED), source, save_as_external_data=True, location="weights", size_threshold=1024)
    read, seen = constants.read_tensor, list[str | None]()

    def noted(tensor: ir.TensorProtocol) -> constants.Array | None:
        seen.append(tensor.name)
        return read(tensor)

    monkeypatch.setattr(folding, "read_tensor", noted)
    result = onnx_attnfuse.optimize(source, ep="cpu", cache="shared", verify="none")
    assert not seen
    result.save(target)
    assert {"wq0", "wk1", "bv"} <= set(seen)
    written = onnx.load(target)
    assert result.report.decoder is not None
    fed = steps(_PADDINGS[1], (1, 1))
    assert_same_at_tokens(grown(model, result.report.decoder, fed), buffered(written, result.report.decoder, fed), fed)


@pytest.mark.usefixtures("merging")
def test_the_cpu_rotates_packed_operands_too() -> None:
    model = _decoder(PROJECTED, rotated=True, given=False, seen=UNPADDED)
    result = _shared(model, verify="model")
    assert _packed(result) == [True, True]
    assert all("do_rotary" in (site.mask_form or "") for site in result.report.sites)
    assert any(note.startswith("whole model verified in ") for note in result.report.notes)
    fed = steps(_PADDINGS[0], (1, 1, 1))
    assert result.report.decoder is not None
    assert_same_at_tokens(grown(model, result.report.decoder, fed), buffered(result.model, result.report.decoder, fed), fed)


def test_rotations_inside_of_the_operator_are_of_packed_tokens_too() -> None:
    model = _decoder(_BIASED, rotated=True, dtype="float16")
    result = _shared(model, ep="cuda", arch="sm90")
    assert _packed(result) == [True, True]
    assert {site.mask_form for site in result.report.sites} == {
        "GroupQueryAttention causal, shared buffer, do_rotary, packed qkv"
    }
    assert all(site.verified is not None for site in result.report.sites)


@pytest.mark.parametrize("rotated", [True, False], ids=["rotated inside", "not rotated"])
def test_a_step_of_packed_operands_can_be_captured(*, rotated: bool) -> None:
    """Sizes are told by the output of the operator, whose shape is that of the queries."""
    between = "sizes = Shape(y0) same = Reshape(y0, sizes) next = Identity(same)"
    model = _decoder(_BIASED, rotated=rotated, dtype="float16", between=between)
    sizes = {"b": 1, "s": 1, "total": 24, "max_sequence_length": 24}
    result = _shared(model, ep="cuda", arch="sm90", cuda_graph=True, dim=sizes, verify="none")
    assert _packed(result) == [True, True]
    assert result.report.capture is not None
    assert result.report.capture.possible
    assert "Shape" not in {node.op_type for node in result.model.graph.node}


@pytest.mark.parametrize("rotated", [True, False], ids=["rotated inside", "not rotated"])
def test_a_wrong_order_of_packed_heads_is_found(monkeypatch: pytest.MonkeyPatch, *, rotated: bool) -> None:
    """Keys and values in each other's place, as a mistake of ours would put them."""
    read, turns = operand_products._product, itertools.cycle((0, 2, 1))

    def swapped(value: ir.Value | None, reader: ir.Node, builder: Builder) -> object:
        del value
        return read(reader.inputs[next(turns)], reader, builder)

    monkeypatch.setattr(operand_products, "_product", swapped)
    model = _decoder(PROJECTED, rotated=rotated, dtype="float16")
    result = onnx_attnfuse.optimize(model, ep="cuda", arch="sm90", cache="shared")
    assert result.report.decoder is None
    assert {reason.code for site in result.report.sites for reason in site.reasons} == {"differs"}


@pytest.mark.usefixtures("merging")
def test_rotations_in_front_of_the_operator_leave_three_products() -> None:
    result = _shared(_decoder(PROJECTED, rotated=True))
    assert _packed(result) == [False, False]
    assert _products(result) == 9


_NORMED = """qp{i} = MatMul({x}, wq{i}) qh{i} = Reshape(qp{i}, queries) qs{i} = LpNormalization<axis=-1>(qh{i})
   q{i} = Reshape(qs{i}, wide) k{i} = MatMul({x}, wk{i}) v{i} = MatMul({x}, wv{i})"""
_OTHER = "past_x{i} = Tanh({x}) q{i} = MatMul({x}, wq{i}) k{i} = MatMul({x}, wk{i}) v{i} = MatMul(past_x{i}, wv{i})"
_RUNTIME = "wz{i} = Tanh(w_flat) q{i} = MatMul({x}, wq{i}) k{i} = MatMul({x}, wk{i}) v{i} = MatMul({x}, wz{i})"
_SHIFTED = "all{i} = MatMul({x}, w_all) k{i}, q{i}, v{i} = Split<axis=-1>(all{i}, shifted)"
_OVERLAPPING = _SLICED.replace("Slice(all{i}, to_values, far, last)", "Slice(all{i}, to_keys, to_values, last)")


@pytest.mark.usefixtures("merging")
@pytest.mark.parametrize(
    "projected",
    [_NORMED, _OTHER, _RUNTIME, _SHIFTED, _OVERLAPPING],
    ids=["normalised", "another input", "weight at run time", "another order", "a part twice"],
)
def test_near_misses_are_handed_over_as_three(projected: str) -> None:
    model = _decoder(projected)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([_GROUPS, _QUERIES, _GROUPS]), "shifted"))
    result = _shared(model)
    assert _packed(result) == [False, False]
    _assert_serves(model, result)


@pytest.mark.usefixtures("merging")
def test_a_projection_that_something_else_reads_is_not_merged() -> None:
    end = "mean = ReduceMean<keepdims=1>(v1, last) more = Add(y1, mean) logits = MatMul(more, head)"
    model = _decoder(PROJECTED, end=end)
    result = _shared(model)
    assert _packed(result) == [True, False]
    _assert_serves(model, result)
