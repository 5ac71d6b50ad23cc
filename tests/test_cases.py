"""Every golden case: what becomes of it, and that it still computes the same."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Iterator

import numpy as np
import onnx
import onnx.parser
import onnx.reference
import pytest

import onnx_attnfuse
from onnx_attnfuse.testing import Case, assert_case, cases_in
from tests.support.bundled import Array, run_in, session

SIZES = [
    {"b": 2, "n": 2, "s": 3, "t": 5, "w": 3, "p": 2, "b2": 4},
    {"b": 1, "n": 3, "s": 1, "t": 4, "w": 1, "p": 1, "b2": 2},
    {"b": 3, "n": 1, "s": 6, "t": 6, "w": 2, "p": 3, "b2": 6},
]
PATTERNS = ("full", "left", "right", "holes", "dead")
FILLS = (-math.inf, float(np.finfo(np.float32).min), -1e4)
FOUND = cases_in(pathlib.Path(__file__).parent / "cases")
CASES = [pytest.param(case, id=case.name) for case in FOUND]
BY_REFERENCE = [pytest.mark.newest]
"""Before onnx 1.23 its reference is wrong about rows without a key."""
COMPUTED = [pytest.param(case, id=case.name, marks=BY_REFERENCE if "by_reference" in case.flags else ()) for case in FOUND]


def optimized(case: Case) -> tuple[onnx.ModelProto, onnx.ModelProto, onnx_attnfuse.Report]:
    """The case before and after, and the report."""
    model = onnx.parser.parse_model(case.text)
    result = onnx_attnfuse.optimize(model, verify="none", keep_outputs="keep_outputs" in case.flags)
    return model, result.model, result.report


@pytest.mark.parametrize("case", CASES)
def test_each_attention_becomes_what_the_case_says(case: Case) -> None:
    assert_case(case)


def is_mask(name: str) -> bool:
    return name.startswith("mask")


def masks(shape: list[int], pattern: str) -> Array:
    """True where a key may be seen; shapes end in the keys."""
    kept = np.ones(shape, bool)
    length = shape[-1]
    if pattern == "left":
        kept[..., : length // 2] = False
    elif pattern == "right":
        kept[..., length - length // 2 :] = False
    elif pattern == "holes":
        kept[..., 1::3] = False
    elif pattern == "dead" and len(shape) > 1:
        kept.reshape(-1, length)[-1] = False
    return kept


def feeds(model: onnx.ModelProto, sizes: dict[str, int], pattern: str, fill: float, seed: int) -> dict[str, Array]:
    """Inputs for the model: random numbers, hostile masks, small integers."""
    random = np.random.default_rng(seed)
    found: dict[str, Array] = {}
    for entry in model.graph.input:
        kind = entry.type.tensor_type
        shape = [sizes[dim.dim_param] if dim.dim_param else dim.dim_value for dim in kind.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        if is_mask(entry.name):
            kept = masks(shape, pattern)
            found[entry.name] = np.where(kept, 0.0, fill).astype(dtype) if dtype.kind == "f" else kept.astype(dtype)
        elif dtype.kind == "f":
            found[entry.name] = random.normal(0.0, 2.0, shape).astype(dtype)
        elif dtype.kind == "b":
            found[entry.name] = random.integers(0, 2, shape).astype(bool)
        else:
            found[entry.name] = random.integers(1, 4, shape).astype(dtype)
    return found


def inputs(model: onnx.ModelProto) -> Iterator[dict[str, Array]]:
    """Inputs of several sizes with every kind of mask the model takes."""
    kinds = {entry.name: entry.type.tensor_type.elem_type for entry in model.graph.input if is_mask(entry.name)}
    patterns = PATTERNS if kinds else PATTERNS[:1]
    fills = FILLS if onnx.TensorProto.FLOAT in kinds.values() else FILLS[:1]
    for seed, sizes in enumerate(SIZES):
        for pattern in patterns:
            for fill in fills:
                yield feeds(model, sizes, pattern, fill, seed)


@pytest.mark.sampled
@pytest.mark.parametrize("case", COMPUTED)
def test_each_case_computes_what_it_did(case: Case) -> None:
    before, after, _ = optimized(case)
    names = [entry.name for entry in before.graph.output]
    by_reference = onnx.reference.ReferenceEvaluator(before) if "by_reference" in case.flags else None
    original, fused = None if by_reference else session(before), session(after)
    for given in inputs(before):
        if by_reference is not None:
            with np.errstate(all="ignore"):
                expected = dict(zip(names, by_reference.run(None, given), strict=True))
        else:
            assert original is not None
            expected = run_in(original, given)
        for name, result in run_in(fused, given).items():
            np.testing.assert_allclose(result, expected[name], rtol=1e-4, atol=1e-5, err_msg=f"{name} of {given}")


@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES)
def test_a_second_run_finds_nothing_left_to_do(case: Case) -> None:
    _, once, _ = optimized(case)
    twice = onnx_attnfuse.optimize(once, verify="none", keep_outputs="keep_outputs" in case.flags)
    assert twice.report.fused == 0
    assert twice.model.SerializeToString(deterministic=True) == once.SerializeToString(deterministic=True)
