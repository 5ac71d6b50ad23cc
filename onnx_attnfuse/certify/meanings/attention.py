"""The meanings of MultiHeadAttention and Attention of com.microsoft, and of ai.onnx Attention, as ONNX Runtime computes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from onnx_attnfuse.certify import arithmetic, arrays
from onnx_attnfuse.certify.arrays import Array, Unsupported
from onnx_attnfuse.certify.magnitudes import LOWEST, settled
from onnx_attnfuse.certify.meanings.call import Call, Meaning
from onnx_attnfuse.certify.meanings.heads import (
    Score,
    attended,
    before,
    behind,
    capped,
    merge_heads,
    products,
    repeat_heads,
    split_heads,
    unseen,
)
from onnx_attnfuse.certify.terms import NINF, ONE, ZERO, Term, add, ite, multiply, number, subtract

Kept = Callable[[Term, Term, Term], Term]
"""Whether a mask keeps a key: of batch entry, row and key."""


def _kept(mask: Array, batch: Term, keys: Term) -> Kept:
    """The keys that a mask of MultiHeadAttention or Attention keeps, as a term.

    Raises:
        Unsupported: It has none of the forms.
    """
    if mask.rank == 1 and mask.shape[0] in {batch, add(multiply(number(3), batch), number(2))} and batch is not ONE:
        return lambda b, _, j: arithmetic.below(j, mask.at(b))
    if mask.rank == 2 and mask.shape[1] is keys:
        return lambda b, _, j: arithmetic.below(ZERO, mask.at(b, j))
    if mask.rank == 3 and mask.shape[2] is keys:
        return lambda b, i, j: arithmetic.below(ZERO, mask.at(b, i, j))
    raise Unsupported(f"a mask of {mask.shape}")


def _masked(call: Call, score: Score, mask: Kept | None, rows: Term, keys: Term, new: Term, dtype: ir.DataType) -> Score:
    """Scores with what a mask and the triangle add to them."""
    fill = number(call.attribute("mask_filter_value", -10000.0), "Real")
    triangle = bool(call.attribute("unidirectional", 0))
    if triangle and rows is not new and rows is not ONE:
        raise Unsupported("a triangle of other numbers of queries and keys, on which kernels disagree")
    if triangle and dtype not in LOWEST:
        raise Unsupported(f"a triangle in {dtype}")
    offset = subtract(keys, rows)
    zero, lowest = number(0, "Real"), number(LOWEST.get(dtype, 0.0), "Real")

    def score_of(b: Term, n: Term, i: Term, j: Term) -> Term:
        added = zero if mask is None else ite(mask(b, i, j), zero, fill)
        if triangle:
            added = ite(before(i, j, offset), added, lowest)
        return settled(add(score(b, n, i, j), added), dtype)

    return score_of


def _with_bias(score: Score, bias: Array | None) -> Score:
    if bias is None:
        return score
    return lambda b, n, i, j: add(score(b, n, i, j), bias.at(*arrays.aligned((b, n, i, j), bias.shape)))


def _with_constant(array: Array, bias: Array, start: Term) -> Array:
    return Array(array.shape, array.dtype, lambda at: add(array.at(*at), bias.at(add(start, at[-1]))))


def _multi_head_attention(call: Call) -> Sequence[Array]:
    query, key, value, bias = call.array(0), call.array(1), call.array(2), call.optional(3)
    if query.rank != 3 or (key.rank, value.rank) not in {(3, 3), (4, 4)}:
        raise Unsupported("packed operands of MultiHeadAttention")
    heads = int(call.attribute("num_heads"))
    width = query.shape[2]
    queries = split_heads(query if bias is None else _with_constant(query, bias, ZERO), heads)
    if key.rank == 4:
        keys, values = key, value
    else:
        if bias is not None:
            key, value = _with_constant(key, bias, width), _with_constant(value, bias, multiply(number(2), width))
        keys, values = split_heads(key, heads), split_heads(value, heads)
    rows, new = queries.shape[2], keys.shape[2]
    past = call.optional(6), call.optional(7)
    if any(item is not None for item in past) and len(call.node.outputs) < 3:
        raise Unsupported("a past without a present, of which kernels make something else")
    keys, values = behind(past[0], keys), behind(past[1], values)
    mask = call.optional(4)
    kept = None if mask is None else _kept(mask, query.shape[0], keys.shape[2])
    score = _with_bias(products(queries, keys, call.attribute("scale", 0.0)), call.optional(5))
    score = _masked(call, score, kept, rows, keys.shape[2], new, query.dtype)
    scores = Array([*queries.shape[:3], keys.shape[2]], query.dtype, lambda at: score(*at))
    return [merge_heads(attended(score, values, rows)), keys, values, scores][: max(1, len(call.node.outputs))]


def _part(past: Array, place: int) -> Array:
    """The keys or the values of a past that holds both."""
    return Array(past.shape[1:], past.dtype, lambda at: past.at(number(place), *at))


def _packed_attention(call: Call) -> Sequence[Array]:
    tokens, weights, bias, mask = call.array(0), call.array(1), call.optional(2), call.optional(3)
    heads = int(call.attribute("num_heads"))
    product = arrays.matmul(tokens, weights)
    if bias is not None:
        product = _with_constant(product, bias, ZERO)
    sizes = call.attribute("qkv_hidden_sizes") or [int(weights.shape[1].data) // 3] * 3
    starts = [0, sizes[0], sizes[0] + sizes[1]]
    parts = [arrays.sliced(product, 2, number(start), number(count)) for start, count in zip(starts, sizes, strict=True)]
    queries, keys, values = (split_heads(part, heads) for part in parts)
    rows = queries.shape[2]
    past = call.optional(4)
    if past is not None:
        keys, values = behind(_part(past, 0), keys), behind(_part(past, 1), values)
    kept = None if mask is None else _kept(mask, tokens.shape[0], keys.shape[2])
    score = _with_bias(products(queries, keys, call.attribute("scale", 0.0)), call.optional(5))
    score = _masked(call, score, kept, rows, keys.shape[2], rows, tokens.dtype)
    present = Array([number(2), *keys.shape], keys.dtype, lambda at: arrays.chosen([keys.at(*at[1:]), values.at(*at[1:])], at[0]))
    return [merge_heads(attended(score, values, rows)), present][: len(call.node.outputs)]


def _onnx_attention(call: Call) -> Sequence[Array]:
    query, key, value, mask = call.array(0), call.array(1), call.array(2), call.optional(3)
    flat, heads, groups = query.rank == 3, call.attribute("q_num_heads"), call.attribute("kv_num_heads")
    call.attribute("softmax_precision")  # how it is rounded, of which proofs know nothing
    mode = call.attribute("qk_matmul_output_mode", 0)
    if flat:
        query, key, value = split_heads(query, int(heads)), split_heads(key, int(groups)), split_heads(value, int(groups))
    past = call.optional(4), call.optional(5)
    rows, heads, offset = query.shape[2], query.shape[1], ZERO if past[0] is None else past[0].shape[2]
    key, value = behind(past[0], key), behind(past[1], value)
    count = call.optional(6)
    if query.dtype == ir.DataType.DOUBLE:
        raise Unsupported("ai.onnx Attention in float64, whose rows without a key are others")
    if mask is not None and (mask.shape[-1] is ONE) != (key.shape[2] is ONE):
        raise Unsupported("a mask of other keys than there are")
    cap, triangle = call.attribute("softcap", 0.0), bool(call.attribute("is_causal", 0))
    behind_row, ahead = call.attribute("left_window_size", -1), call.attribute("right_window_size", -1)
    ahead = 0 if triangle else ahead
    raw = products(query, repeat_heads(key, heads), call.attribute("scale"))

    def score(b: Term, n: Term, i: Term, j: Term) -> Term:
        item = capped(raw(b, n, i, j), cap)
        if mask is not None:
            found = mask.at(*arrays.aligned((b, n, i, j), mask.shape))
            item = ite(found, item, NINF) if mask.sort == "Bool" else add(item, unseen(found, mask.dtype))
        seen_from = offset
        if count is not None:
            item = ite(arithmetic.below(j, count.at(b)), item, NINF)
            seen_from = subtract(count.at(b), rows)
        item = ite(before(i, j, add(seen_from, number(ahead))), item, NINF) if ahead >= 0 else item
        hidden = before(i, j, subtract(seen_from, number(behind_row + 1)))
        return ite(hidden, NINF, item) if behind_row >= 0 else item

    result = attended(score, repeat_heads(value, heads), rows, number(0, "Real"))
    outputs = [merge_heads(result) if flat else result, key, value]
    if len(call.node.outputs) > 3 and call.node.outputs[3].uses():
        if mode != 0:
            raise Unsupported("another matrix of ai.onnx Attention than the scaled scores")
        outputs.append(Array([*query.shape[:3], key.shape[2]], query.dtype, lambda at: raw(*at)))
    return outputs[: len(call.node.outputs)]


MEANINGS: Mapping[str, Meaning] = {"Attention": _onnx_attention}
CONTRIB_MEANINGS: Mapping[str, Meaning] = {"MultiHeadAttention": _multi_head_attention, "Attention": _packed_attention}
