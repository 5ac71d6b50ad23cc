"""Blocks of a mask in the order in which flex attention walks them, with strides that no compiler chooses.

The kernels of flex attention find the blocks of entry b at `(b * heads + head) * stride(1)` of each tensor, whatever
`stride(0)` is. Of an axis of one head, inductor makes the stride that it likes: 0 where the tensor is a part of another one, so
that every entry has as many blocks as the first, or that of the whole tensor, which leads beyond its end. So strides are asked
for by `as_strided`, the one operator whose result has no others.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sort_blocks(seen: Tensor, whole: int) -> list[Tensor]:
    """Sorts blocks: first those that are there, in order.

    Args:
        seen: (b, n, r, c): how many pairs of each block see each other.
        whole: How many pairs a block has.

    Returns:
        For partial blocks, then for full ones: counts as (b, n, r) and columns as (b, n, r, c) for rows; then the same for keys,
        counts as (b, n, c) and rows as (b, n, c, r). All are int32.
    """
    full = seen == whole
    partial = (seen > 0) & ~full
    turned = (blocks.transpose(2, 3) for blocks in (partial, full))
    return [with_strides_of_its_shape(found) for blocks in (partial, full, *turned) for found in sorted_columns(blocks)]


def sorted_columns(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of each row there are, and their columns in order, those that are not there last.

    No sort operator does that, which takes minutes to compile for some hundred blocks.
    """
    ones = blocks.to(torch.int32)
    count = ones.sum(-1)
    there, missing = ones.cumsum(-1) - 1, count.unsqueeze(-1) + (1 - ones).cumsum(-1) - 1
    columns = torch.arange(blocks.shape[-1], dtype=torch.int32, device=blocks.device).expand(blocks.shape)
    order = torch.zeros(blocks.shape, dtype=torch.int32, device=blocks.device)
    return count.to(torch.int32), order.scatter(-1, torch.where(blocks, there, missing).long(), columns)


def with_strides_of_its_shape(found: Tensor) -> Tensor:
    """A tensor whose last axis is contiguous, and each axis before around those after it, axes of length 1 too."""
    strides = [math.prod(found.shape[place + 1 :]) for place in range(found.dim())]
    return found.contiguous().as_strided(found.shape, strides)
