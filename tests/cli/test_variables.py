"""Variables that ask for kernels which the device lacks are reported, with and without -q."""

from __future__ import annotations

import pathlib

import pytest

from onnx_attnfuse_cli.main import main
from tests.support import small_models


@pytest.fixture
def model(tmp_path: pathlib.Path) -> str:
    return str(small_models.written(small_models.ATTENTION, tmp_path / "model.onnx"))


@pytest.mark.parametrize(
    ("variable", "option", "is_warned"),
    [
        ("EFFICIENT_ATTENTION", [], True),
        ("ATTNFUSE_USE_EFFICIENT_ATTENTION", [], True),
        ("ATTNFUSE_USE_EFFICIENT_ATTENTION", ["--no-efficient"], False),
        ("SDPA_FALLBACK", [], False),
    ],
)
@pytest.mark.parametrize("quiet", [[], ["-q"]])
def test_what_a_variable_leaves_unfused_is_reported(
    variable: str,
    option: list[str],
    is_warned: bool,
    quiet: list[str],
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, "1")
    assert main(["optimize", model, "--ep", "cpu", "--dry-run", *option, *quiet]) == 0
    warned = f"Warning: {variable} asks for efficient kernels only, and 1 of 1 attentions are left unfused; "
    assert (warned in capsys.readouterr().err) == is_warned


def test_an_option_that_asks_for_the_same_is_no_surprise(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SDPA_FALLBACK", "1")
    assert main(["optimize", model, "--ep", "cpu", "--dry-run", "--efficient"]) == 0
    assert "Warning" not in capsys.readouterr().err
