"""A small GPT trained on text that comes with Python: eager, plain ORTModule and ours, loss by loss.

PYTHONPATH=. .venv-training/bin/python benchmarks/training_losses.py
"""

from __future__ import annotations

import os

os.environ |= {"ORTMODULE_FALLBACK_POLICY": "FALLBACK_DISABLE", "ATTNFUSE_DEBUG": "0"}

import pathlib
import warnings
from collections.abc import Callable, Mapping
from pydoc_data.topics import topics

import onnxruntime.training.ortmodule as theirs
import torch
import transformers

from benchmarks.loss_picture import picture
from onnx_attnfuse.training import ORTModule

RESULTS = pathlib.Path(__file__).parent / "results"
STEPS, BATCH, LENGTH = 200, 8, 64
WRAPPERS: Mapping[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "PyTorch": lambda module: module,
    "plain ORTModule": theirs.ORTModule,
    "ours": ORTModule,
}


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
