"""A small language model trained on text that comes with Python, loss by loss, with each way to train it.

    PYTHONPATH=.:patterns:cli python -m benchmarks.losses blocks --to OUT.md [--ortmodule PYTHON]
    .venv-training/bin/python -m benchmarks.losses gpt2 --ways "eager;plain ORTModule;ours, ORTModule" --to OUT.md

`blocks` are two blocks with padding, `gpt2` is a GPT-2 of transformers of two layers. PYTHON is an interpreter that has
onnxruntime-training. Beside OUT.md there is a picture, OUT.svg.
"""

from __future__ import annotations

import os

os.environ |= {"ATTNFUSE_DEBUG": "0", "ORTMODULE_FALLBACK_POLICY": "FALLBACK_DISABLE", "OMP_NUM_THREADS": "1"}

import importlib
import json
import math
import pathlib
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pydoc_data.topics import topics

import click
import torch
from torch.nn import functional

from benchmarks.on_torch._models import Block, Case, seen, spelled
from onnx_attnfuse.training import wrap

BATCH, LENGTH, WIDTH = 8, 64, 64
CASE = Case("gpt", "padding", BATCH, LENGTH, WIDTH, 4, 4, 2)
_SHOWN = 25
_COLOURS = ("#bbbbbb", "#e08214", "#2166ac", "#b2182b", "#1b7837", "#000000")


def _compiled(module: torch.nn.Module) -> torch.nn.Module:
    module.compile()
    return module


def _ortmodule(home: str) -> Callable[[torch.nn.Module], torch.nn.Module]:
    """ORTModule's own class, or ours, imported when it is used."""
    return lambda module: importlib.import_module(home).ORTModule(module)


WAYS: Mapping[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "eager": lambda module: module,
    "torch.compile": _compiled,
    "ours": lambda module: wrap(module, backend="torch", rest="eager"),
    "ours + inductor": lambda module: wrap(module, backend="torch"),
    "ours, ORTModule": _ortmodule("onnx_attnfuse.training"),
    "plain ORTModule": _ortmodule("onnxruntime.training.ortmodule"),
}
"""Ours before the plain ORTModule, as that makes ORTModule run on a PyTorch that it does not know."""
_HERE, _THERE = ";".join(list(WAYS)[:4]), ";".join(list(WAYS)[4:])


class Blocks(torch.nn.Module):
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


class Gpt2(torch.nn.Module):
    """GPT-2 with two layers on bytes, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        transformers = importlib.import_module("transformers")
        sizes = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": WIDTH, "n_layer": 2, "n_head": 4}
        drops = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
        config = transformers.GPT2Config(**sizes, **drops, use_cache=False, attn_implementation="eager")
        self.model = transformers.GPT2LMHeadModel(config)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.model(input_ids=tokens)[0].reshape(-1, 256), labels.reshape(-1))


MODELS: Mapping[str, Callable[[], torch.nn.Module]] = {"blocks": Blocks, "gpt2": Gpt2}


def batches(steps: int) -> list[torch.Tensor]:
    """Pieces of Python's own documentation, as bytes."""
    text = torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()))
    starts = torch.randint(len(text) - LENGTH - 1, (steps, BATCH), generator=torch.Generator().manual_seed(0))
    return [torch.stack([text[start : start + LENGTH + 1] for start in row.tolist()]) for row in starts]


def losses(name: str, way: str, steps: int) -> list[float]:
    """The loss of each step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = WAYS[way](MODELS[name]().train())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mask = (CASE.inputs("cpu", torch.float32)["mask"],) if name == "blocks" else ()
    found = list[float]()
    for batch in batches(steps):
        loss = model(batch[:, :-1].contiguous(), batch[:, 1:].contiguous(), *mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def picture(curves: Mapping[str, Sequence[float]]) -> str:
    """The curves one upon the other as SVG, the widest first, so that those below show where they differ; six at most."""
    width, height, steps = 640, 320, len(next(iter(curves.values())))
    low, high = min(map(min, curves.values())), max(map(max, curves.values()))
    box = f'viewBox="-50 -20 {width + 70} {height + 60}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="12">']
    for line in range(math.ceil(low), math.floor(high) + 1):
        y = height * (high - line) / (high - low)
        parts.append(f'<path d="M0 {y:.1f}H{width}" stroke="#dddddd"/>')
        parts.append(f'<text x="-8" y="{y + 4:.1f}" text-anchor="end">{line}</text>')
    for row, (name, curve) in enumerate(curves.items()):
        places = [(width * step / (steps - 1), height * (high - loss) / (high - low)) for step, loss in enumerate(curve)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        style = f'stroke="{_COLOURS[row]}" stroke-width="{2 * (len(curves) - row) - 0.5}"'
        parts.append(f'<polyline points="{points}" fill="none" {style}/>')
        parts.append(f'<path d="M{width - 170} {20 + 18 * row}h24" {style}/>')
        parts.append(f'<text x="{width - 140}" y="{24 + 18 * row}">{name}</text>')
    parts.append(f'<text x="{width / 2}" y="{height + 30}" text-anchor="middle">step</text>')
    return "\n".join([*parts, '<text x="-40" y="-6">loss</text></svg>']) + "\n"


def beside(name: str, python: str, steps: int) -> dict[str, list[float]]:
    """The losses with ORTModule, by another interpreter."""
    command = [python, "-W", "ignore", "-m", "benchmarks.losses", name, "--ways", _THERE, "--steps", str(steps)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def table(found: Mapping[str, Sequence[float]], steps: int) -> str:
    """Some steps, and how far each way is from the first at most."""
    from benchmarks import harness

    rows = [[step + 1, *(f"{curve[step]:.5f}" for curve in found.values())] for step in [*range(0, steps, _SHOWN), steps - 1]]
    first = next(iter(found.values()))
    far = [f"{max(abs(a - b) for a, b in zip(curve, first, strict=True)):.1e}" for curve in found.values()]
    return harness.table(["step", *found], [*rows, ["furthest from the first", *far]])


@click.command()
@click.argument("name", type=click.Choice(sorted(MODELS)))
@click.option("--steps", default=200)
@click.option("--ways", default=_HERE, help="With semicolons between.")
@click.option("--ortmodule", metavar="PYTHON", help="Trains with ORTModule as well, in this interpreter.")
@click.option("--to", type=pathlib.Path, help="The page; without it losses are printed as JSON.")
def main(name: str, steps: int, ways: str, ortmodule: str | None, to: pathlib.Path | None) -> None:
    """Trains with each, and writes a table and a picture."""
    found = {way: losses(name, way, steps) for way in ways.split(";")}
    found |= beside(name, ortmodule, steps) if ortmodule else {}
    if to is None:
        click.echo(json.dumps(found))
        return
    words = f"python -m benchmarks.losses {name}" + f" --ortmodule {ortmodule}" * bool(ortmodule)
    data = f"{steps} steps of {BATCH} × {LENGTH} bytes of Python's documentation"
    where = f"torch {torch.__version__} on the CPU, float32, AdamW, {data}."
    image = to.with_suffix(".svg")
    to.write_text(
        f"# Losses\n\n    {words}\n\n{where}\n\n![loss by step]({image.name})\n\n{table(found, steps)}\n", encoding="utf-8"
    )
    image.write_text(picture(found), encoding="utf-8")


if __name__ == "__main__":
    main()
