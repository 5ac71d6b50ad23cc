"""Recurrences in a Scan or Loop as LinearAttention of all tokens: by torch's scan and by scripted loops, and near misses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest
import torch

from onnx_attnfuse import Options, optimize
from tests.mixers.test_convolutions import ran
from tests.mixers.test_recurrences import NEAR, STEPS, operands_of

pytestmark = [pytest.mark.newest, pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")]


def _tokens(seed: int, length: int, step: Callable[..., Any]) -> list[torch.Tensor]:
    """Operands of some tokens, (batch, length, ...), and a state that is not zero."""
    every = [operands_of(seed + now, 2, step) for now in range(max(length, 1))]
    return [*(torch.stack(items, 1)[:, :length] for items in zip(*(item[:-1] for item in every), strict=True)), every[0][-1]]


def _by_hand(step: Callable[..., Any], *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of all tokens, one after the other."""
    *sequences, state = inputs
    results: list[torch.Tensor] = []
    for now in range(sequences[0].shape[1]):
        result, state = step(*(item[:, now] for item in sequences), state)
        results.append(result)
    return torch.stack(results, 1) if results else sequences[2], state


class _Scanned(torch.nn.Module):
    """All tokens by torch's scan."""

    def __init__(self, step: Callable[..., Any]) -> None:
        super().__init__()
        self.step = step

    def forward(self, *inputs: torch.Tensor) -> Any:
        from torch._higher_order_ops.scan import scan

        def turn(state: Any, now: Any) -> Any:
            result, after = self.step(*now, state)
            return after.contiguous(), result.contiguous()

        *sequences, state = inputs
        last, results = scan(turn, state, tuple(item.movedim(1, 0) for item in sequences))
        return results.movedim(0, 1), last


def _scanned(step: Callable[..., Any]) -> ir.Model:
    dynamic = torch.export.Dim.DYNAMIC
    shapes = (tuple([{0: dynamic, 1: dynamic}] * 5 + [{0: dynamic}]),)
    program = torch.onnx.export(
        _Scanned(step).eval(), tuple(_tokens(0, 5, step)), dynamo=True, opset_version=18, dynamic_shapes=shapes, verbose=False
    )
    assert program is not None
    return program.model


def _unused(model: ir.Model) -> set[str]:
    """The initializers that nothing reads."""
    return {name for name, value in model.graph.initializers.items() if not value.uses()}


def _held(model: ir.Model, step: Callable[..., Any]) -> None:
    """Compares a model with the tokens one after the other."""
    proto = ir.serde.serialize_model(model)
    names = [value.name for value in proto.graph.input]
    for length in (0, 1, 2, 17, 65):
        given = _tokens(length, length, step)
        found = ran(proto, dict(zip(names, [item.numpy() for item in given], strict=True)))
        for item, wanted in zip(found, _by_hand(step, *given), strict=True):
            np.testing.assert_allclose(item, wanted.numpy(), rtol=1e-4, atol=1e-4)


def _by_key(query: Any, key: Any, value: Any, decay: Any, rate: Any, state: Any) -> Any:
    """A delta rule whose decays and rates are computed in each turn, and that adds to what it reads."""
    fading = (decay[..., None] * key.sigmoid()).exp()
    state, key = state * fading[..., None], torch.nn.functional.normalize(key, dim=-1)
    change = (value - (state * key[..., None]).sum(-2)) * rate.sigmoid()[..., None]
    state = state + key[..., None] * change[..., None, :]
    return (state * query[..., None]).sum(-2) + value * rate[..., None], state


def _turned(query: Any, key: Any, value: Any, decay: Any, rate: Any, state: Any) -> Any:
    """Keys whose halves each turn exchanges, as rotations do."""
    key = torch.cat([-key[..., key.shape[-1] // 2 :], key[..., : key.shape[-1] // 2]], -1)
    state = state * decay.exp()[..., None, None] + key[..., None] * (value * rate[..., None])[..., None, :]
    return (state * query[..., None]).sum(-2), state


def _weighed(query: Any, key: Any, value: Any, decay: Any, rate: Any, state: Any) -> Any:
    """Keys that each turn makes by a softmax, which proofs do not look into."""
    state = state * decay.exp()[..., None, None] + key.softmax(-1)[..., None] * (value * rate[..., None])[..., None, :]
    return (state * query[..., None]).sum(-2), state


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("step", [_turned, _by_key, STEPS[1], STEPS[0], STEPS[5], STEPS[4]])
def test_a_scan_is_one_operator_for_every_length(step: Callable[..., Any]) -> None:
    model = _scanned(step)
    needless = _unused(model)
    result = optimize(model)
    assert [item.operator for item in result.report.mixers] == ["LinearAttention"]
    assert all(node.op_type != "Scan" for node in result.model.graph)
    assert _unused(result.model) <= needless
    _held(result.model, step)


def _reset(query: Any, key: Any, value: Any, decay: Any, rate: Any, state: Any) -> Any:
    """The state is read by its sum, too."""
    state = state * decay.exp()[..., None, None] + key[..., None] * value[..., None, :]
    return (state * query[..., None]).sum(-2) + state.sum(-2) * rate[..., None], state


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("step", [_reset, _weighed, *NEAR])
def test_near_misses_in_a_scan_are_left(step: Callable[..., Any]) -> None:
    result = optimize(_scanned(step), Options(verify="none"))
    assert [item.operator for item in result.report.mixers] in ([None], [])
    assert [node.op_type for node in result.model.graph].count("Scan") == 1


_LOOP = """<ir_version: 9, opset_import: ["" : 18]>
recurrence (float[b, t, 2, 4] query, float[b, t, 2, 4] key, float[b, t, 2, 6] value, float[b, t, 2, 1] decay,
            float[b, 2, 4, 6] past)
=> (float[t, b, 2, 6] results, float[b, 2, 4, 6] present) {
  length = Shape<start = 1, end = 2>(query)
  none = Constant<value = int64[1] {0}>()
  trips = Squeeze(length, none)
  begin = Constant<value = bool {1}>()
  present, results = Loop(trips, begin, past)<body = turn (int64 i, bool on, float[b, 2, 4, 6] state)
  => (bool more, float[b, 2, 4, 6] after, float[b, 2, 6] result) {
    more = Identity(on)
    fades = Gather<axis = 1>(decay, i)
    inner = Constant<value = int64[1] {-1}>()
    row = Constant<value = int64[1] {-2}>()
    wide = Unsqueeze(fades, inner)
    fading = Exp(wide)
    faded = Mul(state, fading)
    keys = Gather<axis = 1>(key, i)
    tall = Unsqueeze(keys, inner)
    values = Gather<axis = 1>(value, i)
    flat = Unsqueeze(values, row)
    outer = Mul(tall, flat)
    after = Add(faded, outer)
    queries = Gather<axis = 1>(query, i)
    asked = Unsqueeze(queries, inner)
    read = Mul(after, asked)
    result = ReduceSum<keepdims = 0>(read, row)
  }>
}"""


def _looped(text: str) -> tuple[ir.Model, list[str | None]]:
    result = optimize(ir.from_proto(onnx.parser.parse_model(text)), Options(verify="none"))
    return result.model, [item.operator for item in result.report.mixers]


def test_a_loop_is_one_operator() -> None:
    model, operators = _looped(_LOOP)
    assert operators == ["LinearAttention"]
    source, proto = onnx.parser.parse_model(_LOOP), ir.serde.serialize_model(model)
    draw = np.random.default_rng(0)
    for length in (1, 2, 9):
        shapes = [(3, length, 2, 4), (3, length, 2, 4), (3, length, 2, 6), (3, length, 2, 1), (3, 2, 4, 6)]
        arrays = [draw.standard_normal(shape).astype(np.float32) for shape in shapes]
        given = dict(zip([value.name for value in source.graph.input], arrays, strict=True))
        for item, wanted in zip(ran(proto, given), ran(source, given), strict=True):
            np.testing.assert_allclose(item, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Shape<start = 1, end = 2>(query)", "Shape<start = 0, end = 1>(query)"),  # as many turns as entries
        ("more = Identity(on)", "more = Not(on)"),
        ("begin = Constant<value = bool {1}>()", "begin = Constant<value = bool {0}>()"),
        (
            "values = Gather<axis = 1>(value, i)",
            "one = Constant<value = int64 {1}>() j = Sub(i, one) values = Gather<axis = 1>(value, j)",
        ),
        ("after = Add(faded, outer)", "nth = Cast<to = 1>(i) added = Mul(outer, nth) after = Add(faded, added)"),
        ("fading = Exp(wide)", "fading = Sigmoid(wide)"),
        (
            "queries = Gather<axis = 1>(query, i)",
            "rows = Gather<axis = 1>(query, i) noise = RandomUniform<shape = [1, 1, 1]>() queries = Mul(rows, noise)",
        ),
    ],
)
def test_near_misses_in_a_loop_are_left(old: str, new: str) -> None:
    assert old in _LOOP
    model, operators = _looped(_LOOP.replace(old, new))
    assert operators in ([None], [])
    assert [node.op_type for node in model.graph].count("Loop") == 1
