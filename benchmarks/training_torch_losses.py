"""A small language model trained on text that comes with Python: eager, torch.compile, ours, and with ORTModule, loss by loss.

    PYTHONPATH=.:patterns:cli python benchmarks/training_torch_losses.py OUT.md [--steps 200] [--ortmodule PYTHON]

PYTHON is an interpreter that has onnxruntime-training. Beside OUT.md there is a picture, OUT.svg.
"""

from __future__ import annotations

import os

os.environ |= {"ATTNFUSE_DEBUG": "0", "ORTMODULE_FALLBACK_POLICY": "FALLBACK_DISABLE", "OMP_NUM_THREADS": "1"}

import argparse
import importlib
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable, Mapping
from pydoc_data.topics import topics

import torch
from torch.nn import functional

from benchmarks.loss_picture import picture
from benchmarks.on_torch._models import Block, Case, seen, spelled
from onnx_attnfuse.training import wrap

BATCH, LENGTH, WIDTH = 8, 64, 64
CASE = Case("gpt", "padding", BATCH, LENGTH, WIDTH, 4, 4, 2)
_SHOWN = 25
Wrapper = Callable[[torch.nn.Module], torch.nn.Module]


def _compiled(module: torch.nn.Module) -> torch.nn.Module:
    module.compile()
    return module


def _ortmodule(home: str) -> Wrapper:
    """ORTModule's own class, or ours, imported when it is used."""
    return lambda module: importlib.import_module(home).ORTModule(module)


WRAPPERS: Mapping[str, Wrapper] = {
    "eager": lambda module: module,
    "torch.compile": _compiled,
    "ours": lambda module: wrap(module, backend="torch", rest="eager"),
    "ours + inductor": lambda module: wrap(module, backend="torch"),
}
ORTMODULE: Mapping[str, Wrapper] = {
    "ours, ORTModule": _ortmodule("onnx_attnfuse.training"),
    "plain ORTModule": _ortmodule("onnxruntime.training.ortmodule"),
}
"""Ours first, as that makes ORTModule run on a PyTorch that it does not know."""


def batches(steps: int) -> list[torch.Tensor]:
    """Pieces of Python's own documentation, as bytes."""
    text = torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()))
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(text) - LENGTH - 1, (steps, BATCH), generator=generator)
    return [torch.stack([text[start : start + LENGTH + 1] for start in row.tolist()]) for row in starts]


class Model(torch.nn.Module):
    """Two blocks on bytes, and their loss; the first entries of a batch are padded."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = torch.nn.Embedding(256, WIDTH), torch.nn.Embedding(LENGTH, WIDTH)
        self.blocks = torch.nn.ModuleList([Block(CASE, spelled) for _ in range(CASE.layers)])
        self.head = torch.nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        given = seen(CASE, hidden, mask=mask)
        for block in self.blocks:
            hidden = block(hidden, **given)
        losses = functional.cross_entropy(self.head(hidden).reshape(-1, 256), labels.reshape(-1), reduction="none")
        return (losses * mask.reshape(-1)).sum() / mask.sum()


def losses(wrapped: Wrapper, steps: int) -> list[float]:
    """The loss of each step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = wrapped(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mask = CASE.inputs("cpu", torch.float32)["mask"]
    found = list[float]()
    for batch in batches(steps):
        loss = model(batch[:, :-1].contiguous(), batch[:, 1:].contiguous(), mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def beside(python: str, steps: int) -> tuple[dict[str, list[float]], str]:
    """The losses with ORTModule, by another interpreter, and what that has."""
    command = [python, "-W", "ignore", __file__, "-", "--steps", str(steps)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return found["losses"], found["torch"]


def table(found: Mapping[str, list[float]], steps: int) -> list[str]:
    """Some steps, and how far each is from eager's at most."""
    names = list(found)
    shown = [*range(0, steps, _SHOWN), steps - 1]
    return [
        "| step | " + " | ".join(names) + " |",
        "|---:|" + "---:|" * len(names),
        *(f"| {step + 1} | " + " | ".join(f"{found[name][step]:.5f}" for name in names) + " |" for step in shown),
        "",
        "Largest difference from eager:",
        "",
        *(
            f"- {name}: {max(abs(one - other) for one, other in zip(found[name], found['eager'], strict=True)):.1e}"
            for name in names[1:]
        ),
    ]


def main() -> None:
    """Trains with each, and writes a table and a picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ortmodule", metavar="PYTHON", help="trains with ORTModule as well, in this interpreter")
    chosen = parser.parse_args()
    if str(chosen.out) == "-":
        found = {name: losses(wrapped, chosen.steps) for name, wrapped in ORTMODULE.items()}
        sys.stdout.write(json.dumps({"losses": found, "torch": torch.__version__}) + "\n")
        return
    found = {name: losses(wrapped, chosen.steps) for name, wrapped in WRAPPERS.items()}
    where = f"torch {torch.__version__} on the CPU, float32"
    if chosen.ortmodule is not None:
        others, version = beside(chosen.ortmodule, chosen.steps)
        found |= others
        where += f", ORTModule with torch {version}"
    image = chosen.out.with_suffix(".svg")
    head = ["# Losses on PyTorch", "", f"A language model of two blocks on bytes, its mask spelled out, {where}.", ""]
    chosen.out.write_text("\n".join([*head, f"![loss by step]({image.name})", "", *table(found, chosen.steps)]) + "\n")
    image.write_text(picture(found))


if __name__ == "__main__":
    main()
