"""Decoders as transformers' own exporter writes them, with its usual cache: a shared buffer gives the tokens of `generate`.

`make test-models` runs them. Layers with a window have pasts of their own lengths; texts get longer than the windows.
"""

from __future__ import annotations

import pathlib

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from transformers import DynamicCache
from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

from benchmarks.genai.architectures import ARCHITECTURES, model
from benchmarks.genai.runs import EOS, by_torch, prompts
from tests.support.decoder_loops import Fed, buffered, shared

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch and its exporters
_PROMPT, _MORE = 4, 14


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "mistral", "olmo2", "gptj"])
def test_a_stock_export_gives_the_tokens_of_transformers(name: str, tmp_path: pathlib.Path) -> None:
    decoder = ARCHITECTURES[name]
    source = model(decoder).eval()
    ids, cache = torch.randint(2, decoder.settings["vocab_size"], (2, 5)), DynamicCache(config=source.config)
    with torch.no_grad():
        source(ids, past_key_values=cache, use_cache=True)
    given = {"input_ids": ids[:, :3], "attention_mask": torch.ones(2, 8, dtype=torch.long), "past_key_values": cache}
    made = OnnxExporter().export(source, given, config=OnnxConfig(dynamic=True)).program
    ir.save(made if isinstance(made, ir.Model) else made.model, tmp_path / "model.onnx")

    result = shared(onnx.load(tmp_path / "model.onnx"))
    found = result.report.decoder
    assert found is not None, result.report.unshared
    assert found.others == ()
    (prompt,) = prompts(decoder.settings["vocab_size"], [_PROMPT])
    wanted = by_torch(source, [prompt], _MORE).tokens[0]
    text, mask = np.array([prompt + wanted]), np.ones((1, _PROMPT + _MORE), np.int64)
    ends = range(_PROMPT, _PROMPT + _MORE)
    fed = [Fed(text[:, (0 if end == _PROMPT else end - 1) : end], mask[:, :end]) for end in ends]
    logits = np.stack([step[0, -1] for step in buffered(result.model, found, fed)])
    logits[:, EOS] = -np.inf
    assert logits.argmax(-1).tolist() == wanted
