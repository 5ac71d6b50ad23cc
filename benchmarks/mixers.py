"""Recurrent mixers on a CPU, one token of transformers' and loops over tokens: the export beside what attnfuse makes of it.

    python -m benchmarks.mixers

CPU time of one thread, the median of many rounds in turns, so that ratios hold within one run.
"""

# pyright: basic, reportMissingTypeStubs=false
from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch

from benchmarks.harness import in_turns, table
from onnx_attnfuse import optimize

_WIDTH, _HEAD = 256, 64
_ROUNDS, _RUNS = 12, 100
_LENGTHS = (2, 64, 256)
_CASES: dict[str, tuple[str, str, str, dict[str, Any], tuple[int, ...], tuple[int, ...] | None]] = {
    "Qwen3-Next": (
        "qwen3_next", "Qwen3NextConfig", "Qwen3NextGatedDeltaNet",
        {"linear_num_value_heads": 8, "linear_num_key_heads": 4, "linear_key_head_dim": _HEAD, "linear_value_head_dim": _HEAD},
        (1024, 4), (8, _HEAD, _HEAD),
    ),
    "Kimi Linear": (
        "kimi_linear", "KimiLinearConfig", "KimiLinearDeltaAttention",
        {"linear_num_heads": 4, "linear_head_dim": _HEAD, "linear_conv_kernel_dim": 4}, (768, 4), (4, _HEAD, _HEAD),
    ),
    "Bamba": (
        "bamba", "BambaConfig", "BambaMixer",
        {"mamba_n_heads": 8, "mamba_d_head": _HEAD, "mamba_n_groups": 1, "mamba_d_state": _HEAD, "mamba_expand": 2},
        (640, 4), (8, _HEAD, _HEAD),
    ),
    "LFM2": ("lfm2", "Lfm2Config", "Lfm2ShortConv", {"conv_L_cache": 3, "layer_types": ["conv"]}, (_WIDTH, 3), None),
}  # fmt: skip


class _WithStates(torch.nn.Module):
    """A mixer with the states of its cache as inputs and outputs."""

    def __init__(self, mixer: torch.nn.Module, argument: str) -> None:
        super().__init__()
        self.mixer, self.argument = mixer, argument

    def forward(self, hidden: torch.Tensor, *states: torch.Tensor) -> Any:
        from transformers.cache_utils import Cache, LinearAttentionLayer

        layer = LinearAttentionLayer()
        layer.conv_states[0], layer.is_conv_states_initialized[0], layer.has_previous_state[0] = states[0].clone(), True, True
        layer.conv_kernel_size[0], layer.dtype, layer.device = states[0].shape[-1], states[0].dtype, states[0].device
        if len(states) > 1:
            layer.recurrent_states[0], layer.is_recurrent_states_initialized[0] = states[1].clone(), True
        result = self.mixer(hidden, **{self.argument: Cache(layers=[layer])})
        return result, layer.conv_states[0], *([layer.recurrent_states[0]] if len(states) > 1 else [])


def _exported(case: str) -> tuple[ir.Model, list[torch.Tensor]]:
    """The export of one token of a mixer, and its inputs."""
    import importlib

    module, config, mixer, settings, conv, state = _CASES[case]
    modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    made = getattr(modeling, config)(hidden_size=_WIDTH, num_hidden_layers=1, **settings)
    for name, value in settings.items():
        setattr(made, name, value)
    torch.manual_seed(0)
    whole = _WithStates(getattr(modeling, mixer)(made, 0), "past_key_values" if state is None else "cache_params").eval()
    for item in whole.parameters():
        torch.nn.init.normal_(item, std=0.2)
    given = [torch.randn(1, 1, _WIDTH), *(torch.randn(1, *shape) for shape in (conv, state) if shape is not None)]
    program = torch.onnx.export(whole, tuple(given), dynamo=True, opset_version=18, verbose=False)
    assert program is not None
    return program.model, given


class _Loop(torch.nn.Module):
    """The gated delta rule by torch's scan: queries, keys, values, decays, rates, (tokens, batch, heads, ...), and a state."""

    def forward(self, *given: torch.Tensor) -> Any:
        from torch._higher_order_ops.scan import scan

        def turn(state: torch.Tensor, now: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
            query, key, value, decay, rate = now
            state = state * decay.exp()[..., None, None]
            change = (value - (state * key[..., None]).sum(-2)) * rate[..., None]
            state = state + key[..., None] * change[..., None, :]
            return state, (state * query[..., None]).sum(-2)

        return scan(turn, given[-1], given[:-1])


def _looped(length: int) -> tuple[ir.Model, list[torch.Tensor]]:
    """The export of a loop over tokens, for every length, and inputs of one."""
    torch.manual_seed(0)
    shape, tokens = (length, 1, 4), torch.export.Dim.DYNAMIC
    query, key, value = (torch.nn.functional.normalize(torch.randn(*shape, _HEAD), dim=-1) for _ in range(3))
    given = [query, key, value, -torch.rand(shape), torch.rand(shape), torch.randn(1, 4, _HEAD, _HEAD)]
    shapes = ((*({0: tokens} for _ in given[:-1]), None),)
    program = torch.onnx.export(_Loop(), tuple(given), dynamo=True, dynamic_shapes=shapes, opset_version=18, verbose=False)
    assert program is not None
    return program.model, given


class Session:
    """A model on one thread of the CPU; a call is many runs."""

    def __init__(self, model: ir.Model, given: list[torch.Tensor]) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        text = ir.serde.serialize_model(model).SerializeToString()
        self._session = onnxruntime.InferenceSession(text, options, providers=["CPUExecutionProvider"])
        names = (value.name for value in self._session.get_inputs())
        self._feeds = {name: array.numpy() for name, array in zip(names, given, strict=True)}
        self.nodes = len(list(model.graph))

    def run(self) -> list[Any]:
        """All outputs."""
        return list(self._session.run(None, self._feeds))

    def __call__(self) -> None:
        for _ in range(_RUNS):
            self.run()


def main() -> None:
    """Prints a table."""
    rows: list[list[Any]] = []
    made = {**{case: partial(_exported, case) for case in _CASES}, **{f"scan, {n} tokens": partial(_looped, n) for n in _LENGTHS}}
    for case, make in made.items():
        model, given = make()
        ways = {"export": Session(model.clone(), given), "fused": Session(optimize(model).model, given)}
        one, other = (way.run() for way in ways.values())
        error = max(float(np.abs(left - right).max()) for left, right in zip(one, other, strict=True))
        before, after = in_turns(ways, _ROUNDS, clock=time.process_time).values()
        counts = " → ".join(str(way.nodes) for way in ways.values())
        rows.append([case, counts, f"{before.ms / _RUNS:.3f}", f"{after.ms / _RUNS:.3f}", f"{after.gain:.1f}", f"{error:.1e}"])
    print(table(["mixer", "nodes", "export, ms", "fused, ms", "times faster", "error"], rows))


if __name__ == "__main__":
    main()
