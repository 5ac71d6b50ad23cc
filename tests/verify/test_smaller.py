"""Pieces that are too large to be run are judged with shorter axes."""

from __future__ import annotations

import pytest

from tests.support.pairs import PADDED, PADDED_FUSED, PLAIN, PLAIN_FUSED, graph, judged

_FIXED = "{type}[2, 8192, 32] q, {type}[2, 8193, 32] k, {type}[2, 8193, 32] v"
_WITH_MASK = _FIXED + ", int64[2, 8193] mask"


@pytest.mark.parametrize(
    ("nodes", "inputs"), [(PLAIN + PLAIN_FUSED, _FIXED), (PADDED + PADDED_FUSED, _WITH_MASK)], ids=["plain", "padded"]
)
def test_what_is_equal_is_equal_with_shorter_axes(nodes: str, inputs: str) -> None:
    verdict = judged(graph(nodes, inputs=inputs))
    assert verdict.equal, verdict.detail
    assert "judged shorter" in verdict.detail


@pytest.mark.parametrize(
    ("right", "wrong"), [("scale = 0.25", "scale = 0.5"), ("(q, k, v)", "(q, k, k)"), ("num_heads = 4", "num_heads = 2")]
)
def test_what_differs_is_not_called_equal(right: str, wrong: str) -> None:
    verdict = judged(graph(PLAIN + PLAIN_FUSED.replace(right, wrong), inputs=_FIXED))
    assert not verdict.equal
    assert "judged shorter" in verdict.detail
