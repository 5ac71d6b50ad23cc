"""A mask as it was read, evaluated at small sizes: which keys each row sees, and where something is added."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnx_attnfuse.attention.masks.classify import Meaning
from onnx_attnfuse.attention.spec import AttentionSpec, mask_values
from onnx_attnfuse.graph.scopes import Scope
from onnx_attnfuse.report.pictures.model import Cells, MaskPanel, MaskPicture
from onnx_attnfuse.verify.mask_check import MaskSample, samples

_MAX_CELLS_PER_SIDE = 40
"""Rows or keys that are still drawn apart."""
_TITLES = {"full": "no padding", "right": "padded on the right", "left": "padded on the left"}
_ABOVE, _BELOW = "1234", "abcd"


class MaskPainter:
    """Paints the masks of a model, each once."""

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._painted: dict[tuple[object, ...], MaskPicture | None] = {}

    def paint(self, spec: AttentionSpec, meaning: Meaning, scope: Scope) -> MaskPicture | None:
        """The picture of a mask; None where there is none, or it cannot be evaluated."""
        if (meaning.is_trivial and not spec.causal) or meaning.is_distrusted:
            return None
        key = (meaning.text, spec.axes.num_heads, *mask_values(spec.mask))
        if key not in self._painted:
            opsets = scope.graph.opset_imports or self._model.opset_imports
            self._painted[key] = _painted(samples(spec, meaning, scope.facts, opsets, self._model.functions))
        return self._painted[key]


def _painted(found: dict[str, MaskSample]) -> MaskPicture | None:
    """Panels of those that differ; the last batch entry is the one with most padding."""
    if not found:
        return None
    entry = -1
    largest = max(float(np.abs(sample.added[np.isfinite(sample.added)]).max(initial=0.0)) for sample in found.values())
    rows, keys = next(iter(found.values())).allowed.shape[-2:]
    step = -(-max(rows, keys) // _MAX_CELLS_PER_SIDE)
    panels: dict[Cells, MaskPanel] = {}
    for pattern, sample in found.items():
        cells = _cells(sample.allowed[entry, 0, ::step, ::step], sample.added[entry, 0, ::step, ::step], largest)
        panels.setdefault(cells, MaskPanel(_TITLES[pattern], cells))
    alone = len(panels) == 1
    shown = tuple(dataclasses.replace(panel, title="every batch entry") if alone else panel for panel in panels.values())
    return MaskPicture(shown, step, by_head=any(_differ_by_head(sample) for sample in found.values()))


def _cells(allowed: npt.NDArray[np.bool_], added: npt.NDArray[np.float64], largest: float) -> Cells:
    share = np.clip(np.nan_to_num(np.abs(added) / (largest or 1.0), posinf=1.0), 0.0, 1.0)
    levels = np.ceil(share * len(_ABOVE)).astype(int)

    def letter(row: int, key: int) -> str:
        if not allowed[row, key]:
            return "."
        level = int(levels[row, key])
        return "o" if level == 0 else (_ABOVE if added[row, key] > 0 else _BELOW)[level - 1]

    return tuple("".join(letter(row, key) for key in range(allowed.shape[1])) for row in range(allowed.shape[0]))


def _differ_by_head(sample: MaskSample) -> bool:
    return bool((sample.allowed != sample.allowed[:, :1]).any() or (sample.added != sample.added[:, :1]).any())
