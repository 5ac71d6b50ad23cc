"""The cases that every fused operator is held against its reference on.

    for case in cases():
        inputs = case.inputs(np.float16)

Nothing is run here: the tests run the cases on a CPU, `held_to_references.py` on a GPU. Rows that see no key are in cases for the
CPU only, where kernels disagree on them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from onnx_attnfuse.bench.conformance.cases import Array, Draw, Inputs, int32, lengths_of
from onnx_attnfuse.kernels.operators.bias_split_gelu import WIDTHS
from tests.support.drawing import BOTH, CPU, CUDA, EMPTY, MASKS, STANDARD, Case, angles

_BUFFER = 12
_LONG = ((2, 64), (1, 264), (2, 520))
"""Entries and rows from which on other kernels are chosen."""


def cases() -> Iterator[Case]:
    """All of them, one operator after the other; first those that a GPU is least likely to stumble over."""
    yield from _rotary_cases()
    yield from _standard_cases()
    yield from _multi_head_cases()
    yield from _attention_cases()
    yield from _grouped_cases()
    yield from _padding_cases()
    yield from _packed_cases()
    yield from _gelu_cases()
    yield from _norm_cases()
    yield from _product_cases()
    yield from _convolution_cases()
    yield from _recurrence_cases()


def _plain(op: str, name: str, makers: Sequence[Callable[[Draw], Array | None]], **rest: Any) -> Case:
    attributes = {"num_heads": 2, **rest.pop("attributes", {})}
    return Case(op, name, attributes, lambda draw: [maker(draw) for maker in makers], **rest)


def _words(attributes: dict[str, Any]) -> str:
    return "".join(f", {key} {value:g}" for key, value in attributes.items())


def _multi_head(b: int, s: int, t: int, past: int, sizes: tuple[int, int, int], form: str, **attributes: Any) -> Case:
    """`t` counts the past; `sizes` are heads, and what they measure in keys and in values."""
    n, h, v = sizes

    def make(draw: Draw) -> Inputs:
        operands = [draw.normal(b, s, n * h), draw.normal(b, t - past, n * h), draw.normal(b, t - past, n * v)]
        mask = (MASKS | EMPTY)[form](draw, b, n, s, t)
        return [*operands, None, *mask, *([draw.normal(b, n, past, h), draw.normal(b, n, past, v)] if past else [])]

    name = f"{b}x{s}x{t} past {past} {n}x{h}x{v} {form}{_words(attributes)}"
    providers = CPU if form in EMPTY else BOTH
    return Case("MultiHeadAttention", name, {"num_heads": n, **attributes}, make, 3 if past else 1, providers=providers)


def _multi_head_cases() -> Iterator[Case]:
    shapes = [(1, 1, 1, 0), (2, 4, 4, 0), (3, 7, 7, 0), (2, 4, 9, 5), (3, 1, 6, 5), (2, 4, 7, 0), (2, 7, 4, 0)]
    for shape, form, triangle in itertools.product(shapes, MASKS, (0, 1)):
        if not triangle or shape[1] == shape[2] - shape[3]:
            yield _multi_head(*shape, (2, 16, 16), form, unidirectional=triangle)
    for form, triangle in itertools.product(EMPTY, (0, 1)):
        yield _multi_head(2, 5, 5, 0, (2, 16, 16), form, unidirectional=triangle)
    lowest = float(np.finfo(np.float32).min)
    yield _multi_head(2, 5, 5, 0, (2, 16, 16), "an entry without a key", mask_filter_value=lowest)
    yield _multi_head(2, 5, 5, 0, (2, 16, 16), "raw", unidirectional=1, mask_filter_value=lowest)
    for scale in (0.0, 0.3, -0.2):
        yield _multi_head(2, 4, 4, 0, (4, 8, 24), "bias", scale=scale)
    for form, size, (b, s) in itertools.product(("no mask", "lengths", "ranges", "bias", "raw"), (64, 128), _LONG):
        yield _multi_head(b, s, s, 0, (2, size, size), form, unidirectional=int(form in {"no mask", "bias"}))
    query = [lambda draw: draw.normal(2, 5, 32)]
    plain = [lambda draw: draw.normal(2, 6, 32), lambda draw: draw.normal(2, 6, 48), lambda draw: draw.normal(112)]
    yield _plain("MultiHeadAttention", "projection biases", [*query, *plain])
    by_head = [lambda draw: draw.normal(2, 2, 6, 16), lambda draw: draw.normal(2, 2, 6, 16)]
    yield _plain("MultiHeadAttention", "keys by head", [*query, *by_head])
    yield _plain("MultiHeadAttention", "keys by head, projection biases", [*query, *by_head, lambda draw: draw.normal(96)])
    packed = [lambda draw: draw.normal(2, 6, 2, 2, 16)]
    yield _plain("MultiHeadAttention", "keys and values packed", [*query, *packed], providers=CUDA)
    yield _plain("MultiHeadAttention", "all packed", [lambda draw: draw.normal(2, 6, 2, 3, 16)], providers=CUDA)


def _attention(b: int, s: int, past: int, form: str, triangle: int) -> Case:
    def make(draw: Draw) -> Inputs:
        mask, bias = _ATTENTION_MASKS[form](draw, b, 2, s, s + past)
        cache = draw.normal(2, b, 2, past, 16) if past else None
        return [draw.normal(b, s, 24), draw.normal(24, 96, factor=0.3), draw.normal(96), mask, cache, bias]

    name = f"{b}x{s} past {past} {form}, unidirectional {triangle}"
    providers = CPU if form in EMPTY or form == "a placeholder" else BOTH
    attributes = {"num_heads": 2, "unidirectional": triangle}
    return Case("Attention", name, attributes, make, 2 if past else 1, providers=providers)


_ATTENTION_MASKS = {
    **MASKS,
    **EMPTY,
    "ends and starts": lambda draw, b, n, s, t: [np.concatenate([lengths_of(b, t), int32(np.zeros(b))]), None],
    "a placeholder": lambda draw, b, n, s, t: [int32(np.zeros((b, 1))), None],
}


def _attention_cases() -> Iterator[Case]:
    shapes = [(1, 1, 0), (2, 4, 0), (3, 7, 0), (2, 4, 5), (3, 1, 5)]
    for (b, s, past), form, triangle in itertools.product(shapes, _ATTENTION_MASKS, (0, 1)):
        if not (past and "bias" in form):  # the operator takes a past or a bias
            yield _attention(b, s, past, form, triangle)
    inputs = [lambda draw: draw.normal(2, 5, 24), lambda draw: draw.normal(24, 80, factor=0.3), lambda draw: draw.normal(80)]
    yield _plain("Attention", "values of another size", inputs, attributes={"qkv_hidden_sizes": [32, 32, 16], "scale": 0.4})
    inputs = [lambda draw: draw.normal(2, 264, 24), lambda draw: draw.normal(24, 384, factor=0.3), lambda draw: draw.normal(384)]
    yield _plain("Attention", "long", inputs)
    yield _plain("Attention", "long, lengths", [*inputs, lambda draw: lengths_of(2, 264)])


def _grouped(
    name: str,
    b: int,
    s: int,
    past: int = 0,
    *,
    heads: tuple[int, int] = (4, 2),
    h: int = 32,
    lengths: Sequence[int] = (),
    buffer: int = 0,
    packed: bool = False,
    turned: int = 0,
    positions: Callable[[Array], Array] | None = None,
    bias: tuple[int, int] | None = None,
    sink: bool = False,
    counts: Sequence[int] = (),
    **attributes: Any,
) -> Case:
    """GroupQueryAttention; `lengths` are those of the entries, by default all s + past, and `turned` how many channels turn.

    `counts` are the new rows of each entry where the operator is told.
    """
    n, m = heads
    ends = np.asarray(lengths or [s + past] * b)
    longest = int(ends.max())

    def make(draw: Draw) -> Inputs:
        operands: Inputs = [draw.normal(b, s, n * h), draw.normal(b, s, m * h), draw.normal(b, s, m * h)]
        if packed:
            operands = [draw.normal(b, s, (n + 2 * m) * h), None, None]
        length = buffer or past
        cache = [draw.normal(b, m, length, h), draw.normal(b, m, length, h)] if length else [None, None]
        tables: Inputs = [*angles(draw, longest + 8, turned // 2)] if turned else [None, None]
        starts = ends - counts if counts else np.zeros_like(ends) if s == longest else ends - s
        places = None if positions is None else positions(starts[:, None] + np.arange(s)).astype(np.int64)
        rest = [None if bias is None else draw.normal(*bias, s, longest), draw.normal(n) if sink else None]
        rest += [None, None, None, None, int32(counts)] if counts else []
        return [*operands, *cache, int32(ends - 1), int32(longest), *tables, places, *rest]

    def where(inputs: Inputs) -> list[Array]:
        keys = np.arange(max(longest, buffer)) < ends[:, None]
        if attributes.get("sliding_window_cache"):
            at_once = buffer - attributes["local_window_size"] + 1
            keys = np.arange(buffer) < (ends - at_once * -(-np.maximum(ends - buffer, 0) // at_once))[:, None]
        rows = np.arange(s) < (np.asarray(counts) if counts else np.where(s == longest, ends, s))[:, None]
        return [rows, keys[:, None], keys[:, None]]

    given = {"num_heads": n, "kv_num_heads": m, "do_rotary": int(turned > 0), **attributes}
    providers = CPU if counts else BOTH
    return Case("GroupQueryAttention", f"{name}{_words(attributes)}", given, make, 3, where=where, providers=providers)


def _grouped_cases() -> Iterator[Case]:
    for b, s, past, heads in itertools.product((1, 3), (1, 4, 7), (0, 5), ((2, 2), (4, 2), (4, 1))):
        if not (past and s > 1 and b > 1):  # only one entry may add several rows to a past
            yield _grouped(f"{b}x{s} past {past} heads {heads[0]}, {heads[1]}", b, s, past, heads=heads)
    places: dict[str, dict[str, Any]] = {
        "prompt": {"b": 2, "s": 7},
        "ragged prompt": {"b": 3, "s": 7, "lengths": (7, 3, 5)},
        "ragged prompt into a buffer": {"b": 3, "s": 7, "lengths": (7, 3, 5), "buffer": _BUFFER},
        "next token": {"b": 2, "s": 1, "past": 5},
        "ragged next token": {"b": 3, "s": 1, "past": 5, "lengths": (6, 3, 4)},
        "ragged next token in a buffer": {"b": 3, "s": 1, "lengths": (6, 3, 9), "buffer": _BUFFER},
        "more of a prompt": {"b": 1, "s": 4, "past": 5},
        "counted rows": {"b": 4, "s": 4, "lengths": (7, 3, 9, 2), "counts": (4, 2, 1, 0), "buffer": _BUFFER},
    }
    forms: dict[str, dict[str, Any]] = {
        "window of 1": {"local_window_size": 1},
        "window of 3": {"local_window_size": 3},
        "cap": {"softcap": 1.5, "scale": 0.5},
        "both ways": {"causal": 0},
        "packed": {"packed": True},
        "turned": {"turned": 32},
        "turned neighbours": {"turned": 32, "rotary_interleaved": 1},
        "partly turned": {"turned": 16},
        "partly turned neighbours": {"turned": 16, "rotary_interleaved": 1},
        "turned, packed": {"turned": 32, "packed": True},
        "turned, positions": {"turned": 32, "positions": lambda places: places},
        "turned, positions moved": {"turned": 32, "positions": lambda places: places + 3},
        "bias": {"bias": (1, 4)},
        "sinks": {"sink": True},
        "smooth": {"smooth_softmax": 1},
        "sinks, window, cap": {"sink": True, "local_window_size": 3, "softcap": 1.5},
        "bias, window, cap": {"bias": (1, 1), "local_window_size": 3, "softcap": 1.5},
        "turned, window": {"turned": 32, "local_window_size": 3},
    }
    for (place, where), (form, what) in itertools.product(places.items(), forms.items()):
        if not ("counts" in where and form == "both ways"):  # refused
            yield _grouped(f"{place}, {form}", **where, **what)
    counted = {**places["counted rows"], "sliding_window_cache": 1, "local_window_size": 3}
    for room, form in itertools.product((3, 4, 6, _BUFFER), ("cap", "packed", "turned", "turned, positions", "sinks")):
        yield _grouped(f"counted rows in a window of {room}, {form}", **{**counted, "buffer": room}, **forms[form])
    yield _grouped("counted rows of a prompt, turned", **places["ragged prompt into a buffer"], counts=(7, 3, 5), turned=32)
    for (b, s), window in itertools.product(_LONG, (-1, 40)):
        yield _grouped(f"long {b}x{s}", b, s, h=64, local_window_size=window)
        yield _grouped(f"long {b}x{s}, ragged", b, s, h=128, lengths=[s, s // 2][:b], turned=128, local_window_size=window)


def _rotary_cases() -> Iterator[Case]:
    for by_head, offset, pairs, turned in itertools.product((False, True), (False, True), (0, 1), (0, 8)):
        shape = (3, 2, 7, 16) if by_head else (3, 7, 32)
        places = np.asarray([4]) if offset else np.arange(7) + np.asarray([[0], [5], [2]])
        attributes = {"interleaved": pairs, **({"num_heads": 2, "rotary_embedding_dim": turned} if turned else {})}
        name = f"{len(shape)} axes, {'offset' if offset else 'positions'}{_words(attributes)}"
        yield Case("RotaryEmbedding", name, attributes, _rotary(shape, places, turned or 16))
        if not offset:
            given = {**attributes, **({} if by_head else {"num_heads": 2})}
            yield Case("RotaryEmbedding", name, given, _rotary(shape, places, turned or 16, standard=True), domain=STANDARD)
    yield Case("RotaryEmbedding", "scale", {"scale": 2.0}, _rotary((1, 4, 32), np.asarray([0]), 16))


def _rotary(shape: Sequence[int], places: Array, turned: int, *, standard: bool = False) -> Callable[[Draw], Inputs]:
    def make(draw: Draw) -> Inputs:
        array, tables = draw.normal(*shape), angles(draw, 16, turned // 2)
        return [array, *tables, places] if standard else [array, places, *tables]

    return make


def _some_rows(b: int, s: int, t: int) -> Array:
    """True in every other row."""
    return np.arange(b * s).reshape(b, 1, s, 1) % 2 + np.zeros((b, 1, s, t)) > 0


_STANDARD_MASKS: dict[str, Callable[[Draw, int, int, int, int], Array | None]] = {
    "no mask": lambda draw, b, n, s, t: None,
    "truth values": lambda draw, b, n, s, t: draw.kept(b, n, s, t),
    "truth values for all": lambda draw, b, n, s, t: draw.kept(s, t),
    "bias": lambda draw, b, n, s, t: draw.normal(b, 1, s, t),
    "bias by head": lambda draw, b, n, s, t: draw.normal(n, s, t),
    "bias with holes": lambda draw, b, n, s, t: MASKS["bias with holes"](draw, b, n, s, t)[1],
    "rows without a key": lambda draw, b, n, s, t: _some_rows(b, s, t),
    "rows of -inf": lambda draw, b, n, s, t: draw.cast(np.where(_some_rows(b, s, t), 0, -np.inf)),
    "rows of the lowest": lambda draw, b, n, s, t: np.where(_some_rows(b, s, t), draw.normal(b, 1, s, t), draw.lowest(1)),
}
"""The standard says what a row without a key gives, but not that the lowest number forbids."""


def _standard(
    name: str,
    b: int,
    s: int,
    t: int,
    past: int = 0,
    *,
    heads: tuple[int, int] = (2, 2),
    v: int = 16,
    form: str = "no mask",
    lengths: Sequence[int] | None = None,
    flat: bool = False,
    **given: Any,
) -> Case:
    """Attention of the standard, with `t` keys besides the past."""
    n, m = heads

    def make(draw: Draw) -> Inputs:
        operands = [draw.normal(b, n, s, 16), draw.normal(b, m, t, 16), draw.normal(b, m, t, v)]
        if flat:
            operands = [draw.normal(b, s, n * 16), draw.normal(b, t, m * 16), draw.normal(b, t, m * v)]
        cache = [draw.normal(b, m, past, 16), draw.normal(b, m, past, v)] if past else [None, None]
        counts = None if lengths is None else np.asarray(lengths, np.int64)
        return [*operands, _STANDARD_MASKS[form](draw, b, n, s, past + t), *cache, counts]

    attributes = {**({"q_num_heads": n, "kv_num_heads": m} if flat else {}), **given}
    words = f"{name} {b}x{s}x{t} past {past} heads {n}, {m} {form}{_words(attributes)}{'' if lengths is None else list(lengths)}"
    return Case("Attention", words, attributes, make, 3 if past else 1, STANDARD, opset=23 if lengths is None else 24)


def _standard_cases() -> Iterator[Case]:
    shapes = [(1, 1, 1, 0), (2, 4, 4, 0), (3, 7, 7, 0), (2, 4, 7, 0), (2, 7, 4, 0), (2, 4, 4, 5), (3, 1, 1, 5)]
    for shape, form, causal in itertools.product(shapes, _STANDARD_MASKS, (0, 1)):
        yield _standard("plain", *shape, form=form, is_causal=causal)
    for form, heads in itertools.product(_STANDARD_MASKS, ((4, 2), (4, 1))):
        yield _standard("grouped", 2, 4, 4, 5, heads=heads, form=form, is_causal=1)
    for flat, causal in itertools.product((False, True), (0, 1)):
        yield _standard("capped", 2, 4, 4, heads=(4, 2), flat=flat, form="truth values", softcap=1.5, scale=0.5, is_causal=causal)
        yield _standard("values of another size", 2, 4, 4, v=24, flat=flat, is_causal=causal)
        yield _standard("lengths", 2, 2, 7, lengths=(7, 4), flat=flat, is_causal=causal)
        yield _standard("lengths", 2, 2, 7, lengths=(7, 0), flat=flat, is_causal=causal)
        yield _standard("long", 1, 264, 264, flat=flat, is_causal=causal)


def _counts(lengths: Sequence[int], longest: int) -> Inputs:
    """The places of tokens, then those of padding, and where entries start."""
    places = [(entry * longest + place, place >= count) for entry, count in enumerate(lengths) for place in range(longest)]
    order = sorted(places, key=lambda place: (place[1], place[0]))
    starts = [sum(lengths[:entry]) for entry in range(len(lengths) + 1)]
    return [int32([place for place, _ in order]).reshape(len(lengths), longest), int32(starts)]


PACKINGS = {
    "one": ((5,), 5),
    "padded": ((3, 7, 1), 7),
    "none full": ((3, 2), 6),
    "full": ((4, 4), 4),
    "long": ((264, 100), 264),
    "longer": ((520, 64), 520),
    "an empty entry": ((0, 4, 2), 4),
}
"""Lengths of the entries, and the length that they are padded to; last what a kernel may stumble over."""


def _padding_cases() -> Iterator[Case]:
    for name, (lengths, longest) in PACKINGS.items():
        make = functools.partial(_padded, lengths=lengths, longest=longest)
        yield Case("RemovePadding", name, {}, make, 4, providers=CUDA)
        make = functools.partial(_unpadded, lengths=lengths, longest=longest)
        yield Case("RestorePadding", name, {}, make, providers=CUDA)


def _padded(draw: Draw, *, lengths: Sequence[int], longest: int) -> Inputs:
    return [draw.normal(len(lengths), longest, 24), int32(lengths)]


def _unpadded(draw: Draw, *, lengths: Sequence[int], longest: int) -> Inputs:
    return [draw.normal(sum(lengths), 24), _counts(lengths, longest)[0]]


def _packed_cases() -> Iterator[Case]:
    forms = ("plain", "bias", "bias for all", "values of another size", "projection biases", "all packed")
    for op, (name, packing), form in itertools.product(("PackedMultiHeadAttention", "PackedAttention"), PACKINGS.items(), forms):
        v = 24 if form == "values of another size" else 16
        make = _packed_inputs(*packing, form, v)
        if op == "PackedMultiHeadAttention":
            yield Case(op, f"{name}, {form}", {"num_heads": 2}, make, providers=CUDA)
        elif form not in forms[4:]:
            sizes = {"num_heads": 2, "qkv_hidden_sizes": [32, 32, 2 * v], "scale": 0.3}
            yield Case(op, f"{name}, {form}", sizes, _packed_inputs(*packing, form, v, projected=True), providers=CUDA)


def _packed_inputs(
    lengths: Sequence[int], longest: int, form: str, v: int, *, projected: bool = False
) -> Callable[[Draw], Inputs]:
    """Two heads of 16 in keys and `v` in values, or what is projected to these."""
    count = sum(lengths)

    def make(draw: Draw) -> Inputs:
        batch = {"bias": len(lengths), "bias for all": 1}.get(form)
        tail = [*_counts(lengths, longest), None if batch is None else draw.normal(batch, 2, longest, longest)]
        if projected:
            return [draw.normal(count, 24), draw.normal(24, 64 + 2 * v, factor=0.3), draw.normal(64 + 2 * v), *tail]
        if form == "all packed":
            return [draw.normal(count, 2, 3, 16), None, None, None, *tail]
        biases = draw.normal(64 + 2 * v) if form == "projection biases" else None
        return [draw.normal(count, 32), draw.normal(count, 32), draw.normal(count, 2 * v), biases, *tail]

    return make


def _gelu_cases() -> Iterator[Case]:
    for width, (b, s), factor in itertools.product(WIDTHS, ((1, 1), (2, 7)), (1.0, 3.0)):
        make = functools.partial(_gated, b=b, s=s, width=width, factor=factor)
        yield Case("BiasSplitGelu", f"{b}x{s}x{width} times {factor:g}", {}, make, providers=CUDA)


def _gated(draw: Draw, *, b: int, s: int, width: int, factor: float) -> Inputs:
    return [draw.normal(b, s, width, factor=factor), draw.normal(width)]


def _norm_cases() -> Iterator[Case]:
    forms: dict[str, Sequence[int]] = {
        "factors": (24,),
        "factors by branch": (3, 24),
        "factors in a row": (72,),
        "no factors": (),
    }
    for (b, s), (form, scale), count, epsilon in itertools.product(((1, 1), (2, 7)), forms.items(), (0, 1, 3), (1e-6, 0.1)):
        if count == 1 and form in {"factors by branch", "factors in a row"}:
            continue
        make = functools.partial(_branches, dims=(b, s, 3, 24) if count == 0 else (b, s, 24 * count), scale=scale)
        settings = {"num_branches": count, "epsilon": epsilon}
        yield Case("BranchwiseRMSNorm", f"{b}x{s} {form}{_words(settings)}", settings, make, providers=CUDA)


def _branches(draw: Draw, *, dims: Sequence[int], scale: Sequence[int]) -> Inputs:
    return [draw.normal(*dims, factor=3.0), *([draw.normal(*scale)] if scale else [])]


def _product_cases() -> Iterator[Case]:
    for turned, (b, m, k, n) in itertools.product(((0, 0), (1, 0), (0, 1), (1, 1)), ((1, 1, 8, 8), (2, 7, 24, 5))):
        left, right = (b, k, m) if turned[0] else (b, m, k), (n, k) if turned[1] else (k, n)
        attributes = {"alpha": 0.5, "transA": turned[0], "transB": turned[1]}
        make = functools.partial(_operands, left=left, right=right)
        yield Case("FusedMatMul", f"{b}x{m}x{k}x{n}{_words(attributes)}", attributes, make)


def _operands(draw: Draw, *, left: Sequence[int], right: Sequence[int]) -> Inputs:
    return [draw.normal(*left), draw.normal(*right)]


def _convolution_cases() -> Iterator[Case]:
    """Tokens behind a state and behind none, for the CPU alone, which is where the operator is written."""
    for (b, t), (size, step), last, activation in itertools.product(((1, 1), (3, 7)), ((4, 1), (3, 2)), (0, 1), ("none", "silu")):
        for bias, past in ((True, True), (False, True), (True, False)):
            settings = {"channels_last": last, "dilation": step, "activation": activation}
            make = functools.partial(_tokens, b=b, t=t, size=size, reach=(size - 1) * step, last=last, given=(bias, past))
            name = f"{b}x{t} kernel {size}, step {step}, {activation}, last {last}, bias {bias}, past {past}"
            yield Case("CausalConvWithState", name, settings, make, 2, providers=CPU)


def _tokens(draw: Draw, *, b: int, t: int, size: int, reach: int, last: int, given: tuple[bool, bool]) -> Inputs:
    shapes = [(b, length, 6) if last else (b, 6, length) for length in (t, reach)]
    rest = [draw.normal(6) if given[0] else None, draw.normal(*shapes[1]) if given[1] else None]
    return [draw.normal(*shapes[0]), draw.normal(6, 1, size), *rest]


def _recurrence_cases() -> Iterator[Case]:
    """Tokens behind a state and behind none, for the CPU alone, which is where the operator is written."""
    rules = ("linear", "gated", "delta", "gated_delta")
    for (b, t), groups, rule, past in itertools.product(((1, 1), (3, 5)), (1, 2, 4), rules, (True, False)):
        for by_key, scale in ((False, 1.0), (True, 0.0)):
            settings = {"q_num_heads": groups, "kv_num_heads": 4, "update_rule": rule, "scale": scale}
            make = functools.partial(_steps, b=b, t=t, groups=groups, rule=rule, past=past, by_key=by_key)
            name = f"{b}x{t} {rule}, {groups} heads, past {past}, decay by key {by_key}, scale {scale:g}"
            yield Case("LinearAttention", name, settings, make, 2, providers=CPU)


def _steps(draw: Draw, *, b: int, t: int, groups: int, rule: str, past: bool, by_key: bool) -> Inputs:
    decay = draw.cast(-np.abs(draw.normal(b, t, 32 if by_key else 4))) if "gated" in rule else None
    beta = draw.cast(1 / (1 + np.exp(draw.normal(b, t, 4)))) if "delta" in rule else None
    wide = [draw.normal(b, t, size, factor=0.5) for size in (8 * groups, 8 * groups, 24)]
    return [*wide, draw.normal(b, 4, 8, 6) if past else None, decay, beta]
