"""States of convolutions and recurrences, each with its output, and positions that entries share."""

from __future__ import annotations

import onnx
import pytest

import onnx_attnfuse
from tests.support.decoders import decoder

_INPUTS = ", float[b, 64, 3] conv_0, float[b, 64, 3] conv_2, float[b, 4, 2, 2] memory_0"
_OUTPUTS = ", float[b, 64, 3] next_conv_2, float[b, 4, 2, 2] next_memory_0, float[b, 64, 3] next_conv_0"
_FIRST = "s0 = ReduceMean<keepdims=1>(conv_0, last) f0 = Transpose<perm=[0, 2, 1]>(s0) fed = Add(y0, f0) {between}"
_BETWEEN = """low = Transpose<perm=[0, 2, 1]>(fed) both0 = Concat<axis=-1>(conv_0, low)
   next_conv_0 = Slice(both0, back, far, last) m0 = ReduceMean<keepdims=0>(memory_0, middle)
   m1 = ReduceMean<keepdims=1>(m0, first) m2 = Unsqueeze(m1, last) recalled = Add(fed, m2)
   c0 = ReduceMean<keepdims=1>(next_conv_0, middle) c1 = Unsqueeze(c0, last) next_memory_0 = Add(memory_0, c1)"""
_END = """l2 = Transpose<perm=[0, 2, 1]>(y1) both2 = Concat<axis=-1>({second}, l2) next_conv_2 = Slice(both2, back, far, last)
   s2 = ReduceMean<keepdims=1>(next_conv_2, last) f2 = Transpose<perm=[0, 2, 1]>(s2) {logits}"""


def _hybrid(*, between: str = "next = Identity(recalled)", second: str = "conv_2") -> onnx_attnfuse.Result:
    """A decoder with states in its first layer, and one behind its last."""
    end = _END.format(second=second, logits="sum2 = Add(y1, f2) logits = MatMul(sum2, head)")
    model = decoder(inputs=_INPUTS, outputs=_OUTPUTS, between=_FIRST.format(between=_BETWEEN) + between, end=end, rotated=False)
    model.graph.initializer.append(onnx.helper.make_tensor("back", onnx.TensorProto.INT64, [1], [-3]))
    return onnx_attnfuse.optimize(model, ep="cpu", cache="shared", verify="none")


def test_the_next_value_of_a_state_is_the_output_that_the_fewest_states_reach() -> None:
    found = _hybrid().report.decoder
    assert found is not None
    assert found.convolutions == (("conv_0", "next_conv_0"), ("conv_2", "next_conv_2"))
    assert found.recurrences == (("memory_0", "next_memory_0"),)
    assert found.others == ()


def test_there_are_no_states_where_an_input_reaches_no_output_of_its_shape() -> None:
    """The state of the last layer is an input that nothing of its shape is computed from."""
    found = _hybrid(second="next_conv_0").report.decoder
    assert found is not None
    assert (found.convolutions, found.recurrences) == ((), ())
    assert found.others == ("conv_0", "conv_2", "memory_0")


@pytest.mark.parametrize(
    ("given", "rotated", "wanted"),
    [(True, True, False), (False, True, True), (True, False, False)],
    ids=["given", "counted", "none"],
)
def test_positions_that_are_counted_from_the_past_are_the_same_for_all_entries(given: bool, rotated: bool, wanted: bool) -> None:
    result = onnx_attnfuse.optimize(decoder(given=given, rotated=rotated), ep="cpu", cache="shared", verify="none")
    assert result.report.decoder is not None
    assert result.report.decoder.counts_alike is wanted
