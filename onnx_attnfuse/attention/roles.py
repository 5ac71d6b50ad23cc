"""The roles that nodes have in an attention."""

from __future__ import annotations

from typing import Literal, TypeAlias

import onnx_ir as ir

Role: TypeAlias = Literal[
    "scores", "scale", "softcap", "mask", "mask_input", "softmax", "guard", "result", "rotary", "rounding", "view", "attention"
]
"""What a node does: the product of queries and keys; a factor of scores, operands or weights; a soft cap; the mask, where it
meets the scores; what that mask is computed by; the softmax; what is done to rows without a key; the product with the values; a
rotary embedding; half of a rounding; what only rearranges or casts, operands and result included; a whole attention."""
Roles: TypeAlias = tuple[tuple[Role, ir.Node], ...]
