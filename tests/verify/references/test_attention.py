"""The reference of com.microsoft's Attention beyond what the kernels tell."""

from __future__ import annotations

import numpy as np
import pytest

from onnx_attnfuse.verify.references import operator

attention = operator("Attention").called


def test_without_biases_they_are_zero() -> None:  # the kernel on the CPU ends the process
    draw = np.random.default_rng(0)
    tokens, weights = draw.random((2, 3, 8), np.float32), draw.random((8, 48), np.float32)
    bare, zero = (attention(tokens, weights, bias, num_heads=2)[0] for bias in (None, np.zeros(48, np.float32)))
    np.testing.assert_array_equal(bare, zero)


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="do_rotary"):
        attention(np.ones((2, 3, 8)), np.ones((8, 48)), num_heads=2, do_rotary=1)
    with pytest.raises(ValueError, match="mask"):
        attention(np.ones((2, 3, 8)), np.ones((8, 48)), None, np.ones((2, 1, 4, 4), np.int32), num_heads=2)
