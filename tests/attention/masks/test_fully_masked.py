"""How replaced scores are written, by the numbers that masked keys have before Softmax."""

from __future__ import annotations

import pytest

from onnx_attnfuse.attention.masks.fully_masked import Fills, MaskedKey, MaskedKeys, choose_fills
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.thresholds import LOWEST_FLOAT32


@pytest.mark.parametrize(
    ("replaced", "added", "fills"),
    [
        pytest.param(LOWEST_FLOAT32, LOWEST_FLOAT32, "lowest", id="the lowest number stays what it is"),
        pytest.param(LOWEST_FLOAT32 / 3, LOWEST_FLOAT32 / 3, "exact", id="both are scaled alike afterwards"),
        pytest.param(LOWEST_FLOAT32 / 3, LOWEST_FLOAT32 / 4, "lowest", id="replaced scores lie below"),
        pytest.param(-1e9, -1e9, None, id="neither absorbs"),
    ],
)
def test_keys_with_equal_numbers_share_the_weight_of_a_row_whichever_step_masks_them(
    replaced: float, added: float, fills: Fills | None
) -> None:
    masked = MaskedKeys((MaskedKey(False, replaced, replaced), MaskedKey(True, added, added)))
    if fills is None:
        with pytest.raises(Refused, match="mix both"):
            choose_fills(masked)
    else:
        assert choose_fills(masked) == fills
