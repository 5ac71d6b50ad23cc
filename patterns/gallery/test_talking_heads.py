import pytest
import torch

from gallery.talking_heads import talking_heads
from onnx_attnfuse.testing import assert_fuses, assert_refuses

torch.manual_seed(0)
INPUTS = (*(torch.randn(2, 4, 5, 16) for _ in "qkv"), torch.randn(4, 4))


def attention(q, k, v, mix, *, before=False, after=False):
    scores = q @ k.transpose(-1, -2) / 4
    scores = torch.einsum("bhij,hg->bgij", scores, mix) if before else scores
    weights = scores.softmax(-1)
    return ((weights.permute(0, 2, 3, 1) @ mix).permute(0, 3, 1, 2) if after else weights) @ v


@pytest.mark.parametrize("place", ["before", "after"])
def test_mixed_heads_are_named(place):
    refused = assert_refuses(lambda *x: attention(*x, **{place: True}), talking_heads, inputs=INPUTS, code="talking-heads")
    assert len(refused.report.sites) == 1


def test_heads_that_do_not_talk_are_fused():
    assert_fuses(attention, inputs=INPUTS, sites=1)
