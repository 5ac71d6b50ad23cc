import torch

from gallery.sum_of_products import sum_of_products
from onnx_attnfuse.testing import assert_fuses

torch.manual_seed(0)
NOPE, ROPE = torch.randn(2, 5, 4, 32), torch.randn(2, 5, 4, 16)
INPUTS = (NOPE, torch.randn(2, 5, 4, 32), ROPE, torch.randn(2, 5, 16), torch.randn(2, 5, 4, 32))


def latent(q_nope, k_nope, q_rope, k_rope, v):
    """As DeepSeek-V3's own code has it, before the cache."""
    scores = torch.einsum("bshc,bthc->bsht", q_nope, k_nope) + torch.einsum("bshr,btr->bsht", q_rope, k_rope)
    mask = torch.full((5, 5), float("-inf")).triu(1)
    return torch.einsum("bsht,bthc->bshc", (scores * 0.144 + mask.unsqueeze(1)).softmax(-1), v)


def relative(q, k, q_too, r, v):
    """Positions that differ by row are no keys."""
    scores = torch.einsum("bshc,bthc->bsht", q, k) + torch.einsum("bshr,str->bsht", q_too, r[:1].expand(5, 5, 16))
    return torch.einsum("bsht,bthc->bshc", (scores * 0.144).softmax(-1), v)


def test_the_mask_is_all_that_is_left_beside_the_product():
    (site,) = assert_fuses(latent, sum_of_products, inputs=INPUTS).report.sites
    assert (site.head_size, site.mask, site.mask_form) == (48, "causal", "unidirectional")


def test_products_of_another_kind_stay_a_bias():
    (site,) = assert_fuses(relative, inputs=INPUTS).report.sites
    assert site.pattern is None
    assert site.head_size == 32
