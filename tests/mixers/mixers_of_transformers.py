"""Gated delta rules of transformers, by step, unrolled and in chunks; run by `make test-models`."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import pathlib
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as modeling

import onnx_attnfuse
from tests.mixers.test_candidates import exported, kinds, operands

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch, of itself


def _gated_delta(rule: str, *inputs: torch.Tensor, **settings: int) -> Any:
    *given, state = inputs
    return getattr(modeling, rule)(*given, initial_state=state.clone(), output_final_state=True, **settings)


@pytest.mark.parametrize(("length", "kind"), [(1, "recurrence"), (3, "unrolled recurrence")])
def test_tokens_are_one_mixer(length: int, kind: str) -> None:
    step = functools.partial(_gated_delta, "torch_recurrent_gated_delta_rule")
    assert kinds(exported(step, *operands(length))) == [kind]


def test_chunks_are_one_mixer() -> None:
    rule = functools.partial(_gated_delta, "torch_chunk_gated_delta_rule", chunk_size=4)
    assert kinds(exported(rule, *operands(7))) == ["chunked recurrence"]


_STATE_SPACE = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 8}
_SELECTIVE = {"mamba_d_state": 8, "mamba_dt_rank": 4}
_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": (
        "Qwen3NextGatedDeltaNet",
        {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    ),
    "kimi_linear": ("KimiLinearDeltaAttention", {"linear_num_heads": 4, "linear_head_dim": 16}),
    "bamba": ("BambaMixer", _STATE_SPACE),
    "granitemoehybrid": ("GraniteMoeHybridMambaLayer", _STATE_SPACE),
    "jamba": ("JambaMambaMixer", _SELECTIVE),
}


@pytest.mark.parametrize("family", _CASES)
def test_prompts_of_every_length(family: str, tmp_path: pathlib.Path) -> None:
    name, settings = _CASES[family]
    file = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    prefix = name.removesuffix("GatedDeltaNet").removesuffix("DeltaAttention").removesuffix("MambaMixer")
    config = getattr(file, f"{prefix.removesuffix('MambaLayer').removesuffix('Mixer')}Config")(hidden_size=64)
    for key, value in settings.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    mixer = getattr(file, name)(config, 0).eval()
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    dynamic = torch.export.Dim.DYNAMIC
    with onnx_attnfuse.mixers_as_operators(mixer), contextlib.redirect_stdout(io.StringIO()):
        program = torch.onnx.export(mixer, (torch.randn(2, 19, 64),), dynamo=True, dynamic_shapes=({0: dynamic, 1: dynamic},))
    program.save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for length in (1, 3, 17, 64, 65, 130):
        hidden = torch.randn(3, length, 64)
        (result,) = session.run(None, {session.get_inputs()[0].name: hidden.numpy()})
        with torch.no_grad():
            wanted = mixer(hidden).numpy()
        assert np.abs(result - wanted).max() <= 1e-4 * np.abs(wanted).max()
