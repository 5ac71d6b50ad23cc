import dataclasses

import numpy as np

from gallery.opaque_attention import attn
from onnx_attnfuse.testing import assert_fuses, assert_refuses

TEXT = """<ir_version: 9, opset_import: ["" : 18, "acme" : 1]>
g (float[b, s, 16] q, float[b, t, 16] k, float[b, t, 16] v, float[b, 1, 1, t] mask) => (float[b, s, 16] out) {
    out = acme.Attn<num_heads = 2, scale = 0.35>(q, k, v, mask)
}"""


def in_numpy(query, key, value, mask=None, *, num_heads, scale=1.0, softcap=None):
    q, k, v = (x.reshape(*x.shape[:2], num_heads, -1).swapaxes(1, 2) for x in (query, key, value))
    scores = q @ k.swapaxes(-1, -2) * np.float32(scale) + (0 if mask is None else mask)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True) @ v).swapaxes(1, 2).reshape(*query.shape)


def test_it_becomes_an_operator_of_onnx_runtime():
    result = assert_fuses(TEXT, dataclasses.replace(attn, reference=in_numpy), into="MultiHeadAttention")
    assert not any(node.domain == "acme" for node in result.model.graph)


def test_an_attribute_that_the_definition_does_not_have_stops_it():
    with_reference = dataclasses.replace(attn, reference=in_numpy)
    assert_refuses(TEXT.replace("scale =", "softcap = 5.0, scale ="), with_reference, code="unknown-attribute")
