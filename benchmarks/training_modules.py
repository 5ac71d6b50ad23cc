"""Modules in training with every back end: how many attentions are fused, and how far results and gradients are from eager's.

    python -m benchmarks.training_modules torch=.venv/bin/python ortmodule=.venv-training/bin/python \\
        ortmodule=.venv-training-newest/bin/python [--to benchmarks/results/training_modules.md]

Each back end runs in the interpreter that is given for it, with that one's PyTorch; `make training-modules` does all of it. The
modules are the tests' own in every spelling, those of torch.nn, and models of transformers with every padding, with and without
dropout.
"""

from __future__ import annotations

import os

os.environ |= {"ORTMODULE_FALLBACK_POLICY": "FALLBACK_DISABLE", "ATTNFUSE_DEBUG": "0", "OMP_NUM_THREADS": "1"}

import contextlib
import dataclasses
import json
import math
import pathlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from unittest import mock

import click
import torch

if TYPE_CHECKING:
    from benchmarks.harness import Row

RESULTS = pathlib.Path(__file__).parent / "results" / "training_modules.md"
DROPOUT = 0.1
_WIDTH, _HEADS, _LENGTH, _BATCH = 32, 4, 7, 3
Inputs = dict[str, torch.Tensor]


class Own(torch.nn.Module):
    """A module of torch.nn that is given a mask in one of the ways it takes one."""

    def __init__(self, kind: str, dropout: float) -> None:
        super().__init__()
        self.kind = kind
        size: dict[str, Any] = {"dropout": dropout, "batch_first": True}
        if kind.startswith("MultiheadAttention"):
            self.inner: torch.nn.Module = torch.nn.MultiheadAttention(_WIDTH, _HEADS, **size)
        elif kind.startswith("TransformerEncoder"):
            layer = torch.nn.TransformerEncoderLayer(_WIDTH, _HEADS, 64, **size)
            self.inner = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        else:
            self.inner = torch.nn.TransformerDecoder(torch.nn.TransformerDecoderLayer(_WIDTH, _HEADS, 64, **size), 2)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """(b, s, width), and (b, s) true where a position is padding."""
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        if self.kind == "MultiheadAttention":
            return self.inner(x, x, x, need_weights=False)[0]
        if self.kind == "MultiheadAttention, triangle":
            return self.inner(x, x, x, attn_mask=later, need_weights=False)[0]
        if self.kind == "MultiheadAttention, padding":
            return self.inner(x, x, x, key_padding_mask=mask, need_weights=False)[0]
        if self.kind == "TransformerEncoder, padding":
            return self.inner(x, src_key_padding_mask=mask)
        if self.kind == "TransformerEncoder":
            return self.inner(x)
        told = {"tgt_is_causal": False} if "tgt_is_causal" in self.kind else {}
        return self.inner(x, x.flip(1), tgt_mask=later, **told)


OWN = (
    "MultiheadAttention",
    "MultiheadAttention, triangle",
    "MultiheadAttention, padding",
    "TransformerEncoder",
    "TransformerEncoder, padding",
    "TransformerDecoder",
    "TransformerDecoder, tgt_is_causal=False",
)


def given(padding: str) -> Inputs:
    """What modules of torch.nn are fed."""
    mask = torch.zeros(_BATCH, _LENGTH, dtype=torch.bool)
    mask[0, slice(*{"right": (4, None), "left": (0, 3), "holes": (2, 4)}[padding])] = True
    return {"x": torch.randn(_BATCH, _LENGTH, _WIDTH, generator=torch.Generator().manual_seed(1)), "mask": mask}


@dataclasses.dataclass(frozen=True)
class Subject:
    """A module to train, and what it is fed."""

    name: str
    variant: str
    make: Callable[[], torch.nn.Module]
    inputs: tuple[Inputs, ...]
    drops: bool
    """Its weights are dropped at random, so that nothing can be compared."""
    double: bool = False
    """Rounded too much in float32 to be compared there."""


def subjects() -> Iterator[Subject]:
    """All modules."""
    from tests.training import models, modules

    for name, case in modules.CASES.items():
        if not case.autocast:
            yield Subject(
                "one attention", name, case.module, (case.inputs(),), "drop" in name and name != "not_dropped", case.double
            )
    for kind in OWN:
        for dropout in (0.0, DROPOUT):
            paddings = ("right", "left", "holes") if "padding" in kind else ("right",)
            make = _seeded(lambda kind=kind, dropout=dropout: Own(kind, dropout))
            yield Subject("torch.nn", f"{kind}{_words(dropout)}", make, tuple(map(given, paddings)), dropout > 0)
    for name, spelling in models.SPELLINGS:
        for dropout in (0.0, DROPOUT):
            paddings = models.PADDINGS if name != "vit" else ("none",)
            inputs = [models.inputs(name, padding) for padding in paddings if dropout == 0 or padding in {"right", "none"}]
            groups = {False: [item for item in inputs if "attention_mask" not in item]}
            groups[True] = [item for item in inputs if "attention_mask" in item]
            for masked, group in groups.items():
                make = _seeded(lambda name=name, spelling=spelling, dropout=dropout: models.model(name, spelling, dropout))
                words = f"{name} {spelling}{', padded' * masked}{_words(dropout)}"
                if group:
                    yield Subject("transformers", words, make, tuple(group), dropout > 0)


def _words(dropout: float) -> str:
    return f", dropout {dropout:g}" if dropout else ""


def _seeded(make: Callable[[], torch.nn.Module]) -> Callable[[], torch.nn.Module]:
    def made() -> torch.nn.Module:
        torch.manual_seed(0)
        return make().train()

    return made


def measured(subject: Subject, backend: str) -> tuple[str, str]:
    """A module's cell, after a step with every input beside eager, and how masks are passed, or why an attention stays."""
    from onnx_attnfuse.training import wrap
    from tests.training.ortmodule.steps import apart

    options = {"rest": "eager"} if backend == "torch" else {}
    torch.set_default_dtype(torch.float32)
    dtype = torch.float64 if subject.double and backend == "torch" else torch.float32
    try:
        torch._dynamo.reset()
        module = wrap(subject.make().to(dtype), backend=backend, **options)  # type: ignore[arg-type]
        worst = [0.0, 0.0]
        for inputs in subject.inputs:
            cast = {name: item.to(dtype) if item.is_floating_point() else item for name, item in inputs.items()}
            found = _step(module, cast, backend)
            if not subject.drops:
                off = apart(found, _step(subject.make().to(dtype), cast, backend))
                worst = [_larger(*pair) for pair in zip(worst, off, strict=True)]
    except Exception as error:  # noqa: BLE001 - a cell of its own
        words = " ".join(f"{type(error).__name__}: {error}".split())
        return f"not trained: {words[:100]}".replace("|", "/"), ""
    sites = [
        site for report in module.__dict__.get("attention_reports", None) or module.attention_reports for site in report.sites
    ]
    words = dict.fromkeys(
        f"{site.kernel}, {site.handed}"
        if site.fused
        else ", ".join(reason.code for reason in (*site.reasons, *(r for _, r in site.others)))
        for site in sites
    )
    fused = sum(site.fused for site in sites)
    off = "" if subject.drops else f", {worst[0]:.0e}, {worst[1]:.0e}"
    return f"{fused} of {len(sites)}{off}", "; ".join(words)


def _step(module: torch.nn.Module, inputs: Inputs, backend: str) -> Any:
    """One step; beside ORTModule PyTorch's own fused kernels are off, whose gradients of rows without a key are wrong."""
    from tests.training.ortmodule import steps

    if backend == "ortmodule":
        return steps.step(module, inputs)
    with mock.patch.object(steps, "sdpa_kernel", return_value=contextlib.nullcontext()):
        return steps.step(module, inputs)


def _larger(one: float, other: float) -> float:
    return one if math.isnan(one) or one > other else other


NOTE = """\
Attentions fused of those found, on the CPU, and how far the result and the worst gradient of any parameter are from
eager's, in parts of the largest, at worst over every padding (right, left, holes, all of an entry). With dropout other
weights are dropped than in eager, so nothing is compared. What `-1e4` masks is compared in float64 on PyTorch,
as eager rounds it in float32; ORTModule has no float64. The last column says how masks are passed by the first back end."""
Found = Mapping[str, Mapping[tuple[str, str], tuple[str, str]]]
"""What each back end makes of each module."""


def rows(found: Found) -> Iterator[Row]:
    """A row for each module, a column for each back end."""
    from benchmarks.harness import Row

    first = next(iter(found.values()))
    for label in dict.fromkeys(label for cells in found.values() for label in cells):
        cells = {name: made.get(label, ("", ""))[0] for name, made in found.items()}
        yield Row(label, lambda _, label=label, cells=cells: {**cells, "of the first, how": first.get(label, ("", ""))[1]})


def run(backend: str, only: str) -> None:
    """The process of a back end: a line of JSON for what runs, then one for each module."""
    warnings.filterwarnings("ignore")
    names = {"torch": "PyTorch", "ortmodule": "ORTModule"}
    print(json.dumps(f"{names[backend]}, torch {torch.__version__}"), flush=True)  # what it finds unwritten ORTModule swallows
    for subject in subjects():
        if only in subject.variant:
            print(json.dumps([subject.name, subject.variant, *measured(subject, backend)]), flush=True)


@click.command()
@click.argument("backends", nargs=-1, required=True)
@click.option("--to", type=pathlib.Path, default=RESULTS)
@click.option("--only", default="", help="A part of the names of modules.")
def main(backends: tuple[str, ...], to: pathlib.Path, only: str) -> None:
    """Runs every back end, `torch=PYTHON` or `ortmodule=PYTHON`, and writes the table; one by itself prints its rows."""
    if "=" not in backends[0]:
        run(backends[0], only)
        return
    from benchmarks.harness import Benchmark, Setting, page, printed

    found: dict[str, dict[tuple[str, str], tuple[str, str]]] = {}
    for backend, _, python in (item.partition("=") for item in backends):
        lines = printed("benchmarks.training_modules", backend, "--only", only, python=python).splitlines()
        name, *made = [json.loads(line) for line in lines if line[:1] in {'"', "["}]
        found[name] = {(kind, variant): (cell, how) for kind, variant, cell, how in made}
        page(
            Benchmark("Modules in training", lambda _: rows(found), NOTE, ("", "module")),
            Setting("cpu"),
            "make training-modules",
            to,
        )


if __name__ == "__main__":
    main()
