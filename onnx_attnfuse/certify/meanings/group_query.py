"""The meaning of com.microsoft's GroupQueryAttention, without quantised caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnx_attnfuse.certify import arithmetic, arrays
from onnx_attnfuse.certify.arrays import Array, Index, Unsupported
from onnx_attnfuse.certify.meanings.call import Call, Meaning
from onnx_attnfuse.certify.meanings.heads import attended, before, capped, merge_heads, products, repeat_heads, split_heads
from onnx_attnfuse.certify.meanings.norms import normalized
from onnx_attnfuse.certify.meanings.rotary import angles, turned
from onnx_attnfuse.certify.terms import NINF, ONE, ZERO, Term, add, disjoin, element, ite, number, subtract


def _appended(past: Array | None, new: Array, start: Array, longest: Term) -> Array:
    """The cache with the new keys or values of each entry behind its past; 0 behind those."""
    length = longest if past is None else arithmetic.larger(longest, past.shape[2])
    rows = new.shape[2]

    def read(at: Index) -> Term:
        b, n, j, h = at
        first = start.at(b)
        inside = arithmetic.below(j, add(first, rows))
        item = ite(inside, new.at(b, n, subtract(j, first), h), number(0, "Real"))
        return item if past is None else ite(arithmetic.below(j, first), past.at(b, n, j, h), item)

    return Array([*new.shape[:2], length, new.shape[3]], new.dtype, read)


def _operands(call: Call) -> tuple[Array, Array, Array]:
    query, key, value = call.array(0), call.optional(1), call.optional(2)
    heads, groups = int(call.attribute("num_heads")), int(call.attribute("kv_num_heads"))
    if key is not None and value is not None:
        return split_heads(query, heads), split_heads(key, groups), split_heads(value, groups)
    packed = split_heads(query, heads + 2 * groups)
    starts, counts = [0, heads, heads + groups], [heads, groups, groups]
    first, second, third = (
        arrays.sliced(packed, 1, number(start), number(count)) for start, count in zip(starts, counts, strict=True)
    )
    return first, second, third


def _group_query_attention(call: Call) -> Sequence[Array]:
    queries, keys, values = _operands(call)
    for_queries, for_keys, epsilon = call.optional(14), call.optional(15), call.attribute("qk_norm_epsilon", 1e-6)
    if for_queries is not None and for_keys is not None:
        queries, keys = (
            normalized(item, epsilon, weight, None, centred=False) for item, weight in ((queries, for_queries), (keys, for_keys))
        )
    rows, heads = queries.shape[2], queries.shape[1]
    last, longest = call.array(5), call.array(6).at(*[ZERO] * call.array(6).rank)
    prompt = arithmetic.equals(rows, longest)
    ends = Array([queries.shape[0]], last.dtype, lambda at: add(last.at(*_entry(last, at[0])), ONE))
    starts = Array(ends.shape, last.dtype, lambda at: ite(prompt, ZERO, subtract(ends.at(at[0]), rows)))
    cos, sin, places = call.optional(7), call.optional(8), call.optional(9)
    if call.attribute("do_rotary", 0):
        if cos is None or sin is None:
            raise Unsupported("a rotary embedding without caches")

        def position(b: Term, i: Term) -> Term:
            return add(starts.at(b), i) if places is None else places.at(ZERO if places.shape[0] is ONE else b, i)

        half, interleaved = int(cos.shape[1].data), bool(call.attribute("rotary_interleaved", 0))
        queries, keys = (
            turned(item, angles(cos, position), angles(sin, position), half, interleaved=interleaved) for item in (queries, keys)
        )
    presents = _appended(call.optional(3), keys, starts, longest), _appended(call.optional(4), values, starts, longest)
    seen_keys, seen_values = (repeat_heads(_shortened(item, longest), heads) for item in presents)
    raw, bias = products(queries, seen_keys, call.attribute("scale", 0.0)), call.optional(10)
    window, cap = call.attribute("local_window_size", -1), call.attribute("softcap", 0.0)
    causal = bool(call.attribute("causal", 1))
    if window < 1 and window != -1:
        raise Unsupported(f"a window of {window}")

    def score(b: Term, n: Term, i: Term, j: Term) -> Term:
        item = capped(raw(b, n, i, j), cap)
        if bias is not None:
            item = add(item, bias.at(*arrays.aligned((b, n, i, j), bias.shape)))
        item = ite(arithmetic.below(j, ends.at(b)), item, NINF)
        item = ite(before(i, j, starts.at(b)), item, NINF) if causal else item
        hidden = before(i, j, subtract(starts.at(b), number(window)))
        return ite(hidden, NINF, item) if causal and window > 0 else item

    sinks = call.optional(11)
    smooth = call.attribute("smooth_softmax", -1) == 1

    def sink_of(n: Term) -> Term:
        return number(0, "Real") if sinks is None else sinks.at(n)

    sink = None if sinks is None and not smooth else sink_of
    output = attended(score, seen_values, rows, number(0, "Real"), sink)
    inside = Array(
        output.shape, output.dtype,
        lambda at: ite(arithmetic.below(at[2], subtract(ends.at(at[0]), starts.at(at[0]))), output.at(*at), number(0, "Real")),
    )  # fmt: skip
    taken = disjoin(arithmetic.at_most(queries.shape[0], ONE), arithmetic.at_most(rows, ONE), prompt)
    return [_where(taken, item) for item in (merge_heads(inside), *presents)][: len(call.node.outputs)]


def _where(taken: Term, array: Array) -> Array:
    """The array where the kernel takes its operands: of several entries with a past only one new token each."""
    return Array(array.shape, array.dtype, lambda at: ite(taken, array.at(*at), element("refused", array.sort, at)))


def _entry(last: Array, entry: Term) -> tuple[Term, ...]:
    return (entry, *[ZERO] * (last.rank - 1))


def _shortened(array: Array, length: Term) -> Array:
    return Array([*array.shape[:2], length, array.shape[3]], array.dtype, lambda at: array.at(*at))


MEANINGS: Mapping[str, Meaning] = {}
CONTRIB_MEANINGS: Mapping[str, Meaning] = {"GroupQueryAttention": _group_query_attention}
