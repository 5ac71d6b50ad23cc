"""What the command says about itself: help, versions, completion."""

from __future__ import annotations

import importlib
import importlib.metadata
import pathlib
import re
import shlex
import subprocess
import sys

import click
import pytest

from onnx_attnfuse.graph.assumptions import ASSUMPTIONS
from onnx_attnfuse_cli import main
from onnx_attnfuse_cli.manual import Manual
from onnx_attnfuse_cli.terminal import MEANINGS, Exit

_ROOT = pathlib.Path(__file__).parents[2]
_COMMANDS: dict[str, click.Command] = {
    name: importlib.import_module(module).command for name, module in main._COMMANDS.items() if name != "patterns"
}
"""Every command but `patterns`, a group of commands."""


def test_every_command_is_known_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--help"]) == 0
    listed = capsys.readouterr().out.partition("Commands:\n")[2].partition("\n\n")[0]
    assert set(re.findall(r"^  (\S+)", listed, re.MULTILINE)) == {*_COMMANDS, "patterns"}


@pytest.mark.parametrize("name", _COMMANDS)
def test_examples_are_taken(name: str) -> None:
    command = _COMMANDS[name]
    assert isinstance(command, Manual)
    assert command.examples
    for example in command.examples:
        words = shlex.split(example.line.replace('eval "$(', "").replace(')"', ""))
        taken = words[: words.index(">")] if ">" in words else words
        assert taken[:2] == ["attnfuse", name]
        command.make_context(name, taken[2:])


@pytest.mark.parametrize("name", _COMMANDS)
def test_every_option_says_what_it_does_in_a_sentence(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = _COMMANDS[name]
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.name
            assert parameter.help.partition("  [")[0].endswith(".")
    assert main.main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert "Examples:\n" in text
    assert all(f"  {example.line}\n" in text for example in command.examples)


def test_every_exit_status_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(MEANINGS) == set(Exit)
    assert main.main(["optimize", "--help"]) == 0
    explained = capsys.readouterr().out.partition("Exit status:\n")[2]
    assert [int(line.split()[0]) for line in explained.splitlines() if not line.startswith("     ")] == list(map(int, Exit))


def test_the_versions_that_matter(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--version"]) == 0
    told = dict(line.split(" ") for line in capsys.readouterr().out.splitlines())
    assert next(iter(told)) == "attnfuse"
    assert told["onnx-ir"] == importlib.metadata.version("onnx-ir")
    assert told["onnxruntime"] == importlib.metadata.version("onnxruntime")
    assert told["torch"] == importlib.metadata.version("torch")
    assert told["Python"] == sys.version.split()[0]


def test_what_is_not_there_is_said_or_left_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    version = importlib.metadata.version

    def without(package: str) -> str:
        if package in {"onnxruntime", "onnxruntime-gpu", "torch"}:
            raise importlib.metadata.PackageNotFoundError(package)
        return version(package)

    monkeypatch.setattr(importlib.metadata, "version", without)
    assert main.main(["--version"]) == 0
    out = capsys.readouterr().out
    assert "onnxruntime not installed\n" in out
    assert "torch" not in out


def completed(words: str, tmp_path: pathlib.Path) -> list[str]:
    """What bash offers after `words`, by the script of the command itself."""
    folders = ":".join(str(_ROOT / folder) for folder in ("", "patterns", "cli"))
    command = tmp_path / "attnfuse"
    command.write_text(f'#!/bin/sh\nPYTHONPATH={folders} exec {sys.executable} -m onnx_attnfuse_cli "$@"\n')
    command.chmod(0o755)
    count = len(words.split(" ")) - 1
    script = f"""
        PATH={tmp_path}:$PATH
        eval "$(attnfuse completion bash)"
        COMP_WORDS=({words}); COMP_CWORD={count}
        _attnfuse_completion attnfuse
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("attnfuse opti", ["optimize"]),
        ("attnfuse optimize --tar", ["--target"]),
        ("attnfuse explain --ep c", ["coreml", "cpu", "cuda"]),
        ("attnfuse completion f", ["fish"]),
        ("attnfuse verbatim --x", []),
    ],
)
def test_bash_completes_commands_options_and_choices(words: str, offered: list[str], tmp_path: pathlib.Path) -> None:
    assert completed(words, tmp_path) == offered


@pytest.mark.parametrize(("shell", "line"), [("zsh", "#compdef attnfuse"), ("fish", "complete --no-files --command attnfuse")])
def test_other_shells_get_scripts_of_theirs(shell: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["completion", shell]) == 0
    assert line in capsys.readouterr().out


def test_an_unknown_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["completion", "cmd"]) == 2
    assert capsys.readouterr().err == "Error: Invalid value for '{bash|zsh|fish}': 'cmd' is not one of 'bash', 'zsh', 'fish'.\n"


def test_a_reason_code_is_explained_without_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["explain", "--code", "soft-fill"]) == 0
    assert capsys.readouterr().out.startswith("soft-fill: The mask does not clearly exclude a key (mask-values)\n    Scores are")


def test_a_family_of_reason_codes_is_explained_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["explain", "--code", "mask-values"]) == 0
    text = capsys.readouterr().out
    assert 'masked_fill(~mask, float("-inf"))' in text
    assert "What to do: Mask once" in text
    assert "soft-fill" in text


@pytest.mark.parametrize(("earlier", "code"), [("not-spelled", "not-decomposed"), ("spelled-as-wanted", "provider-form")])
def test_the_earlier_name_of_a_reason_code_is_understood(earlier: str, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["explain", "--code", earlier]) == 0
    assert capsys.readouterr().out.startswith(f"{code}: ")


def test_help_names_every_assumption(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["optimize", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.replace("-\n", "-").split()).replace("- ", "-")
    assert all(name in said for name in ASSUMPTIONS)
    assert main.main(["optimize", "any.onnx", "--assume", "large-fill"]) == 2
    assert "did you mean 'large-fills'?" in capsys.readouterr().err


@pytest.mark.parametrize(("code", "hint"), [("soft-fil", "did you mean 'soft-fill'?"), ("zzz", "docs/reasons.md lists them")])
def test_an_unknown_reason_code(code: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["explain", "--code", code]) == 2
    assert capsys.readouterr().err == f"Error: Invalid value for '--code': '{code}' is no reason code; {hint}\n"
