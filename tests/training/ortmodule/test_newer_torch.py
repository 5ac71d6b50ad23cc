"""ORTModule on the PyTorch that is installed: what has changed since is made up for, in ORTModule alone, and told once."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys

import pytest
import torch

from onnx_attnfuse.training import ORTModule
from onnx_attnfuse.training.ortmodule import newer_torch
from onnx_attnfuse.training.ortmodule.newer_torch import ortmodule
from tests.training.modules import CASES
from tests.training.ortmodule.steps import assert_same, step

PLAIN = CASES["plain"]
_PRESENT = """from onnx_attnfuse.training.ortmodule import newer_torch
print([change.name for change in newer_torch.BEFORE_IMPORT if change.present()])"""


class Rounded(torch.autograd.Function):
    """Rounding whose own backward part lets gradients through."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class WithFunction(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Rounded.apply(self.before(x))


def new_process(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=variables)


def test_nothing_is_left_to_make_up_for() -> None:
    ortmodule()
    changes = (*newer_torch.BEFORE_IMPORT, *newer_torch.AFTER_IMPORT)
    assert [change.name for change in changes if change.present()] == []


def test_changes_are_found_where_pytorch_has_them_and_nowhere_else() -> None:
    find = "import importlib.util; print(importlib.util.find_spec('torch.onnx._internal.jit_utils') is None)"
    moved = new_process(find).stdout.strip() == "True"
    names = new_process(_PRESENT).stdout
    assert (newer_torch.EXPORTER_MOVED.name in names) == moved
    assert (newer_torch.NAMES_HIDDEN.name in names) == moved


def test_exports_of_the_program_itself_stay_as_they_are() -> None:
    asked = inspect.signature(torch.onnx.export).parameters["dynamo"].default
    fresh = new_process("import inspect, torch; print(inspect.signature(torch.onnx.export).parameters['dynamo'].default)")
    assert str(asked) == fresh.stdout.strip()


def test_it_is_told_in_one_line() -> None:
    told = new_process("import onnx_attnfuse.training as t; t.enable(); t.enable()", ATTNFUSE_DEBUG="1").stderr.splitlines()
    lines = [line for line in told if line.startswith("attnfuse: ORTModule was made to run on torch")]
    assert len(lines) == ("moved" in new_process(_PRESENT).stdout)


def test_a_custom_function_keeps_its_own_backward_part_or_is_refused() -> None:
    x = torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(1))
    module = ORTModule(WithFunction())
    if newer_torch.interop_can_be_built():
        assert_same(step(module, {"x": x}), step(WithFunction(), {"x": x}))
        return
    with pytest.raises(Exception, match=r"has a torch\.autograd\.Function \(Rounded\).*or without ORTModule"):
        step(module, {"x": x})


def test_a_module_without_one_is_trained() -> None:
    assert_same(step(ORTModule(PLAIN.module()), PLAIN.inputs()), step(PLAIN.module(), PLAIN.inputs()))
