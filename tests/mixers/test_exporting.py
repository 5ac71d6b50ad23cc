"""Recurrences of torch modules, exported as LinearAttention for every length, beside the modules themselves, and near misses."""

from __future__ import annotations

import contextlib
import io
import math
import pathlib
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor

import onnx_attnfuse

pytestmark = [pytest.mark.newest, pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")]
_LENGTHS = (1, 2, 9, 33)


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Any = None, **rest: Any
) -> Any:
    """Token by token; the name is that of flash-linear-attention."""
    state = v.new_zeros((len(v), v.shape[2], k.shape[3], v.shape[3])) if initial_state is None else initial_state
    if rest.get("use_qk_l2norm_in_kernel"):
        q, k = (item / (item.square().sum(-1, keepdim=True) + 1e-6).sqrt() for item in (q, k))
    out = torch.zeros_like(v)
    for now in range(v.shape[1]):
        fading = g[:, now].exp()
        state = state * (fading[..., None] if fading.dim() == 3 else fading[..., None, None])
        change = beta[:, now, :, None] * (v[:, now] - (state * k[:, now, :, :, None]).sum(2))
        state = state + k[:, now, :, :, None] * change[:, :, None]
        out[:, now] = (state * q[:, now, :, :, None]).sum(2) / math.sqrt(k.shape[3])
    return out, state


chunk_kda = chunk_gated_delta_rule


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Any = None,
    initial_states: Any = None,
    **rest: Any,
) -> Any:
    dt = torch.nn.functional.softplus(dt + rest["dt_bias"]).clamp(*rest["dt_limit"])
    B, C = (item.repeat_interleave(x.shape[2] // item.shape[2], 2) for item in (B, C))
    state = x.new_zeros((*x.shape[:1], *x.shape[2:], B.shape[3])) if initial_states is None else initial_states
    out = torch.zeros_like(x)
    for now in range(x.shape[1]):
        added = (dt[:, now, :, None] * x[:, now])[..., None] * B[:, now, :, None]
        state = state * (dt[:, now] * A).exp()[..., None, None] + added
        out[:, now] = (state * C[:, now, :, None]).sum(3) + D[:, None] * x[:, now]
    return out, state


def selective_scan_fn(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Any = None, z: Any = None, **rest: Any
) -> Any:
    delta = torch.nn.functional.softplus(delta + rest["delta_bias"][:, None])
    state, out = u.new_zeros((*u.shape[:2], A.shape[1])), torch.zeros_like(u)
    for now in range(u.shape[2]):
        state = state * (delta[:, :, now, None] * A).exp() + (delta[:, :, now] * u[:, :, now])[..., None] * B[:, None, :, now]
        out[:, :, now] = (state * C[:, None, :, now]).sum(2) + D * u[:, :, now]
    return out * torch.nn.functional.silu(z), state


def fused_recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Any = None, **rest: Any
) -> Any:
    """A near miss: it reads the state before the token is written."""
    state = v.new_zeros((len(v), v.shape[2], k.shape[3], v.shape[3])) if initial_state is None else initial_state
    out = torch.zeros_like(v)
    for now in range(v.shape[1]):
        out[:, now] = (state * q[:, now, :, :, None]).sum(2) / math.sqrt(k.shape[3])
        change = beta[:, now, :, None] * (v[:, now] - (state * k[:, now, :, :, None]).sum(2))
        state = state * g[:, now].exp()[..., None, None] + k[:, now, :, :, None] * change[:, :, None]
    return out, state


class Delta(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, state: Tensor) -> Any:
        done = {
            "initial_state": state,
            "output_final_state": True,
            "use_qk_l2norm_in_kernel": True,
            "cu_seqlens": None,
            "else": 1,
        }
        return chunk_gated_delta_rule(q, k, v, g=-g.abs(), beta=b.sigmoid(), **done)


class DeltaByChannel(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, state: Tensor) -> Any:
        return chunk_kda(q, k, v, -g.abs(), b.sigmoid(), state, output_final_state=True)  # by its place in this library


class StateSpace(torch.nn.Module):
    def forward(self, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, state: Tensor) -> Any:
        a, bias = -torch.arange(1.0, 5), torch.linspace(-1, 1, 4)
        settings = {"dt_bias": bias, "dt_softplus": True, "dt_limit": (0.0, 1.5), "return_final_states": True}
        return mamba_chunk_scan_combined(x, dt, a, b, c, chunk_size=4, D=bias, initial_states=state, **settings)


class SelectiveScan(torch.nn.Module):
    def forward(self, u: Tensor, delta: Tensor, b: Tensor, c: Tensor, z: Tensor) -> Any:
        a, bias = -torch.arange(1.0, 31).reshape(5, 6) / 9, torch.linspace(-1, 1, 5)
        channels = [item.transpose(1, 2) for item in (u, delta, b, c, z)]
        settings = {"delta_bias": bias, "delta_softplus": True, "return_last_state": True}
        return selective_scan_fn(channels[0], channels[1], a, *channels[2:4], D=bias[:, None][:, 0], z=channels[4], **settings)


class ReadsBefore(torch.nn.Module):
    def forward(self, *inputs: Tensor) -> Any:
        return fused_recurrent_gated_delta_rule(*inputs)


class Own(torch.nn.Module):
    """Hand-written, with fewer heads of queries; by the operands that it is given, each of the four rules."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names

    def forward(self, q: Tensor, k: Tensor, v: Tensor, first: Tensor | None = None, second: Tensor | None = None) -> Any:
        given: Any = dict(zip(self.names, (first, second), strict=False))
        return onnx_attnfuse.linear_attention(q, k, v, scale=0.5, **given)


_DELTA = ((2, 8), (2, 8), (2, 6), (2,), (2,), None)
_CASES: dict[str, tuple[torch.nn.Module, Any, tuple[int, ...]]] = {
    "gated delta rule": (Delta(), _DELTA, (2, 8, 6)),
    "by channel": (DeltaByChannel(), (*_DELTA[:3], (2, 8), (2,), None), (2, 8, 6)),
    "state space": (StateSpace(), ((4, 8), (4,), (2, 6), (2, 6), None), (4, 8, 6)),
    "selective scan": (SelectiveScan(), ((5,), (5,), (6,), (6,), (5,)), ()),
}


def _inputs(shapes: Any, state: tuple[int, ...], length: int) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(length)
    return tuple(torch.randn((3, *state) if shape is None else (3, length, *shape), generator=random) for shape in shapes)


def _exported(
    module: torch.nn.Module, inputs: tuple[Tensor, ...], states: Any, path: pathlib.Path
) -> onnxruntime.InferenceSession:
    dynamic = torch.export.Dim.DYNAMIC
    axes = tuple({0: dynamic} if shape is None else {0: dynamic, 1: dynamic} for shape in states)
    with contextlib.redirect_stdout(io.StringIO()):
        program = torch.onnx.export(module.eval(), inputs, dynamo=True, dynamic_shapes=axes, verbose=False)
    assert program is not None
    operators = [node.op_type for node in program.model.graph if node.domain == "com.microsoft"]
    assert operators == ["LinearAttention"]
    program.save(path)
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def _held(session: onnxruntime.InferenceSession, inputs: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    feeds = {item.name: value.numpy() for item, value in zip(session.get_inputs(), inputs, strict=True)}
    for result, expected in zip(session.run(None, feeds), wanted, strict=True):
        np.testing.assert_allclose(result, expected.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", _CASES)
def test_an_export_holds_for_every_length(name: str, tmp_path: pathlib.Path) -> None:
    module, shapes, state = _CASES[name]
    before = dict(globals())
    with onnx_attnfuse.mixers_as_operators(module) as functions:
        session = _exported(module, _inputs(shapes, state, 5), shapes, tmp_path / "model.onnx")
    assert all(function.startswith(__name__) for function in functions)
    assert globals() == before
    for length in _LENGTHS:
        inputs = _inputs(shapes, state, length)
        _held(session, inputs, module(*inputs))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("given", [(), ("decay",), ("beta",), ("decay", "beta")])
def test_a_module_of_ones_own(given: tuple[str, ...], tmp_path: pathlib.Path) -> None:
    module, shapes = Own(given), [(2, 8), (2, 8), (4, 6), *[(4,)] * len(given)]
    session = _exported(module, _inputs(shapes, (), 5), shapes, tmp_path / "model.onnx")
    for length in _LENGTHS:
        inputs = tuple(item / 4 for item in _inputs(shapes, (), length))
        q, k, v = (item.repeat_interleave(4 // item.shape[2], 2).double() for item in inputs[:3])
        operands = dict(zip(given, inputs[3:], strict=True))
        state, rows = torch.zeros(3, 4, 8, 6).double(), []
        for now in range(length):
            state = state * operands["decay"][:, now].exp()[..., None, None] if "decay" in given else state
            row = v[:, now]
            if "beta" in given:
                row = operands["beta"][:, now, :, None] * (row - (state * k[:, now, :, :, None]).sum(2))
            state = state + k[:, now, :, :, None] * row[:, :, None]
            rows.append((state * q[:, now, :, :, None]).sum(2) / 2)
        wanted = (torch.stack(rows, 1).float(), state.float())
        torch.testing.assert_close(module(*inputs), wanted, rtol=1e-3, atol=1e-3)
        _held(session, inputs, wanted)


def test_another_recurrence_under_the_name_is_left(caplog: pytest.LogCaptureFixture) -> None:
    before = fused_recurrent_gated_delta_rule
    with onnx_attnfuse.mixers_as_operators(ReadsBefore()) as functions:
        assert fused_recurrent_gated_delta_rule is before
    assert not any("fused_recurrent" in name for name in functions)
    assert "fused_recurrent_gated_delta_rule is exported as it is: it differs from LinearAttention on drawn inputs" in caplog.text


def test_a_call_with_an_argument_that_the_operator_lacks_is_that_of_the_library() -> None:
    class Packed(torch.nn.Module):
        def forward(self, *operands: Tensor) -> Any:
            return chunk_gated_delta_rule(*operands, cu_seqlens=torch.tensor([0, 4]))

    with onnx_attnfuse.mixers_as_operators(Packed()):
        program = torch.export.export(Packed(), _inputs(_DELTA[:5], (), 4))
    assert not [node for node in program.graph.nodes if "symbolic" in str(node.target)]


def test_a_model_without_recurrences_is_an_error() -> None:
    with (
        pytest.raises(onnx_attnfuse.OptionError, match="linear_attention in your own module"),
        onnx_attnfuse.mixers_as_operators(torch.nn.Linear(2, 2)),
    ):
        pass
