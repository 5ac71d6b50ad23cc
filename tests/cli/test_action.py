"""The GitHub Action: its script on a repository with changed models, and its file."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from tests.support import small_models

ROOT = pathlib.Path(__file__).parents[2]
WEIGHTS = "(float[b, 2, s, 4] out, float[b, 2, s, t] weights)"
USED = small_models.ATTENTION.replace("(float[b, 2, s, 4] out)", WEIGHTS)


def git(folder: pathlib.Path, *arguments: str) -> str:
    identity = ["-c", "user.name=any", "-c", "user.email=any@example.com"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: pathlib.Path) -> tuple[pathlib.Path, str]:
    """A repository whose last commit changes one model of two, and the commit before; `attnfuse` is on its path."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q")
    for name in ("kept.onnx", "a b.onnx"):
        small_models.written(USED if name == "kept.onnx" else small_models.LINEAR, folder / name)
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "first")
    first = git(folder, "rev-parse", "HEAD")
    small_models.written(small_models.ATTENTION, folder / "a b.onnx")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "second")
    command = tmp_path / "bin" / "attnfuse"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{pathlib.Path(sys.executable).as_posix()}" -m onnx_attnfuse_cli "$@"\n')
    command.chmod(0o755)
    return folder, first


def check(folder: pathlib.Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OPTIONS": "--require-all", **variables}
    environment["PATH"] = f"{folder.parent / 'bin'}{os.pathsep}{os.environ['PATH']}"
    script = ["bash", str(ROOT / ".ci" / "check_models.sh")]
    return subprocess.run(script, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("variables", "status", "checked"),
    [
        ({"BASE": "first"}, 0, {"a b.onnx"}),
        ({"BASE": "HEAD"}, 0, set()),
        ({"BASE": "0" * 40}, 1, {"a b.onnx", "kept.onnx"}),
        ({"MODELS": "kept.onnx"}, 1, {"kept.onnx"}),
        ({"MODELS": "kept.onnx", "OPTIONS": ""}, 0, {"kept.onnx"}),
    ],
)
def test_changed_models_are_checked(
    variables: dict[str, str], status: int, checked: set[str], repository: tuple[pathlib.Path, str], tmp_path: pathlib.Path
) -> None:
    folder, first = repository
    given = {name: first if value == "first" else value for name, value in variables.items()}
    done = check(folder, GITHUB_STEP_SUMMARY=str(tmp_path / "summary.md"), **given)
    assert done.returncode == status, done.stderr
    if not checked:
        assert done.stdout == "no model to check\n"
        return
    summary = (tmp_path / "summary.md").read_text()
    assert {name for name in ("a b.onnx", "kept.onnx") if f"| {name} |" in summary} == checked
    assert ("::" in done.stdout) == ("kept.onnx" in checked)
    assert git(folder, "status", "--porcelain") == ""


def test_inputs_of_the_action_reach_the_script_as_variables_only() -> None:
    text = (ROOT / "action.yml").read_text()
    commands = [line for line in text.splitlines() if line.strip().startswith("run:")]
    assert commands
    assert not [line for line in commands if "${{" in line]
    for name in ("MODELS", "OPTIONS", "BASE"):
        assert f"{name}: ${{{{" in text
        assert name in (ROOT / ".ci" / "check_models.sh").read_text()
