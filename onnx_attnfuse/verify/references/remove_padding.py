"""com.microsoft.RemovePadding: the tokens of all entries one after the other, without padding, which is on the right.

| | shape |
|---|---|
| input, sequence_token_count | (b, s, d), (b) |
| output | (tokens, d) |
| token_offset | (b, s): the places in (b·s) that hold a token, then those of padding |
| cumulated_seq_len, max_seq_len | (b + 1), (1) |
"""

from __future__ import annotations

import numpy as np

from onnx_attnfuse.verify.references.core import Array, Operator, Results, places


def remove_padding(input: Array, sequence_token_count: Array) -> Results:  # noqa: A002 - its name in the schema
    """The tokens, their places, the places where entries start, and the length of the longest.

    Raises:
        ValueError: An entry has more tokens than there are.
    """
    batch, length, width = input.shape
    counts = np.reshape(sequence_token_count, batch)
    if counts.size and not 0 <= counts.min() <= counts.max() <= length:
        raise ValueError(f"{counts.tolist()} tokens do not fit {length} places")
    is_token = np.ravel(places(length) < counts[:, None])
    order = np.concatenate([np.flatnonzero(is_token), np.flatnonzero(~is_token)])
    starts = np.concatenate([[0], np.cumsum(counts)])
    longest = np.max(counts, initial=0, keepdims=True)
    tokens = np.reshape(input, (-1, width))[is_token]
    return tokens, np.reshape(order, (batch, length)).astype(np.int32), starts.astype(np.int32), longest.astype(np.int32)


class RemovePadding(Operator):
    """The operator RemovePadding for onnx's evaluator."""

    compute = staticmethod(remove_padding)
