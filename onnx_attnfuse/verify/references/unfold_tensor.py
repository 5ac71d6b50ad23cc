"""com.microsoft.UnfoldTensor: pieces of an axis, each a step behind the one before.

| | shape |
|---|---|
| input | (…, d, …) with d ≥ size |
| output | (…, (d - size) // step + 1, …, size) |
"""

from __future__ import annotations

import numpy as np

from onnx_attnfuse.verify.references.core import Array, Operator, Results


def unfold_tensor(input: Array, *, dim: int = -1, size: int = 1, step: int = 1) -> Results:  # noqa: A002 - its name in the schema
    """The pieces, as in torch's `unfold`.

    Raises:
        ValueError: The axis is shorter than a piece.
    """
    if input.shape[dim] < size:
        raise ValueError(f"UnfoldTensor takes no pieces of {size} from an axis of {input.shape[dim]}")
    pieces = np.lib.stride_tricks.sliding_window_view(input, size, axis=dim)
    starts = [slice(None)] * input.ndim
    starts[dim] = slice(None, None, step)
    return (np.ascontiguousarray(pieces[tuple(starts)]),)


class UnfoldTensor(Operator):
    """The operator UnfoldTensor for onnx's evaluator."""

    compute = staticmethod(unfold_tensor)
