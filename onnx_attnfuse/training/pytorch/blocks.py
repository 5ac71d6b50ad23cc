"""Blocks of a mask in the order in which flex attention walks them, by an operator that no compiler looks into.

The kernels of flex attention find the blocks of entry b at `(b * heads + head) * stride(1)` of each tensor, whatever
`stride(0)` is. Of an axis of one head, inductor makes the stride that it likes: 0 where the tensor is a part of another one, so
that every entry has the blocks of the first, or that of the whole tensor, which leads beyond its end. So the tensors come from an
operator, whose results inductor leaves as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

Blocks = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""For rows the number and the order of their partial blocks, then of their full ones, and the same for keys; int32."""


@torch.library.custom_op("attnfuse::sort_blocks", mutates_args=())
def sort_blocks(seen: Tensor, whole: int) -> Blocks:
    """Sorts blocks: first those that are there, in order.

    Args:
        seen: (b, n, r, c): how many pairs of each block see each other.
        whole: How many pairs a block has.

    Returns:
        Counts as (b, n, r) and columns as (b, n, r, c) for rows, then counts as (b, n, c) and rows as (b, n, c, r) for keys.
    """
    full = seen == whole
    kinds = torch.stack(((seen > 0) & ~full, full)).to(torch.int32)
    found: list[Tensor] = []
    for blocks in (kinds, kinds.transpose(3, 4)):
        counts = blocks.sum(-1, dtype=torch.int32)
        order = blocks.sort(dim=-1, descending=True, stable=True).indices
        for kind in range(2):
            found += [_apart(counts[kind]), _apart(order[kind])]
    first, second, third, fourth, fifth, sixth, seventh, eighth = found
    return first, second, third, fourth, fifth, sixth, seventh, eighth


@sort_blocks.register_fake
def _(seen: Tensor, whole: int) -> Blocks:
    """The shapes alone."""
    batch, heads, rows, columns = seen.shape

    def made(*shape: int) -> Tensor:
        return seen.new_empty((batch, heads, *shape), dtype=torch.int32)

    by_rows, by_keys = (made(rows), made(rows, columns)), (made(columns), made(columns, rows))
    more_rows, more_keys = (made(rows), made(rows, columns)), (made(columns), made(columns, rows))
    return (*by_rows, *more_rows, *by_keys, *more_keys)


def _apart(found: Tensor) -> Tensor:
    """A tensor of its own, whose strides are those of its shape, for axes of length 1 too."""
    return torch.empty(found.shape, dtype=torch.int32, device=found.device).copy_(found)
