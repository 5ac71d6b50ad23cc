"""Classes of operators, and what their names alone tell of shapes."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import is_attention

QUERY, SHARED = "float[b, s, 32] q, float[b, s, 16] k, float[b, s, 16] v", "num_heads = 4, kv_num_heads = 2"


@pytest.mark.parametrize(
    ("domain", "op", "expected"),
    [
        ("", "Attention", True),
        ("ai.onnx", "Attention", True),
        ("com.microsoft", "Attention", True),
        ("com.microsoft", "SparseAttention", True),
        ("com.microsoft", "PagedAttention", True),
        ("com.microsoft", "LinearAttention", False),
        ("com.microsoft", "SparseAttentionIndexer", False),
        ("com.microsoft", "RotaryEmbedding", False),
        ("", "LinearAttention", False),
        ("", "SparseAttention", False),
        ("com.example", "Attention", False),
    ],
)
def test_an_attention_is_known_by_its_domain_and_name(domain: str, op: str, expected: bool) -> None:
    assert is_attention(ir.Node(domain, op, [])) == expected


@pytest.mark.parametrize(
    ("inputs", "call", "expected"),
    [
        (QUERY, f"GroupQueryAttention<{SHARED}>(q, k, v)", "(b, s, 32)"),
        (QUERY, f"SparseAttention<{SHARED}>(q, k, v)", "(b, s, 32)"),
        ("float[b, s, 64] q", f"GroupQueryAttention<{SHARED}>(q)", "(b, s, 32)"),
        (QUERY, "MultiHeadAttention<num_heads = 4>(q, k, v)", "(b, s, 16)"),
        ("float[b, s, 32] q, float[64, 96] k, float[96] v", "QAttention<num_heads = 4>(q, k, v)", "(b, s, 32)"),
        ("float[t, 32] q, float[t, 32] k, float[t, 32] v", "PagedAttention<num_heads = 4>(q, k, v)", "None"),
        (QUERY, "LinearAttention<num_heads = 4>(q, k, v)", "None"),
    ],
)
def test_an_attention_of_com_microsoft_gives_as_many_rows_as_it_has_queries(inputs: str, call: str, expected: str) -> None:
    text = f"""<ir_version: 10, opset_import: ["" : 18, "com.microsoft" : 1]>
    g ({inputs}) => (float[o, p, q] y) {{
        x = com.microsoft.{call}
        y = Identity(x)
    }}"""
    graph = ir.from_onnx_text(text).graph
    dims = Facts(graph).dims(graph[0].outputs[0])
    assert str(dims and tuple(map(str, dims))).replace("'", "") == expected
