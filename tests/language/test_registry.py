"""Where patterns come from: files, folders, the environment, installed packs; and what is said where they cannot be used."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import zipfile

import pytest

import onnx_attnfuse
from onnx_attnfuse import OptionError, Options
from onnx_attnfuse.language.registry.discovery import VARIABLE, load
from tests.support.small_models import ATTENTION, written

GALLERY = pathlib.Path(__file__).parents[2] / "patterns" / "gallery"
ONE = (GALLERY / "softmax_one.py").read_text(encoding="utf-8")


def names(**choices: object) -> set[str]:
    """Patterns that are not built in."""
    return {entry.name for entry in load(Options(**choices)).entries if entry.owner != "pack builtin"}  # type: ignore[arg-type]


@pytest.fixture
def one(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "one.py"
    path.write_text(ONE, encoding="utf-8")
    return path


def test_a_file_and_a_folder_hold_patterns(one: pathlib.Path) -> None:
    (one.parent / "test_one.py").write_text("raise SystemExit", encoding="utf-8")
    (one.parent / "_helper.py").write_text("raise SystemExit", encoding="utf-8")
    assert names(patterns=(one,)) == names(patterns=(one.parent,)) == {"softmax_one"}
    assert load(Options(patterns=(one,))).entries[-1].owner == str(one)


def test_the_whole_gallery_can_be_used_together() -> None:
    assert len(names(patterns=(GALLERY,))) == 7


def test_the_environment_names_files(one: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, f"{one}{os.pathsep}{GALLERY / 'differential.py'}")
    assert names() == {"softmax_one", "differential"}
    with pytest.raises(OptionError, match=f"two patterns are called 'softmax_one': in {one} and in {one}"):
        names(patterns=(one,))


def test_names_are_skipped_and_chosen(one: pathlib.Path) -> None:
    everything = (one, GALLERY / "differential.py")
    assert names(patterns=everything, skip_patterns=("soft*",)) == {"differential"}
    assert names(patterns=everything, only_patterns=("softmax_one",)) == {"softmax_one"}
    assert {entry.name for entry in load(Options(only_patterns=("soft_cap",))).entries} >= {"masks.add", "soft_cap.tanh"}


IMPORTS = "from onnx_attnfuse.language import operator, pattern, softmax\n"
BAD = {
    "no file": (None, r"there is no file .*bad\.py; --patterns takes a Python file or a folder"),
    "no pattern": ("x = 1\n", r"bad\.py: module attnfuse_patterns\.bad holds no pattern; decorate a function"),
    "no Python": ("def (:\n", r"bad\.py:1: SyntaxError: invalid syntax; correct the file"),
    "a failure": ("\n\nimport does_not_exist\n", r"bad\.py:3: ModuleNotFoundError: No module named 'does_not_exist'; correct"),
    "a way out": ("import sys\nsys.exit(3)\n", r"bad\.py:2: SystemExit: 3; correct the file"),
    "a bad pattern": (
        ONE.replace("@ v, meaning", ", meaning"),
        r"bad\.py:11: pattern 'softmax_one': the operand 'v' is not in the written formula",
    ),
    "a truth value": (
        IMPORTS + "@pattern\ndef one(q, k, v):\n    s = q @ k.T\n    if s:\n        s = -s\n    return softmax(s) @ v\n",
        r"bad\.py:5: a formula has no truth value; write where\(condition, a, b\)",
    ),
    "no operand": (
        IMPORTS + "@operator('acme::A')\ndef a():\n    return softmax(1)\n",
        r"bad\.py:2: the definition of acme::A takes its inputs by position",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_cannot_be_used_says_why(name: str, tmp_path: pathlib.Path) -> None:
    content, message = BAD[name]
    path = tmp_path / "bad.py"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(OptionError, match=message) as error:
        names(patterns=(path,))
    assert "\n" not in str(error.value)


def test_an_empty_folder_holds_none(tmp_path: pathlib.Path) -> None:
    with pytest.raises(OptionError, match="holds no pattern files"):
        names(patterns=(tmp_path,))


def wheel(folder: pathlib.Path, content: str) -> pathlib.Path:
    """A distribution with one module and an entry point."""
    info = "acme_patterns-1.0.dist-info"
    files = {
        "acme_patterns.py": content,
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: acme-patterns\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[onnx_attnfuse.patterns]\nacme = acme_patterns\n",
    }
    path = folder / "acme_patterns-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"]))
    return path


def installed(folder: pathlib.Path, content: str, *arguments: str, by_pip: bool = False) -> subprocess.CompletedProcess[str]:
    """What the command says where the distribution is installed: by pip, or unpacked as pip would, in a tenth of the time."""
    target = folder / "site"
    if by_pip:
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
        subprocess.run([*install, str(wheel(folder, content))], check=True)
    else:
        zipfile.ZipFile(wheel(folder, content)).extractall(target)
    root = pathlib.Path(onnx_attnfuse.__file__).parents[1]
    paths = os.pathsep.join(map(str, (target, root, root / "patterns", root / "cli")))
    command = [sys.executable, "-m", "onnx_attnfuse_cli", *arguments]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False)


def test_an_installed_pack_is_found_by_its_entry_point(tmp_path: pathlib.Path) -> None:
    done = installed(tmp_path, ONE, "patterns", "show", "softmax_one", by_pip=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("softmax_one: pattern, from pack acme (acme_patterns.softmax_one)\n  written: (plain: ")
    assert "Safety: where the row's maximum is subtracted first" in done.stdout


BROKEN = {
    "raises": ("import does_not_exist\n", r"line 1: ModuleNotFoundError: No module named 'does_not_exist'"),
    "leaves": ("import sys\n\nsys.exit(3)\n", "line 3: SystemExit: 3"),
    "no Python": ("x = 1\ndef (:\n", "line 2: SyntaxError: invalid syntax"),
    "too new": ("from onnx_attnfuse.language import of_tomorrow\n", "line 1: ImportError: cannot import name 'of_tomorrow'"),
    "rubbish": ("x = 3\n", "OptionError: pack acme: module acme_patterns holds no pattern"),
    "a reader of ours": (
        "from onnx_attnfuse.language import score_step\n\n@score_step('Tanh')\ndef tanh(node, facts):\n    return []\n",
        "two patterns read ai.onnx::Tanh",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_installed_pack_that_is_broken_is_left_out_and_told(name: str, tmp_path: pathlib.Path) -> None:
    content, message = BROKEN[name]
    model = written(ATTENTION, tmp_path / "model.onnx")
    done = installed(tmp_path, content, "optimize", str(model), "--report", str(tmp_path / "report.json"))
    assert (done.returncode, done.stderr) == (0, f"wrote {tmp_path / 'model.attnfuse.onnx'}\n")
    (line,) = [line for line in done.stdout.splitlines() if "pack" in line]
    assert line.startswith("the installed pack 'acme' ")
    assert line.endswith("; repair or uninstall it")
    assert message in line
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["fused"] == 1
    assert [failure["kind"] for failure in report["failures"]] == ["pack"]


def test_a_pack_that_is_broken_is_told_where_patterns_are_listed(tmp_path: pathlib.Path) -> None:
    done = installed(tmp_path, "import does_not_exist\n", "patterns", "list")
    assert done.returncode == 0
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("the installed pack 'acme' of acme-patterns 1.0 is left out: ")


def test_a_pack_in_order_is_not_told(tmp_path: pathlib.Path) -> None:
    done = installed(tmp_path, ONE, "explain", str(written(ATTENTION, tmp_path / "model.onnx")))
    assert (done.returncode, "pack" in done.stdout) == (0, False)
