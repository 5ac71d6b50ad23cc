"""The reference of GroupQueryAttention with a quantised cache against the kernel on the CPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from onnx_attnfuse.kernels.cache_formats import FORMATS, format_of
from onnx_attnfuse.verify.references import quantised, restored, step
from onnx_attnfuse.verify.runtime import Reference
from tests.support.drawing import Case
from tests.support.kernel_cases import cases_of, model_of

_CASES = [
    case
    for case in cases_of("com.microsoft.GroupQueryAttention")
    if case.inputs()[3] is not None and "both ways" not in case.name
]


def _with_quantised_cache(case: Case, kind: str, scales: str, dtype: Any) -> tuple[onnx.ModelProto, dict[str, Any]]:
    form, inputs = FORMATS[kind], case.inputs(dtype)
    past = inputs[3]
    assert past is not None
    _, heads, _, size = past.shape
    shape = (1, heads, 1, size) if scales == "PER_CHANNEL" else (1,)
    rng = np.random.default_rng(7)
    k_scale, v_scale = (rng.uniform(2, 3, shape).astype(np.float32) / form.largest for _ in range(2))
    for place, scale in ((3, k_scale), (4, v_scale)):
        held = inputs[place]
        assert held is not None
        inputs[place] = quantised(held, scale.reshape(1, -1, 1, size) if scale.size > 1 else scale, form)
    inputs += [None] * (14 - len(inputs))
    inputs[12:14] = k_scale, v_scale
    given = {"k_quant_type": scales, "v_quant_type": scales, "kv_cache_bit_width": form.bits}
    case = dataclasses.replace(case, attributes={**case.attributes, **given})
    model = model_of(case, inputs)
    kinds = {"x3": None, "x4": None, "y1": None, "y2": None}
    for item in (*model.graph.input, *model.graph.output):
        if item.name in kinds:
            item.type.tensor_type.elem_type = int(form.dtype)
    return model, {f"x{place}": array for place, array in enumerate(inputs) if array is not None}


_HALF = pytest.param(np.float16, marks=pytest.mark.newest)  # onnxruntime 1.28 takes a quantised cache beside float32 only


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [np.float32, _HALF])
@pytest.mark.parametrize("scales", ["PER_CHANNEL", "PER_TENSOR"])
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=pytest.mark.newest if "counted" in case.name else ()) for case in _CASES]
)
def test_is_what_the_kernel_computes(case: Case, kind: str, scales: str, dtype: Any) -> None:
    model, feeds = _with_quantised_cache(case, kind, scales, dtype)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    started = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    got, wanted = started.run(None, feeds), Reference(model).run(None, feeds)
    seen = case.where(case.inputs(dtype))
    tolerance = 2e-5 if dtype == np.float32 else 5e-3
    for place, where in ((1, seen[1]), (2, seen[2])):
        one = np.ones((), np.float32)
        new, old = (
            restored(item[place], one, FORMATS[kind], 32 if "long" not in case.name else item[place].shape[-1])
            for item in (got, wanted)
        )
        apart = np.abs(new - old)[np.broadcast_to(where[..., None], new.shape)]
        assert (apart <= 1).all()
        assert (apart > 0).mean() < 2e-2
    wide = np.broadcast_to(seen[0][..., None], got[0].shape)
    error = np.abs(got[0][wide].astype(np.float32) - wanted[0][wide].astype(np.float32))
    assert error.max() < tolerance * 100 if dtype == np.float16 else error.max() < 2e-3


def test_what_is_stored_is_the_nearest_within_the_range() -> None:
    array = np.asarray([[[[0.0, 0.5, 1.5, -2.5, 300, -300, 7.4, 6.6]]]], np.float32)
    one = np.ones((1, 1, 1, 1), np.float32)
    assert quantised(array, one, FORMATS["int8"]).tolist() == [[[[0, 0, 2, -2, 127, -128, 7, 7]]]]
    packed = quantised(array, one, FORMATS["int4"])
    assert packed.tolist() == [[[[0x88, 0x6A, 0x0F, 0xFF]]]]
    assert restored(packed, one, FORMATS["int4"], 8).tolist() == [[[[0, 0, 2, -2, 7, -8, 7, 7]]]]
    odd = quantised(array[..., :3], one, FORMATS["int4"])
    assert restored(odd, one, FORMATS["int4"], 3).tolist() == [[[[0, 0, 2]]]]


@pytest.mark.parametrize("kind", list(FORMATS))
def test_nothing_within_the_range_is_further_off_than_a_step(kind: str) -> None:
    form = FORMATS[kind]
    scale = np.asarray([0.3], np.float32)
    array = np.linspace(form.lowest * 0.3, form.largest * 0.3, 4002, dtype=np.float32).reshape(1, 1, -1, 2)
    off = np.abs(restored(quantised(array, scale, form), scale, form, 2) - array)
    assert (off <= step(array, scale, form) * (1 + 1e-5)).all()
    assert off.max() > step(array, scale, form).max() / 2
    assert format_of(form.dtype) == form


def test_a_cache_without_a_format_has_none() -> None:
    assert format_of(None) is None
    assert helper.tensor_dtype_to_np_dtype(onnx.TensorProto.FLOAT) == np.float32
