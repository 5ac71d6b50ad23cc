"""Whether flex attention of fused modules has the loss and the gradients that the module has without fusing, mask by mask.

Each mask, with 1, 2 and 4 entries, in float32 and bfloat16, the rest run eagerly and compiled by inductor, at two lengths in
turn, by a graph for each and by one for both; the truth is the same module in float64 without fusing. A process for each row.
On a CPU flex attention has a gradient only where it is not compiled.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import WRONG, Benchmark, Cells, Row, Setting, printed, tried
from benchmarks.on_torch._models import Case, Model, seen, spelled

LENGTHS = (300, 640)
MASKS = (
    "right padding",
    "documents",
    "window",
    "left padding",
    "prefix",
    "window and padding",
    "alibi in a window",
    "soft cap",
    "soft cap and padding",
    "computed triangle",
)
_SHAPE: dict[str, Any] = {"width": 256, "heads": 4, "kv_heads": 2, "layers": 2, "window": 100, "document": 100}
_MOST = {torch.float32: 2e-4, torch.bfloat16: 4e-2}


def step(module: torch.nn.Module, hidden: Tensor, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The loss, and the gradients of all parameters and of the hidden states."""
    module.zero_grad(set_to_none=True)
    hidden = hidden.detach().requires_grad_()
    loss = module(hidden, **given)
    loss.backward()
    grads = {name: item.grad for name, item in module.named_parameters() if item.grad is not None}
    assert hidden.grad is not None
    return {"loss": loss.detach(), "hidden": hidden.grad, **grads}


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative distance; gradients that are 0 but for rounding (of key biases) are told by those of all."""
    floor = 1e-3 * max(float(item.norm()) for name, item in expected.items() if name != "loss")
    distances = [
        float((found[name].double() - item).norm() / item.norm().clamp(min=1e-30 if name == "loss" else floor))
        for name, item in expected.items()
    ]
    return math.nan if any(map(math.isnan, distances)) else max(distances)


def compared(mask: str, entries: int, rest: str, kind: str, device: str, *, dynamic: bool) -> str:
    """How far losses and gradients are from the truth, in parts of them, in brackets those of the module as it is."""
    from onnx_attnfuse.training import fuse

    dtype = getattr(torch, kind)
    torch._dynamo.config.automatic_dynamic_shapes = dynamic
    torch.manual_seed(0)
    cases = [Case(mask, mask, entries, length, **_SHAPE) for length in LENGTHS]
    plain, fused, true = (Model(cases[0], spelled, seen).to(device, kind) for kind in (dtype, dtype, torch.float64))
    true.load_state_dict(plain.state_dict())
    fused.load_state_dict(plain.state_dict())
    fuse(fused, rest=rest, flex=True)
    off, eager = 0.0, 0.0
    for case in cases:
        given = case.inputs(device, dtype)
        hidden = given.pop("hidden")
        expected = step(true, hidden.double(), given)
        off = max(off, apart(step(fused, hidden, given), expected))
        eager = max(eager, apart(step(plain, hidden, given), expected))
    sites = [site for report in fused.__dict__["attention_reports"] for site in report.sites]
    right = math.isfinite(off) and off <= max(_MOST[dtype], 3 * eager)
    return f"{'' if right else WRONG} {off:.1e} ({eager:.1e}) {'/'.join(sorted({str(site.kernel) for site in sites}))}".strip()


def measure(mask: str, entries: int, setting: Setting) -> Cells:
    """A column for each backend, type and kind of graph."""
    found: dict[str, str] = {}
    rests = ("inductor", "eager") if setting.cuda else ("eager",)
    kinds = ("bfloat16", "float32") if setting.cuda else ("float32",)
    settings = {"ATTNFUSE_DEBUG": "0", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    for rest, kind, graph in itertools.product(rests, kinds, ("static", "dynamic")[: 1 + (entries > 1 and setting.cuda)]):
        words = "benchmarks.on_torch.flex", mask, entries, rest, kind, setting.provider, graph
        found[f"{rest}, {kind}, {graph}"] = tried(functools.partial(printed, *words, seconds=600, environment=settings)).strip()
    return found


def rows(setting: Setting) -> Iterator[Row]:
    """A row for each mask and number of entries."""
    for mask in setting.some(MASKS):
        for entries in setting.some((4, 1, 2)):
            yield Row(f"{mask}, {entries}", functools.partial(measure, mask, entries))


BENCHMARK = Benchmark("Flex attention beside float64", rows, "The largest of all losses and gradients (the module as it is).")

if __name__ == "__main__":
    _, name, count, rest_of, dtype_of, place, graphs = sys.argv
    print(compared(name, int(count), rest_of, dtype_of, place, dynamic=graphs == "dynamic"))
