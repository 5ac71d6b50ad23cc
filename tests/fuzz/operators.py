"""Operators of newer opsets that say in one node what other recipes spell out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.fuzz.frame import Frame
from tests.fuzz.masks import Masks
from tests.fuzz.operands import Sources
from tests.fuzz.recipe import BIASES, Mask
from tests.fuzz.writer import Operand, Writer

ATTENTION, SCATTER, WINDOWS = 23, 24, 25
"""Opsets from which on there are Attention, RMSNormalization and RotaryEmbedding; TensorScatter and lengths; windows."""
CAP = 20
"""Where soft caps end."""
_SCALES = {"odd": 0.37} | dict.fromkeys(("none", "before_q", "before_k", "q_div", "both", "both_runtime"), 1.0)
_PROBABILITIES = 3
"""The mode in which the fourth output is weights."""


class Operator:
    """Attention of ai.onnx in the place of products, scale, masks and softmax."""

    def __init__(self, frame: Frame, sources: Sources, masks: Masks) -> None:
        self.frame, self.sources, self.masks = frame, sources, masks
        self.g: Writer = frame.g
        self.recipe = frame.recipe

    def applied(self, query: str, key: str, value: str, layer: int) -> tuple[str, str]:
        """The result (b, heads, s, v_size) and the weights; keys and values have heads of their own."""
        g, recipe = self.g, self.recipe
        attributes, length, rest = self._attributes()
        operands = [query, key, value]
        if recipe.operator == "flat":
            operands = [g.op("Reshape", g.transpose(item, 0, 2, 1, 3), [0, 0, -1]) for item in operands]
            attributes |= {"q_num_heads": recipe.heads, "kv_num_heads": recipe.kv_heads}
        inputs: list[Operand | None] = [*operands, self._mask(rest, layer)]
        inputs += self.sources.pasts(layer) if recipe.operator == "past" else [None, None]
        inputs.append(length)
        while inputs[-1] is None:
            inputs.pop()
        if recipe.weights_used:
            attributes["qk_matmul_output_mode"] = _PROBABILITIES
        result, *presents, weights = g.op("Attention", *inputs, outputs=4, **attributes)
        g.without_outputs(0 if recipe.weights_used else 1, 0 if recipe.operator == "past" else 2)
        if recipe.operator == "past":
            for name, present, size in zip("kv", presents, (recipe.size, recipe.v_size), strict=True):
                g.gives_as(present, f"present_{name}{layer}", "b", recipe.kv_heads, "t", size)
        if recipe.operator == "flat":
            result = g.transpose(g.op("Reshape", result, [0, 0, recipe.heads, recipe.v_size]), 0, 2, 1, 3)
        return result, weights

    def _attributes(self) -> tuple[dict[str, Any], Operand | None, list[int]]:
        """Attributes, lengths of entries, and the numbers of the masks that neither says."""
        recipe = self.recipe
        found: dict[str, Any] = {}
        if recipe.scale in _SCALES:
            found["scale"] = _SCALES[recipe.scale]
        if recipe.cap != "none":
            found["softcap"] = float(CAP)
        length: Operand | None = None
        said: dict[str, int] = {}
        rest: list[int] = []
        for number, mask in enumerate(recipe.masks):
            more = self._said(mask)
            if self._is_length(mask) and length is None and not said:
                length = self.g.feed(f"lengths{number}", ("b",), "lengths", "int64")
            elif more is None or length is not None:
                rest.append(number)
            else:
                said |= more
        return found | said, length, rest

    def _is_length(self, mask: Mask) -> bool:
        return mask.kind == "lengths" and _is_plain(mask) and self.recipe.opset >= SCATTER and self.recipe.operator != "past"

    def _said(self, mask: Mask) -> dict[str, int] | None:
        """The attributes that say a mask; None where none do, as with keys before it that the operator does not see."""
        if not _is_plain(mask) or (self.recipe.cache != "none" and self.recipe.operator != "past"):
            return None
        if mask.kind == "causal":
            return {"is_causal": 1}
        if self.recipe.opset < WINDOWS or mask.kind not in {"window", "band"}:
            return None
        window = self.recipe.window - 1
        return {"left_window_size": window} | ({"is_causal": 1} if mask.kind == "window" else {"right_window_size": window})

    def _mask(self, numbers: Sequence[int], layer: int) -> str | None:
        """Masks as one: booleans where there is one that asks for it."""
        if not numbers:
            return None
        masks = [self.recipe.masks[number] for number in numbers]
        if len(masks) == 1 and masks[0].kind not in BIASES and masks[0].applied == "where":
            return self._four(self.masks.kept(masks[0], numbers[0], layer))
        return self._four(self.masks.summed(numbers, layer))

    def _four(self, mask: str) -> str:
        """With all rows and columns, as kernels want it."""
        g, frame = self.g, self.frame
        return g.op("Expand", mask, g.vector(1, 1, frame.length("s"), frame.length(frame.long)))


def _is_plain(mask: Mask) -> bool:
    return mask.join == "none" and mask.cut == "none" and mask.spelled == "compare" and mask.applied == "where"
