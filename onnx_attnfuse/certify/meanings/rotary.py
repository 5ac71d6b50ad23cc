"""The meanings of RotaryEmbedding, of com.microsoft and of ai.onnx: pairs of channels turned by the angle of a position."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from onnx_attnfuse.certify import arithmetic
from onnx_attnfuse.certify.arrays import Array, Index, Unsupported
from onnx_attnfuse.certify.meanings.call import Call, Meaning
from onnx_attnfuse.certify.meanings.heads import merge_heads, split_heads
from onnx_attnfuse.certify.terms import ONE, ZERO, Term, add, ite, multiply, number, subtract

Angle = Callable[[Term, Term, Term], Term]
"""A cosine or sine of batch entry, row and pair."""


def turned(array: Array, cos: Angle, sin: Angle, half: int, *, interleaved: bool) -> Array:
    """(b, n, s, h) with the first 2 · `half` channels turned."""

    def read(at: Index) -> Term:
        b, n, i, h = at
        if interleaved:
            pair, second = arithmetic.divide(h, number(2)), arithmetic.modulo(h, number(2))
            is_first = arithmetic.equals(second, ZERO)
            other = ite(is_first, add(h, ONE), subtract(h, ONE))
        else:
            is_first = arithmetic.below(h, number(half))
            pair = ite(is_first, h, subtract(h, number(half)))
            other = ite(is_first, add(h, number(half)), subtract(h, number(half)))
        item = array.at(b, n, i, h)
        first = subtract(
            multiply(item, cos(b, i, _then(pair))), multiply(array.at(b, n, i, _then(other)), sin(b, i, _then(pair)))
        )
        later = add(multiply(array.at(b, n, i, _else(other)), sin(b, i, _else(pair))), multiply(item, cos(b, i, _else(pair))))
        return ite(arithmetic.below(h, number(2 * half)), ite(is_first, first, later), item)

    return Array(array.shape, array.dtype, read)


def _then(term: Term) -> Term:
    return term.args[1] if term.op == "ite" else term


def _else(term: Term) -> Term:
    return term.args[2] if term.op == "ite" else term


def angles(cache: Array, position: Callable[[Term, Term], Term]) -> Angle:
    """Cosines or sines read from a cache at positions."""
    return lambda b, i, pair: cache.at(position(b, i), pair)


def _half(cache: Array) -> int:
    if cache.shape[-1].op != "const":
        raise Unsupported("a cache of angles of unknown width")
    return int(cache.shape[-1].data)


def _split(call: Call, array: Array, half: int) -> Array:
    heads, turned_channels = call.attribute("num_heads", 0), call.attribute("rotary_embedding_dim", 0)
    if turned_channels not in {0, 2 * half}:
        raise Unsupported("a cache of other channels than those that are turned")
    if array.rank == 4:
        return array
    if not heads:
        if array.shape[2].op != "const":
            raise Unsupported("an unknown number of heads")
        heads = int(array.shape[2].data) // (2 * half)
    return split_heads(array, heads)


def _contrib_rotary(call: Call) -> Sequence[Array]:
    data, places, cos, sin = (call.array(place) for place in range(4))
    half = _half(cos)
    array = _split(call, data, half)

    def position(b: Term, i: Term) -> Term:
        return (
            add(places.at(*[ZERO] * places.rank), i)
            if places.rank < 2
            else places.at(b if places.shape[0] is not ONE else ZERO, i)
        )

    interleaved = bool(call.attribute("interleaved", 0))
    result = turned(array, angles(cos, position), angles(sin, position), half, interleaved=interleaved)
    return [merge_heads(result) if data.rank == 3 else result]


def _read_at(cache: Array, places: Array | None) -> Angle:
    """Angles of each token, or those at its position."""
    if places is None:
        return lambda b, i, pair: cache.at(ZERO if cache.shape[0] is ONE else b, i, pair)
    return angles(cache, lambda b, i: places.at(ZERO if places.shape[0] is ONE else b, i))


def _onnx_rotary(call: Call) -> Sequence[Array]:
    data, cos, sin, places = call.array(0), call.array(1), call.array(2), call.optional(3)
    half = _half(cos)
    array = _split(call, data, half)
    cosines, sines = _read_at(cos, places), _read_at(sin, places)
    result = turned(array, cosines, sines, half, interleaved=bool(call.attribute("interleaved", 0)))
    return [merge_heads(result) if data.rank == 3 else result]


MEANINGS: Mapping[str, Meaning] = {"RotaryEmbedding": _onnx_rotary}
CONTRIB_MEANINGS: Mapping[str, Meaning] = {"RotaryEmbedding": _contrib_rotary}
