"""What is installed: types for checkers, and the versions that the tests are run with."""

from __future__ import annotations

import importlib.resources
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
UNTESTED = {
    "onnxruntime-gpu": "the kernels of its CPU are those of onnxruntime",
    "tomli": "it is for Python 3.10, without onnxruntime",
    "torch": "there is one torch, that of constraints.txt",
}
"""Lower bounds that no environment of ours holds, and why."""
EXTRAS = ("cpu", "gpu", "torch", "report")


@pytest.mark.parametrize("package", ["onnx_attnfuse", "onnx_attnfuse_patterns", "onnx_attnfuse_cli"])
def test_type_checkers_are_told_that_there_are_types(package: str) -> None:
    assert importlib.resources.files(package).joinpath("py.typed").is_file()


def lower_bounds() -> dict[str, str]:
    """The bounds of what users install, by package."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lists = [re.search(r"^dependencies = (\[.*?^\])", text, re.MULTILINE | re.DOTALL)]
    lists += [re.search(rf"^{extra} = (\[.*?\])", text, re.MULTILINE) for extra in EXTRAS]
    found = [entry for item in lists if item for entry in re.findall(r'"([\w-]+)>=([\d.]+)', item.group(1))]
    assert len(lists) == sum(item is not None for item in lists)
    return dict(found)


def pinned(file: str, after: str = "") -> dict[str, str]:
    """The versions of a constraints file, of the part behind a comment."""
    text = (ROOT / file).read_text(encoding="utf-8").partition(after)[2] if after else (ROOT / file).read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w-]+)==(\S+)$", text, re.MULTILINE))


def test_the_oldest_versions_are_those_that_are_allowed() -> None:
    bounds, tested = lower_bounds(), pinned("constraints-lowest.txt")
    assert {name: bound for name, bound in bounds.items() if name not in UNTESTED} == {
        name: tested.get(name) for name in bounds if name not in UNTESTED
    }


def test_all_else_is_as_in_every_other_check() -> None:
    others = pinned("constraints-lowest.txt", after="as in constraints.txt")
    assert others
    assert others.items() <= pinned("constraints.txt").items()
