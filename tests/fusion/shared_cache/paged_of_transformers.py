"""Exports of transformers with a cache in pages: many requests at once give the tokens that transformers gives for each.

`make test-models` runs them.
"""

from __future__ import annotations

import pathlib

import onnx
import pytest

from benchmarks.genai.architectures import ARCHITECTURES, export, model
from benchmarks.genai.runs import by_torch, prompts
from tests.support.paged import generated, paged

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch and its exporters
_LENGTHS, _COUNTS = (3, 11, 1, 6, 5, 8), (9, 5, 12, 7, 10, 8)


@pytest.mark.parametrize("exporter", ["dyn18", "ts17"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_many_requests_get_the_tokens_of_transformers(name: str, exporter: str, tmp_path: pathlib.Path) -> None:
    decoder = ARCHITECTURES[name]
    export(decoder, exporter, tmp_path / "model.onnx")
    result = paged(onnx.load(tmp_path / "model.onnx"))
    found, source = result.report.decoder, model(decoder)
    assert found is not None, result.report.unshared
    given = prompts(decoder.settings["vocab_size"], _LENGTHS)
    wanted = [by_torch(source, [prompt], count).tokens[0] for prompt, count in zip(given, _COUNTS, strict=True)]
    assert generated(result.model, found, given, _COUNTS, part=4) == wanted
