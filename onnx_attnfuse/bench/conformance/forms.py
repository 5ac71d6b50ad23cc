"""The forms of an operator that are tried: read off its record and its schema, so that a new operator needs nothing here."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

from onnx_attnfuse.kernels.conditions import MaskForm
from onnx_attnfuse.kernels.conformance import BiasForm, Form
from onnx_attnfuse.kernels.operators import OpInfo, records

DTYPES = ("float32", "float16")
RARE_DTYPE = "bfloat16"
"""The forms tried, with one head size, where an execution provider is known to have a kernel for it, or where it is asked for."""
HEAD_SIZE, ODD_HEAD_SIZE = 64, 15
"""The forms of every kind of attention: kernels that load vectors of channels take the first, others the second."""
HEAD_SIZES = (8, 12, 16, 20, 32, 40, 72, 80, 96, 128, 256)
"""Additional forms of plain attention."""
TRIANGLES: Mapping[str, int] = {"unidirectional": 0, "is_causal": 0, "causal": 1}
"""The names that schemas have for the causal attribute, and its default."""
WINDOW, CAP = "local_window_size", "softcap"
_MASKS: tuple[tuple[MaskForm, BiasForm], ...] = (
    ("none", ""),
    *(("bias", spread) for spread in ("full", "broadcast", "holes")),
    ("lengths", ""),
    ("ranges", ""),
    ("raw", ""),
)
_LONG = 264
ODD_HEADS, ODD_GROUPED_HEADS = 5, 9
"""Heads whose number is odd: each with keys of its own, and three sharing one."""
_PAST = 6


def operators() -> list[OpInfo]:
    """The operators that are tried: those of attention."""
    return [info for info in records().values() if info.kind == "attention"]


def forms(info: OpInfo, attributes: frozenset[str], dtypes: Sequence[str] = DTYPES) -> Iterator[Form]:
    """All forms of an operator, so that the first few are those that tell most.

    Args:
        info: Its record.
        attributes: The names of its attributes, as its schema has them.
        dtypes: The element types.
    """
    roles = set(info.inputs.values())
    own_keys = info.packed or "weights" in roles or "last" in roles  # keys are those of the tokens of the queries
    short = [
        dataclasses.replace(kind, columns=5 if own_keys or kind.causal else 7, dtype=dtype)
        for dtype, kind in itertools.product(dtypes, list(_kinds(info, attributes)))
    ]
    yield from short
    yield from _unusual(short)
    usual = [form for form in short if form.dtype != RARE_DTYPE]
    yield from (dataclasses.replace(form, head_size=ODD_HEAD_SIZE) for form in usual)
    if "past" in roles:
        pasts = [form for form in short if not ("weights" in roles and form.mask == "bias")]
        cached = [dataclasses.replace(form, past=_PAST, cached=True) for form in pasts]
        yield from (dataclasses.replace(form, rows=1, columns=_PAST + 1) for form in cached)
        yield from (dataclasses.replace(form, batch=1, rows=4, columns=_PAST + 4) for form in cached)
    yield from (dataclasses.replace(form, batch=1, rows=_LONG, columns=_LONG) for form in short)
    for form, size in itertools.product(filter(_is_plain, usual), HEAD_SIZES):
        yield dataclasses.replace(form, head_size=size)


def _unusual(short: Sequence[Form]) -> Iterator[Form]:
    """Forms that see no key in a row, and forms with an odd number of heads.

    A float16 score plus the lowest float16 is kept or not by how a provider rounds, so that no result is the right one.
    """
    plain = [form for form in short if form.bias in {"", "broadcast"} and not (form.windowed or form.capped)]
    absorbing = [form for form in plain if form.mask == "bias" and form.dtype != "float16"]
    empty = [dataclasses.replace(form, bias="empty") for form in absorbing]
    yield from empty
    yield from (dataclasses.replace(form, batch=1, rows=_LONG, columns=_LONG) for form in empty if not form.grouped)
    odd = [form for form in plain if form.mask in {"none", "bias"}]
    yield from (dataclasses.replace(form, heads=ODD_GROUPED_HEADS if form.grouped else ODD_HEADS) for form in odd)


def _kinds(info: OpInfo, attributes: frozenset[str]) -> Iterator[Form]:
    """Every combination of what an operator may be asked for, sizes and element types aside; the plainest first."""
    roles, is_grouped = set(info.inputs.values()), "kv_num_heads" in attributes
    for capped, grouped, (mask, bias), (causal, windowed) in itertools.product(
        _both(CAP in attributes), _both(is_grouped), _MASKS, _triangles(attributes)
    ):
        if mask == "none" or ("bias" if mask == "bias" else "mask") in roles:
            yield Form(info.key, "", mask, bias, causal, windowed, grouped=grouped, capped=capped, head_size=HEAD_SIZE)


def _is_plain(form: Form) -> bool:
    return (form.mask == "none" or form.bias == "broadcast") and not (form.windowed or form.grouped or form.capped)


def _both(exists: bool) -> tuple[bool, ...]:
    return (False, True) if exists else (False,)


def _triangles(attributes: frozenset[str]) -> tuple[tuple[bool, bool], ...]:
    """Neither triangle nor window, a triangle, and a window in it; a window without a causal attribute is always causal."""
    named, has_window = bool(attributes & set(TRIANGLES)), WINDOW in attributes
    free = [(False, False)] if named or not has_window else []
    return (*free, *([(True, False)] if named or has_window else []), *([(True, True)] if has_window else []))
