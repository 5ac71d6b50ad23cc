"""A decoder that is told its sizes gets the form that is fastest there, and one that is not gets one for prompts and steps."""

from __future__ import annotations

import onnx
import pytest

import onnx_attnfuse
from tests.support.bundled import BUNDLED

_LLAMA = next(path for path in BUNDLED if path.stem == "llama_past__dyn18__sdpa")


@pytest.mark.parametrize(
    ("new", "expected"),
    [(None, {("", "Attention")}), (1, {("", "Attention")}), (512, {("com.microsoft", "MultiHeadAttention")})],
    ids=["any", "one", "a prompt"],
)
def test_a_cache_goes_into_the_operator_unless_a_prompt_of_known_length_is_faster(
    new: int | None, expected: set[tuple[str, str]]
) -> None:
    model = onnx.load(_LLAMA)
    length = model.graph.input[0].type.tensor_type.shape.dim[1].dim_param
    result = onnx_attnfuse.optimize(model, ep="cuda", arch="90", verify="none", dim={} if new is None else {length: new})
    assert {(node.domain, node.op_type) for node in result.model.graph.node if "Attention" in node.op_type} == expected
