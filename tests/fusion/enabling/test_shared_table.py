"""The table of a tied embedding is read as it lies, where ONNX Runtime would keep its transpose too."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import numpy_helper

import onnx_attnfuse

ROWS, C = 1 << 15, 32
_TEXT = """<ir_version: 9, opset_import: ["" : 18]>
tied (int64[b, s] tokens) => (float[b, s, n] logits{outputs})
{{ x = Gather<axis = 0>({read}, tokens) kt = Transpose<perm = [0, 2, 1]>(x) qk = MatMul(x, kt)
   weights = Softmax<axis = -1>(qk) seen = MatMul(weights, x) turned = Transpose<perm = {perm}>(table)
   logits = MatMul(seen, turned) {more} }}"""


def model_of(
    *, rows: int = ROWS, read: str = "table", perm: str = "[1, 0]", outputs: str = "", more: str = ""
) -> onnx.ModelProto:
    """A decoder of one attention, whose last product reads the table of tokens turned."""
    model = onnx.parser.parse_model(_TEXT.format(read=read, perm=perm, outputs=outputs, more=more))
    rng = np.random.default_rng(0)
    square = perm != "[1, 0]"
    arrays = {"table": rng.standard_normal((C if square else rows, C)).astype(np.float32)}
    if read != "table":
        arrays[read] = arrays["table"].copy()
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    return model


def fused_products(model: onnx.ModelProto) -> int:
    return sum(node.op_type == "FusedMatMul" for node in model.graph.node)


def test_the_table_is_read_as_it_lies_and_nothing_turns_it() -> None:
    model = model_of()
    result = onnx_attnfuse.optimize(model, ep="cuda", verify="sites")
    assert (result.report.fused, fused_products(result.model)) == (1, 1)
    assert "turned" not in {name for node in result.model.graph.node for name in node.output}
    tokens = np.random.default_rng(1).integers(0, ROWS, (2, 5))
    old, new = (
        onnxruntime.InferenceSession(item.SerializeToString()).run(None, {"tokens": tokens})[0] for item in (model, result.model)
    )
    np.testing.assert_allclose(new, old, rtol=1e-4, atol=1e-3)


def test_a_second_run_finds_nothing_to_do() -> None:
    once = onnx_attnfuse.optimize(model_of(), ep="cuda", verify="none").model
    again = onnx_attnfuse.optimize(once, ep="cuda", verify="none")
    assert not [note for note in again.report.notes if "token embedding" in note]
    assert fused_products(again.model) == 1


@pytest.mark.parametrize(
    ("model", "ep"),
    [
        pytest.param(model_of(), "cpu", id="a CPU"),
        pytest.param(model_of(rows=1 << 10), "cuda", id="a small table"),
        pytest.param(model_of(read="other"), "cuda", id="nothing else reads it"),
        pytest.param(model_of(perm="[0, 1]"), "cuda", id="it is not turned"),
        pytest.param(
            model_of(outputs=f", float[{C}, m] copy", more="copy = Identity(turned)"), "cuda", id="the transpose is read too"
        ),
    ],
)
def test_near_misses_stay(model: onnx.ModelProto, ep: str) -> None:
    result = onnx_attnfuse.optimize(model, ep=ep, verify="none")
    assert (result.report.fused, fused_products(result.model)) == (1, 0)
