"""Losses of a small language model, trained for some steps in each way that needs no other environment."""

from __future__ import annotations

import pathlib

import pytest

pytest.importorskip("torch")

from click.testing import CliRunner

from benchmarks.losses import losses, main


def test_ours_has_the_losses_of_eager_and_another_start_has_not() -> None:
    eager, ours = losses("blocks", "eager", 4), losses("blocks", "ours", 4)
    assert ours == pytest.approx(eager, abs=1e-5)
    assert eager[0] != pytest.approx(eager[-1], abs=1e-2)


def test_a_page_has_the_steps_that_are_shown(tmp_path: pathlib.Path) -> None:
    to = tmp_path / "page.md"
    done = CliRunner().invoke(main, ["blocks", "--steps", "3", "--ways", "eager", "--to", str(to)])
    assert done.exit_code == 0, done.output
    rows = [line for line in to.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows] == ["| step", "| ---", "| 1", "| 3", "| furthest from the first"]
