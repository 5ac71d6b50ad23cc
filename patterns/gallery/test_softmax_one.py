import pytest
import torch

from gallery.softmax_one import softmax_one
from onnx_attnfuse.testing import assert_fuses, assert_refuses

torch.manual_seed(0)
INPUTS = tuple(torch.randn(2, 3, 5, 16) * 1.5 for _ in "qkv")


def attention(q, k, v, *, shift=True, one=lambda m: torch.exp(-m)):
    scores = q @ k.transpose(-1, -2) / 4
    m = scores.amax(-1, keepdim=True) if shift else torch.zeros(())
    e = torch.exp(scores - m) if shift else torch.exp(scores)
    return e / ((one(m) if shift else 1) + e.sum(-1, keepdim=True)) @ v


@pytest.mark.parametrize("shift", [False, True])
def test_both_forms(shift):
    result = assert_fuses(lambda q, k, v: attention(q, k, v, shift=shift), softmax_one, inputs=INPUTS, sites=1)
    assert result.report.sites[0].pattern == f"softmax_one(form={'shifted' if shift else 'plain'})"


def test_a_plain_one_after_the_shift_is_another_function():
    assert_refuses(lambda q, k, v: attention(q, k, v, one=lambda m: 1), softmax_one, inputs=INPUTS, code="sink-shifted")
