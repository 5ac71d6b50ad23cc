"""Decoders as transformers' own exporter writes them, with its usual cache: a shared buffer gives the tokens of `generate`.

`make test-models` runs them. Layers with a window have pasts of their own lengths; texts get longer than the windows.
"""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from transformers import DynamicCache
from transformers.exporters.configs import OnnxConfig
from transformers.exporters.exporter_onnx import OnnxExporter

from benchmarks.genai.architectures import ARCHITECTURES, Decoder, model
from benchmarks.genai.runs import EOS, by_torch, prompts
from tests.support.decoder_loops import Fed, buffered, shared

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch and its exporters
_PROMPT, _MORE = 4, 40
_SIZE = ARCHITECTURES["llama"].settings | {"num_key_value_heads": 4}
_LATENT = _SIZE | {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
_EXPERTS = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "experts_implementation": "batched_mm",
}
_WIDE_KEYS = {"num_key_value_heads": 2, "head_dim": 24, "v_head_dim": 16, "layer_types": ["full_attention"] * 2}
_ROUNDS = {"num_key_value_heads": 2, "kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
_DERIVED = (
    Decoder("deepseek_v2", "DeepseekV2", _LATENT | _EXPERTS | {"head_dim": 8, "topk_method": "greedy"}),
    Decoder("deepseek_v3", "DeepseekV3", _LATENT | _EXPERTS),
    Decoder("minicpm3", "MiniCPM3", _LATENT),
    Decoder("youtu", "Youtu", _LATENT),
    Decoder("glm4_moe_lite", "Glm4MoeLite", _LATENT | _EXPERTS),
    Decoder("axk1", "AXK1", _LATENT | _EXPERTS),
    Decoder("mistral4", "Mistral4", _LATENT | _EXPERTS),
    Decoder("mimo_v2", "MiMoV2Flash", _SIZE | _EXPERTS | _WIDE_KEYS, attention="eager"),
    Decoder("diffllama", "DiffLlama", _SIZE | {"num_key_value_heads": 2}),
    Decoder("jetmoe", "JetMoe", _SIZE | _ROUNDS),
)
"""Decoders that compute keys and values from a cache, or repeat them in rounds."""
_OTHERS = [ARCHITECTURES[name] for name in ("llama", "gemma3", "gpt_oss", "mistral", "olmo2", "gptj")]


@pytest.mark.parametrize("decoder", [*_OTHERS, *_DERIVED], ids=lambda decoder: decoder.name.partition(",")[0])
def test_a_stock_export_gives_the_tokens_of_transformers(decoder: Decoder, tmp_path: pathlib.Path) -> None:
    source = model(decoder).eval()
    ids, cache = torch.randint(2, decoder.settings["vocab_size"], (2, 5)), DynamicCache(config=source.config)
    with torch.no_grad():
        source(ids, past_key_values=cache, use_cache=True)
    given: dict[str, Any] = {
        "input_ids": ids[:, :3],
        "attention_mask": torch.ones(2, 8, dtype=torch.long),
        "past_key_values": cache,
    }
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
    logits = np.stack([step[0, -1] for step in buffered(result.model, found, fed, room=_PROMPT + _MORE)])
    logits[:, EOS] = -np.inf
    assert logits.argmax(-1).tolist() == wanted
