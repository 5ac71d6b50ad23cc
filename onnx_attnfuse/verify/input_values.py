"""Inputs that are more than masks: ids that differ, positions that count up, lengths that fit the sizes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from onnx_attnfuse.graph import sizes
from onnx_attnfuse.verify.input_kinds import InputKind
from onnx_attnfuse.verify.inputs import Array, InputCase

_TOKENS = 10
"""Ids are below this where no table tells a bound."""
_MAX_TOKEN_ID = 1 << 30


def as_its_kind(kind: InputKind, array: Array, case: InputCase, values: Mapping[str, int], seed: int = 0) -> Array:
    """An input as its kind wants it; masks, biases and numbers stay as the case has them."""
    if kind.name == "ids":
        rng = np.random.default_rng((len(case.pattern), seed))
        return rng.integers(0, min(kind.below or _TOKENS, _MAX_TOKEN_ID), array.shape).astype(array.dtype)
    if kind.name == "types":
        return np.minimum(array, (kind.below or 2) - 1).astype(array.dtype)
    if kind.name == "positions":
        last = array.shape[-1] if array.ndim else 1
        counted = np.arange(last) if kind.below is None else np.minimum(np.arange(last), kind.below - 1)
        return np.broadcast_to(counted if array.ndim else counted[0], array.shape).astype(array.dtype)
    if kind.name == "image":
        return np.tanh(array).astype(array.dtype)
    if kind.name not in {"lengths", "last", "total"} or kind.keys is None or kind.rows is None:
        return array
    keys, rows = (sizes.evaluate(dim, values) for dim in (kind.keys, kind.rows))
    return _counted(kind, array, case, keys, rows)


def _counted(kind: InputKind, array: Array, case: InputCase, keys: int, rows: int) -> Array:
    """How many keys each entry has; in a prompt of several lengths no more is claimed of the rest, so there it has all."""
    if kind.name == "total":
        return np.full(array.shape, keys).astype(array.dtype)
    count = array.shape[0] if array.ndim else 1
    shorter = np.arange(count) % keys
    if kind.name == "last":
        shorter = np.arange(count) % (keys - rows + 1)
    elif case.pattern == "empty" and array.ndim:
        shorter[-1] = keys
    found = keys - (shorter if case.pattern not in {"full", "index"} else np.zeros(count, np.int64))
    return np.reshape(found - (kind.name == "last"), array.shape).astype(array.dtype)
