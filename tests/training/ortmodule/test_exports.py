"""What PyTorch's exporter spells so that ORTModule cannot train it: exported another way, right forward and backward."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys

import pytest
import torch
from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference
from torch.nn import functional

from onnx_attnfuse.training import ORTModule
from onnx_attnfuse.training.ortmodule.newer_torch import ortmodule
from onnx_attnfuse.training.ortmodule.symbolics import gives_zeros
from tests.training.modules import KEPT
from tests.training.ortmodule.steps import assert_same, step

_HAS_GROUPS = "enable_gqa" in str(functional.scaled_dot_product_attention.__doc__)


class ManyHeads(torch.nn.Module):
    """PyTorch's own module, which unflattens its projection."""

    def __init__(self, *, weights: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = weights
        self.attention = torch.nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        return self.attention(x, x, x, key_padding_mask=padding, need_weights=self.weights)[0]


class Unflattened(torch.nn.Module):
    """A Linear whose result is unflattened along an axis in the middle, counted from either end."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.axis = axis
        self.before = torch.nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.before(x).transpose(1, 2).unflatten(self.axis, (4, 2)).sum(2)


class Grouped(torch.nn.Module):
    """Fewer heads of keys and values than of queries, given to PyTorch as they are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = (torch.nn.Linear(32, size) for size in (32, 16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        named = (self.query, 4), (self.key, 2), (self.value, 2)
        query, key, value = (item(x).view(x.shape[0], x.shape[1], heads, 8).transpose(1, 2) for item, heads in named)
        groups = {"enable_gqa": True} if _HAS_GROUPS else {}
        if not _HAS_GROUPS:
            key, value = (item.repeat_interleave(2, 1) for item in (key, value))
        return functional.scaled_dot_product_attention(query, key, value, **groups).transpose(1, 2)


class Masked(torch.nn.Module):
    """`scaled_dot_product_attention` with a mask that may leave a row without a key."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = (torch.nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        split = (item(x).view(x.shape[0], x.shape[1], 4, 8).transpose(1, 2) for item in (self.query, self.key, self.value))
        return functional.scaled_dot_product_attention(*split, attn_mask=mask).transpose(1, 2)


def images() -> torch.Tensor:
    return torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(1))


def kept(*, dead: bool) -> torch.Tensor:
    mask = torch.ones(3, 1, 1, 7, dtype=torch.bool)
    mask[0, ..., 4:] = False
    mask[1] = not dead
    return mask


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("weights", [False, True])
def test_multihead_attention(weights: bool, padded: bool) -> None:
    named = {"x": images()} | ({"padding": kept(dead=False)[:, 0, 0].logical_not()} if padded else {})
    module = ORTModule(ManyHeads(weights=weights))
    found = step(module, named)
    assert [site.fused for site in module.attention_reports[0].sites] == [True]
    assert_same(found, step(ManyHeads(weights=weights), named))


def test_without_shape_inference_it_is_trained_and_told(monkeypatch, capfd) -> None:
    def fails(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setenv("ATTNFUSE_DEBUG", "1")
    monkeypatch.setattr(SymbolicShapeInference, "infer_shapes", staticmethod(fails))
    found = step(ORTModule(ManyHeads(weights=False)), {"x": images()})
    told = [line for line in capfd.readouterr().err.splitlines() if "infer the shapes" in line]
    assert told == [
        "attnfuse: ONNX Runtime cannot infer the shapes of this module (AssertionError in fails); it is trained without them"
    ]
    assert_same(found, step(ManyHeads(weights=False), {"x": images()}))


def test_what_nothing_is_fused_in_fails_as_it_did(monkeypatch) -> None:
    monkeypatch.setattr(SymbolicShapeInference, "infer_shapes", staticmethod(lambda *_, **__: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        step(ortmodule().ORTModule(Unflattened(1)), {"x": images()})


@pytest.mark.parametrize("axis", [1, -2])
def test_unflatten(axis: int) -> None:
    named = {"x": images()}
    assert_same(step(ORTModule(Unflattened(axis)), named), step(Unflattened(axis), named))


def test_grouped_heads() -> None:
    module = ORTModule(Grouped())
    found = step(module, {"x": images()})
    assert [site.fused for site in module.attention_reports[0].sites] == [True]
    assert_same(found, step(Grouped(), {"x": images()}))


@pytest.mark.parametrize("name", ["torch_scaled", "torch_causal"])
def test_a_scale_that_a_module_gives_is_its_scale_and_none_is_pytorchs(name: str) -> None:
    case = KEPT[name]
    module = ORTModule(case.module())
    found = step(module, case.inputs())
    assert [site.fused for site in module.attention_reports[0].sites] == [True]
    assert_same(found, step(case.module(), case.inputs()))


@pytest.mark.parametrize("dead", [False, True])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_rows_without_a_key_are_as_eager_has_them(kind: str, dead: bool) -> None:
    mask = kept(dead=dead)
    named = {"x": images(), "mask": mask if kind == "bool" else torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)}
    found, wanted = (step(module, named) for module in (ORTModule(Masked()), Masked()))
    assert bool(wanted.result.isnan().any()) == (dead and not gives_zeros())
    assert torch.allclose(found.result, wanted.result, atol=1e-6, equal_nan=True)
    for name, gradient in wanted.gradients.items():
        assert torch.allclose(found.gradients[name], gradient, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("asked", ["0", "1"])
def test_ortmodules_own_fallback_does_not_fail(asked: str) -> None:
    program = inspect.cleandoc("""
        from tests.training.modules import CASES
        from tests.training.ortmodule.steps import assert_same, step
        from onnx_attnfuse.training import ORTModule
        for name in ("torch_causal", "torch_masked"):
            module = ORTModule(CASES[name].module())
            assert_same(step(module, CASES[name].inputs()), step(CASES[name].module(), CASES[name].inputs()))
            print([site.fused for site in module.attention_reports[0].sites], flush=True)
    """)
    variables = {**os.environ, "ORTMODULE_ATEN_SDPA_FALLBACK": asked}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=variables)
    assert done.stdout.splitlines()[-2:] == ["[True]"] * 2
