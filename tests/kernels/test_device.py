"""Versions of ONNX Runtime that a model can be written for."""

from __future__ import annotations

import pytest

from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.kernels.device import OLDEST, runtime_version
from onnx_attnfuse.kernels.providers import provider


@pytest.mark.parametrize("version", ["1.22", "1.27.3", "0.99"])
def test_a_version_that_nothing_is_known_of_is_refused(version: str) -> None:
    with pytest.raises(OptionError, match=r"before 1\.28; give 1\.28 or newer"):
        runtime_version(version, provider("cpu"))


@pytest.mark.parametrize(("version", "known"), [("1.28", OLDEST), ("1.28.1", (1, 28)), ("2.0", (2, 0))])
def test_the_oldest_known_version_and_newer_ones_are_taken(version: str, known: tuple[int, int]) -> None:
    assert runtime_version(version, provider("cpu")) == known
