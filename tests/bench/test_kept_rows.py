"""Rows of earlier runs of many models: which of them still hold, and what is measured again."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from benchmarks import providers
from benchmarks.on_providers import kept
from benchmarks.on_providers.judge import Row, Side
from benchmarks.on_providers.kept import Kept, digest
from tests.support.bundled import BUNDLED

VIT = next(path for path in BUNDLED if path.stem == "vit__dyn18__sdpa")
SLOW = Row("folder/model", ratio=1.5, low=1.2, export=Side(attention=2), ours=Side(attention=2), run="b")


@pytest.fixture
def bench(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[str], list[str]]]:
    """Runs the command on one export on the CPU; gives what was written and what was run, a line each."""
    folder = tmp_path / "models"
    folder.mkdir()
    for suffix in (".onnx", ".npz"):
        shutil.copy(VIT.with_suffix(suffix), folder / f"model{suffix}")
    asked: tuple[list[str], list[str]] = ([], [])
    ask = providers.Child.ask

    def noted(self: providers.Child, task: Mapping[str, Any]) -> dict[str, Any]:
        if "models" in task:
            asked[1].append(" ".join(task["models"]))
        elif "ep" in task:
            asked[0].append(task["ep"])
        return ask(self, task)

    def run(*words: str) -> tuple[list[str], list[str]]:
        for found in asked:
            found.clear()
        command = ["providers", "--ep", "cpu", str(folder), "--cache", str(tmp_path / "rows.jsonl"), "--time", "0", *words]
        monkeypatch.setattr(sys, "argv", command)
        providers.main()
        return ([*asked[0]], [*asked[1]])

    monkeypatch.setattr(providers.Child, "ask", noted)
    return run


def test_a_row_is_measured_again_where_what_is_written_differs_and_only_there(
    bench: Callable[..., tuple[list[str], list[str]]], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    wrote, ran = bench()
    assert wrote[:1] == ["cpu"]
    assert ran[:1] == ["export ours"]
    assert bench() == (["cpu"], []), "what is written is the same, so that nothing is run"
    assert bench("--choices", '{"target": "Attention"}')[1], "what is written differs"
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) >= 3
    assert bench("--choices", '{"target": "Attention"}', "--fresh")[1]
    other = tmp_path / "other.py"
    other.write_text("changed")
    monkeypatch.setattr(providers, "runners", lambda: iter([other]))
    assert bench("--choices", '{"target": "Attention"}')[1], "it is judged in another way"


@pytest.mark.exhaustive
def test_other_inputs_or_another_export_are_measured_again(
    bench: Callable[..., tuple[list[str], list[str]]], tmp_path: pathlib.Path
) -> None:
    bench()
    other = next(path for path in BUNDLED if path.stem.startswith("bert"))
    for suffix in (".onnx", ".npz"):
        shutil.copy(other.with_suffix(suffix), tmp_path / "models" / f"model{suffix}")
    assert bench()[1]


@pytest.mark.exhaustive
def test_what_seemed_slower_is_timed_a_second_time_for_longer(
    bench: Callable[..., tuple[list[str], list[str]]], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    def slow(name: str, *_: object, **__: object) -> Row:
        return dataclasses.replace(SLOW, name=name)

    monkeypatch.setattr(providers, "judged", slow)
    assert bench() == (["cpu"] * 2, ["export ours"] * 2)
    monkeypatch.setattr(providers, "judged", lambda name, *_, **__: dataclasses.replace(SLOW, name=name, ratio=1.0))
    assert bench("--fresh") == (["cpu"], ["export ours"])


@pytest.mark.exhaustive
def test_what_took_too_long_is_tried_again(
    bench: Callable[..., tuple[list[str], list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    late = Row("models/model", export=Side("stopped after 120 s"), ours=Side())
    monkeypatch.setattr(providers, "judged", lambda *_, **__: late)
    bench()
    assert bench()[1]
    monkeypatch.setattr(
        providers, "judged", lambda *_, **__: dataclasses.replace(late, export=Side("ended the process with SIGSEGV"))
    )
    bench()
    assert bench() == (["cpu"], [])


def test_a_row_of_before_there_were_digests_does_not_hold(tmp_path: pathlib.Path) -> None:
    told = dataclasses.asdict(dataclasses.replace(SLOW, name="old"))
    file = tmp_path / "folder" / "rows.jsonl"
    file.parent.mkdir()
    file.write_text(json.dumps({key: told[key] for key in told if key != "run"} | {"code": "x"}) + "\n")
    rows = Kept(file)
    assert (rows.rows["old"].run, rows.rows["old"].ratio) == ("", 1.5)
    rows.add(dataclasses.replace(rows.rows["old"], ratio=1.0))
    assert Kept(file).rows["old"].ratio == 1.0


def test_a_digest_tells_what_is_said_and_what_is_in_files(tmp_path: pathlib.Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("a")
    two.write_text("b")
    assert digest(["x"], [one]) == digest(["x"], [one])
    assert (
        len({digest(["x"], [one]), digest(["y"], [one]), digest(["x"], [two]), digest(["x"], [one, two]), digest(["x"], [])}) == 5
    )


def test_what_decides_about_a_row_is_there() -> None:
    assert {"runner.js", "judge.py"} <= {file.name for file in kept.runners()}
    assert all(file.exists() for file in kept.runners())
