"""The axes of a fused operator, chosen for one attention: which factors are the batch and which the heads."""

from __future__ import annotations

import dataclasses

from onnx_attnfuse.axes.factors import Axes, Axis, Factor, leaves, length
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.spec import AttentionSpec


@dataclasses.dataclass(frozen=True)
class Axes4:
    """Batch, heads, rows, columns and channels of one attention, each as its factors."""

    b: Axis
    n: Axis
    i: Axis
    j: Axis
    h: Axis
    v: Axis

    @property
    def num_heads(self) -> int:
        """Number of heads; the heads' factors have known sizes."""
        size = length(self.n)
        assert isinstance(size, int)
        return size

    @property
    def scores(self) -> Axes:
        """The layout of scores and masks."""
        return self.b, self.n, self.i, self.j

    def size(self, axis: Axis) -> Dim:
        """The length of one of the axes."""
        return length(axis)

    def names(self) -> dict[Factor, str]:
        """Names for einops expressions: b n s t h, numbered where an axis is several factors."""
        names: dict[Factor, str] = {}
        for letter, axis in zip("bnsthv", (self.b, self.n, self.i, self.j, self.h, self.v), strict=True):
            parts = leaves(axis)
            for index, part in enumerate(parts):
                names[part] = letter if len(parts) == 1 else f"{letter}{index + 1}"
        return names


def place(spec: AttentionSpec) -> Axes4:
    """Names the axes of `spec`."""
    heads = leaves(spec.heads)
    return Axes4(
        tuple(leaf for leaf in leaves(spec.batch_axis) if leaf not in heads),
        heads,
        leaves(spec.query_axis),
        leaves(spec.key_axis),
        leaves(spec.head_axis),
        leaves(spec.v_head_axis),
    )
