"""For authors of patterns: that a pattern fuses what it should, refuses what it must, and changes no result.

    from onnx_attnfuse.testing import assert_fuses, assert_refuses

    def test_it_is_fused():
        assert_fuses(attention, my_pattern, inputs=(q, k, v))

    def test_its_near_miss_is_not():
        assert_refuses(nearly, my_pattern, inputs=(q, k, v), code="unreadable-score-step")

A model is a torch function or module with its inputs, ONNX text, a file, or any model object. Whatever comes out is held against
the original on hostile inputs: every kind of mask and padding, rows without a key, large scores.
"""

from __future__ import annotations

from onnx_attnfuse.testing.asserting import (
    Case,
    Expectation,
    Model,
    as_model,
    assert_case,
    assert_fuses,
    assert_refuses,
    cases_in,
)

__all__ = ["Case", "Expectation", "Model", "as_model", "assert_case", "assert_fuses", "assert_refuses", "cases_in"]
