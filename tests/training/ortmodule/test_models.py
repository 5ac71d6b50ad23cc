"""Models of transformers in the real ORTModule: result and every gradient as PyTorch has them, whatever the padding."""

from __future__ import annotations

import pytest

from onnx_attnfuse.training import ORTModule
from tests.training.models import PADDINGS, SPELLINGS, inputs, model
from tests.training.ortmodule.steps import assert_same, step

SITES = {"bert": 2, "gpt2": 2, "vit": 2, "llama": 2, "mistral": 2, "t5": 6}
FUSED = {"t5": 2}
"""The others have a position bias that is trained, which the CPU's kernel gives no gradient for."""
CASES = [(name, spelling, padding) for name, spelling in SPELLINGS for padding in (PADDINGS if name != "vit" else ("none",))]


@pytest.mark.parametrize(("name", "spelling", "padding"), CASES)
def test_models(name: str, spelling: str, padding: str) -> None:
    module = ORTModule(model(name, spelling))
    named = inputs(name, padding)
    found = step(module, named)
    (report,) = module.attention_reports
    mixed = name == "gpt2" and spelling == "eager" and padding != "none"  # scores replaced, then a mask added
    assert (len(report.sites), report.fused) == (SITES[name], 0 if mixed else FUSED.get(name, SITES[name]))
    assert_same(found, step(model(name, spelling), named))


@pytest.mark.parametrize(("name", "spelling"), SPELLINGS)
def test_other_lengths_need_no_other_graph(name: str, spelling: str) -> None:
    module = ORTModule(model(name, spelling))
    step(module, inputs(name, "right"))
    for batch, length in ((2, 12), (5, 4)):
        named = inputs(name, "left", batch, length)
        assert_same(step(module, named), step(model(name, spelling), named))
    assert len(module.attention_reports) == 1
