"""Models of one interface are compared call by call; where a cache that grows became one buffer, the way to compare is named."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from onnx_attnfuse.errors import ModelError
from onnx_attnfuse.verify.model_session import check_interfaces

_MODEL = """<ir_version: 10, opset_import: ["" : 24, "com.microsoft" : 1]>
decoder (float[b, s, 64] q, float[b, s, 64] k, float[b, s, 64] v, int32[b] last, int32 total,
         float[b, 4, {past}, 16] pk, float[b, 4, {past}, 16] pv)
=> (float[b, s, 64] y, float[b, 4, {present}, 16] nk, float[b, 4, {present}, 16] nv) {{ {nodes} }}"""
_GROWS = "y, nk, nv = Attention<q_num_heads = 4, kv_num_heads = 4>(q, k, v, , pk, pv)"
_SHARED = "y, nk, nv = com.microsoft.GroupQueryAttention<num_heads = 4, kv_num_heads = 4>(q, k, v, pk, pv, last, total)"
_WRITES = "nk = Relu(pk) nv = Relu(pv) y = Identity(q)"


def _model(past: str, present: str, nodes: str) -> ir.Model:
    return ir.from_onnx_text(_MODEL.format(past=past, present=present, nodes=nodes))


def test_a_cache_that_grows_is_compared_with_one_buffer_in_a_loop() -> None:
    with pytest.raises(ModelError, match="attnfuse optimize FIRST --cache shared --verify model"):
        check_interfaces((_model("p", "t", _GROWS), _model("m", "m", _SHARED)))


@pytest.mark.parametrize(
    "first", [("p", "t", _GROWS), ("m", "m", _WRITES), ("m", "m", _SHARED)], ids=["grows", "writes", "shared"]
)
def test_caches_of_one_kind_are_compared_call_by_call(first: tuple[str, str, str]) -> None:
    check_interfaces((_model(*first), _model("p", "t", _GROWS) if first[2] == _GROWS else _model("m", "m", _SHARED)))


def test_what_only_one_model_has_is_named() -> None:
    one, other = _model("p", "t", _GROWS), _model("p", "t", _GROWS)
    other.graph.inputs[4].name = "length"
    with pytest.raises(ModelError, match="only one has length, total"):
        check_interfaces((one, other))
