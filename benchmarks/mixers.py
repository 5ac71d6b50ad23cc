"""Recurrent mixers on a CPU, one token of transformers' and loops over tokens: the export beside what attnfuse makes of it.

    python -m benchmarks.mixers

CPU time of one thread, the median of many rounds in turns, so that ratios hold within one run.
"""

# pyright: basic, reportMissingTypeStubs=false
from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from benchmarks.harness import Benchmark, Race, Setting, command
from benchmarks.sessions import Bound
from onnx_attnfuse import optimize

_WIDTH, _HEAD = 256, 64
_RUNS = 100
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


class Many(Bound):
    """A model of which a call is many runs."""

    def __init__(self, made: ir.Model, setting: Setting, given: list[torch.Tensor]) -> None:
        names = [value.name or "" for value in made.graph.inputs]
        feeds = {name: array.numpy() for name, array in zip(names, given, strict=True)}
        super().__init__(ir.to_proto(made).SerializeToString(), setting, feeds)
        self.words = f"{len(made.graph)} nodes"

    def __call__(self) -> None:
        for _ in range(_RUNS):
            self.run()

    def output(self) -> Any:
        """All outputs."""
        return np.concatenate([value.numpy().ravel() for value in self._binding.get_outputs()])


def races(setting: Setting) -> Iterator[Race]:
    """A row for each mixer, and for a loop over so many tokens."""
    made = {**{case: partial(_exported, case) for case in _CASES}, **{f"scan, {n} tokens": partial(_looped, n) for n in _LENGTHS}}
    for case in setting.some(list(made)):
        model, given = made[case]()
        forms = {"export": model.clone(), "fused": optimize(model).model}
        yield Race(case, {name: partial(Many, form, setting, given) for name, form in forms.items()}, each=_RUNS)


BENCHMARK = Benchmark("Recurrent mixers on the CPU", races)
main = command("mixers", BENCHMARK, provider="cpu", threads=1, rounds=12)

if __name__ == "__main__":
    main()
