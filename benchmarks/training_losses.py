"""A small GPT trained on text that comes with Python: eager, plain ORTModule and ours, loss by loss.

PYTHONPATH=. .venv-training/bin/python benchmarks/training_losses.py
"""

from __future__ import annotations

import os

os.environ |= {"ORTMODULE_FALLBACK_POLICY": "FALLBACK_DISABLE", "ATTNFUSE_DEBUG": "0"}

import math
import pathlib
import warnings
from collections.abc import Callable, Mapping
from pydoc_data.topics import topics

import onnxruntime.training.ortmodule as theirs
import torch
import transformers

from onnx_attnfuse.training import ORTModule

RESULTS = pathlib.Path(__file__).parent / "results"
STEPS, BATCH, LENGTH = 200, 8, 64
WRAPPERS: Mapping[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "PyTorch": lambda module: module,
    "plain ORTModule": theirs.ORTModule,
    "ours": ORTModule,
}
COLOURS = {"PyTorch": "#bbbbbb", "plain ORTModule": "#e08214", "ours": "#2166ac"}
WIDTHS = {"PyTorch": 7, "plain ORTModule": 4, "ours": 1.5}


def batches() -> list[torch.Tensor]:
    """Pieces of Python's own documentation, as bytes."""
    text = torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()))
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(text) - LENGTH - 1, (STEPS, BATCH), generator=generator)
    return [torch.stack([text[start : start + LENGTH + 1] for start in row.tolist()]) for row in starts]


class Model(torch.nn.Module):
    """GPT-2 with two layers on bytes, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.GPT2Config(
            vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, use_cache=False, attn_implementation="eager",
            attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
        )  # fmt: skip
        self.model = transformers.GPT2LMHeadModel(config)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=tokens)[0]
        return torch.nn.functional.cross_entropy(logits.reshape(-1, 256), labels.reshape(-1))


def losses(wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> list[float]:
    torch.manual_seed(0)
    module = wrap(Model().train())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    found: list[float] = []
    for batch in batches():
        optimizer.zero_grad()
        loss = module(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        loss.backward()
        optimizer.step()
        found.append(float(loss))
    return found


def picture(curves: Mapping[str, list[float]]) -> str:
    """The curves one upon the other, the widest first."""
    width, height = 640, 320
    low, high = min(map(min, curves.values())), max(map(max, curves.values()))

    def place(step: int, loss: float) -> tuple[float, float]:
        return width * step / (STEPS - 1), height * (high - loss) / (high - low)

    box = f'viewBox="-50 -20 {width + 70} {height + 60}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="12">']
    for line in range(math.ceil(low), math.floor(high) + 1):
        y = place(0, line)[1]
        parts.append(f'<path d="M0 {y:.1f}H{width}" stroke="#dddddd"/>')
        parts.append(f'<text x="-8" y="{y + 4:.1f}" text-anchor="end">{line}</text>')
    for row, (name, curve) in enumerate(curves.items()):
        points = " ".join("{:.1f},{:.1f}".format(*place(step, loss)) for step, loss in enumerate(curve))
        style = f'stroke="{COLOURS[name]}" stroke-width="{WIDTHS[name]}"'
        parts.append(f'<polyline points="{points}" fill="none" {style}/>')
        parts.append(f'<path d="M{width - 150} {20 + 18 * row}h24" {style}/>')
        parts.append(f'<text x="{width - 120}" y="{24 + 18 * row}">{name}</text>')
    parts.append(f'<text x="{width / 2}" y="{height + 30}" text-anchor="middle">step</text>')
    return "\n".join([*parts, '<text x="-40" y="-6">loss</text></svg>']) + "\n"


def main() -> None:
    warnings.filterwarnings("ignore")
    curves = {name: losses(wrap) for name, wrap in WRAPPERS.items()}
    (RESULTS / "training_losses.svg").write_text(picture(curves))
    apart = {name: max(abs(a - b) for a, b in zip(curve, curves["PyTorch"], strict=True)) for name, curve in curves.items()}
    rows = [
        f"| {name} | {curve[0]:.6f} | {curve[49]:.6f} | {curve[99]:.6f} | {curve[-1]:.6f} | {apart[name]:.1e} |"
        for name, curve in curves.items()
    ]
    text = [
        "# The loss of a small GPT",
        "",
        f"Two layers, 4 heads of 16, {STEPS} steps of {BATCH} × {LENGTH} bytes of Python's documentation, AdamW, float32,",
        "on the CPU.",
        "",
        "![loss by step](training_losses.svg)",
        "",
        "| | step 1 | step 50 | step 100 | step 200 | furthest from PyTorch |",
        "|---|---|---|---|---|---|",
        *rows,
    ]
    (RESULTS / "training_losses.md").write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
