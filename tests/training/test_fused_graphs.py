"""Gradient graphs that ORTModule built, fused and run: result and every gradient as PyTorch has them."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
import pytest

from onnx_attnfuse.kernels.policy import Policy
from onnx_attnfuse.training.kernels import TrainingDevice
from onnx_attnfuse.training.ortmodule import pipeline
from onnx_attnfuse.training.ortmodule.kernels import CPU_FLASH, EFFICIENT, FLASH
from onnx_attnfuse.training.report import TrainingSiteReport
from tests.training import kernels_in_torch
from tests.training.evaluating import SEED, Step, buffers_of, eager, evaluated, recorded
from tests.training.modules import CASES

CPU, GPU = TrainingDevice("cpu"), TrainingDevice("cuda", 90)
TOLERANCE = 2e-6
"""Of the largest gradient; float32 has 1.2e-7, and sums of some hundred terms."""


class AsHalf:
    """A kernel that takes float32 for half precision: here it is computed by PyTorch, whatever the type."""

    def __init__(self, kernel) -> None:
        self._kernel = kernel

    def __getattr__(self, name: str):
        return getattr(self._kernel, name)

    def refuse(self, demand, device):
        half = demand if demand.dtype is None else dataclasses.replace(demand, dtype=ir.DataType.FLOAT16)
        return self._kernel.refuse(half, device)


@pytest.fixture(autouse=True)
def _same_seed(monkeypatch) -> None:
    monkeypatch.setattr(kernels_in_torch, "_seeds", lambda: (np.int64(SEED), np.int64(0)))


def fused(name: str, device: TrainingDevice, policy: Policy = Policy()) -> tuple[TrainingSiteReport, Step, ir.Model]:  # noqa: B008
    model = ir.from_proto(recorded(name))
    (site,) = pipeline.fuse_graph(model.graph, device, policy).sites
    return site, evaluated(ir.to_proto(model), CASES[name]), model


def assert_same(step: Step, wanted: Step, within: float = TOLERANCE) -> None:
    np.testing.assert_allclose(step.result, wanted.result, rtol=0, atol=within)
    assert step.gradients.keys() == wanted.gradients.keys()
    scale = max(np.nanmax(np.abs(item), initial=0.0) for item in wanted.gradients.values())
    for name, gradient in wanted.gradients.items():
        np.testing.assert_allclose(step.gradients[name], gradient, rtol=0, atol=within * scale, err_msg=name)


def tolerance(name: str) -> float:
    return 5e-3 if CASES[name].autocast else TOLERANCE


def count(model: ir.Model, *operators: str) -> int:
    return sum(node.op_type in operators for node in model.graph)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "dropout" not in name and not case.double])
def test_recorded_graphs_compute_what_pytorch_does(name: str) -> None:
    assert_same(evaluated(recorded(name), CASES[name]), eager(CASES[name]), tolerance(name))


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.refused is None])
def test_fused_on_the_cpu(name: str) -> None:
    site, step, model = fused(name, CPU)
    assert site.kernel == CPU_FLASH.name, site.line()
    assert not count(model, "Softmax", "SoftmaxGrad_13")
    assert_same(step, eager(CASES[name]), tolerance(name))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.refused is not None])
def test_left_alone_on_the_cpu(name: str) -> None:
    before = recorded(name)
    model = ir.from_proto(before)
    (site,) = pipeline.fuse_graph(model.graph, CPU, Policy()).sites
    codes = {reason.code for reason in (*site.reasons, *(reason for _, reason in site.others))}
    assert codes == {CASES[name].refused}
    assert sorted(map(str, ir.to_proto(model).graph.node)) == sorted(map(str, before.graph.node))


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.refused is None or case.refused_by_kernel])
def test_fused_by_the_efficient_kernel(name: str) -> None:
    site, step, model = fused(name, GPU, Policy(flash=False, efficient=True))
    assert site.kernel == EFFICIENT.name, site.line()
    assert not count(model, "Softmax", "SoftmaxGrad_13", "Dropout", "DropoutGrad")
    wanted = evaluated(recorded(name), CASES[name]) if site.dropout else eager(CASES[name])
    assert_same(step, wanted, tolerance(name))


@pytest.mark.parametrize("name", ["plain", "batched", "grouped", "triangle", "torch_causal", "cross", "frozen_keys", "dropout"])
@pytest.mark.sampled(every=3)
def test_fused_by_kernels_without_a_mask(name: str, monkeypatch) -> None:
    monkeypatch.setattr(pipeline, "KERNELS", (AsHalf(FLASH),))
    site, step, model = fused(name, GPU)
    assert site.kernel == FLASH.name, site.line()
    assert not count(model, "Softmax", "SoftmaxGrad_13", "Dropout", "DropoutGrad")
    assert_same(step, evaluated(recorded(name), CASES[name]))


def test_kernels_without_a_mask_refuse_one(monkeypatch) -> None:
    monkeypatch.setattr(pipeline, "KERNELS", (AsHalf(FLASH),))
    assert [reason.code for _, reason in fused("padding", GPU)[0].others] == ["no-mask"]
    assert [reason.code for _, reason in fused("trained_bias", GPU)[0].others] == ["bias-gradient"]


def test_half_precision_needs_no_change_of_type(monkeypatch) -> None:
    monkeypatch.setattr(pipeline, "KERNELS", (FLASH,))
    site, step, model = fused("autocast_triangle", GPU)
    assert site.kernel == FLASH.name, site.line()
    assert_same(step, eager(CASES["autocast_triangle"]), tolerance("autocast_triangle"))
    kinds = [node for node in model.graph if node.op_type == "ATen"]
    assert {value.dtype for node in kinds for value in node.outputs[:1]} == {ir.DataType.FLOAT16}


def test_a_triangle_in_a_buffer_is_causal_where_its_content_is_told() -> None:
    model = ir.from_proto(recorded("buffered"))
    (site,) = pipeline.fuse_graph(model.graph, CPU, Policy(), buffers=buffers_of(CASES["buffered"])).sites
    assert (site.mask, site.handed, site.buffers) == ("causal", "causal by attribute", ("_original_module.earlier",))
    assert "_original_module.earlier" not in {value.name for node in model.graph for value in node.inputs if value is not None}
    assert_same(evaluated(ir.to_proto(model), CASES["buffered"]), eager(CASES["buffered"]))


def test_it_is_arbitrary_where_it_is_not_told_or_is_no_triangle() -> None:
    broken = {name: array.copy() for name, array in buffers_of(CASES["buffered"]).items()}
    broken["_original_module.earlier"][0, 0, 3, 1] = False
    for told in (None, broken):
        model = ir.from_proto(recorded("buffered"))
        (site,) = pipeline.fuse_graph(model.graph, CPU, Policy(), buffers=told).sites
        assert site.handed == "its mask as a bias, rows without a key apart"
        assert site.buffers == (() if told is None else ("_original_module.earlier",))
        assert_same(evaluated(ir.to_proto(model), CASES["buffered"]), eager(CASES["buffered"]))


def test_buffers_of_what_is_left_alone_are_inputs_again() -> None:
    before = recorded("buffered")
    model = ir.from_proto(before)
    report = pipeline.fuse_graph(model.graph, CPU, Policy(flash=False), buffers=buffers_of(CASES["buffered"]))
    assert not report.buffers
    assert sorted(map(str, ir.to_proto(model).graph.node)) == sorted(map(str, before.graph.node))
    assert len(model.graph.initializers) == len(before.graph.initializer)


def test_dropout_of_zero_is_none() -> None:
    assert fused("not_dropped", CPU)[0].dropout == 0.0
    assert fused("dropout", CPU)[0].dropout == 0.25


def test_a_second_run_changes_nothing() -> None:
    model = ir.from_proto(recorded("padding"))
    pipeline.fuse_graph(model.graph, CPU, Policy())
    before = sorted(map(str, ir.to_proto(model).graph.node))
    assert not pipeline.fuse_graph(model.graph, CPU, Policy()).sites
    assert sorted(map(str, ir.to_proto(model).graph.node)) == before
