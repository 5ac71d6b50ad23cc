"""Queries, keys and values of GroupQueryAttention as one product: where they are, and what they compute."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import pytest

import onnx_attnfuse
from onnx_attnfuse.kernels import providers
from tests.support.bundled import run
from tests.support.decoders import PROJECTED, UNPADDED, decoder

Array = npt.NDArray[Any]
_EXPORTS = pathlib.Path(__file__).parents[1] / "shared_cache" / "exports"
_SHOWN = "merged for GroupQueryAttention"


@pytest.fixture(autouse=True)
def _pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a provider where it pays, so that results can be run."""
    record = providers.provider("cpu")
    changed = dataclasses.replace(record, pays=record.pays | {"merged-projections"})
    monkeypatch.setitem(providers._records, "cpu", changed)


def optimized(model: onnx.ModelProto, **choices: Any) -> tuple[onnx.ModelProto, int]:
    """The model as we fuse it, judged, and how often a rule was applied."""
    result = onnx_attnfuse.optimize(model, **{"ep": "cpu", "verify": "sites", **choices})
    assert not result.report.failures
    assert not result.report.differing
    notes = [note for note in result.report.notes if _SHOWN in note]
    return result.model, int(notes[0].split()[0]) if notes else 0


def count(model: onnx.ModelProto, *ops: str) -> int:
    return sum(node.op_type in ops for node in model.graph.node)


def _grouped(projected: str = PROJECTED, **choices: Any) -> onnx.ModelProto:
    return decoder(projected=projected, **{"seen": UNPADDED, "rotated": False, **choices})


def _packed(model: onnx.ModelProto) -> list[bool]:
    return [not node.input[1] for node in model.graph.node if node.op_type == "GroupQueryAttention"]


_GROUPED = {"target": "GroupQueryAttention", "padding": "assume-none"}


def test_grouped_heads_with_a_cache_that_grows_are_handed_over_as_one_product() -> None:
    before = _grouped()
    after, times = optimized(before, **_GROUPED)
    assert times == 2
    assert _packed(after) == [True, True]
    assert count(after, "Split") == 0
    made = {output for node in after.graph.node for output in node.output}
    assert not made & {node.input[1] for node in after.graph.node if node.op_type == "MatMul"}
    rng = np.random.default_rng(2)
    for past, new in ((5, 1), (0, 4), (3, 2)):
        feeds: dict[str, Array] = {before.graph.input[0].name: rng.integers(0, 99, (1, new))}
        feeds |= {
            f"past_{part}_{layer}": rng.standard_normal((1, 2, past, 16)).astype(np.float32)
            for part in ("key", "value")
            for layer in (0, 1)
        }
        wanted, found = run(before, feeds), run(after, feeds)
        for name, array in wanted.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-3, atol=1e-4)


def test_a_device_that_rotates_each_token_itself_rotates_packed_ones() -> None:
    before = _grouped(rotated=True, dtype="float16")
    after, times = optimized(before, ep="cuda", arch="sm90", **_GROUPED)
    assert times == 2
    assert _packed(after) == [True, True]


def test_an_export_of_opt_is_packed_and_one_of_gpt2_hands_over_what_it_split() -> None:
    opt = onnx.load(_EXPORTS / "opt_past__ts17__sdpa.onnx")
    after, times = optimized(opt, **_GROUPED)
    assert (times, _packed(after)) == (2, [True, True])
    gpt2 = onnx.load(_EXPORTS / "gpt2_past__ts17__eager.onnx")
    after, times = optimized(gpt2, **_GROUPED)
    assert (times, _packed(after)) == (0, [True, True])
    assert count(after, "Split") == 0


_OTHER = "past_x{i} = Tanh({x}) q{i} = MatMul({x}, wq{i}) k{i} = MatMul({x}, wk{i}) v{i} = MatMul(past_x{i}, wv{i})"
_SCALED = "q{i} = MatMul({x}, wq{i}) k{i} = MatMul({x}, wk{i}) vp{i} = MatMul({x}, wv{i}) v{i} = Tanh(vp{i})"


@pytest.mark.parametrize(
    ("projected", "end"),
    [
        (_OTHER, ""),
        (_SCALED, ""),
        (PROJECTED, "mean = ReduceMean<keepdims=1>(v1, last) more = Add(y1, mean) logits = MatMul(more, head)"),
    ],
    ids=["another input", "changed after it was projected", "read elsewhere"],
)
def test_near_misses_are_handed_over_as_three(projected: str, end: str) -> None:
    before = _grouped(projected, **({"end": end} if end else {}))
    after, times = optimized(before, **_GROUPED)
    assert (times, _packed(after)) == ((1, [True, False]) if end else (0, [False, False]))


def test_on_a_cpu_it_pays_nothing_and_is_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    after, times = optimized(_grouped(), **_GROUPED)
    assert (times, _packed(after)) == (0, [False, False])
