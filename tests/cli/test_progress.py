"""Progress is for a person at a terminal; logs hold none of it."""

from __future__ import annotations

import io
import sys

import pytest

import onnx_attnfuse
from onnx_attnfuse_cli.show import progress_bar
from tests.support import small_models


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "is_drawn"), [(io.StringIO(), False), (_Terminal(), True)], ids=["log", "terminal"])
def test_frames_are_drawn_on_a_terminal_only_whatever_force_color_says(
    stream: io.StringIO, is_drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_bar(shown=True) as progress:
        progress("fusing", 1, 2)
        progress("verify the whole model", 0, 1)
    drawn = stream.getvalue()
    assert ("verify the whole model" in drawn) == is_drawn
    assert ("0:00:0" in drawn) == is_drawn


def test_every_long_step_is_named_when_it_begins() -> None:
    steps: list[tuple[str, int, int]] = []
    model = small_models.parsed(small_models.ATTENTION)
    onnx_attnfuse.optimize(model, verify="model", progress=lambda *step: steps.append(step))
    names = [name for name, _, _ in steps]
    assert ("fusing", 0, 1) in steps
    assert names.index("fusing") < names.index("verify the whole model")
    assert all(0 <= done <= total for _, done, total in steps)
