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

import argparse
import contextlib
import dataclasses
import json
import math
import pathlib
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch

RESULTS = pathlib.Path(__file__).parent / "results" / "training_modules.md"
DROPOUT = 0.1
_WIDTH, _HEADS, _LENGTH, _BATCH = 32, 4, 7, 3
Inputs = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Row:
    """One module with one back end."""

    module: str
    variant: str
    sites: int = 0
    fused: int = 0
    handed: str = ""
    """How masks are passed, and on which kernels, or why an attention stays."""
    result: float | None = None
    gradients: float | None = None
    """How far result and gradients are from eager's, in parts of the largest, at worst over all paddings."""
    failure: str = ""


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


def measured(subject: Subject, backend: str) -> Row:
    """Trains a module for a step with every input, beside eager."""
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
    except Exception as error:  # noqa: BLE001 - a row of its own
        return Row(subject.name, subject.variant, failure=f"{type(error).__name__}: {str(error).strip()[:80]}")
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
    result, gradients = (None, None) if subject.drops else worst
    return Row(subject.name, subject.variant, len(sites), fused, "; ".join(words), result, gradients)


def _step(module: torch.nn.Module, inputs: Inputs, backend: str) -> Any:
    """One step; beside ORTModule PyTorch's own fused kernels are off, whose gradients of rows without a key are wrong."""
    from tests.training.ortmodule import steps

    if backend == "ortmodule":
        return steps.step(module, inputs)
    with mock.patch.object(steps, "sdpa_kernel", return_value=contextlib.nullcontext()):
        return steps.step(module, inputs)


def _larger(one: float, other: float) -> float:
    return one if math.isnan(one) or one > other else other


def table(found: Mapping[str, list[Row]]) -> str:
    """All rows, a column for each back end."""
    names = list(found)
    rows = list(dict.fromkeys((row.module, row.variant) for item in found.values() for row in item))
    lines = [
        "# Modules in training",
        "",
        "Attentions fused of those found, on the CPU, and how far the result and the worst gradient of any parameter are from",
        "eager's, in parts of the largest, at worst over every padding (right, left, holes, all of an entry). With dropout other",
        "weights are dropped than in eager, so nothing is compared. What `-1e4` masks is compared in float64 on PyTorch,",
        "as eager rounds it in float32; ORTModule has no float64. `make training-modules` writes this.",
        "",
        f"| | module | {' | '.join(names)} | of the first, how |",
        "|---|---|" + "---|" * (len(names) + 1),
    ]
    for key in rows:
        at = {name: next((row for row in item if (row.module, row.variant) == key), None) for name, item in found.items()}
        first = at[names[0]]
        lines.append(f"| {' | '.join([*key, *map(_cell, at.values())])} | {'' if first is None else first.handed} |")
    if any(row.failure for item in found.values() for row in item):
        lines += ["", "Not trained:", ""]
    lines += [f"- {name}, {row.variant}: {row.failure}" for name, item in found.items() for row in item if row.failure]
    return "\n".join(lines) + "\n"


def _cell(row: Row | None) -> str:
    if row is None or row.failure:
        return "" if row is None else "not trained"
    off = "" if row.result is None or row.gradients is None else f", {row.result:.0e}, {row.gradients:.0e}"
    return f"{row.fused} of {row.sites}{off}"


def run(backend: str, only: str) -> None:
    """The process of a back end: a line of JSON for what runs, then one for each module."""
    warnings.filterwarnings("ignore")
    names = {"torch": "PyTorch", "ortmodule": "ORTModule"}
    sys.stdout.write(json.dumps(f"{names[backend]}, torch {torch.__version__}") + "\n")
    sys.stdout.flush()  # what ORTModule finds unwritten when it exports, it swallows
    for subject in subjects():
        if only not in subject.variant:
            continue
        sys.stdout.write(json.dumps(dataclasses.asdict(measured(subject, backend))) + "\n")
        sys.stdout.flush()


def main() -> None:
    """Runs every back end in its interpreter, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backends", nargs="+", help="torch=PYTHON or ortmodule=PYTHON; without an interpreter: prints its rows")
    parser.add_argument("--to", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--only", default="", help="a part of the names of modules, of one back end")
    chosen = parser.parse_args()
    if len(chosen.backends) == 1 and "=" not in chosen.backends[0]:
        run(chosen.backends[0], chosen.only)
        return
    found: dict[str, list[Row]] = {}
    for item in chosen.backends:
        backend, python = item.split("=", 1)
        command = [python, "-W", "ignore", "-m", "benchmarks.training_modules", backend]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
        name, *rows = [json.loads(line) for line in done.stdout.splitlines() if line[:1] in {'"', "{"}]
        found[name] = [Row(**row) for row in rows]
        chosen.to.write_text(table(found))


if __name__ == "__main__":
    main()
