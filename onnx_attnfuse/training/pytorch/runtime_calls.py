"""Functions that a rewritten graph calls: operands laid out, masks put together, and the attention itself."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import attention, functional

if TYPE_CHECKING:
    from torch import Tensor

Kernels = Sequence[str]
"""Names of `torch.nn.attention.SDPBackend`, the one to be tried first in front; none: as PyTorch chooses."""
PLAIN = ("PLAIN",)
"""No kernel at all: products and a softmax."""


def arranged(x: Tensor, parts: Sequence[Sequence[int | None]], order: Sequence[int], groups: Sequence[int]) -> Tensor:
    """A tensor with its axes split, permuted and joined.

    Args:
        x: The tensor.
        parts: For each axis the lengths that it is a product of, one of which may be None; none: an axis of length 1 that goes.
        order: The parts in their new order.
        groups: How many parts each new axis is made of; 0 makes an axis of length 1.
    """
    lengths: list[int] = []
    for length, inside in zip(x.shape, parts, strict=True):
        known = math.prod(part for part in inside if part is not None)
        lengths += [length if len(inside) == 1 else length // known if part is None else part for part in inside]
    if len(lengths) != x.dim() or any(len(inside) != 1 for inside in parts):
        x = x.reshape(lengths)
    if list(order) != sorted(order):
        x = x.permute(list(order))
    if all(count == 1 for count in groups):
        return x
    joined, place = list[int](), 0
    for count in groups:
        joined.append(math.prod(x.shape[place : place + count]))
        place += count
    return x.reshape(joined)


def repeated(x: Tensor, pieces: Sequence[Sequence[int | None]], *operands: Tensor) -> Tensor:
    """A mask that lacks parts of axes, in full length along these.

    Args:
        x: The mask, with an axis for each piece, and one of length 1 for an axis without pieces.
        pieces: For each axis of the scores the lengths of its pieces: 0 as in `x`, None for whatever is left of the axis.
        operands: Queries (b, n, s, h) and keys (b, n or fewer, t, h), where something is left.
    """
    whole = (*operands[0].shape[:3], operands[1].shape[2]) if operands else (0, 0, 0, 0)
    lengths, joined, place = list[int](), list[int](), 0
    for inside, length in zip(pieces, whole, strict=True):
        sizes = [size or x.shape[place + index] for index, size in enumerate(inside or (1,))]
        place += len(sizes)
        rest = length // math.prod(sizes)
        lengths += [rest if size is None else known for size, known in zip(inside or (1,), sizes, strict=True)]
        joined.append(math.prod(lengths[len(lengths) - len(sizes) :]))
    return x.expand(lengths).reshape(joined)


def multiplied(x: Tensor, factor: Tensor, divide: bool) -> Tensor:
    """Queries times a factor of their scores, in their type."""
    return (x / factor if divide else x * factor).to(x.dtype)


def above(mask: Tensor, limit: float, negative: bool) -> Tensor:
    """Where a mask that is added, or subtracted, lets a key be seen."""
    return mask < -limit if negative else mask > limit


def holds(condition: Tensor, keep_where: bool) -> Tensor:
    """Where a condition lets a key be seen."""
    known = condition if condition.dtype == torch.bool else condition != 0
    return known if keep_where else known.logical_not()


def both(left: Tensor, right: Tensor) -> Tensor:
    """Where two masks let a key be seen."""
    return left & right


def added(total: Tensor | None, mask: Tensor, negative: bool, dtype: torch.dtype) -> Tensor:
    """A bias with another mask added to it, or subtracted from it."""
    number = (-mask if negative else mask).to(dtype)
    return number if total is None else total + number


def replaced(total: Tensor | None, kept: Tensor, fill: float, dtype: torch.dtype) -> Tensor:
    """A bias that is `fill` where a key is not seen."""
    zero = torch.zeros((), dtype=dtype, device=kept.device) if total is None else total
    return torch.where(kept, zero, fill)


def scaled(total: Tensor, factor: float, divide: bool) -> Tensor:
    """The numbers of a mask, multiplied or divided."""
    return total / factor if divide else total * factor


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool = False,
    dropout: float = 0.0,
    kernels: Kernels = (),
) -> Tensor:
    """`scaled_dot_product_attention` on the kernels that are wanted; fewer heads of keys than of queries are shared.

    Args:
        query: (b, n, s, h)
        key: (b, n or fewer, t, h)
        value: (b, as many, t, v)
        mask: (b or 1, n or 1, s or 1, t) as truth values or numbers.
        scale: The factor of the scores.
        causal: Row i sees keys up to i.
        dropout: The share of weights that is dropped.
        kernels: The kernels to choose from.
    """
    if kernels == PLAIN:
        return plain(query, key, value, mask, scale, causal, dropout)
    groups = key.shape[1] != query.shape[1]
    if groups and mask is not None and query.is_cuda:  # kernels that take a mask take no groups there
        key, value = (spread(item, query.shape[1] // key.shape[1]) for item in (key, value))
        groups = False
    with _choosing(kernels):
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=groups
        )


def plain(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, causal: bool = False, dropout: float = 0.0
) -> Tensor:
    """Attention with all its weights, as a module computes it: PyTorch's own way without a kernel has more steps."""
    key, value = (spread(item, query.shape[1] // key.shape[1]) for item in (key, value))
    scores = torch.matmul(query * scale, key.transpose(2, 3))
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        scores = scores.masked_fill(mask.logical_not(), -math.inf) if mask.dtype == torch.bool else scores + mask
    return torch.matmul(functional.dropout(scores.softmax(-1).to(value.dtype), dropout), value)


_CHANNELS = 8
"""Kernels take heads of multiples of this."""


def attend_with_sink(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sink: Tensor,
    scale: float,
    causal: bool,
    dropout: float,
    kernels: Kernels,
) -> Tensor:
    """Attention with one more score in each row, which takes weight and has no value.

    It is the score of one more key, in front: of zeros but for a channel of its own, where queries have the sink. A triangle
    gets a row in front, too, so that row i still sees keys up to i, and the sink.

    Args:
        query: (b, n, s, h)
        key: (b, n or fewer, t, h)
        value: (b, as many, t, v)
        mask: (b or 1, n or 1, s or 1, t or 1) as truth values or numbers.
        sink: (b or 1, n or 1, s or 1, 1): not +inf, and -inf only in rows that see a key.
        scale: The factor of the scores.
        causal: Row i sees keys up to i.
        dropout: The share of weights that is dropped.
        kernels: The kernels to choose from.
    """
    width = wide_enough(query.shape[-1], value.shape[-1])
    sink = sink.to(query.dtype).clamp(min=_LOWEST_SINK).expand(*query.shape[:3], 1)
    queries = functional.pad(torch.cat([query, sink], -1), (0, width - query.shape[-1] - 1, int(causal), 0))
    own = functional.pad(key.new_full((1, 1, 1, 1), 1 / scale), (key.shape[-1], width - key.shape[-1] - 1))
    keys = functional.pad(key, (0, width - key.shape[-1]))
    keys = torch.cat([own.expand(*key.shape[:2], 1, width), keys], 2)
    values = functional.pad(value, (0, width - value.shape[-1], 1, 0))
    if mask is not None:
        mask = functional.pad(mask.expand(*mask.shape[:3], key.shape[2]), (1, 0), value=mask.dtype == torch.bool)
    found = attend(queries, keys, values, mask, scale, causal, dropout, kernels)
    return found[:, :, int(causal) :, : value.shape[-1]]


def wide_enough(size: int, own: int) -> int:
    """The channels of a head that has one for a sink besides those of queries, or of values."""
    return -(-max(size + 1, own) // _CHANNELS) * _CHANNELS


_LOWEST_SINK = -3e4
"""Beside a key that is seen, the weight of a sink from here down is 0, and in float16 it is a number still."""


def spread(item: Tensor, groups: int) -> Tensor:
    """Keys or values (b, n, t, h) with every head as often in a row as there are queries that share it: (b, n * groups, t, h)."""
    batch, heads, length, size = item.shape
    if groups == 1:
        return item
    return item[:, :, None].expand(batch, heads, groups, length, size).reshape(batch, heads * groups, length, size)


def _choosing(kernels: Kernels) -> contextlib.AbstractContextManager[object]:
    if not kernels:
        return contextlib.nullcontext()
    choices: Any = attention
    return choices.sdpa_kernel([getattr(choices.SDPBackend, name) for name in kernels], set_priority=True)
