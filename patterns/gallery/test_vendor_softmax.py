import dataclasses

from gallery.vendor_softmax import scaled_masked_softmax
from onnx_attnfuse.testing import assert_fuses, assert_refuses

TEXT = """<ir_version: 9, opset_import: ["" : 18, "acme" : 1]>
g (float[b, 2, s, 8] q, float[b, 2, t, 8] k, float[b, 2, t, 8] v, bool[b, 1, s, t] hidden) => (float[b, 2, s, 8] out) {
    kt = Transpose<perm = [0, 1, 3, 2]>(k)
    scores = MatMul(q, kt)
    weights = acme.ScaledMaskedSoftmax<scale = 0.35>(scores, hidden)
    out = MatMul(weights, v)
}"""


def test_the_operator_is_read():
    assert_fuses(TEXT, scaled_masked_softmax, sites=1)


def test_a_definition_that_the_reference_contradicts_is_not_used():
    wrong = dataclasses.replace(scaled_masked_softmax, reference=lambda scores, mask, *, scale: scores * scale)
    result = assert_refuses(TEXT, wrong, code="differs")
    assert [node.op_type for node in result.model.graph][-2:] == ["ScaledMaskedSoftmax", "MatMul"]
