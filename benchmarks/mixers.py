"""One token of recurrent mixers of transformers on a CPU: the export beside what attnfuse makes of it.

    python -m benchmarks.mixers

CPU time of one thread, the least of many rounds in turns, so that ratios hold within one run.
"""

# pyright: basic, reportMissingTypeStubs=false
from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch

from onnx_attnfuse import optimize

_WIDTH, _HEAD = 256, 64
_ROUNDS, _RUNS = 12, 100
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


def _ways(case: str) -> Iterator[tuple[str, int, Callable[[], list[Any]]]]:
    """The export and what is made of it, each with its nodes and what runs it."""
    model, given = _exported(case)
    for name, item in (("export", model), ("fused", optimize(model.clone()).model)):
        proto: onnx.ModelProto = ir.serde.serialize_model(item)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
        feeds = {value.name: array.numpy() for value, array in zip(session.get_inputs(), given, strict=True)}
        yield name, len(proto.graph.node), lambda session=session, feeds=feeds: list(session.run(None, feeds))


def _times(ways: list[tuple[str, int, Callable[[], list[Any]]]]) -> list[float]:
    """Milliseconds of each, the least of rounds in turns."""
    best = [float("inf")] * len(ways)
    for _ in range(_ROUNDS):
        for place, (_, _, run) in enumerate(ways):
            start = time.process_time()
            for _ in range(_RUNS):
                run()
            best[place] = min(best[place], (time.process_time() - start) / _RUNS * 1e3)
    return best


def main() -> None:
    """Prints a table."""
    print("| mixer | nodes | export, ms | fused, ms | times faster | error |\n|---|---|---|---|---|---|")
    for case in _CASES:
        ways = list(_ways(case))
        one, other = (run() for _, _, run in ways)
        error = max(float(np.abs(left - right).max()) for left, right in zip(one, other, strict=True))
        times = _times(ways)
        counts = f"{ways[0][1]} → {ways[1][1]}"
        print(f"| {case} | {counts} | {times[0]:.3f} | {times[1]:.3f} | {times[0] / times[1]:.1f} | {error:.1e} |", flush=True)


if __name__ == "__main__":
    main()
