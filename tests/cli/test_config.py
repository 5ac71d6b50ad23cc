"""Defaults from pyproject.toml: what they change, what overrules them, and one line for what is none."""

from __future__ import annotations

import pathlib

import pytest

from onnx_attnfuse_cli.main import main
from tests.support import small_models

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def project(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A folder inside of a project, with a model whose one Softmax is no attention."""
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    small_models.written(small_models.LINEAR, tmp_path / "inside" / "linear.onnx")
    small_models.written(small_models.ATTENTION, tmp_path / "inside" / "model.onnx")
    return tmp_path


def configured(project: pathlib.Path, *lines: str) -> None:
    (project / "pyproject.toml").write_text("\n".join(["[project]", 'name = "any"', "[tool.attnfuse]", *lines]))


def test_defaults_count_unless_the_command_line_has_others(project: pathlib.Path, capsys: Captured) -> None:
    assert main(["optimize", "linear.onnx", "--dry-run"]) == 0
    configured(project, "min-fused = 1", 'ep = "cpu"', "dim = {s = 3}")
    assert main(["optimize", "linear.onnx", "--dry-run"]) == 1
    assert "attnfuse: pyproject.toml sets min-fused, ep, dim\n" in capsys.readouterr().err
    assert main(["optimize", "linear.onnx", "--dry-run", "--min-fused", "0"]) == 0
    assert main(["optimize", "model.onnx", "--dry-run", "-q"]) == 0
    assert "pyproject" not in capsys.readouterr().err.splitlines()[-1]


def test_explain_takes_those_that_it_has(project: pathlib.Path, capsys: Captured) -> None:
    configured(project, "require-all = true", 'ep = "cuda"', 'arch = "sm90"', "keep-outputs = true")
    assert main(["explain", "model.onnx"]) == 0
    out, err = capsys.readouterr()
    assert "attnfuse: pyproject.toml sets ep, arch, keep-outputs" in err
    assert "fused" in out


def test_other_commands_and_other_tables_are_left_alone(project: pathlib.Path) -> None:
    configured(project, "nonsense = 1")
    assert main(["verify", "model.onnx", "model.onnx", "-q"]) == 0
    (project / "pyproject.toml").write_text('[tool.other]\nattnfuse = "x"\n')
    assert main(["optimize", "model.onnx", "--dry-run", "-q"]) == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('epp = "cpu"', "[tool.attnfuse] has no key 'epp'; did you mean 'ep'?"),
        ("model = 1", "[tool.attnfuse] has no key 'model'; "),
        ('target = "auot"', "target is 'auot'; "),
        ('require-all = "yes"', "require-all is 'yes'; give true or false"),
        ("skip-patterns = 'one'", "skip-patterns is 'one'; give a list"),
        ("min-fused = -1", "min-fused is -1; "),
        ("dim = {s = 0}", "dim is ['s=0']; 's=0' is not NAME=N"),
        ("ep =", ""),
    ],
)
def test_what_is_no_option_is_one_line(line: str, message: str, project: pathlib.Path, capsys: Captured) -> None:
    configured(project, line)
    before = small_models.contents(project)
    assert main(["optimize", "model.onnx"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"Error: {project / 'pyproject.toml'}")
    assert message in err
    assert err.count("\n") == 1
    assert small_models.contents(project) == before
