"""Kernels that are asked for by name, and gradients that are to be the same bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch.nn import attention

from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.training import fuse
from onnx_attnfuse.training.kernels import CUDNN, EFFICIENT, FLASH, TrainingDevice
from onnx_attnfuse.training.pytorch import captured_graph
from onnx_attnfuse.training.pytorch.backend import known_kernel
from onnx_attnfuse.training.pytorch.plan import is_deterministic
from tests.training.modules import CASES
from tests.training.pytorch import masked
from tests.training.pytorch.comparing import check
from tests.training.pytorch.masked import Masked, given


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are planned for an H100, and run on the CPU."""
    monkeypatch.setattr(captured_graph._Run, "_device", lambda *_: TrainingDevice("cuda", 90, (2, 13)))


@pytest.fixture
def switched() -> object:
    """PyTorch is asked for deterministic algorithms."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def planned(rule=masked.triangle, **options):
    """The report on an attention in half precision, planned for whichever device there is taken to be."""
    inputs = {name: item.to(torch.bfloat16) if item.is_floating_point() else item for name, item in given("mask").items()}
    (site,) = check(Masked(rule, -torch.inf).to(torch.bfloat16), inputs, 5e-2, flex=False, **options).sites
    return site


@pytest.mark.parametrize(("kernels", "kernel"), [(["math"], "math"), (["FLASH", "math"], "flash (CPU)"), (["efficient"], None)])
@pytest.mark.parametrize("case", ["plain", "torch_zeroed"])
def test_kernels_are_asked_for_by_name_in_calls_of_the_module_too(kernels, kernel, case) -> None:
    (site,) = check(CASES[case].module(), CASES[case].inputs(), kernels=tuple(kernels)).sites
    if kernel is not None or case == "plain":
        assert (site.kernel, site.own_call) == (kernel, False)
    codes = [reason.code for reason in site.reasons] + [reason.code for _, reason in site.others]
    assert ("no-such-kernel" in codes) == (kernel is None)


def test_names_of_kernels_that_are_not_there_are_one_clear_error(monkeypatch) -> None:
    with pytest.raises(OptionError, match="kernels names 'fast'; choose from flash, cudnn, efficient, flex, math, flash 2"):
        fuse(Masked(masked.triangle), kernels=["fast"])
    with pytest.raises(OptionError, match="kernels names 'efficient 2'"):
        fuse(Masked(masked.triangle), kernels=["efficient 2"])

    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named '{name}'")

    monkeypatch.setattr(attention, "activate_flash_attention_impl", missing)
    with pytest.raises(OptionError, match=r"flash 3 cannot be used \(No module named 'FA3'\); install it, or choose flash"):
        known_kernel("flash 3")


def test_a_version_of_flash_attention_is_activated_once(monkeypatch) -> None:
    active: list[str] = []
    monkeypatch.setattr(attention, "activate_flash_attention_impl", active.append)
    monkeypatch.setattr(attention, "current_flash_attention_impl", lambda: active[-1] if active else None)
    assert [known_kernel(name) for name in ("flash 4", "flash 4", "flash 2", "flash")] == ["flash"] * 4
    assert active == ["FA4"]


@pytest.mark.usefixtures("on_a_gpu")
def test_kernels_are_tried_in_the_order_in_which_they_are_named() -> None:
    assert planned().kernel == "flash"
    assert planned(kernels=("efficient", "flash", "math")).kernel == "efficient"
    assert planned(kernels=("cudnn", "flash", "math")).kernel == "cuDNN"
    assert planned(masked.padding, kernels=("cudnn", "efficient", "math")).kernel == "efficient"


@pytest.mark.usefixtures("on_a_gpu")
def test_kernels_whose_gradients_differ_are_reported_and_left_out_where_others_are_asked_for() -> None:
    site = planned()
    assert not site.deterministic
    assert site.line().endswith(", not deterministic")
    other = planned(deterministic=True)
    assert (other.kernel, other.deterministic) == ("math", True)
    assert {name: reason.code for name, reason in other.others} == dict.fromkeys(["flash", "efficient"], "not-deterministic")


@pytest.mark.usefixtures("on_a_gpu", "switched")
def test_pytorchs_own_switch_makes_kernels_deterministic_and_leaves_out_those_that_it_does_not() -> None:
    site = planned(kernels=("cudnn", "flash", "math"))
    assert (site.kernel, site.deterministic) == ("flash", True)
    assert [(name, reason.code) for name, reason in site.others] == [("cuDNN", "not-deterministic")]


@pytest.mark.usefixtures("switched")
def test_a_switch_that_only_warns_changes_no_kernel() -> None:
    assert list(map(is_deterministic, (FLASH, EFFICIENT, CUDNN))) == [True, True, False]
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert not any(map(is_deterministic, (FLASH, EFFICIENT, CUDNN)))


def test_a_cpu_is_deterministic() -> None:
    assert planned(deterministic=True).deterministic
