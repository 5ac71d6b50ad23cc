"""Which gradients are right: of every parameter, with each way to train a model, beside the same model in float64.

    PYTHONPATH=.:patterns:cli python benchmarks/training_torch_gradients.py OUT_FOLDER [--only "vit-l 196"] [--device cpu --small]

Models are those of `training_torch.py`, of one block. torch.compile is tried as it is, without the patterns by which inductor
finds attention, and without one kernel of `scaled_dot_product_attention` or the other, so that what is wrong has a place.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.training_torch_models import Case, Model, best, blocks, cases, seen, spelled
from onnx_attnfuse.training import fuse

Made = Callable[[Case], torch.nn.Module]


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to train."""

    make: Made
    fused: bool = False
    compiled: bool = False
    patterns: bool = True
    without: str | None = None
    """A kernel of `scaled_dot_product_attention` that is off: flash, mem_efficient or cudnn."""


def _spelled(case: Case) -> torch.nn.Module:
    return Model(case, spelled, seen)


WAYS = {
    "eager": Way(_spelled),
    "by hand + compile": Way(lambda case: Model(case, best, blocks), compiled=True),
    "ours": Way(_spelled, fused=True),
    "ours + inductor": Way(_spelled, fused=True, compiled=True),
    "torch.compile": Way(_spelled, compiled=True),
    "torch.compile, no patterns": Way(_spelled, compiled=True, patterns=False),
    "torch.compile, no cudnn": Way(_spelled, compiled=True, without="cudnn"),
    "torch.compile, no flash": Way(_spelled, compiled=True, without="flash"),
    "torch.compile, no mem_efficient": Way(_spelled, compiled=True, without="mem_efficient"),
}


def measure(case: Case, name: str, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """How far the loss and each gradient are from those in float64, in parts of them, and the kernels of attention that ran."""
    way = WAYS[name]
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = way.make(case).to(device, dtype)
    true = _spelled(case).to(device, torch.float64)
    true.load_state_dict(
        {key: item.double() for key, item in module.state_dict().items() if key in true.state_dict()}, strict=False
    )
    inputs = case.inputs(device, dtype)
    expected = _step(true, {key: item.double() if item.is_floating_point() else item for key, item in inputs.items()})
    if way.fused:
        fuse(module, rest="inductor" if way.compiled else "eager")
    elif way.compiled:
        module.compile()
    with _switched(way):
        _step(module, inputs)
        with torch.profiler.profile() as profile:
            found = _step(module, inputs)
    distances = {
        key: float((found[key] - item).norm() / item.norm()) for key, item in expected.items() if not key.endswith("key.bias")
    }
    norms = {key: float(found[key].norm() / item.norm() - 1) for key, item in expected.items() if key.endswith("query.weight")}
    kernels = {event.name.removeprefix("aten::") for event in profile.events() or () if event.name.startswith("aten::_scaled")}
    return {"case": case.name, "way": name, "distances": distances, "norms": norms, "kernels": sorted(kernels)}


@contextlib.contextmanager
def _switched(way: Way) -> Iterator[None]:
    """Inductor without its patterns, and PyTorch without a kernel, as a way asks for."""
    config: Any = __import__("torch._inductor.config", fromlist=["config"])
    switch = None if way.without is None else getattr(torch.backends.cuda, f"enable_{way.without}_sdp")
    before = config.pattern_matcher
    config.pattern_matcher = way.patterns
    if switch is not None:
        switch(False)
    try:
        yield
    finally:
        config.pattern_matcher = before
        if switch is not None:
            switch(True)


def _step(module: torch.nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    module.zero_grad(set_to_none=True)
    loss = module(**inputs)
    loss.backward()
    gradients = {name: item.grad.double() for name, item in module.named_parameters() if item.grad is not None}
    return {"loss": loss.detach().double(), **gradients}


def words(row: dict[str, Any]) -> str:
    """A row as a line: the loss, the worst gradients, and what else tells where they come from."""
    worst = sorted(row["distances"].items(), key=lambda pair: -pair[1])[:3]
    told = ", ".join(f"{name} {distance:.1e}" for name, distance in worst)
    norms = ", ".join(f"{distance:+.1e}" for distance in row["norms"].values())
    return (
        f"{row['case']}, {row['way']}: {told}; norm of queries {norms}; {', '.join(row['kernels']) or 'no kernel of attention'}"
    )


def main() -> None:
    """Measures each way in turn, and writes after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", default="vit", help="parts of the names of cases, with commas")
    parser.add_argument("--dtype", default="bfloat16")
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    for case in cases(small=chosen.small):
        if not any(part in case.name for part in chosen.only.split(",")):
            continue
        for name in WAYS:
            try:
                row = measure(dataclasses.replace(case, layers=1), name, chosen.device, getattr(torch, chosen.dtype))
                line = words(row)
            except Exception as error:  # noqa: BLE001 - the others are measured all the same
                row = {"case": case.name, "way": name, "failure": f"{type(error).__name__}: {str(error).strip()[:200]}"}
                line = f"{case.name}, {name}: {row['failure']}"
            print(line, flush=True)
            with (chosen.folder / "training_torch_gradients.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
