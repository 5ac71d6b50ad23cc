"""Fused modules are modules: state, hooks, checkpointing, accumulation, evaluation, other shapes, changed buffers, options."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.checkpoint import checkpoint

from onnx_attnfuse.errors import MissingDependencyError, OptionError
from onnx_attnfuse.kernels.policy import Policy
from onnx_attnfuse.training import REPORTS, fuse, wrap
from onnx_attnfuse.training.pytorch.reports import Reports
from tests.training.modules import CASES, LOWEST
from tests.training.pytorch import masked
from tests.training.pytorch.comparing import compiled, outcome, same
from tests.training.pytorch.masked import Masked, given


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def fused(module: torch.nn.Module, **options) -> torch.nn.Module:
    return fuse(module, rest="eager", **options)


def test_a_fused_module_is_the_module_with_its_state_and_hooks() -> None:
    module = Masked(masked.triangle)
    before, seen = dict(module.state_dict()), list[str]()
    module.register_forward_hook(lambda *_: seen.append("hook"))
    found = fused(module)
    found(**given())
    assert found is module
    assert list(found.state_dict()) == list(before)
    assert seen == ["hook"]
    assert [report.fused for report in found.attention_reports] == [1]


def test_torch_compile_knows_the_backend_by_its_name() -> None:
    module, reports = Masked(masked.triangle), Reports()
    call = reports.around(torch.compile(module, backend="attnfuse", options={"rest": "eager"}))
    same(outcome(module, module, given()), outcome(module, call, given()))
    assert [report.fused for report in reports] == [1]
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed, match="has no option 'speed'; choose rest, policy, flex"):
        torch.compile(module, backend="attnfuse", options={"speed": 1})(**given())


class Checkpointed(torch.nn.Module):
    """An attention that is computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Masked(masked.buffer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def test_attention_inside_of_a_checkpoint_is_fused() -> None:
    module = Checkpointed()
    call, reports = compiled(module)
    same(outcome(module, module, given()), outcome(module, call, given()))
    assert [(site.kernel, site.handed) for site in reports[-1].sites] == [("flash (CPU)", "causal by attribute")]


def test_gradients_accumulate() -> None:
    module = Masked(masked.triangle)
    call, _ = compiled(module)
    for model in (module, call):
        model(**given()).sum().backward()
    once = module.query.weight.grad.clone()
    module.zero_grad()
    module(**given()).sum().backward()
    torch.testing.assert_close(once, 2 * module.query.weight.grad, atol=1e-4, rtol=1e-4)


def test_evaluation_drops_nothing_and_training_does() -> None:
    module = CASES["plain"].module()
    module.attend = lambda query, key, value, module, mask: (
        torch.nn.functional.dropout((query @ key.transpose(2, 3)).softmax(-1), 0.5, module.training) @ value
    )
    call, reports = compiled(module)
    inputs = CASES["plain"].inputs()
    assert not torch.equal(call(**inputs), call(**inputs))
    module.eval()
    torch.testing.assert_close(call(**inputs), module(**inputs))
    assert [report.sites[0].dropout for report in reports] == [0.5, 0.0]


def test_other_lengths_are_captured_anew_with_lengths_that_change() -> None:
    module = Masked(masked.padded_triangle)
    call, reports = compiled(module)
    for length in (37, 23, 11):
        inputs = given("mask", length=length, padding="none")
        same(outcome(module, module, inputs), outcome(module, call, inputs))
    assert [report.fused for report in reports] == [1, 1]


def test_a_mask_whose_length_is_that_of_states_with_a_gradient_is_not_trained() -> None:
    module = Masked(masked.window)
    call, reports = compiled(module, flex=True)
    for length in (37, 23):
        inputs = given(length=length)
        same(outcome(module, module, inputs), outcome(module, call, inputs))
    assert [report.sites[0].kernel for report in reports] == ["flex", "flex"]


def test_axes_that_change_are_told_before() -> None:
    module = fused(Masked(masked.buffer), dynamic_shapes={"x": {1: "length"}})
    for length in (37, 23, 11):
        module(**given(length=length))
    assert [report.sites[0].handed for report in module.attention_reports] == ["causal by attribute"]


def test_a_mask_may_be_missing_in_one_step_and_given_in_the_next() -> None:
    module = CASES["padding"].module()
    module.attend = lambda query, key, value, module, mask: (
        (query @ key.transpose(2, 3) * 0.3 + (0.0 if mask is None else mask)).softmax(-1) @ value
    )
    call, reports = compiled(module)
    inputs = CASES["padding"].inputs()
    for step in ({"x": inputs["x"]}, inputs, {"x": inputs["x"]}):
        same(outcome(module, module, step), outcome(module, call, step))
    assert [report.sites[0].handed for report in reports] == ["without a mask", "its mask as a bias, rows without a key apart"]


def test_a_buffer_that_is_written_to_is_read_again() -> None:
    module = Masked(masked.buffer)
    call, reports = compiled(module)
    same(outcome(module, module, given()), outcome(module, call, given()))
    module.triangle[:, 3] = True
    same(outcome(module, module, given()), outcome(module, call, given()))
    module.triangle = torch.ones(64, 64, dtype=torch.bool).tril(2)
    same(outcome(module, module, given()), outcome(module, call, given()))
    handed = [report.sites[0].handed for report in reports]
    assert handed[0] == "causal by attribute"
    assert handed[1:] == ["its mask as truth values, rows without a key apart", "its mask as truth values"]


def test_a_buffer_that_is_written_with_what_it_held_is_not_read_again() -> None:
    module = Masked(masked.buffer)
    call, reports = compiled(module)
    call(**given())
    module.load_state_dict(module.state_dict())
    call(**given())
    assert len(reports) == 1


def test_scores_that_are_masked_in_place_are_read() -> None:
    module = CASES["plain"].module()

    def attend(query, key, value, module, mask):
        scores = query @ key.transpose(2, 3)
        scores *= 0.3
        scores.masked_fill_(torch.ones(7, 7, dtype=torch.bool).triu(1), LOWEST)
        return scores.softmax(-1) @ value

    module.attend = attend
    call, reports = compiled(module)
    inputs = CASES["plain"].inputs()
    same(outcome(module, module, inputs), outcome(module, call, inputs))
    assert [site.handed for site in reports[-1].sites] == ["causal by attribute"]


def test_scores_whose_part_is_written_to_are_left_alone() -> None:
    module = CASES["plain"].module()

    def attend(query, key, value, module, mask):
        scores = query @ key.transpose(2, 3) * 0.3
        scores[:, :, 2] = 0.0
        return scores.softmax(-1) @ value

    module.attend = attend
    call, reports = compiled(module)
    inputs = CASES["plain"].inputs()
    same(outcome(module, module, inputs), outcome(module, call, inputs))
    assert [report.fused for report in reports] == [0]


class SelfAttention(torch.nn.Module):
    """PyTorch's own attention over one input."""

    def __init__(self, *, weights: bool) -> None:
        super().__init__()
        self.inner, self.weights = torch.nn.MultiheadAttention(32, 4, batch_first=True), weights

    def forward(self, x: torch.Tensor, **given: torch.Tensor) -> torch.Tensor:
        result, weights = self.inner(x, x, x, **given)
        return result + weights.sum() if self.weights else result


@pytest.mark.parametrize("weights", [False, True])
def test_torchs_own_attention_is_opened_and_stays_where_its_weights_are_looked_at(weights) -> None:
    module = SelfAttention(weights=weights)
    call, reports = compiled(module)
    inputs = {"x": given()["x"], "attn_mask": torch.ones(37, 37, dtype=torch.bool).triu(1)}
    same(outcome(module, module, inputs), outcome(module, call, inputs))
    (site,) = reports[-1].sites
    assert site.fused != weights
    assert [reason.code for reason in site.reasons] == ["inner-value-used"] * weights


def test_torchs_own_layers_are_read_through() -> None:
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    module = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    call, reports = compiled(module)
    same(*(outcome(module, lambda x, run=run: run(x), {"x": given()["x"]}) for run in (module, call)))
    assert [(site.kernel, site.handed) for site in reports[-1].sites] == [("flash (CPU)", "the module's own call")] * 2


def test_blocks_that_are_fused_one_by_one_share_their_graphs_and_each_reports_them() -> None:
    blocks = [fused(Masked(masked.buffer)) for _ in range(12)]
    twins = [copy.deepcopy(block) for block in blocks]
    x, y = given()["x"], given()["x"]
    for block, twin in zip(blocks, twins, strict=True):
        x, y = block(x).detach(), twin(y).detach()
    torch.testing.assert_close(x, y)
    assert [[report.fused for report in block.attention_reports] for block in blocks] == [[1]] * 12
    assert {id(block.attention_reports[0]) for block in blocks} == {id(blocks[0].attention_reports[0])}


def test_blocks_that_share_a_graph_keep_the_masks_of_their_own_buffers() -> None:
    blocks = [fused(Masked(masked.buffer)) for _ in range(3)]
    blocks[1].triangle.fill_(True)
    twins = [copy.deepcopy(block) for block in blocks]
    for _ in range(2):
        for block, twin in zip(blocks, twins, strict=True):
            same(outcome(twin, twin, given()), outcome(block, block, given()))
    handed = [[report.sites[0].handed for report in block.attention_reports] for block in blocks]
    assert handed == [["causal by attribute"], ["its mask as truth values"], ["causal by attribute"]]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: torch.optim.swa_utils.AveragedModel(module).module])
def test_a_copy_is_not_compiled_and_reports_nothing_until_it_is_fused(duplicate) -> None:
    module = fused(Masked(masked.triangle))
    module(**given())
    other = duplicate(module)
    other(**given())
    assert (len(module.attention_reports), len(other.attention_reports)) == (1, 0)
    fused(other)(**given())
    assert [report.fused for report in other.attention_reports] == [1]


class WithoutAttention(torch.nn.Module):
    """A product of two inputs' channels, which weighs nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x.mT).relu()


def test_a_module_without_attention_is_reported_in_one_line(caplog) -> None:
    caplog.set_level("INFO", "onnx_attnfuse.training")
    fused(WithoutAttention())(torch.ones(1, 4))
    lines = [record.message for record in caplog.records if record.name == "onnx_attnfuse.training"]
    assert lines == ["attnfuse: found no attention in a captured graph on cpu"]


def test_calls_of_the_module_itself_are_counted_apart() -> None:
    module = fused(CASES["torch_causal"].module())
    module(**CASES["torch_causal"].inputs())
    (report,) = module.attention_reports
    assert report.lines()[0].startswith("attnfuse: 0 of 1 attentions fused, 1 kept as the module's own call, ")


def test_reports_of_modules_that_torch_compile_made_are_kept_together() -> None:
    before = len(REPORTS)
    torch.compile(Masked(masked.triangle), backend="attnfuse", options={"rest": "eager"})(**given())
    (report,) = REPORTS[before:]
    assert report.fused == 1


def test_a_variable_that_cannot_be_read_is_one_error_before_anything_is_captured(monkeypatch) -> None:
    monkeypatch.setenv("ATTNFUSE_USE_FLASH_ATTENTION", "yes")
    with pytest.raises(OptionError, match="ATTNFUSE_USE_FLASH_ATTENTION"):
        fused(Masked(masked.triangle))
    fused(Masked(masked.triangle), policy=Policy())(**given())


def test_policies_switch_kernels_off_and_say_so(monkeypatch) -> None:
    module = fused(CASES["plain"].module(), policy=Policy(flash=False))
    module(**CASES["plain"].inputs())
    ((site,),) = [report.sites for report in module.attention_reports]
    assert site.kernel == "math"
    assert [(name, reason.code) for name, reason in site.others] == [("flash (CPU)", "switched-off")]
    monkeypatch.setenv("ATTNFUSE_USE_FLASH_ATTENTION", "0")
    other = fused(CASES["plain"].module())
    other(**CASES["plain"].inputs())
    assert other.attention_reports[0].sites[0].kernel == "math"
    assert "ATTNFUSE_USE_FLASH_ATTENTION=0" in other.attention_reports[0].lines()[0]


def test_kernels_that_are_switched_off_do_not_run() -> None:
    from torch.profiler import ProfilerActivity, profile

    for policy, runs in ((Policy(), True), (Policy(flash=False), False)):
        module = fused(CASES["plain"].module(), policy=policy)
        module(**CASES["plain"].inputs())
        with profile(activities=[ProfilerActivity.CPU]) as found:
            module(**CASES["plain"].inputs())
        names = {item.key for item in found.key_averages()}
        assert ("aten::_scaled_dot_product_flash_attention_for_cpu" in names) == runs


def test_examples_are_captured_at_once_and_change_nothing() -> None:
    module = Masked(masked.triangle)
    state = torch.random.get_rng_state()
    fused(module, example_inputs=given())
    assert len(module.attention_reports) == 1
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_one_way_in_for_both_back_ends(backend) -> None:
    module = wrap(Masked(masked.triangle), backend=backend, rest="eager")
    module(**given())
    assert module.attention_reports[0].fused == 1
    with pytest.raises(OptionError, match="choose torch, ortmodule or auto"):
        wrap(Masked(masked.triangle), backend="jax")  # pyright: ignore[reportArgumentType]


def test_options_that_are_not_there_are_one_clear_error() -> None:
    with pytest.raises(OptionError, match="choose inductor, eager"):
        fuse(Masked(masked.triangle), rest="nowhere")
    with pytest.raises(OptionError, match="dynamic_shapes names 'y'; choose from x"):
        fuse(Masked(masked.triangle), dynamic_shapes={"y": {0: "batch"}})


def test_a_pytorch_that_is_too_old_is_one_clear_error(monkeypatch) -> None:
    package = importlib.import_module("onnx_attnfuse.training.pytorch")
    monkeypatch.setattr(torch, "__version__", "2.4.1")
    with pytest.raises(MissingDependencyError, match=r"needs torch 2\.11 or newer, and 2\.4\.1 is installed; run pip install"):
        importlib.reload(package)
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    importlib.reload(package)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inductor_compiles_the_rest() -> None:
    module = Masked(masked.padded_triangle)
    call, reports = compiled(module, rest="inductor")
    inputs = given("mask", padding="left")
    same(outcome(module, module, inputs), outcome(module, call, inputs))
    assert reports[-1].fused == 1
