"""The documentation names what there is; that its links lead somewhere is for `make docs` to say."""

from __future__ import annotations

import pathlib
import re

import pytest

import onnx_attnfuse
from docs import reasons
from onnx_attnfuse_cli import reason_codes

_DOCS = pathlib.Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("name", onnx_attnfuse.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    assert re.search(rf"(?:auto\w+:: |onnx_attnfuse\.){name}$", (_DOCS / "python.md").read_text(), re.MULTILINE)


def test_nothing_else_is() -> None:
    named = re.findall(r"auto(?:function|class|exception):: (\w+)", (_DOCS / "python.md").read_text())
    assert set(named) <= set(onnx_attnfuse.__all__)
    assert len(set(named)) == len(named)


def test_every_example_is_shown() -> None:
    text = (_DOCS / "examples.md").read_text()
    assert set(re.findall(r"literalinclude\} examples/(\w+)\.py", text)) == {
        path.stem for path in (_DOCS / "examples").glob("*.py")
    }


def test_every_reason_code_has_an_entry_and_every_entry_a_code() -> None:
    assert reasons.codes().keys() == reason_codes.entries().keys()
    assert all(entry.meaning.endswith(".") and entry.remedy.endswith(".") for entry in reason_codes.entries().values())


def test_the_index_of_reason_codes_is_as_the_code_has_it() -> None:
    assert (_DOCS / "reasons.md").read_text(encoding="utf-8") == reasons.page(), "run `make reasons`"
