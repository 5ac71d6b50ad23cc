"""Steps of recurrences as LinearAttention: transformers' spellings and those of torch, token by token, and near misses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from onnx_attnfuse import Options, optimize
from onnx_attnfuse.certify.certificate import certify
from onnx_attnfuse.graph import io
from onnx_attnfuse.report.model import Report
from tests.mixers.test_candidates import exported
from tests.mixers.test_convolutions import ran

pytestmark = [pytest.mark.newest, pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")]
_HEADS, _KEY, _VALUE = 4, 8, 6


def _delta(query: Any, key: Any, value: Any, decay: Any, rate: Any, state: Any) -> Any:
    """The gated delta rule of Qwen3-Next."""
    state = state * decay.exp()[..., None, None]
    change = (value - (state * key[..., None]).sum(-2)) * rate[..., None]
    state = state + key[..., None] * change[..., None, :]
    return (state * query[..., None]).sum(-2), state


def _delta_by_key(query: Any, key: Any, value: Any, decay: Any, rate: Any, state: Any) -> Any:
    """That of Kimi, whose decay each channel of a key has."""
    decay = decay[..., None] * torch.arange(1, _KEY + 1)
    state = state * decay[..., None].exp()
    change = rate[..., None] * (value - torch.einsum("bhkv,bhk->bhv", state, key))
    state = state + key[..., None] * change[..., None, :]
    return torch.einsum("bhkv,bhk->bhv", state, query / _KEY**0.5), state


def _space(query: Any, key: Any, value: Any, decay: Any, rate: Any, state: Any) -> Any:
    """A state space of Mamba-2: the state is values by keys, and two heads share keys and queries."""
    query, key = (item[:, : _HEADS // 2, None].expand(-1, -1, 2, -1).reshape(-1, _HEADS, _KEY) for item in (query, key))
    wide = torch.nn.functional.softplus(rate[..., None].expand(-1, -1, _VALUE) + 0.5)
    fading = (wide[..., None] * torch.tensor([-0.5, -1.0, -2.0, -0.1])[:, None, None].expand(_HEADS, _VALUE, _KEY)).exp()
    state = state * fading + wide[..., None] * key[..., None, :] * value[..., None]
    read = torch.bmm(state.reshape(-1, _VALUE, _KEY), query.reshape(-1, _KEY, 1)).reshape(-1, _HEADS, _VALUE)
    return read + decay[..., None] * value, state


def _gated(query: Any, key: Any, value: Any, decay: Any, rate: Any, state: Any) -> Any:
    """Gated linear attention."""
    state = state * decay.exp()[..., None, None] + key[..., None] * (value * rate[..., None])[..., None, :]
    return (query[..., None, :] @ state)[..., 0, :], state


def _plain(query: Any, key: Any, value: Any, decay: Any, rate: Any, state: Any) -> Any:
    """Linear attention without decays."""
    state = state + key[..., None] * value[..., None, :]
    return (query[..., None, :] @ state)[..., 0, :] * (decay + rate)[..., None], state


def operands_of(seed: int, batch: int, step: Callable[..., Any]) -> list[torch.Tensor]:
    """Those of one token, with decays far from 1, and a state that is not zero."""
    torch.manual_seed(seed)
    shapes = [(batch, _HEADS, size) for size in (_KEY, _KEY, _VALUE)]
    wide = [torch.randn(shape) for shape in shapes]
    return [*wide, -torch.rand(batch, _HEADS), torch.rand(batch, _HEADS), _state(batch, step)]


def _state(batch: int, step: Callable[..., Any]) -> torch.Tensor:
    state = torch.randn(batch, _HEADS, _KEY, _VALUE)
    return state.transpose(2, 3).contiguous() if step is _space else state


def _fused(step: Callable[..., Any], **options: Any) -> tuple[ir.Model, ir.Model, Report]:
    """The export of a step, as it is and fused."""
    model = exported(step, *operands_of(0, 2, step))
    result = optimize(model.clone(), Options(**options))
    return model, result.model, result.report


def _shared(query: Any, key: Any, value: Any, decay: Any, rate: Any, state: Any) -> Any:
    """All heads share a key and a query, which have no axis for them."""
    state = state * decay.exp()[..., None, None] + key[:, 0, None, :, None] * (value * rate[..., None])[..., None, :]
    return (state * query[:, 0, None, :, None]).sum(-2), state


STEPS = [_shared, _delta, _delta_by_key, _space, _gated, _plain]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("step", STEPS)
def test_tokens_one_by_one_are_those_of_torch(step: Callable[..., Any]) -> None:
    _, model, report = _fused(step)
    assert [item.operator for item in report.mixers] == ["LinearAttention"]
    proto = ir.serde.serialize_model(model)
    names = [value.name for value in proto.graph.input]
    state = found = operands_of(1, 2, step)[-1]
    for now in range(12):
        given = operands_of(now, 2, step)[:-1]
        wanted, state = step(*given, state)
        result, found = ran(proto, dict(zip(names, [*(item.numpy() for item in given), np.asarray(found)], strict=True)))
        np.testing.assert_allclose(result, wanted.numpy(), rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(found, state.numpy(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("step", [_delta, _space])
def test_a_batch_of_one(step: Callable[..., Any]) -> None:
    model = exported(step, *operands_of(0, 1, step))
    assert [item.operator for item in optimize(model).report.mixers] == ["LinearAttention"]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("step", STEPS)
def test_a_certificate_proves_output_and_state(step: Callable[..., Any]) -> None:
    pytest.importorskip("z3")
    before, after, _ = _fused(step)
    assert certify(io.from_any(before)[0], io.from_any(after)[0]).is_complete


def _late_decay(query: Any, key: Any, value: Any, decay: Any, rate: Any, state: Any) -> Any:
    state = (state + key[..., None] * value[..., None, :]) * (decay * rate).exp()[..., None, None]
    return (state * query[..., None]).sum(-2), state


def _decay_of_values(query: Any, key: Any, value: Any, decay: Any, rate: Any, state: Any) -> Any:
    state = state * (value * decay[..., None] * rate[..., None]).exp()[..., None, :] + key[..., None] * value[..., None, :]
    return (state * query[..., None]).sum(-2), state


def _rate_of_the_value_alone(query: Any, key: Any, value: Any, decay: Any, rate: Any, state: Any) -> Any:
    state = state * decay.exp()[..., None, None]
    change = value * rate[..., None] - (state * key[..., None]).sum(-2)
    state = state + key[..., None] * change[..., None, :]
    return (state * query[..., None]).sum(-2), state


def _retrieved_before_the_decay(query: Any, key: Any, value: Any, decay: Any, rate: Any, state: Any) -> Any:
    change = (value - (state * key[..., None]).sum(-2)) * rate[..., None]
    state = state * decay.exp()[..., None, None] + key[..., None] * change[..., None, :]
    return (state * query[..., None]).sum(-2), state


def _read_before_the_update(query: Any, key: Any, value: Any, decay: Any, rate: Any, state: Any) -> Any:
    result = (state * query[..., None]).sum(-2)
    return result, state * (decay * rate).exp()[..., None, None] + key[..., None] * value[..., None, :]


def _linear_decay(query: Any, key: Any, value: Any, decay: Any, rate: Any, state: Any) -> Any:
    state = state * (decay * rate)[..., None, None] + key[..., None] * value[..., None, :]
    return (state * query[..., None]).sum(-2), state


NEAR = [
    _late_decay,
    _decay_of_values,
    _rate_of_the_value_alone,
    _retrieved_before_the_decay,
    _read_before_the_update,
    _linear_decay,  # a decay that may be 0 or negative has no logarithm
]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("step", NEAR)
def test_near_misses_are_left(step: Callable[..., Any]) -> None:
    _, model, report = _fused(step, verify="none")
    assert {reason.code for item in report.mixers for reason in item.reasons} <= {"mixer-step", "mixer-unequal"}
    assert all(item.operator is None for item in report.mixers)
    assert all(node.op_type != "LinearAttention" for node in model.graph)


def test_a_state_in_double_precision_is_left() -> None:
    model = exported(_gated, *(item.double() for item in operands_of(0, 2, _gated)))
    assert [item.reasons[0].code for item in optimize(model, Options(verify="none")).report.mixers] == ["no-kernel-for-type"]
