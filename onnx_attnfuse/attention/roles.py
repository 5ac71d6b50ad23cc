"""The roles that nodes have in an attention."""

from __future__ import annotations

from typing import Literal, TypeAlias

import onnx_ir as ir

Role: TypeAlias = Literal[
    "scores", "scale", "softcap", "mask", "mask_input", "softmax", "guard", "result", "rotary", "rounding", "view", "attention"
]
"""The role of a node: the product of queries and keys; a factor of scores, operands or weights; a soft cap; the mask, where it
meets the scores; a node that computes that mask; the softmax; a guard of rows without a key; the product with the values; a
rotary embedding; half of a rounding; a view or cast, operands and result included; a whole attention."""
Roles: TypeAlias = tuple[tuple[Role, ir.Node], ...]
