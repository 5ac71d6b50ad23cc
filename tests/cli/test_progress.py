"""Progress is for a person at a terminal; logs hold none of it."""

from __future__ import annotations

import io
import sys

import pytest

from onnx_attnfuse_cli.progress import progress_bar


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
    assert ("fusing" in stream.getvalue()) == is_drawn
