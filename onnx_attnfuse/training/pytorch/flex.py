"""Attention by `torch.nn.attention.flex_attention`: masks as a rule for each pair of row and key, which skips blocks nobody sees.

A rewritten graph calls `block_mask` once for each rule, and `attend` for each attention. Inside of a graph that inductor
compiles both are traced; where the rest runs eagerly they are compiled by themselves. On a CPU flex attention is computed with
all weights, which is for tests alone.

The kernels of flex attention find the blocks of entry b at `(b * heads + head) * stride(1)` of each tensor, whatever
`stride(0)` is. Of an axis of one head, inductor makes the stride that it likes: 0 where the tensor is a part of another one, so
that every entry has as many blocks as the first, or that of the whole tensor, which leads beyond its end. So strides are asked
for by `as_strided`, the one operator whose result has no others.
"""

from __future__ import annotations

import functools
import itertools
import math
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention as operator
from torch.nn import functional
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import BlockMask, noop_mask

from onnx_attnfuse.training.pytorch.programs import Program, run, uses
from onnx_attnfuse.training.pytorch.rows import gradient_term, level
from onnx_attnfuse.training.pytorch.trace import is_plain

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 128
_NAMES = tuple(f"{kind}{side}_{what}" for side in ("kv", "q") for kind in ("", "full_") for what in ("num_blocks", "indices"))
"""The parts of a block mask, as `sort_blocks` returns them."""
_OPERATOR: Any = operator
_flex: Any = flex_attention
_KEPT: dict[Any, tuple[Any, ...]] = {}
"""Blocks of rules that read nothing, by the rule, its lengths, the device and the stream: a window is the same at each step."""
_MOST_KEPT = 64
_COPIES = itertools.count()


def block_mask(program: Program, tensors: Sequence[Tensor], query: Tensor, key: Tensor, traced: bool) -> tuple[Any, ...]:
    """Which blocks of rows and keys a rule lets see each other, as the operator takes it, without the rule.

    Args:
        program: The rule, true where a key is seen.
        tensors: The tensors that it reads.
        query: (b, n, s, h)
        key: (b, n or fewer, t, h)
        traced: This is part of a graph that is compiled.
    """
    if traced:
        return _blocks(program, tensors, query, key)
    if tensors or not is_plain(query) or (query.is_cuda and torch.cuda.is_current_stream_capturing()):
        return _made(program, tuple(tensors), query, key)
    stream = torch.cuda.current_stream(query.device).cuda_stream if query.is_cuda else 0
    mark = program, tuple(_lengths(query, key).values()), query.device, stream
    if mark not in _KEPT:
        if len(_KEPT) >= _MOST_KEPT:
            _KEPT.clear()
        with torch.inference_mode(False), torch.no_grad():
            _KEPT[mark] = _made(program, (), query, key)
    return _KEPT[mark]


def _made(program: Program, tensors: tuple[Tensor, ...], query: Tensor, key: Tensor) -> tuple[Any, ...]:
    return (_compiled(_blocks, program) if query.is_cuda else _blocks)(program, tensors, query, key)


def _blocks(program: Program, tensors: Sequence[Tensor], query: Tensor, key: Tensor) -> tuple[Any, ...]:
    """The blocks that a rule lets see each other, counted and sorted, as a block mask without the rule."""
    rows, keys = query.shape[2], key.shape[2]
    found = _whole(program, tensors, query, key)
    whole = functional.pad(found, (0, -keys % _BLOCK, 0, -rows % _BLOCK))
    batch, heads, height, width = whole.shape
    seen = whole.view(batch, heads, height // _BLOCK, _BLOCK, width // _BLOCK, _BLOCK).sum((3, 5))
    sorted_blocks: dict[str, Any] = dict(zip(_NAMES, sort_blocks(seen, _BLOCK * _BLOCK), strict=True))
    made = BlockMask(seq_lengths=(rows, keys), BLOCK_SIZE=(_BLOCK, _BLOCK), mask_mod=noop_mask, **sorted_blocks)
    return tuple(made.as_tuple()[:-1])


def _whole(program: Program, tensors: Sequence[Tensor], query: Tensor, key: Tensor) -> Tensor:
    """(b or 1, n or 1, s, t): a rule at all rows and keys, which a compiler never writes to memory; places have 32 bits."""
    lengths = _lengths(query, key)
    counts = {letter: length if letter in "ij" or uses(program, letter) else 1 for letter, length in lengths.items()}
    at = {letter: _places(count, axis, query.device) for axis, (letter, count) in enumerate(counts.items())}
    found = run(program, at, tensors, lengths)
    known = found if isinstance(found, torch.Tensor) else torch.full((1,) * 4, bool(found), device=query.device)
    return known.expand(tuple(counts.values()))


def _places(count: int, axis: int, device: torch.device) -> Tensor:
    """The indices of one of four axes."""
    return torch.arange(count, dtype=torch.int32, device=device).view([-1 if place == axis else 1 for place in range(4)])


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: tuple[Any, ...],
    program: Program,
    tensors: Sequence[Tensor],
    bias: Program | None,
    added: Sequence[Tensor],
    scale: float,
    softcap: float | None,
    rows: str,
    traced: bool,
) -> Tensor:
    """Attention whose scores a rule keeps or forbids.

    Args:
        query: (b, n, s, h)
        key: (b, n or fewer, t, h)
        value: (b, as many, t, v)
        blocks: The result of `block_mask`.
        program: The rule.
        tensors: The tensors that it reads.
        bias: A summand of the scores; None: none.
        added: The tensors that the bias reads.
        scale: The factor of the scores.
        softcap: Scores x become c tanh(x / c); None: they stay.
        rows: Rows without a key: `zero`, `none` (there are none), or those of scores that are `replaced` by a number, or
            have one `added`.
        traced: This is part of a graph that is compiled.
    """
    call = _attend if traced or not query.is_cuda else _compiled(_attend, program, bias, scale, softcap, rows)
    return call(query, key, value, blocks, program, tuple(tensors), bias, tuple(added), scale, softcap, rows)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: tuple[Any, ...],
    program: Program,
    tensors: Sequence[Tensor],
    bias: Program | None,
    added: Sequence[Tensor],
    scale: float,
    softcap: float | None,
    rows: str,
) -> Tensor:
    rule = _rule(program, query, key)
    scores = _scores(bias, softcap, query, key)
    operands = [item.contiguous() if item.stride(-1) != 1 else item for item in (query, key, value)]
    options = _flex._apply_kernel_options(*operands, query.is_cuda or rows not in {"none", "zero"}, {})
    if torch.compiler.is_dynamo_compiling():  # Dynamo finds what a rule reads by itself, and wants no more arguments

        def bound(score: Tensor, b: Tensor, n: Tensor, i: Tensor, j: Tensor) -> Any:
            return scores(score, b, n, i, j, *added)

        def held(b: Tensor, n: Tensor, i: Tensor, j: Tensor) -> Any:
            return rule(b, n, i, j, *tensors)

        output, logarithm, _ = _OPERATOR(*operands, bound, (*blocks, held), scale, options)
    else:
        mask = (*blocks, rule)
        output, logarithm, _ = _OPERATOR(*operands, scores, mask, scale, options, tuple(added), tuple(tensors))
    if rows not in {"replaced", "added"}:
        return output
    empty = (logarithm.detach() == -math.inf).unsqueeze(-1)
    found = torch.where(empty, level(value, query), output)
    return found if rows == "replaced" else found + gradient_term(query, key, value, empty, scale)


def _rule(program: Program, query: Tensor, key: Tensor) -> Callable[..., Any]:
    """A rule as flex attention calls it: indices, then the tensors read."""
    lengths = _lengths(query, key)

    def rule(b: Tensor, n: Tensor, i: Tensor, j: Tensor, *tensors: Tensor) -> Any:
        found = run(program, {"b": b, "n": n, "i": i, "j": j}, tensors, lengths)
        return found if isinstance(found, torch.Tensor) else torch.full_like(j, bool(found), dtype=torch.bool)

    return rule


def _scores(bias: Program | None, softcap: float | None, query: Tensor, key: Tensor) -> Callable[..., Any]:
    """Scores as flex attention asks for them: the scaled score, indices, then the tensors read."""
    lengths = _lengths(query, key)

    def scores(score: Tensor, b: Tensor, n: Tensor, i: Tensor, j: Tensor, *tensors: Tensor) -> Any:
        if softcap is not None:
            score = torch.tanh(score / softcap) * softcap
        return score if bias is None else score + run(bias, {"b": b, "n": n, "i": i, "j": j}, tensors, lengths)

    return scores


def _lengths(query: Tensor, key: Tensor) -> dict[str, int]:
    return {"b": query.shape[0], "n": query.shape[1], "i": query.shape[2], "j": key.shape[2]}


@functools.lru_cache(maxsize=256)
def _compiled(function: Callable[..., Any], *rule: Any) -> Callable[..., Any]:
    """A function compiled by itself, for its own sizes, for one rule.

    Each rule has a copy of the function: PyTorch counts what it compiles of one piece of code, and ends in an error after eight.
    """
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_COPIES)}")
    own = types.FunctionType(code, function.__globals__, code.co_name)
    return torch.compile(own, fullgraph=True)


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
