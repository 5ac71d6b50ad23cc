"""Attention with roundings drawn at any place, of any type, along any axis: each is told, and fusing without them is exact."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnx_attnfuse
from onnx_attnfuse.verify.quantised.roundings import without_roundings
from onnx_attnfuse.verify.quantised.stated_error import check_dequantised
from tests.support.bundled import Array, run
from tests.support.graph_builder import GraphBuilder

TYPES = [np.int8, np.uint8, np.int16, np.uint16]
INSIDE = {"scores", "scaled", "masked", "weights", "guarded"}


class Drawn:
    """A graph that is being written, with roundings where a random number says so."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.graph = GraphBuilder(21)
        self.places: Counter[tuple[str, str, int | None]] = Counter()

    def rounded(self, place: str, value: str, rank: int = 4) -> str:
        """The value, perhaps rounded, perhaps twice."""
        for _ in range(int(self.random.choice(3, p=[0.45, 0.45, 0.1]))):
            dtype = TYPES[self.random.integers(len(TYPES))]
            axis = 1 if rank == 4 and self.random.random() < 0.3 else None
            size = () if axis is None else (3,)
            span = 2.0 if place in {"weights", "guarded"} else 24.0
            scale = np.asarray(self.random.uniform(0.8, 1.2, size) * span / (1 << 8 * dtype().itemsize), np.float32)
            middle = 0 if np.iinfo(dtype).min else (1 << 8 * dtype().itemsize) // 2
            point = np.full(size, middle, dtype)
            fixed = {} if axis is None else {"axis": axis}
            codes = self.graph.op("QuantizeLinear", value, scale, point, **fixed)
            value = self.graph.op("DequantizeLinear", codes, scale, point, **fixed)
            self.places[place, np.dtype(dtype).name.upper(), axis] += 1
        return value

    def attention(self) -> onnx.ModelProto:
        """Attention of 3 heads with a factor, a mask and a guard, each in one of its spellings."""
        graph, random = self.graph, self.random
        operands: list[str] = []
        for name, place in zip("qkv", ("query", "key", "value"), strict=True):
            value = self.rounded(place, graph.given(name, [2, 5, 24]), 3)
            value = self.rounded(place, graph.op("Reshape", value, [2, 5, 3, 8]), 3)
            value = self.rounded(place, graph.op("Transpose", value, perm=[0, 2, 1, 3]))
            operands.append(value)
        query, key, value = operands
        scores = graph.op("MatMul", query, self.rounded("key", graph.op("Transpose", key, perm=[0, 1, 3, 2])))
        scores = self.rounded("scores", scores)
        if random.random() < 0.7:
            scores = self.rounded("scaled", graph.op("Mul", scores, np.float32(0.35)))
        if random.random() < 0.7:
            mask = self.rounded("mask", graph.given("mask", [2, 1, 5, 5]), 3)
            scores = self.rounded("masked", graph.op("Add", scores, mask))
        weights = self.rounded("weights", graph.op("Softmax", scores, axis=-1))
        if random.random() < 0.5:
            weights = graph.op("Where", graph.op("IsNaN", weights), np.float32(0), weights)
            weights = self.rounded("guarded", weights)
        result = self.rounded("output", graph.op("MatMul", weights, value))
        result = self.rounded("output", graph.op("Transpose", result, perm=[0, 2, 1, 3]), 3)
        graph.gives(graph.op("Reshape", result, [2, 5, 24]), "out", [2, 5, 24])
        return graph.model()


def feeds(model: onnx.ModelProto) -> dict[str, Array]:
    random = np.random.default_rng(1)
    shapes = {entry.name: [dim.dim_value for dim in entry.type.tensor_type.shape.dim] for entry in model.graph.input}
    return {name: random.normal(0, 1, shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("seed", range(40))
def test_each_is_told_where_it_is_and_fusing_without_them_is_exact(seed: int) -> None:
    drawn = Drawn(seed)
    model = drawn.attention()
    inputs, inside = feeds(model), any(place in INSIDE for place, _, _ in drawn.places)
    plain = onnx_attnfuse.optimize(model, ep="cpu")
    (site,) = plain.report.sites
    told = Counter((item.place, item.type, item.axis) for item in site.roundings)
    assert told == drawn.places
    assert site.status == ("skipped" if inside else "fused")
    if inside:
        assert [reason.code for reason in site.reasons] == ["quantized"]
        assert np.array_equal(run(model, inputs)["out"], run(plain.model, inputs)["out"])
    fused = onnx_attnfuse.optimize(model, ep="cpu", dequantise_attention=True)
    assert [site.status for site in fused.report.sites] == ["fused"]
    assert not fused.report.failures
    verdict = check_dequantised(ir.from_proto(model), ir.from_proto(fused.model))
    assert verdict.equal, verdict.detail
    bare = [ir.to_proto(without_roundings(ir.from_proto(item))) for item in (model, fused.model)]
    assert np.allclose(run(bare[0], inputs)["out"], run(bare[1], inputs)["out"], atol=1e-5)
    assert onnx_attnfuse.verify_models(model, fused.model, tolerance=0.2).equal


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("seed", range(40, 60))
def test_moving_them_for_a_provider_changes_no_bit(seed: int) -> None:
    drawn = Drawn(seed)
    model = drawn.attention()
    moved = onnx_attnfuse.optimize(model, ep="tensorrt")
    if any(place in INSIDE for place, _, _ in drawn.places):
        for scale in (1.0, 30.0):
            inputs = {name: array * np.float32(scale) for name, array in feeds(model).items()}
            assert np.array_equal(run(model, inputs)["out"], run(moved.model, inputs)["out"])
    assert not moved.report.failures
