"""Where two models begin to differ: the first value that both have by name, in the order of the first.

Values are asked for in blocks, in order, and the search ends with the first block that holds a difference; so a model of any size
is run with few of its values at a time. The attention that it belongs to lies between it and the last equal values, found by
walking up: the search knows nothing of how attentions are read or built.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import ml_dtypes
import numpy as np
import onnx_ir as ir

from onnx_attnfuse.graph.constants import subgraphs
from onnx_attnfuse.graph.ops import is_attention
from onnx_attnfuse.graph.uses import producer_of
from onnx_attnfuse.verify.inputs import Array
from onnx_attnfuse.verify.model_session import Source, session
from onnx_attnfuse.verify.runtime import PieceSession, Reference, RuntimeRefusal
from onnx_attnfuse.verify.verdict import Divergence, ErrorBounds, compare

_VALUES_PER_RUN = 128
"""Values that are looked at in one run."""


def first_divergence(
    sources: tuple[Source, Source],
    models: tuple[ir.Model, ir.Model],
    inputs: tuple[Mapping[str, Array], Mapping[str, Array]],
    tolerance: float | ErrorBounds,
) -> Divergence | None:
    """The first inner value, or output, that differs; None if none of those that both models have does.

    Args:
        sources: The models as they were handed in.
        models: The same, to look at.
        inputs: A case in which an output differs, for each model.
        tolerance: The largest difference that counts as equal.
    """
    first, second = (_named(model) for model in models)
    shared = [name for name in first if name in second]
    try:
        sessions = [session(source, shared) for source in sources]
    except RuntimeRefusal:
        return None
    known: set[str] = set()
    for name, left, right in _values(sessions, inputs, shared):
        result = compare(*_comparable(left, right), tolerance)
        if not result.equal:
            site = _attention_above(first[name], known) or _attention_above(second[name], known)
            return Divergence(name, _described(first[name]), _described(second[name]), site, result.detail)
        known.add(name)
    return None


def _named(model: ir.Model) -> dict[str, ir.Value]:
    """Everything that the nodes of the main graph give, in order."""
    return {value.name: value for node in model.graph for value in node.outputs if value.name}


def _values(
    sessions: Sequence[PieceSession | Reference], inputs: Sequence[Mapping[str, Array]], names: Sequence[str]
) -> Iterator[tuple[str, Array, Array]]:
    """Values by name, as both models have them; without those of a block that one of them refuses to give."""
    for start in range(0, len(names), _VALUES_PER_RUN):
        block = names[start : start + _VALUES_PER_RUN]
        try:
            left, right = (one.run(block, given) for one, given in zip(sessions, inputs, strict=True))
        except RuntimeRefusal:
            continue
        yield from (item for item in zip(block, left, right, strict=True) if not isinstance(item[1], list))  # sequences


def _comparable(left: Array, right: Array) -> tuple[Array, Array]:
    """Floats of two types as the wider one, bounded by the narrower one's range."""
    if left.dtype == right.dtype or left.dtype.kind not in "fV" or right.dtype.kind not in "fV":
        return left, right
    narrow, wide = sorted((left.dtype, right.dtype), key=lambda dtype: dtype.itemsize)
    most = float(cast("float", ml_dtypes.finfo(narrow).max))
    one, other = (array.astype(wide) for array in (left, right))
    bounded = np.where(np.isfinite(one), np.clip(one, -most, most), one)
    return bounded.astype(wide), other  # NumPy 1 widens a single number


def _described(value: ir.Value) -> str:
    node = producer_of(value)
    return f"{node.name or value.name} ({node.op_type})"


def _attention_above(value: ir.Value, known: set[str]) -> str | None:
    """The nearest attention that the value is computed by from values that are known to be equal."""
    pending, seen = [value], {value}
    for item in pending:
        node = item.producer()
        if node is None or (item is not value and item.name in known):
            continue
        inner = [node, *(found for graph in subgraphs(node) for found in graph.all_nodes())]
        for found in inner:
            if found.op_type == "Softmax" or is_attention(found):
                return found.name or found.outputs[0].name
        fresh = [read for read in node.inputs if read is not None and read not in seen]
        seen.update(fresh)
        pending.extend(fresh)
    return None
