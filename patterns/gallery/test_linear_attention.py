import pytest
import torch

from gallery.linear_attention import linear_attention
from onnx_attnfuse.testing import assert_refuses

torch.manual_seed(0)
INPUTS = tuple(torch.randn(2, 3, 5, 16) for _ in "qkv")
FEATURES = {"elu": lambda x: torch.nn.functional.elu(x) + 1, "relu": torch.relu}


def attention(q, k, v, features, other=None):
    k = (other or features)(k)
    return features(q) @ (k.transpose(-1, -2) @ v) / (features(q) @ k.sum(-2, keepdim=True).transpose(-1, -2))


@pytest.mark.parametrize("name", FEATURES)
def test_it_is_listed_with_its_reason(name):
    result = assert_refuses(lambda *x: attention(*x, FEATURES[name]), linear_attention, inputs=INPUTS, code="linear-attention")
    assert [site.status for site in result.report.sites] == ["skipped"]


def test_features_of_two_kinds_are_not_recognised():
    mixed = lambda *x: attention(*x, FEATURES["relu"], FEATURES["elu"])
    assert_refuses(mixed, linear_attention, inputs=INPUTS, code=None)
