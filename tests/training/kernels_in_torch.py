"""The kernels that a GPU is needed for, computed by PyTorch on the CPU: same arguments, same results, same roundings of shapes.

They are no copies: weights are computed in float64 from what the real kernels keep, the logarithm of each row's sum in float32,
and dropout follows from the seed alone, so that a forward and a backward call that do not agree come out wrong. The names of
their parameters are those of PyTorch 2.4's schemas.
"""

from __future__ import annotations

import math

import torch

_EMPTY = torch.empty(0)
_MOST_KEYS = 256
"""Drawn for each row, so that padding the keys changes nothing for the others."""


def _scores(query, key, bias, causal, scale):
    scores = query.double() @ key.double().transpose(-1, -2) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if bias is not None:
        scores = scores + bias.double()
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).tril().logical_not()
        scores = scores.masked_fill(later, float("-inf"))
    return scores


def _kept(shape, dropout_p, seed):
    if not dropout_p:
        return torch.ones(shape, dtype=torch.float64)
    generator = torch.Generator().manual_seed(int(seed))
    drawn = torch.rand((*shape[:-1], _MOST_KEYS), generator=generator)[..., : shape[-1]]
    return (drawn >= dropout_p).double() / (1 - dropout_p)


def _attend(query, key, value, bias, causal, dropout_p, scale, seed):
    """Everything as (b, n, s, h)."""
    scores = _scores(query, key, bias, causal, scale)
    logsumexp = torch.logsumexp(scores, -1).float()
    kept = _kept(scores.shape, dropout_p, seed)
    return ((scores.softmax(-1) * kept) @ value.double()).to(query.dtype), logsumexp


def _differentiate(gradient, query, key, value, bias, out, logsumexp, causal, dropout_p, scale, seed):
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = _scores(query, key, bias, causal, scale)
    weights = (scores - logsumexp.double()[..., None]).exp()
    kept = _kept(scores.shape, dropout_p, seed)
    gradient = gradient.double()
    mean = (gradient * out.double()).sum(-1, keepdim=True)
    scored = weights * (gradient @ value.double().transpose(-1, -2) * kept - mean)
    queries, keys = scored @ key.double() * scale, scored.transpose(-1, -2) @ query.double() * scale
    values = (weights * kept).transpose(-1, -2) @ gradient
    return tuple(item.to(query.dtype) for item in (queries, keys, values, scored))


def _seeds():
    return torch.randint(1 << 30, (), dtype=torch.int64), torch.zeros((), dtype=torch.int64)


def _swapped(*tensors):
    return tuple(tensor.transpose(1, 2) for tensor in tensors)


def _rounded(rows, multiple):
    return -rows % multiple


def _efficient_attention_forward(
    query, key, value, bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, custom_mask_type,
    compute_log_sumexp=False, *, scale=None, seqlen_k=None, window_size=None,
):  # fmt: skip
    """Everything as (b, s, n, h); the bias has every axis at full length, its last a multiple of 8."""
    assert compute_log_sumexp
    assert bias is None or (bias.shape[-1] % 8 == 0 and bias.shape == (len(query), query.shape[2], query.shape[1], key.shape[1]))
    seed, offset = _seeds()
    out, logsumexp = _attend(*_swapped(query, key, value), bias, custom_mask_type == 1, dropout_p, scale, seed)
    logsumexp = torch.nn.functional.pad(logsumexp, (0, _rounded(query.shape[1], 32)), value=float("inf"))
    return out.transpose(1, 2).contiguous(), logsumexp, seed, offset, query.shape[1], key.shape[1]


def _efficient_attention_backward(
    grad_out_, query, key, value, bias, out, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, logsumexp, dropout_p,
    philox_seed, philox_offset, custom_mask_type, bias_requires_grad, *, scale=None, num_splits_key=None, window_size=None,
    shared_storage_dqdkdv=False,
):  # fmt: skip
    """Likewise."""
    assert (max_seqlen_q, max_seqlen_k) == (query.shape[1], key.shape[1])
    moved = _swapped(grad_out_, query, key, value)
    kept = logsumexp[..., : query.shape[1]]
    found = _differentiate(
        *moved, bias, out.transpose(1, 2), kept, custom_mask_type == 1, dropout_p, scale, philox_seed
    )  # fmt: skip
    return *(item.contiguous() for item in _swapped(*found[:3])), found[3] if bias_requires_grad else _EMPTY


def _scaled_dot_product_flash_attention(
    query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
):  # fmt: skip
    """Everything as (b, n, s, h)."""
    assert not return_debug_mask
    assert not is_causal or query.shape[2] == key.shape[2]
    seed, offset = _seeds()
    out, logsumexp = _attend(query, key, value, None, is_causal, dropout_p, scale, seed)
    return out, logsumexp, None, None, query.shape[2], key.shape[2], seed, offset, _EMPTY


def _scaled_dot_product_flash_attention_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, philox_seed,
    philox_offset, *, scale=None,
):  # fmt: skip
    """Likewise."""
    assert (max_q, max_k) == (query.shape[2], key.shape[2])
    found = _differentiate(grad_out, query, key, value, None, out, logsumexp, is_causal, dropout_p, scale, philox_seed)
    return found[:3]


KERNELS = {name: found for name, found in list(globals().items()) if name.startswith(("_efficient", "_scaled_dot"))}
"""By name."""
