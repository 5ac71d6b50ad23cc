"""Rows that are rotated before they are put back in their places: the same attention, and where they are rotated behind."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx.reference
import pytest
from onnx import numpy_helper

import onnx_attnfuse
from onnx_attnfuse.verify.references import OPERATORS

_BATCH, _LENGTH, _WIDTH = 2, 16, 32
_TURNED = "q = com.microsoft.RotaryEmbedding<num_heads = 4>(xp, places, cosines, sines)"
_PADDED = "xp = com.microsoft.RestorePadding(x, offset)"


def _model(places: str = "b, s", rows: int = 24, table: int = _LENGTH, nodes: str = "", outputs: str = "") -> onnx.ModelProto:
    shape = f"{_BATCH}, {_LENGTH}" if places == "b, s" else places
    text = f"""<ir_version: 9, opset_import: ["" : 20, "com.microsoft" : 1]>
    main (float[{rows}, {_WIDTH}] x, int32[{_BATCH}, {_LENGTH}] offset, int64[{shape}] places)
      => (float[{_BATCH}, {_LENGTH}, {_WIDTH}] out{outputs})
      <float[{_BATCH}, {_LENGTH}, {_WIDTH}] xp, float[{_BATCH}, {_LENGTH}, {_WIDTH}] q>
    {{ {_PADDED} {_TURNED} {nodes} out = com.microsoft.MultiHeadAttention<num_heads = 4>(q, q, q) }}"""
    model = onnx.parser.parse_model(text)
    numbers = np.random.default_rng(0)
    for name in ("cosines", "sines"):
        array = numbers.standard_normal((table, _WIDTH // 8)).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def _optimized(model: onnx.ModelProto, ep: str = "cuda") -> onnx.ModelProto:
    return onnx_attnfuse.optimize(model, ep=ep, arch="sm90" if ep == "cuda" else None).model


def _is_behind(model: onnx.ModelProto) -> bool:
    """Whether rows are rotated where they were put back."""
    operators = [node.op_type for node in model.graph.node]
    return operators.index("RestorePadding") < operators.index("RotaryEmbedding")


def _assert_equal(model: onnx.ModelProto, other: onnx.ModelProto) -> None:
    numbers = np.random.default_rng(1)
    entry = {item.name: [size.dim_value for size in item.type.tensor_type.shape.dim] for item in model.graph.input}
    offset = numbers.permutation(_BATCH * _LENGTH).reshape(_BATCH, _LENGTH).astype(np.int32)
    places = np.zeros(1, np.int64) if entry["places"] == [1] else numbers.integers(0, _LENGTH, entry["places"])
    feeds = {"x": numbers.standard_normal(entry["x"]).astype(np.float32), "offset": offset, "places": places}
    one, two = (onnx.reference.ReferenceEvaluator(item, new_ops=list(OPERATORS)).run(None, feeds) for item in (model, other))
    for wanted, found in zip(one, two, strict=True):
        np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), atol=1e-5)


@pytest.mark.parametrize(("places", "rows"), [("b, s", 24), ("b, s", 32), ("1", 16)])
def test_rows_are_rotated_before_they_are_put_back(places: str, rows: int) -> None:
    model = _model(places, rows)
    optimized = _optimized(model)
    assert not _is_behind(optimized)
    _assert_equal(model, optimized)
    assert not _is_behind(_optimized(optimized))


@pytest.mark.parametrize(
    "changed",
    [
        {"rows": 20},
        {"nodes": "other = Neg(xp)", "outputs": f", float[{_BATCH}, {_LENGTH}, {_WIDTH}] other"},
        {"table": 7},
    ],
    ids=["no parts of a power of two", "also read as they are", "tables of fewer rows"],
)
def test_rows_are_rotated_behind_where(changed: dict[str, str]) -> None:
    assert _is_behind(_optimized(_model(**changed)))


def test_it_is_for_cuda() -> None:
    assert _is_behind(_optimized(_model(), "cpu"))
