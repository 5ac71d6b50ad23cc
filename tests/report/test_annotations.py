"""Annotations for GitHub and SARIF: what they hold, how they are escaped, and where a model has none."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

import onnx_attnfuse
from onnx_attnfuse.report import annotations, reason_codes
from onnx_attnfuse_cli.main import main
from tests.support import small_models

Captured = pytest.CaptureFixture[str]
USED = small_models.ATTENTION.replace(
    "(float[b, 2, s, 4] out)", "(float[b, 2, s, 4] out, float[b, 2, s, t] weights)"
)  # its weights are an output, so that it stays unfused


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A model that is fused, one that is not, and one that is none, in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    (tmp_path / "models").mkdir()
    small_models.written(small_models.ATTENTION, tmp_path / "models" / "fused.onnx")
    small_models.written(USED, tmp_path / "models" / "a, b.onnx")
    return tmp_path


@pytest.mark.parametrize(("required", "level", "status"), [([], "warning", 0), (["--require-all"], "error", 1)])
def test_each_unfused_attention_is_one_annotation(
    required: list[str], level: str, status: int, folder: pathlib.Path, capsys: Captured
) -> None:
    assert main(["optimize", "models", "--dry-run", "--format", "github", *required]) == status
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("::")]
    assert len(found) == 1
    assert found[0].startswith(f"::{level} file=models/a%2C b.onnx,title=attnfuse%3A inner-value-used::softmax: left unfused; ")
    assert "to do: `--keep-outputs`" in found[0]


def test_a_fused_model_has_no_annotation_and_a_line_in_the_summary(
    folder: pathlib.Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(folder / "summary.md"))
    (folder / "summary.md").write_text("before\n")
    assert main(["explain", "models/fused.onnx", "--format", "github"]) == 0
    assert "::" not in capsys.readouterr().out
    text = (folder / "summary.md").read_text()
    assert text.startswith("before\n### attnfuse\n")
    assert "| models/fused.onnx | fused 1 of 1 attention site |" in text


def test_a_model_that_cannot_be_read_is_an_error(folder: pathlib.Path, capsys: Captured) -> None:
    (folder / "models" / "broken.onnx").write_text("nothing of the kind")
    for models in ("models", "models/broken.onnx"):
        assert main(["optimize", models, "--dry-run", "-q", "--format", "github"]) == 2
        assert "::error file=models/broken.onnx,title=attnfuse%3A failed::broken.onnx: " in capsys.readouterr().out


def test_sarif_is_the_whole_output(folder: pathlib.Path, capsys: Captured) -> None:
    assert main(["optimize", "models", "--dry-run", "--format", "sarif"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    (result,) = run["results"]
    (rule,) = run["tool"]["driver"]["rules"]
    assert rule["id"] == result["ruleId"]
    assert rule["helpUri"] == reason_codes.by_code()[rule["id"]].url
    assert result["level"] == "warning"
    (location,) = result["locations"]
    assert location["physicalLocation"]["artifactLocation"]["uri"] == "models/a%2C%20b.onnx"
    assert location["logicalLocations"] == [{"fullyQualifiedName": "softmax"}]


SARIF: Mapping[str, Any] = json.loads(pathlib.Path(__file__).with_name("sarif_2_1_0.json").read_text(encoding="utf-8"))
TYPES = {"array": list, "integer": int, "string": str, "object": dict}


def violations(value: Any, schema: Mapping[str, Any], place: str = "") -> Iterator[str]:
    """Where a value breaks a schema, as far as the fixture uses JSON Schema."""
    schema = SARIF["definitions"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    kind = TYPES["object" if "properties" in schema else schema.get("type", "string")]
    if not isinstance(value, kind):
        yield f"{place}: {value!r} is no {kind.__name__}"
    elif isinstance(value, dict):
        yield from (f"{place}: {name} is missing" for name in schema["required"] if name not in value)
        for name, inner in value.items():
            known = schema["properties"].get(name)
            yield from [f"{place}: {name} is unknown"] if known is None else violations(inner, known, f"{place}/{name}")
    elif isinstance(value, list):
        if schema.get("uniqueItems") and any(item in value[:at] for at, item in enumerate(value)):
            yield f"{place}: items are repeated"
        for at, item in enumerate(value):
            yield from violations(item, schema["items"], f"{place}/{at}")
    else:
        is_absolute = schema.get("format") != "uri" or urllib.parse.urlsplit(value).scheme
        if value not in schema.get("enum", [value]) or value < schema.get("minimum", value) or not is_absolute:
            yield f"{place}: {value!r} is not allowed"


def test_sarif_keeps_its_schema(folder: pathlib.Path, capsys: Captured) -> None:
    """With findings of every kind: a warning, an error, and a model that cannot be read."""
    (folder / "models" / "broken.onnx").write_text("nothing of the kind")
    for options in ([], ["--require-all"]):
        main(["optimize", "models", "--dry-run", "--format", "sarif", *options])
        log = json.loads(capsys.readouterr().out)
        assert [*violations(log, SARIF)] == []
        assert len(log["runs"][0]["results"]) == 2


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("version",), "2.0.0"),
        (("version",), None),
        (("more",), 1),
        (("runs", 0, "results", 0, "level"), "warn"),
        (("runs", 0, "results", 0, "message"), "text"),
        (("runs", 0, "results", 0, "locations", 0, "physicalLocation", "region", "startLine"), 0),
        (("runs", 0, "tool", "driver", "informationUri"), "not a URI"),
    ],
)
def test_a_log_that_breaks_the_schema_is_found(path: tuple[Any, ...], value: Any) -> None:
    report = onnx_attnfuse.explain(small_models.parsed(USED), verify="none")
    found = annotations.findings({pathlib.Path("m.onnx"): report}, is_required=False)
    log = json.loads(json.dumps(annotations.sarif(found)))
    assert [*violations(log, SARIF)] == []
    inner = log
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    assert len([*violations(log, SARIF)]) == 1


def test_lines_and_signs_of_github_are_escaped() -> None:
    finding = annotations.Finding(pathlib.Path("a:b%.onnx"), "error", "code", "place", "100 %\nof it")
    assert [*annotations.github([finding])] == [
        "::error file=a%3Ab%25.onnx,title=attnfuse%3A code::place: 100 %25%0Aof it",
    ]


def test_alike_attentions_are_one_finding() -> None:
    report = onnx_attnfuse.explain(small_models.parsed(USED), verify="none")
    (site,) = report.sites
    twice = dataclasses.replace(report, sites=(site, dataclasses.replace(site, name=f"{site.name}_1"), site))
    found = annotations.findings({pathlib.Path("m.onnx"): twice}, is_required=False)
    assert sum(int(count) for item in found for count in re.findall(r" ×(\d+)", item.place) or ["1"]) == 3


@pytest.mark.parametrize(
    "arguments",
    [["explain", "models/fused.onnx", "--json", "--format", "github"], ["optimize", "-", "-o", "-", "--format", "sarif"]],
)
def test_formats_that_contradict_are_refused(arguments: list[str], folder: pathlib.Path, capsys: Captured) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().out == ""
