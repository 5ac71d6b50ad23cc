"""The wrapper itself: a changed import, or one call; modes, switches, lines, files."""

from __future__ import annotations

import inspect
import os

import onnx
import pytest
import torch

from onnx_attnfuse.training import ORTModule, Policy, disable, enable
from onnx_attnfuse.training.ortmodule.newer_torch import ortmodule
from tests.training.modules import CASES
from tests.training.ortmodule.steps import assert_same, step

theirs = ortmodule()
PLAIN = CASES["plain"]


@pytest.fixture(autouse=True)
def _disabled():
    yield
    disable()


def test_signature_is_theirs_and_one_more() -> None:
    ours, original = (list(inspect.signature(item.__init__).parameters) for item in (ORTModule, theirs.ORTModule))
    assert ours == [*original, "policy"]
    assert issubclass(ORTModule, theirs.ORTModule)


def test_their_module_is_left_alone_unless_it_is_asked_for() -> None:
    module = theirs.ORTModule(PLAIN.module())
    enabled = enable()
    disable()
    step(module, PLAIN.inputs())
    assert not enabled.reports


def test_enable_takes_every_module_and_can_be_called_twice() -> None:
    enable()
    enabled = enable()
    found = step(theirs.ORTModule(PLAIN.module()), PLAIN.inputs())
    (report,) = enabled.reports
    assert report.fused == 1
    assert_same(found, step(PLAIN.module(), PLAIN.inputs()))


def test_each_module_has_its_own_policy() -> None:
    off, on = ORTModule(PLAIN.module(), policy=Policy(flash=False)), ORTModule(PLAIN.module())
    for module in (off, on):
        step(module, PLAIN.inputs())
    assert [reason.code for _, reason in off.attention_reports[0].sites[0].others] == ["switched-off"]
    assert on.attention_reports[0].fused == 1


def test_environment_is_read_when_the_graph_is_built(monkeypatch) -> None:
    module = ORTModule(PLAIN.module())
    monkeypatch.setenv("ATTNFUSE_USE_FLASH_ATTENTION", "0")
    step(module, PLAIN.inputs())
    assert module.attention_reports[0].fused == 0


def test_nothing_is_fused_in_eval_mode() -> None:
    module = ORTModule(PLAIN.module()).eval()
    with torch.no_grad():
        result = module(**PLAIN.inputs())
        assert torch.allclose(result, PLAIN.module()(**PLAIN.inputs()), atol=1e-6)
    assert module.attention_reports == ()


def test_a_model_without_attention_reports_nothing() -> None:
    module = ORTModule(torch.nn.Linear(4, 4))
    module(torch.ones(2, 4)).sum().backward()
    (report,) = module.attention_reports
    assert report.sites == ()


def test_a_frozen_part_trains_the_rest() -> None:
    case = CASES["frozen_queries_and_keys"]
    module = ORTModule(case.module())
    found = step(module, case.inputs())
    assert module.attention_reports[0].fused == 1
    assert not {"query.weight", "key.weight"} & found.gradients.keys()
    assert_same(found, step(case.module(), case.inputs()))


def test_several_steps_learn_as_pytorch_does() -> None:
    modules = ORTModule(PLAIN.module()), PLAIN.module()
    for module in modules:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        for _ in range(5):
            step(module, PLAIN.inputs())
            optimizer.step()
    assert_same(step(modules[0], PLAIN.inputs()), step(modules[1], PLAIN.inputs()))


def test_lines_and_graphs_are_written(tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATTNFUSE_DEBUG", "2")
    step(ORTModule(PLAIN.module()), PLAIN.inputs())
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("attnfuse:")]
    assert lines[0] == "attnfuse: 1 of 1 attentions fused, forward and backward, on cpu"
    assert "4 heads of 8, no_mask): flash (CPU), forward and backward, without a mask" in lines[1]
    before, after = sorted(tmp_path.glob("attnfuse_*_*.onnx"), reverse=True)
    kinds = [{node.op_type for node in onnx.load(path).graph.node} for path in (before, after)]
    assert "Softmax" in kinds[0]
    assert "Softmax" not in kinds[1]


def test_other_ranks_are_silent(monkeypatch, capfd) -> None:
    monkeypatch.setenv("ATTNFUSE_DEBUG", "1")
    monkeypatch.setenv("RANK", "1")
    step(ORTModule(PLAIN.module()), PLAIN.inputs())
    assert "attnfuse:" not in capfd.readouterr().err


def test_under_distributed_data_parallel(monkeypatch) -> None:
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        module = ORTModule(PLAIN.module())
        parallel = torch.nn.parallel.DistributedDataParallel(module, find_unused_parameters=True)
        found = step(parallel, PLAIN.inputs())
    finally:
        torch.distributed.destroy_process_group()
    assert module.attention_reports[0].fused == 1
    assert found.result.shape == PLAIN.inputs()["x"].shape
    assert os.environ["RANK"] == "0"


@pytest.mark.parametrize("name", ["torch_causal", "torch_masked"])
def test_calls_are_fused_where_ortmodule_is_asked_to_keep_them(name: str) -> None:
    module = ORTModule(CASES[name].module(), policy=Policy(sdpa_fallback=True))
    found = step(module, CASES[name].inputs())
    assert module.attention_reports[0].fused == 1
    assert_same(found, step(CASES[name].module(), CASES[name].inputs()))


def test_a_defect_costs_the_fusing_and_not_the_training(monkeypatch) -> None:
    def broken(*arguments) -> None:
        raise TypeError("no such thing")

    monkeypatch.setattr("onnx_attnfuse.training.ortmodule.pipeline.fuse_graph", broken)
    module = ORTModule(PLAIN.module())
    found = step(module, PLAIN.inputs())
    (report,) = module.attention_reports
    assert report.defect is not None
    assert report.lines() == [f"attnfuse: the graph was left as it was: {report.defect}"]
    assert_same(found, step(PLAIN.module(), PLAIN.inputs()))
