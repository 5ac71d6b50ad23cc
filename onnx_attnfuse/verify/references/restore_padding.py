"""com.microsoft.RestorePadding: tokens (tokens, d) back to their places, (b, s, d), with padding 0.

`token_offset` is (b, s), as RemovePadding gives it.
"""

from __future__ import annotations

import numpy as np

from onnx_attnfuse.verify.references.core import Array, Operator, Results


def restore_padding(input: Array, token_offset: Array) -> Results:  # noqa: A002 - its name in the schema
    """The padded tensor."""
    count, width = input.shape
    result = np.zeros((token_offset.size, width), input.dtype)
    result[token_offset.reshape(-1)[:count]] = input
    return (result.reshape(*token_offset.shape, width),)


class RestorePadding(Operator):
    """The operator RestorePadding for onnx's evaluator."""

    compute = staticmethod(restore_padding)
