"""A number for what is masked and a bias of the lowest number: equal in all rows, those that see no key among them."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

from tests.certify.test_joined import unproved

_HEAD = """<ir_version: 10, opset_import: ["" : 20]>
g (float[B,2,S,8] q, float[B,2,S,8] k, float[B,2,S,8] v, INPUT) => (float[B,2,S,8] y) {
t = Transpose<perm = [0, 1, 3, 2]>(k)  scores = MatMul(q, t)  low = Constant<value_float = FILL>()  MASK
masked = RULE  weights = Softmax<axis = -1>(masked)  y = MatMul(weights, v) }"""
_BIAS = "zero = Constant<value_float = 0.0>()  bias = Where(seen, zero, low)"
_PADDING = ("bool[B,S] m", "axes = Constant<value_ints = [1, 2]>()  seen = Unsqueeze(m, axes)")
_TRIANGLE = ("int64 kk", "s = Shape<start = 2, end = 3>(q)  n = Concat<axis = 0>(s, s)  one = Constant<value_int = 1>()\n"
             "ones = Expand(one, n)  low_ones = Trilu<upper = 0>(ones, kk)  seen = Cast<to = 9>(low_ones)")  # fmt: skip


def _models(fill: str, mask: tuple[str, str]) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    before = _HEAD.replace("FILL", fill).replace("RULE", "Where(seen, scores, low)").replace("MASK", mask[1])
    after = _HEAD.replace("FILL", "-3.4028235e38").replace("RULE", "Add(scores, bias)").replace("MASK", f"{mask[1]}  {_BIAS}")
    after = (
        after.replace("low =", "least =")
        .replace("zero, low)", "zero, least)")
        .replace("masked", "biased")
        .replace("weights", "w")
    )
    first, second = (onnx.parser.parse_model(text.replace("INPUT", mask[0])) for text in (before, after))
    return first, second


def _run(model: onnx.ModelProto, given: dict[str, np.ndarray]) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, given)[0])


@pytest.mark.parametrize(("fill", "mask"), [("-1001.0", _PADDING), ("-1e9", _TRIANGLE)])
def test_a_fill_that_masks_is_a_bias_also_in_rows_that_see_nothing(fill: str, mask: tuple[str, str]) -> None:
    first, second = _models(fill, mask)
    assert unproved(first, second) == []
    random = np.random.default_rng(3)
    given = {name: random.standard_normal((2, 2, 3, 8)).astype(np.float32) for name in "qkv"}
    masks = [{"m": np.array([[True, False, True], [False] * 3])}] if "m" in mask[0].split() else []
    for seen in masks or [{"kk": np.array(number, np.int64)} for number in (-2, -1, 0, 1)]:
        np.testing.assert_allclose(_run(first, given | seen), _run(second, given | seen), atol=1e-6)


@pytest.mark.parametrize("mask", [_PADDING, _TRIANGLE])
def test_a_fill_that_leaves_something_of_a_key_is_no_bias_of_the_lowest_number(mask: tuple[str, str]) -> None:
    assert unproved(*_models("-3.0", mask)) == ["y"]
