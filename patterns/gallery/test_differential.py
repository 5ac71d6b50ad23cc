import torch

from gallery.differential import differential
from onnx_attnfuse.testing import assert_fuses, assert_refuses

torch.manual_seed(0)
Q, K, V = (torch.randn(2, 5, 2, 32).mul(2).reshape(2, 5, 64) for _ in "qkv")


def attention(q, k, v, weight, normalise=lambda weights: weights):
    q, k = (x.view(2, 5, 4, 16).transpose(1, 2) for x in (q, k))
    weights = torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1).view(2, 2, 2, 5, 5)
    return normalise(weights[:, :, 0] - weight * weights[:, :, 1]) @ v.view(2, 5, 2, 32).transpose(1, 2)


def test_one_softmax_over_both_halves():
    assert_fuses(attention, differential, inputs=(Q, K, V, torch.tensor(0.8)), sites=2)


def test_a_difference_that_is_normalised_again_stays():
    def again(q, k, v, weight):
        return attention(q, k, v, weight, torch.relu)

    assert_refuses(again, differential, inputs=(Q, K, V, torch.tensor(0.8)), code="not-attention")
