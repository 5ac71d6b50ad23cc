"""Models over versions: what counts as a problem, what has drifted, and one row from end to end."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import drift
from benchmarks.drift import MAKERS, RUNNERS, Environment, Row, drifted, newest, page
from models.bundle import FOLDER
from models.export import jobs


def model(name: str, fused: int, *, crash: str = "", wrong: tuple[str, ...] = ()) -> dict[str, Any]:
    """What the coverage says of a model of two sites."""
    comparison = None if crash else {"cases": 3, "wrong": list(wrong)}
    reasons = {} if fused == 2 else {"some-code: some message": 2 - fused}
    return {"name": name, "fused": fused, "sites": 2, "crash": crash, "comparison": comparison, "reasons": reasons}


OLD = Row("made", "old", (model("one", 2), model("two", 1)))
NEW = Row("made", "new", (model("one", 2), model("two", 2)))


def test_a_row_counts_sites_and_what_is_wrong() -> None:
    assert NEW.cells == ["made", "new", "2", "4/4", "2", "0", "0", "0"]
    assert NEW.problems == []
    wrong = dataclasses.replace(
        NEW, models=(model("one", 2, wrong=("padded: differs by 0.3",)), model("two", 0, crash="exit code 4"))
    )
    assert wrong.cells == ["made", "new", "2", "2/4", "1", "1", "1", "1"]
    assert wrong.problems == ["one: padded: differs by 0.3", "two: exit code 4"]


def test_a_row_without_an_environment_is_a_problem() -> None:
    lost = Row("made", "none", (), "no such version")
    assert lost.problems == ["no such version"]
    assert lost.cells[-1] == "-"
    assert list(drifted([lost, NEW])) == []


def test_sites_are_compared_with_those_of_the_last_row() -> None:
    assert list(drifted([OLD, NEW])) == ["two (made): 1/2 with old, 2/2 with new: some-code: some message"]
    assert list(drifted([NEW, OLD])) == ["two (made): 2/2 with new, 1/2 with old: some-code: some message"]
    assert list(drifted([OLD, dataclasses.replace(NEW, maker="others")])) == []
    ended = model("two", 0, crash="exit code 2") | {"fused": None, "sites": None}
    assert list(drifted([dataclasses.replace(OLD, models=(ended,)), NEW])) == []


def test_the_page_has_every_row_and_says_nothing_of_what_is_right() -> None:
    text = page([OLD, NEW], ["export: reason"], "Some machine")
    assert "| made | old | 2 | 3/4 | 2 | 0 | 0 | 0 |" in text
    assert "The models: one, two." in text
    assert "## What is not as it should be\n\nNothing." in text
    assert "- two (made): 1/2" in text
    assert "- export: reason" in text


def test_the_newest_row_has_the_packages_of_the_last_without_versions() -> None:
    for packages in (MAKERS, RUNNERS):
        (row,) = newest(packages)
        assert [package.partition("==")[0] for package in packages[-1]] == list(row)


def test_exporters_are_asked_for_by_tag() -> None:
    recipes = [
        SimpleNamespace(name=name, dtypes=[dtype], attentions=["sdpa"]) for name, dtype in (("one", "fp32"), ("half", "fp16"))
    ]
    assert {job.exporter for job in jobs(["one"], recipes=recipes)} == {"dyn18", "dyn23", "ts17"}
    assert {job.exporter for job in jobs(["one"], ["dyn26"], recipes)} == {"dyn26"}
    assert {job.exporter for job in jobs(["half"], ["dyn18", "dyn26"], recipes)} == {"dyn18"}


class Here(Environment):
    """The environment of the tests, in the place of one that pip makes."""

    @property
    def python(self) -> pathlib.Path:
        return pathlib.Path(sys.executable)

    def make(self) -> str:
        self.folder.mkdir()
        return "" if self.packages[0] != "none" else "no such version"


@pytest.mark.parametrize(("packages", "status"), [(("onnx",), 0), (("none",), 1)])
def test_one_row(packages: tuple[str, ...], status: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = tmp_path / "models"
    models.mkdir()
    for suffix in ("onnx", "npz"):
        shutil.copy(FOLDER / f"vit__dyn18__sdpa.{suffix}", models)
    monkeypatch.setattr(drift, "Environment", Here)
    monkeypatch.setattr(drift, "BUNDLED", models)
    monkeypatch.setattr(drift, "MAKERS", ())
    monkeypatch.setattr(drift, "RUNNERS", (packages,))
    written = tmp_path / "page.md"
    assert drift.main(["--folder", str(tmp_path / "rows"), "--to", str(written), "--jobs", "1"]) == status
    text = written.read_text(encoding="utf-8")
    assert ("no such version" in text) is bool(status)
    assert ("| 1 | 2/2 | 1 | 0 | 0 | 0 |" in text) is not bool(status)
    assert not (tmp_path / "rows" / "environment").exists()
