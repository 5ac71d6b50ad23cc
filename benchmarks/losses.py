"""A small language model trained on text that comes with Python, loss by loss, with each way to train it.

    PYTHONPATH=.:patterns:cli python -m benchmarks.losses blocks --to OUT.md [--ortmodule PYTHON]
    .venv-training/bin/python -m benchmarks.losses gpt2 --ways "eager;plain ORTModule;ours, ORTModule" --to OUT.md

`blocks` are two blocks with padding, `gpt2` is a GPT-2 of transformers of two layers. PYTHON is an interpreter that has
onnxruntime-training.
"""

from __future__ import annotations

import os

os.environ |= {"ATTNFUSE_DEBUG": "0", "ORTMODULE_FALLBACK_POLICY": "FALLBACK_DISABLE", "OMP_NUM_THREADS": "1"}

import importlib
import json
import pathlib
from collections.abc import Callable, Mapping
from pydoc_data.topics import topics

import click
import torch
from torch.nn import functional

from benchmarks.on_torch._models import Block, Case, seen, spelled
from onnx_attnfuse.training import wrap

BATCH, LENGTH, WIDTH = 8, 64, 64
CASE = Case("gpt", "padding", BATCH, LENGTH, WIDTH, 4, 4, 2)
_SHOWN = 25


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


@click.command()
@click.argument("name", type=click.Choice(sorted(MODELS)))
@click.option("--steps", default=200)
@click.option("--ways", default=_HERE, help="With semicolons between.")
@click.option("--ortmodule", metavar="PYTHON", help="Trains with ORTModule as well, in this interpreter.")
@click.option("--to", type=pathlib.Path, help="The page; without it losses are printed as JSON.")
def main(name: str, steps: int, ways: str, ortmodule: str | None, to: pathlib.Path | None) -> None:
    """Trains with each, and writes some steps, and how far each way is from the first at most."""
    from benchmarks.harness import Benchmark, Row, Setting, page, printed

    found = {way: losses(name, way, steps) for way in ways.split(";")}
    if ortmodule:
        found |= json.loads(
            printed("benchmarks.losses", name, "--ways", _THERE, "--steps", steps, python=ortmodule).splitlines()[-1]
        )
    if to is None:
        click.echo(json.dumps(found))
        return
    first = next(iter(found.values()))
    far = {way: max(abs(a - b) for a, b in zip(curve, first, strict=True)) for way, curve in found.items()}
    rows = [
        Row(str(step + 1), lambda _, step=step: {way: f"{curve[step]:.5f}" for way, curve in found.items()})
        for step in (*range(0, steps, _SHOWN), steps - 1)
    ]
    rows.append(Row("furthest from the first", lambda _: {way: f"{largest:.1e}" for way, largest in far.items()}))
    note = f"{steps} steps of {BATCH} × {LENGTH} bytes of Python's documentation, float32, AdamW."
    words = (
        f"python -m benchmarks.losses {name}"
        + f' --ways "{ways}"' * (ways != _HERE)
        + f" --ortmodule {ortmodule}" * bool(ortmodule)
    )
    page(Benchmark("Losses", lambda _: iter(rows), note, ("step",)), Setting("cpu"), words, to)


if __name__ == "__main__":
    main()
