"""Rows that see no key, as the original has them, forward and backward; `training.fully_masked_rows` defines them.

`scaled_dot_product_attention` gives 0 for a row whose keys are all forbidden, and with -3.4e38 added its kernels keep a logarithm
that has swallowed the scores. So such rows are computed apart, by operators that autograd differentiates:

    scores replaced     queries of 0 and every key seen: equal weights, and no gradient but that of the values
    -inf throughout     NaN, in the gradients as well
    a number added      queries q - stop(q): 0, with the gradient of q, so that weights are equal and only numbers are gone;
                        gradients of keys are missing, from a term that is 0 itself
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from onnx_attnfuse.graph.thresholds import MASKS, ROUNDS_ALL, ROUNDS_ALL_DOUBLE
from onnx_attnfuse.training.pytorch.runtime_calls import PLAIN, Kernels, attend, plain

if TYPE_CHECKING:
    from torch import Tensor


def without_key(kept: Tensor) -> Tensor:
    """(b or 1, n or 1, s or 1, 1): rows whose keys are all forbidden."""
    return kept.any(-1, keepdim=True).logical_not()


def opened(kept: Tensor, empty: Tensor) -> Tensor:
    """Which keys are seen where rows without one see all."""
    return kept | empty


def bounded(bias: Tensor | None, kept: Tensor, empty: Tensor, dtype: torch.dtype) -> Tensor:
    """A bias that masks keys, and is 0 in rows without a key."""
    bias = torch.zeros((), dtype=dtype, device=kept.device) if bias is None else bias
    return torch.where(empty, 0.0, torch.where(kept, bias, -math.inf))


def attend_replaced(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    empty: Tensor,
    scale: float,
    dropout: float,
    kernels: Kernels,
    ends: float | None,
) -> Tensor:
    """Attention where scores are replaced by a mask.

    Args:
        query: (b, n, s, h)
        key: (b, n, t, h)
        value: (b, n, t, v)
        mask: The mask, which lets rows without a key see all.
        empty: Rows without a key.
        scale: The factor of the scores.
        dropout: The share of weights that is dropped.
        kernels: The kernels to choose from.
        ends: The final result of rows without a key: NaN or 0; None: that of equal weights.
    """
    if ends is None:
        query = query.masked_fill(empty, 0.0)
    output = attend(query, key, value, mask, scale, dropout=dropout, kernels=kernels)
    if ends is None:
        return output
    if ends == 0:
        return output.masked_fill(empty, 0.0)
    unknown = torch.where(empty, math.nan, 1.0).to(output.dtype)
    return torch.where(empty, level(value, query) * unknown, output)


def attend_added(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    empty: Tensor,
    scale: float,
    dropout: float,
    kernels: Kernels,
    fill: float,
) -> Tensor:
    """Attention where one number, -inf or so low that nothing is left of a score, is added to those that are not seen.

    With dropout the gradient of keys, of rows without a key, is that of the weights before they are dropped: its expectation.
    """
    if fill == -math.inf:
        output = attend(query, key, value, mask, scale, dropout=dropout, kernels=kernels)
        factor = torch.where(empty, math.nan, 1.0).to(output.dtype)
        return output * factor
    if not _is_known(empty):
        return added_apart(query, key, value, mask, empty, scale, dropout, kernels)
    if not bool(empty.any()):
        return attend(query, key, value, mask, scale, dropout=dropout, kernels=kernels)
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    bias = torch.zeros_like(mask, dtype=wide).masked_fill(mask.logical_not() | empty, fill)
    return plain(query, key, value, bias, scale, dropout=dropout)


def added_apart(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, empty: Tensor, scale: float, dropout: float, kernels: Kernels
) -> Tensor:
    """Attention under a mask whose rows without a key are corrected beside the kernel, whichever rows there are."""
    query_of_rows = torch.where(empty, query - query.detach(), query)
    output = attend(query_of_rows, key, value, mask, scale, dropout=dropout, kernels=kernels)
    return output + gradient_term(query.detach(), key, value, empty, scale)


def attend_levelled(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float, gain: float, dropout: float, kernels: Kernels
) -> Tensor:
    """Attention where numbers of any kind are added: as rows without a key may see some keys more than others, they get a call.

    Args:
        query: (b, n, s, h)
        key: (b, n, t, h)
        value: (b, n, t, v)
        bias: (b or 1, n or 1, s or 1, t): the summand.
        scale: The factor of the scores.
        gain: The smallest factor of a summand after it was added.
        dropout: The share of weights that is dropped.
        kernels: The kernels to choose from.
    """
    if kernels == PLAIN or (_is_known(bias) and bool((bias.detach().amax(-1) <= MASKS).any())):
        return plain(query, key, value, bias, scale, dropout=dropout)
    if _is_known(bias):
        return attend(query, key, value, bias.to(query.dtype), scale, dropout=dropout, kernels=kernels)
    return levelled_apart(query, key, value, bias, scale, gain, dropout, kernels)


def levelled_apart(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float, gain: float, dropout: float, kernels: Kernels
) -> Tensor:
    """Attention under a bias whose rows without a key get a call of their own, whichever rows there are."""
    level, empty, void = _levelled(bias, gain)
    level = level.to(query.dtype)
    main = attend(torch.where(empty, query - query.detach(), query), key, value, level, scale, dropout=dropout, kernels=kernels)
    fixed = torch.where(empty, query.detach(), 0.0)
    other = attend(fixed, key - key.detach(), value.detach(), level.detach(), scale, kernels=kernels)
    output = main + torch.where(empty, other - other.detach(), 0.0)
    return output * torch.where(void, math.nan, 1.0).to(output.dtype)


def _is_known(tensor: Tensor) -> bool:
    """Whether the contents of a tensor are there to be looked at, and nothing waits for it."""
    return type(tensor) in {torch.Tensor, torch.nn.Parameter} and tensor.device.type == "cpu"


def _levelled(bias: Tensor, gain: float) -> tuple[Tensor, Tensor, Tensor]:
    """A bias that loses nothing of rows without a key, which rows these are, and which are -inf throughout."""
    lowest = torch.finfo(bias.dtype).min
    counts = bias.detach() >= lowest
    void = counts.any(-1, keepdim=True).logical_not()
    top = torch.where(counts, bias.detach(), lowest).amax(-1, keepdim=True)
    shifted = bias - torch.where((top <= MASKS) & ~void, top, 0.0)
    empty = (top <= gain * (ROUNDS_ALL_DOUBLE if bias.dtype == torch.float64 else ROUNDS_ALL)) & ~void
    level = torch.where(shifted.detach() == 0, 0.0, -math.inf)
    if bias.requires_grad:
        straight = torch.where(counts, bias, 0.0)
        level = level + (straight - straight.detach())
    return torch.where(void, 0.0, torch.where(empty, level, shifted)), empty, void


def level(value: Tensor, query: Tensor) -> Tensor:
    """The mean of the values, which equal weights give: (b, heads of the queries, 1, v)."""
    mean = value.mean(2, keepdim=True)
    return mean.repeat_interleave(query.shape[1] // value.shape[1], 1) if value.shape[1] != query.shape[1] else mean


def gradient_term(query: Tensor, key: Tensor, value: Tensor, empty: Tensor, scale: float) -> Tensor:
    """0 in every row, with the gradient that queries and keys get from rows of equal weights; keys alone where queries are fixed.

    With weights 1/t the result of a row changes with a key k_j by scale/t (q · dk_j) (v_j - mean of v), which needs
    (keyᵀ value), of the size of a head, and no weights.
    """
    groups = query.shape[1] // key.shape[1]
    if groups != 1:
        key, value = (item.repeat_interleave(groups, 1) for item in (key, value))
    held = value.detach()
    centred = held - held.mean(2, keepdim=True)
    term = torch.matmul(query, torch.matmul(key.transpose(2, 3), centred)) * (scale / key.shape[2])
    return torch.where(empty, term - term.detach(), 0.0)
