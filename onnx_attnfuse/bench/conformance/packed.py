"""Forms of operators on tokens without padding: their inputs, and the same attention over all tokens as one entry."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from onnx_attnfuse.bench.conformance.drawing import Array, Draw, Inputs, int32
from onnx_attnfuse.kernels.conformance import Form
from onnx_attnfuse.kernels.operators import OpInfo

_SHORTER = 2
"""How many tokens less each further entry has."""


def lengths(form: Form) -> list[int]:
    """How many tokens each entry has."""
    return [max(1, form.rows - _SHORTER * entry) for entry in range(form.batch)]


def flat(form: Form) -> Form:
    """The form of the attention over all tokens as those of one entry, of which each sees its own entry only."""
    return dataclasses.replace(form, batch=1, rows=sum(lengths(form)), columns=sum(lengths(form)))


def inputs(form: Form, info: OpInfo, draw: Draw, width: int, bias: Callable[[], Array]) -> Inputs:
    """Arrays by the roles of the inputs of a packed operator.

    Args:
        form: The form.
        info: The record of its operator.
        draw: The generator of numbers.
        width: The channels of the projected values.
        bias: The function that draws the bias, laid out with padding.
    """
    tokens, channels = sum(lengths(form)), form.heads * form.head_size
    offsets = iter(_offsets(form))
    projects = "weights" in info.inputs.values()
    makers: Mapping[str, Callable[[], Array | None]] = {
        "input": lambda: draw.normal(tokens, width),
        "weights": lambda: draw.normal(width, 3 * channels, factor=0.3),
        "projection bias": lambda: draw.normal(3 * channels, factor=0.3) if projects else None,
        "query": lambda: draw.normal(tokens, channels),
        "key": lambda: draw.normal(tokens, channels),
        "value": lambda: draw.normal(tokens, channels),
        "offsets": lambda: next(offsets),
        "bias": lambda: bias() if form.mask == "bias" else None,
    }
    return [makers[role]() if role in makers else None for role in info.inputs.values()]


def _offsets(form: Form) -> tuple[Array, Array]:
    """The source of each token, padding last, and the number of tokens before each entry."""
    places = np.arange(form.batch * form.rows).reshape(form.batch, form.rows)
    kept = np.arange(form.rows) < np.asarray(lengths(form))[:, None]
    order = np.concatenate([places[kept], places[~kept]]).reshape(form.batch, form.rows)
    return int32(order), int32(np.cumsum([0, *lengths(form)]))


def mask(form: Form, bias: Array | None, fill: float) -> Array:
    """The summand to the scores of all tokens as one entry: the bias of each entry, and a fill between entries."""
    counts = lengths(form)
    heads = 1 if bias is None else bias.shape[1]
    found = np.full((1, heads, sum(counts), sum(counts)), fill, np.float64)
    start = 0
    for entry, count in enumerate(counts):
        own = 0.0 if bias is None else bias[min(entry, bias.shape[0] - 1), :, :count, :count]
        found[0, :, start : start + count, start : start + count] = own
        start += count
    return found
