"""The command on several models: each by itself, nothing written over anything, the worst end of all."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

import onnx_attnfuse
from onnx_attnfuse_cli.main import main
from tests.support import small_models

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Two models of one name in folders of their own, below the working directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / "models" / name).mkdir(parents=True)
        small_models.written(small_models.ATTENTION, tmp_path / "models" / name / "model.onnx")
    return tmp_path


def files(folder: pathlib.Path) -> set[str]:
    """Every file below a folder."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


SOURCES = {"models/a/model.onnx", "models/b/model.onnx"}
RESULTS = {"models/a/model.attnfuse.onnx", "models/b/model.attnfuse.onnx"}


@pytest.mark.parametrize(
    "arguments", [["models"], ["models/a", "models/b"], ["models/*/model.onnx"], ["models/**/*.onnx"], sorted(SOURCES)]
)
def test_each_has_its_verdict_and_its_result_beside_it(arguments: list[str], folder: pathlib.Path, capsys: Captured) -> None:
    before = {name: (folder / name).read_bytes() for name in SOURCES}
    for _ in range(2):
        assert main(["optimize", *arguments]) == 0
        assert files(folder) == SOURCES | RESULTS
        out, err = capsys.readouterr()
        assert out.splitlines() == [
            "models/a/model.onnx: fused 1 of 1 attention site, wrote models/a/model.attnfuse.onnx",
            "models/b/model.onnx: fused 1 of 1 attention site, wrote models/b/model.attnfuse.onnx",
            "2 of 2 models done: fused 2 of 2 attention sites",
        ]
        assert err == ""
    assert {name: (folder / name).read_bytes() for name in SOURCES} == before


def test_below_another_folder_results_of_one_name_do_not_meet(folder: pathlib.Path) -> None:
    assert main(["optimize", "models", "-o", "out", "--report", "told", "-q"]) == 0
    assert files(folder / "out") == {"a/model.attnfuse.onnx", "b/model.attnfuse.onnx"}
    assert files(folder / "told") == {"index.html", *(f"{name}/model.{kind}" for name in "ab" for kind in ("html", "json"))}
    assert json.loads((folder / "told/a/model.json").read_text())["fused"] == 1
    assert "<title>b/model.onnx" in (folder / "told/b/model.html").read_text()
    assert files(folder / "models") == {"a/model.onnx", "b/model.onnx"}


def test_weights_beside_models_go_with_each(folder: pathlib.Path) -> None:
    for name in "ab":
        small_models.linear_with_data(folder / "models" / name, f"{name}.bin")
    assert main(["optimize", "models", "-o", "out", "-q"]) == 0
    assert files(folder / "out") == {f"{name}/model.attnfuse.onnx{end}" for name in "ab" for end in ("", ".data")}


def test_one_that_is_broken_does_not_stop_the_others(folder: pathlib.Path, capsys: Captured) -> None:
    (folder / "models/a/broken.onnx").write_text("nothing of the kind")
    assert main(["optimize", "models", "--report", "told"]) == 2
    assert files(folder / "models") == {"a/broken.onnx", *(name.removeprefix("models/") for name in SOURCES | RESULTS)}
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "2 of 3 models done: fused 2 of 2 attention sites"
    assert err.startswith("Error: models/a/broken.onnx: broken.onnx is not an ONNX model; ")
    assert err.count("\n") == 1
    assert "could not be done" in (folder / "told/index.html").read_text()


@pytest.mark.parametrize(
    ("ends", "status"), [({}, 0), ({"a": "few"}, 1), ({"a": "bad", "b": "few"}, 2), ({"a": "defect", "b": "bad"}, 4)]
)
def test_the_worst_end_is_the_end(
    ends: dict[str, str], status: int, folder: pathlib.Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimize = onnx_attnfuse.optimize

    def as_wanted(model: pathlib.Path, **choices: Any) -> Any:
        end = ends.get(model.parent.name)
        if end == "bad":
            raise onnx_attnfuse.ModelError("it is bad; get another")
        if end == "defect":
            raise KeyError("ours")
        return optimize(small_models.parsed(small_models.LINEAR) if end == "few" else model, **choices)

    monkeypatch.setattr(onnx_attnfuse, "optimize", as_wanted)
    assert main(["optimize", "models", "--min-fused", "1", "-q"]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("Error: models/") == len(ends)
    assert len(list(folder.glob("attnfuse-error-*.txt"))) == ("defect" in ends.values())


def test_a_dry_run_writes_nothing(folder: pathlib.Path, capsys: Captured) -> None:
    assert main(["optimize", "models", "--dry-run"]) == 0
    assert files(folder) == SOURCES
    assert "wrote" not in capsys.readouterr().out


def test_models_without_verification_are_one_line(
    folder: pathlib.Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["optimize", "models", "--verify", "none", "--dry-run"]) == 0
    assert "nothing was verified" not in capsys.readouterr().out
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["optimize", "models", "--dry-run"]) == 0
    *_, warning, total = capsys.readouterr().out.splitlines()
    assert warning == "nothing was verified: onnxruntime is not installed; run pip install 'onnx-attnfuse[cpu]'"
    assert total == "2 of 2 models done: fused 2 of 2 attention sites"
    assert files(folder) == SOURCES


def test_verbose_tells_all_of_each(folder: pathlib.Path, capsys: Captured) -> None:
    assert main(["optimize", "models", "-v", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines.count("softmax") == 2
    assert lines[0] == "models/a/model.onnx:"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["models", "-o", "out.onnx"], "-o is out.onnx, a file, and there are several models; give a folder"),
        (
            ["models", "-o", "models/a/model.onnx"],
            "-o is models/a/model.onnx, a file, and there are several models; give a folder",
        ),
        (["models", "--report", "out.html"], "--report is out.html, a file, and there are several models; give a folder"),
        (["models/*.onnx"], "there is no model in models/*.onnx; check the path"),
        (
            ["models/a/model.onnx", "models/a/model.attnfuse.onnx"],
            "models/a/model.onnx would be written to models/a/model.attnfuse.onnx, a model of this run too; leave one out",
        ),
        (
            ["models/a/model.onnx", "models/a/model.onnxtxt"],
            "models/a/model.onnxtxt and models/a/model.onnx would both be written to models/a/model.attnfuse.onnx; leave one out",
        ),
    ],
)
def test_arguments_that_contradict_each_other_are_one_line_and_write_nothing(
    arguments: list[str], message: str, folder: pathlib.Path, capsys: Captured
) -> None:
    assert main(["optimize", *arguments]) == 2
    assert capsys.readouterr() == ("", f"Error: {message}\n")
    assert files(folder) == SOURCES


def test_a_model_named_twice_is_done_once(folder: pathlib.Path, capsys: Captured) -> None:
    assert main(["optimize", "models/a", "models/a/model.onnx", "models/a/*.onnx"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 of 1 models done: fused 1 of 1 attention sites"
