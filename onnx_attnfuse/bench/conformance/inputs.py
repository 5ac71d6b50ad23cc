"""A node of a form: its attributes by its schema, its inputs by the roles that its record gives them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from onnx_attnfuse.bench.conformance import packed
from onnx_attnfuse.bench.conformance.drawing import MASKS, Array, Case, Draw, Inputs, int32
from onnx_attnfuse.bench.conformance.forms import CAP, TRIANGLES, WINDOW
from onnx_attnfuse.kernels.conformance import Form
from onnx_attnfuse.kernels.operators import OpInfo
from onnx_attnfuse.kernels.operators.record import Role

WIDTH = 24
"""Channels of the projected values."""
CAPPED_AT, WINDOW_OF = 1.5, 3


def kv_heads(form: Form) -> int:
    """How many heads keys and values have."""
    if not form.grouped:
        return form.heads
    return form.heads // (3 if form.heads % 2 else 2)


def case_of(form: Form, info: OpInfo, attributes: frozenset[str]) -> Case:
    """The case of a form; its inputs are those of the operator, in order.

    Args:
        form: The form.
        info: The record of its operator.
        attributes: The names of its attributes, as its schema has them.
    """
    given = _attributes(form, attributes)
    outputs = 1 + list(info.inputs.values()).count("past") if form.cached or "last" in info.inputs.values() else 1
    return Case(info.name, form.name, given, lambda draw: _inputs(form, info, draw), outputs, info.domain, max(23, info.since))


def _attributes(form: Form, names: frozenset[str]) -> dict[str, Any]:
    heads = {"num_heads": form.heads, "q_num_heads": form.heads, "kv_num_heads": kv_heads(form)}
    given: dict[str, Any] = {name: number for name, number in heads.items() if name in names}
    given |= {name: int(form.causal) for name, default in TRIANGLES.items() if name in names and form.causal != bool(default)}
    given |= {WINDOW: WINDOW_OF} if form.windowed else {}
    return given | ({CAP: CAPPED_AT} if form.capped else {})


def _inputs(form: Form, info: OpInfo, draw: Draw) -> Inputs:
    """Arrays by the roles of the inputs; those of a role that comes twice in turn."""
    if info.packed:
        return packed.inputs(form, info, draw, WIDTH, lambda: _bias(form, draw))
    roles = list(info.inputs.values())
    return [_input(form, role, draw, projects="weights" in roles, stacked=roles.count("past") == 1) for role in roles]


def _input(form: Form, role: Role, draw: Draw, *, projects: bool, stacked: bool) -> Array | None:
    batch, head = form.batch, form.head_size
    fresh = form.columns - form.past
    past = (batch, kv_heads(form), form.past, head)
    makers = {
        "input": lambda: draw.normal(batch, form.rows, WIDTH),
        "weights": lambda: draw.normal(WIDTH, 3 * form.heads * head, factor=0.3),
        "projection bias": lambda: draw.normal(3 * form.heads * head, factor=0.3) if projects else None,
        "query": lambda: draw.normal(batch, form.rows, form.heads * head),
        "key": lambda: draw.normal(batch, fresh, kv_heads(form) * head),
        "value": lambda: draw.normal(batch, fresh, kv_heads(form) * head),
        "mask": lambda: (
            None if form.mask == "bias" else MASKS[_NAMES[form.mask]](draw, batch, form.heads, form.rows, form.columns)[0]
        ),
        "bias": lambda: _bias(form, draw) if form.mask == "bias" else None,
        "last": lambda: int32(np.full(batch, form.columns - 1)),
        "total": lambda: int32(form.columns),
        "past": lambda: (draw.normal(2, *past) if stacked else draw.normal(*past)) if form.cached else None,
    }
    return makers[role]() if role in makers else None


_NAMES = {"none": "no mask", "lengths": "lengths", "ranges": "ranges", "raw": "raw"}


def _bias(form: Form, draw: Draw) -> Array:
    """An additive mask; every row but the last of an empty one sees the last key that a triangle leaves it."""
    sizes = (form.rows, form.columns)
    if form.bias == "full":
        return draw.normal(form.batch, form.heads, *sizes)
    kept = draw.kept(1, 1, *sizes) | np.eye(*sizes, form.columns - form.rows, dtype=np.bool_)
    if form.bias == "empty":
        kept[..., -1, :] = False
    return np.where(kept, draw.normal(1, 1, *sizes), draw.cast(-np.inf) if form.bias == "holes" else draw.lowest(1))


@dataclasses.dataclass(frozen=True)
class Added:
    """The summand that a form's mask is to its scores, and the operands by role, for the decomposed attention."""

    operands: dict[str, Array]
    mask: Array | None


def spread(form: Form, info: OpInfo, inputs: Inputs) -> Added:
    """The inputs of a node by role, `past` and `past value` apart, its mask as an additive bias."""
    found: dict[str, Array] = {}
    for role, array in zip(info.inputs.values(), inputs, strict=False):
        if array is not None:
            found["past value" if role == "past" and role in found else role] = array
    mask, dtype = found.pop("bias", None), inputs[0].dtype if inputs[0] is not None else np.dtype("float32")
    if form.mask in {"lengths", "ranges", "raw"}:
        mask = _filled(found["mask"], form).astype(dtype)
    if info.packed:
        mask = packed.mask(form, mask, _fill(form)).astype(dtype)
    if form.causal:
        triangle = _triangle(form).astype(dtype)
        mask = triangle if mask is None else np.where(triangle < 0, triangle, mask)
    return Added({role: array for role, array in found.items() if role in _OPERANDS}, mask)


_OPERANDS = frozenset(["input", "weights", "projection bias", "query", "key", "value", "past", "past value"])
_FILL = -10000.0


def _filled(mask: Array, form: Form) -> Array:
    if form.mask == "raw":
        return np.where(mask[:, None, None, :] > 0, 0.0, _FILL)
    return np.where(np.arange(form.columns) < mask[: form.batch, None, None, None], 0.0, _FILL)


def _triangle(form: Form) -> Array:
    distance = np.arange(form.rows)[:, None] + form.columns - form.rows - np.arange(form.columns)
    kept = (distance >= 0) & ((distance < WINDOW_OF) | (not form.windowed))
    return np.where(kept, 0.0, _fill(form))


def _fill(form: Form) -> float:
    """The fill that masks a key for good: below the lowest number where a row has nothing else."""
    return -math.inf if form.bias == "empty" else -30000.0
