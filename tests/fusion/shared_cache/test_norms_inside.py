"""Normalizations of queries and keys that GroupQueryAttention does itself: where they are taken in, and what it computes then."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import onnx_ir as ir
import pytest

import onnx_attnfuse
from onnx_attnfuse.verify.model_session import in_front
from onnx_attnfuse.verify.options import Trials
from tests.support.decoder_loops import assert_same_at_tokens, buffered, grown, steps
from tests.support.decoders import UNPADDED, decoder

_PADDINGS = [[[1] * 6] * 2, [[0, 0, 1, 1, 1, 1], [1] * 6], [[1, 0, 1, 1, 0, 1], [0, 1, 1, 0, 1, 1]]]
_APART = "{t}_p{{i}} = MatMul({{x}}, w{t}{{i}}) {t}_h{{i}} = Reshape({t}_p{{i}}, {heads})"
_HALF = "{t}_w{{i}} = Cast<to=1>({t}_h{{i}})"
_POWER = """{t}_s{{i}} = Pow({t}_w{{i}}, two) {t}_m{{i}} = ReduceMean<keepdims=1>({t}_s{{i}}, last)
   {t}_e{{i}} = Add({t}_m{{i}}, {epsilon})"""
_ROOT = "{t}_r{{i}} = Sqrt({t}_e{{i}})"
_DIVIDED = "{t}_d{{i}} = Div({t}_w{{i}}, {t}_r{{i}})"
_WEIGHED = "{t}_c{{i}} = Cast<to=10>({t}_d{{i}}) {t}_n{{i}} = Mul(for_{t}, {t}_c{{i}})"
_JOINED = "{t}{{i}} = Reshape({t}_n{{i}}, joined_heads)"
_VALUES = "v{i} = MatMul({x}, wv{i})"
_PLAIN = [_APART, _HALF, _POWER, _ROOT, _DIVIDED, _WEIGHED, _JOINED]


def _steps(*pieces: str, queries: dict[str, str] | None = None, keys: dict[str, str] | None = None) -> str:
    """What makes queries and keys, and values as they are projected; `queries` and `keys` replace pieces by name of a symbol."""
    made: list[str] = []
    for letter, heads, own in (("q", "queries", queries), ("k", "groups", keys)):
        words = {"t": letter, "heads": heads, "epsilon": "epsilon", **(own or {})}
        made += [piece.format(**words) for piece in pieces]
    return " ".join([*made, _VALUES])


def _replaced(*others: tuple[str, str]) -> list[str]:
    """The pieces of the plain form with others in their places."""
    return [dict(others).get(piece, piece) for piece in _PLAIN]


_INVERSE = "{t}_o{{i}} = Reciprocal({t}_r{{i}}) {t}_d{{i}} = Mul({t}_o{{i}}, {t}_w{{i}})"
_SQUARED = _POWER.replace("Pow({t}_w{{i}}, two)", "Mul({t}_w{{i}}, {t}_w{{i}})")
_WIDE = "{t}_f{{i}} = Mul({t}_d{{i}}, wide_{t}) {t}_n{{i}} = Cast<to=10>({t}_f{{i}})"
_UNWEIGHED = "{t}_n{{i}} = Cast<to=10>({t}_d{{i}})"
_TURNED = _APART.replace("{t}_h{{i}} =", "{t}_g{{i}} =") + " {t}_h{{i}} = Transpose<perm=[0, 2, 1, 3]>({t}_g{{i}})"
_TURNED_BACK = "{t}_b{{i}} = Transpose<perm=[0, 2, 1, 3]>({t}_n{{i}}) {t}{{i}} = Reshape({t}_b{{i}}, joined_heads)"
_INSIDE = {
    "as Qwen3 has it": _steps(*_PLAIN),
    "with a reciprocal": _steps(*_replaced((_DIVIDED, _INVERSE), (_POWER, _SQUARED))),
    "with factors in float32 that float16 holds": _steps(*_replaced((_WEIGHED, _WIDE))),
    "without factors": _steps(*_replaced((_WEIGHED, _UNWEIGHED))),
    "heads first": _steps(*_replaced((_APART, _TURNED), (_JOINED, _TURNED_BACK))),
}
_CENTRED = "{t}_a{{i}} = ReduceMean<keepdims=1>({t}_z{{i}}, last) {t}_w{{i}} = Sub({t}_z{{i}}, {t}_a{{i}})"
_ALL_HEADS = "{t}_h{{i}} = MatMul({{x}}, w{t}{{i}})"
_OUTSIDE = {
    "another number under the root of keys": _steps(*_PLAIN, keys={"epsilon": "more"}),
    "less than nothing under the roots": _steps(*_PLAIN, queries={"epsilon": "less"}, keys={"epsilon": "less"}),
    "less its mean": _steps(*_replaced((_HALF, _HALF.replace("{t}_w{{i}} =", "{t}_z{{i}} =") + " " + _CENTRED))),
    "all heads together": _steps(
        *_replaced((_APART, _ALL_HEADS), (_WEIGHED, _UNWEIGHED), (_JOINED, "{t}{{i}} = Identity({t}_n{{i}})"))
    ),
    "over positions": _steps(*_replaced((_POWER, _POWER.replace("last", "second")))),
    "factors that float16 does not hold": _steps(*_replaced((_WEIGHED, _WIDE.replace("wide_", "fine_")))),
    "factors for each head": _steps(*_replaced((_WEIGHED, _WEIGHED.replace("for_{t}", "heads_{t}")))),
    "changed behind it": _steps(*_replaced((_JOINED, "{t}_y{{i}} = Tanh({t}_n{{i}}) " + _JOINED.replace("({t}_n", "({t}_y")))),
    "keys as they are": _steps(
        *_PLAIN[:6], _JOINED.replace("({t}_n", "({from_}"), queries={"from_": "q_n"}, keys={"from_": "k_h"}
    ),
}


def _normalized(projected: str, **choices: Any) -> onnx.ModelProto:
    """A decoder in float16 whose queries and keys are normalized before they are rotated."""
    model = decoder(projected=projected, dtype="float16", **choices)
    rng = np.random.default_rng(5)
    factors = {name: (1 + 0.3 * rng.standard_normal(16)).astype(np.float16) for name in ("for_q", "for_k")}
    arrays: dict[str, Any] = factors | {f"wide_{name[-1]}": array.astype(np.float32) for name, array in factors.items()}
    arrays |= {f"fine_{name[-1]}": array.astype(np.float32) * np.float32(1 + 2**-14) for name, array in factors.items()}
    arrays |= {
        f"heads_{name[-1]}": np.stack([array * (1 + place / 8) for place in range(count)]).astype(np.float16)
        for (name, array), count in zip(factors.items(), (4, 2), strict=True)
    }
    numbers = {"two": 2, "epsilon": 1e-3, "more": 2e-3, "less": 0.0}
    arrays |= {name: np.asarray(number, np.float32) for name, number in numbers.items()} | {"joined_heads": np.array([0, 0, -1])}
    for name, array in arrays.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def _taken_in(model: onnx.ModelProto) -> list[bool]:
    """Whether each operator normalizes, and is handed one tensor then."""
    nodes = [node for node in model.graph.node if node.op_type == "GroupQueryAttention"]
    found = [any(node.input[14:16]) for node in nodes]
    assert not any(taken and node.input[1] for node, taken in zip(nodes, found, strict=True))
    return found


def _on_cpu(model: onnx.ModelProto) -> onnx.ModelProto:
    return ir.to_proto(in_front(ir.from_proto(model)))


@pytest.mark.parametrize("projected", _INSIDE.values(), ids=_INSIDE)
def test_a_cache_in_one_buffer_gets_operators_that_normalize(projected: str) -> None:
    model = _normalized(projected)
    result = onnx_attnfuse.optimize(model, ep="cuda", arch="sm90", cache="shared", verify="model")
    assert not result.report.failures
    assert _taken_in(result.model) == [True, True]
    assert "ReduceMean" not in {node.op_type for node in result.model.graph.node}
    told = result.report.decoder
    assert told is not None
    for padding in _PADDINGS:
        fed = steps(padding, (1, 1, 1))
        assert_same_at_tokens(grown(model, told, fed), buffered(_on_cpu(result.model), told, fed), fed, atol=3e-2)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("projected", _INSIDE.values(), ids=_INSIDE)
def test_so_does_a_cache_that_grows(projected: str) -> None:
    model = _normalized(projected, seen=UNPADDED)
    result = onnx_attnfuse.optimize(
        model, ep="cuda", arch="sm90", padding="assume-none", target="GroupQueryAttention", verify="sites"
    )
    assert not result.report.failures
    assert _taken_in(result.model) == [True, True]
    assert any("normalizations of queries and keys" in note and note.startswith("2 ") for note in result.report.notes)


def test_whole_models_are_compared_with_normalizations_in_front(tmp_path: pathlib.Path) -> None:
    model = _normalized(_INSIDE["as Qwen3 has it"], seen=UNPADDED)
    choices: dict[str, Any] = {"padding": "assume-none", "target": "GroupQueryAttention"}
    result = onnx_attnfuse.optimize(model, ep="cuda", arch="sm90", **choices)
    assert _taken_in(result.model) == [True, True]
    onnx.save(result.model, tmp_path / "fused.onnx")
    one = Trials(dim={"b": 1})
    assert onnx_attnfuse.verify_models(model, tmp_path / "fused.onnx", one).equal
    wrong = onnx.load(tmp_path / "fused.onnx")
    (factors,) = (item for item in wrong.graph.initializer if item.name == "for_q")
    factors.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(factors)[::-1].copy(), "for_q"))
    assert not onnx_attnfuse.verify_models(model, wrong, one).equal


@pytest.mark.parametrize("projected", _OUTSIDE.values(), ids=_OUTSIDE)
def test_near_misses_are_normalized_in_front(projected: str) -> None:
    model = _normalized(projected)
    result = onnx_attnfuse.optimize(model, ep="cuda", arch="sm90", cache="shared", verify="sites")
    assert result.report.decoder is not None
    assert _taken_in(result.model) == [False, False]


def test_a_quantised_cache_keeps_them_in_front() -> None:
    model = _normalized(_INSIDE["as Qwen3 has it"])
    result = onnx_attnfuse.optimize(model, ep="cuda", arch="sm90", cache="shared", kv_cache="int8")
    assert result.report.kv_cache is not None
    assert _taken_in(result.model) == [False, False]


def test_steps_with_them_are_captured() -> None:
    sizes = {"b": 2, "s": 1, "total": 16, "max_sequence_length": 16}
    model = _normalized(_INSIDE["as Qwen3 has it"])
    result = onnx_attnfuse.optimize(model, ep="cuda", arch="sm90", cache="shared", cuda_graph=True, dim=sizes)
    assert result.report.capture is not None
    assert result.report.capture.possible
    assert _taken_in(result.model) == [True, True]


def test_where_it_does_not_pay_they_stay_in_front() -> None:
    result = onnx_attnfuse.optimize(_normalized(_INSIDE["as Qwen3 has it"]), ep="cpu", cache="shared")
    assert result.report.decoder is not None
    assert _taken_in(result.model) == [False, False]
