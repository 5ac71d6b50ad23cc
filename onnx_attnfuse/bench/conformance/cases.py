"""A node of a form and its random inputs: attributes by its schema, inputs by the roles that its record gives them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from ml_dtypes import finfo

from onnx_attnfuse.bench.conformance.forms import CAP, TRIANGLES, WINDOW
from onnx_attnfuse.graph.ops import CONTRIB
from onnx_attnfuse.kernels.conformance import Form
from onnx_attnfuse.kernels.operators import OpInfo

Array = npt.NDArray[Any]
Inputs = list[Array | None]
_WIDTH = 24
"""Channels of the projected values."""
_CAPPED_AT, _WINDOW_OF = 1.5, 3


class Draw:
    """Random inputs of one element type."""

    def __init__(self, seed: int, dtype: Any) -> None:
        self._random = np.random.default_rng(seed)
        self.dtype = np.dtype(dtype)

    def normal(self, *shape: int, factor: float = 1.0) -> Array:
        """Normally distributed numbers, `factor` their deviation."""
        return self.cast(self._random.standard_normal(shape) * factor)

    def cast(self, array: Any) -> Array:
        """An array in the type of the inputs."""
        return np.asarray(array).astype(self.dtype)

    def lowest(self, *shape: int) -> Array:
        """The lowest number of the type, everywhere."""
        return np.full(shape, finfo(self.dtype).min, self.dtype)

    def kept(self, *shape: int) -> npt.NDArray[np.bool_]:
        """Random truth values; the first key is always seen, as a triangle leaves the first row no other."""
        found = self._random.random(shape) < 0.7
        found[..., 0] = True
        return found


@dataclasses.dataclass(frozen=True)
class Case:
    """A node and how to fill its inputs."""

    op: str
    name: str
    attributes: Mapping[str, Any]
    make: Callable[[Draw], Inputs]
    outputs: int = 1
    domain: str = CONTRIB
    opset: int = 23

    def inputs(self, dtype: Any = np.float32) -> Inputs:
        """Its inputs, the same every time."""
        found = self.make(Draw(sum(map(ord, self.name)), dtype))
        while found[-1] is None:  # an older version of the operator may have fewer
            found.pop()
        return found


def int32(values: Any) -> Array:
    """Integers as ONNX Runtime's operators take them."""
    return np.asarray(values, np.int32)


def lengths_of(batch: int, longest: int) -> Array:
    """Lengths that differ, the first being the longest."""
    return int32([max(1, longest - 2 * entry) for entry in range(batch)])


def ranges_of(lengths: Array, rows: int, columns: int) -> Array:
    """Lengths, and where queries and keys of each entry start."""
    count = np.arange(len(lengths) + 1)
    return np.concatenate([lengths, int32(count * rows), int32(count * columns)])


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


def _kv_heads(form: Form) -> int:
    """How many heads keys and values have."""
    if not form.grouped:
        return form.heads
    return form.heads // (3 if form.heads % 2 else 2)


def _attributes(form: Form, names: frozenset[str]) -> dict[str, Any]:
    heads = {"num_heads": form.heads, "q_num_heads": form.heads, "kv_num_heads": _kv_heads(form)}
    given: dict[str, Any] = {name: number for name, number in heads.items() if name in names}
    given |= {name: int(form.causal) for name, default in TRIANGLES.items() if name in names and form.causal != bool(default)}
    given |= {WINDOW: _WINDOW_OF} if form.windowed else {}
    return given | ({CAP: _CAPPED_AT} if form.capped else {})


def _inputs(form: Form, info: OpInfo, draw: Draw) -> Inputs:
    """Arrays by the roles of the inputs; those of a role that comes twice in turn."""
    roles, head, channels, inner = list(info.inputs.values()), form.head_size, form.heads * form.head_size, _kv_heads(form)
    counts = lengths_of(form.batch, form.rows)
    rows = (int(counts.sum()),) if info.packed else (form.batch, form.rows)
    keys = rows if info.packed else (form.batch, form.columns - form.past)
    past = (*([2] if roles.count("past") == 1 else []), form.batch, inner, form.past, head)
    offsets = iter(_offsets(form, counts))
    makers: Mapping[str, Callable[[], Array | None]] = {
        "input": lambda: draw.normal(*rows, _WIDTH),
        "weights": lambda: draw.normal(_WIDTH, 3 * channels, factor=0.3),
        "projection bias": lambda: draw.normal(3 * channels, factor=0.3) if "weights" in roles else None,
        "query": lambda: draw.normal(*rows, channels),
        "key": lambda: draw.normal(*keys, inner * head),
        "value": lambda: draw.normal(*keys, inner * head),
        "mask": lambda: _mask(form, draw),
        "bias": lambda: _bias(form, draw) if form.mask == "bias" else None,
        "last": lambda: int32(np.full(form.batch, form.columns - 1)),
        "total": lambda: int32(form.columns),
        "past": lambda: draw.normal(*past) if form.cached else None,
        "offsets": lambda: next(offsets),
    }
    return [makers[role]() if role in makers else None for role in roles]


def _mask(form: Form, draw: Draw) -> Array | None:
    """A mask of integers."""
    lengths = lengths_of(form.batch, form.columns)
    if form.mask == "raw":
        return int32(draw.kept(form.batch, form.columns))
    return {"lengths": lengths, "ranges": ranges_of(lengths, form.rows, form.columns)}.get(form.mask)


def _bias(form: Form, draw: Draw) -> Array:
    """An additive mask; every row but the last of an empty one sees the last key that a triangle leaves it."""
    sizes = (form.rows, form.columns)
    if form.bias == "full":
        return draw.normal(form.batch, form.heads, *sizes)
    kept = draw.kept(1, 1, *sizes) | np.eye(*sizes, form.columns - form.rows, dtype=np.bool_)
    if form.bias == "empty":
        kept[..., -1, :] = False
    return np.where(kept, draw.normal(1, 1, *sizes), draw.cast(-np.inf) if form.bias == "holes" else draw.lowest(1))


def _offsets(form: Form, counts: Array) -> tuple[Array, Array]:
    """The source of each token, padding last, and the number of tokens before each entry."""
    places = np.arange(form.batch * form.rows).reshape(form.batch, form.rows)
    kept = np.arange(form.rows) < counts[:, None]
    order = np.concatenate([places[kept], places[~kept]]).reshape(form.batch, form.rows)
    return int32(order), int32(np.cumsum([0, *counts]))
