"""A small GPT trained on text that comes with Python, on PyTorch: eager, torch.compile, and ours with each rest, loss by loss.

PYTHONPATH=.:patterns:cli python benchmarks/training_torch_losses.py OUT.md [--steps 200]
"""

from __future__ import annotations

import os

os.environ |= {"ATTNFUSE_DEBUG": "0"}

import argparse
import pathlib
import time
from collections.abc import Callable, Mapping
from pydoc_data.topics import topics

import torch
from torch.nn import functional

from benchmarks.training_torch_models import Block, Case, seen, spelled
from onnx_attnfuse.training import fuse

BATCH, LENGTH, WIDTH = 8, 64, 64
CASE = Case("gpt", "padding", BATCH, LENGTH, WIDTH, 4, 4, 2)
_SHOWN = 25


def _compiled(module: torch.nn.Module) -> torch.nn.Module:
    module.compile()
    return module


WRAPPERS: Mapping[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "eager": lambda module: module,
    "ours": lambda module: fuse(module, rest="eager"),
    "ours + inductor": fuse,
    "torch.compile": _compiled,
}


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


def losses(wrap: Callable[[torch.nn.Module], torch.nn.Module], steps: int) -> tuple[list[float], float]:
    """The loss of each step, and the seconds that all took."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = wrap(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mask = CASE.inputs("cpu", torch.float32)["mask"]
    found, start = list[float](), time.perf_counter()
    for batch in batches(steps):
        loss = model(batch[:, :-1], batch[:, 1:], mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found, time.perf_counter() - start


def main() -> None:
    """Trains with each, and writes a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=200)
    chosen = parser.parse_args()
    found = {name: losses(wrap, chosen.steps)[0] for name, wrap in WRAPPERS.items()}
    names = list(found)
    lines = [
        "# Losses on PyTorch",
        "",
        f"A language model of two blocks on bytes, its mask spelled out, torch {torch.__version__} on the CPU, float32.",
        "",
        "| step | " + " | ".join(names) + " |",
        "|---:|" + "---:|" * len(names),
    ]
    shown = [*range(0, chosen.steps, _SHOWN), chosen.steps - 1]
    lines += [f"| {step + 1} | " + " | ".join(f"{found[name][step]:.5f}" for name in names) + " |" for step in shown]
    lines += ["", "Largest difference from eager:", ""]
    for name in names[1:]:
        apart = max(abs(one - other) for one, other in zip(found[name], found["eager"], strict=True))
        lines.append(f"- {name}: {apart:.1e}")
    chosen.out.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
