"""Models that benchmarks export: attentions by their mask, and whole models without their weights.

    python -m benchmarks.exports attention|whole FOLDER [--only PART]

Batch and length are dynamic. Beside an attention lies what onnxscript makes of it. Exports that are there are used again.
"""

# pyright: basic, reportMissingTypeStubs=false
from __future__ import annotations

import contextlib
import io
import pathlib
from collections.abc import Callable
from typing import Any

import click
import torch
from torch import nn
from torch.nn import functional

from benchmarks.harness import quietly, tried

LAYERS, WINDOW = 4, 256
KINDS = ("none", "causal", "padding", "padding_causal", "window", "alibi", "t5")


def bias_of(kind: str, mask: torch.Tensor, heads: nn.Module, dtype: torch.dtype) -> torch.Tensor | None:
    """What is added to the scores, or which keys are seen; None for no mask and for the plain triangle."""
    place = torch.arange(mask.shape[1], device=mask.device)
    behind = place[:, None] - place[None, :]
    padded = mask[:, None, None, :] != 0
    if kind == "padding":
        return padded
    if kind == "padding_causal":
        return padded & (behind >= 0)[None, None]
    if kind == "window":
        return ((behind >= 0) & (behind < WINDOW))[None, None]
    if kind == "alibi":
        slopes = heads.get_buffer("slopes")[None, :, None, None]
        return torch.where(behind >= 0, -behind * slopes, float("-inf")).to(dtype)
    if kind == "t5":
        distance = behind.abs()
        far = 8 + (torch.log(distance.clamp(min=1).float() / 8) / 2.7726 * 8).long()
        bucket = torch.where(distance < 8, distance, far.clamp(max=15)) + 16 * (behind < 0)
        return heads.get_submodule("table")(bucket).permute(2, 0, 1)[None].contiguous().to(dtype)
    return None


class Attentions(nn.Module):
    """Several attentions under one mask, with operands of their own."""

    def __init__(self, kind: str, num_heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.num_heads, self.dtype = kind, num_heads, dtype
        self.register_buffer("slopes", torch.tensor([2.0 ** (-8 * (n + 1) / num_heads) for n in range(num_heads)]))
        if kind == "t5":
            self.table = nn.Embedding(32, num_heads)

    def forward(self, mask: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """One result for every three tensors of shape (b, s, n·h)."""
        bias = bias_of(self.kind, mask, self, self.dtype)
        return [self.one(bias, *tensors[at : at + 3]) for at in range(0, len(tensors), 3)]

    def one(self, bias: torch.Tensor | None, *operands: torch.Tensor) -> torch.Tensor:
        """One attention."""
        q, k, v = (item.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for item in operands)
        if self.kind == "t5" and torch.onnx.is_in_onnx_export():
            mixed = (q @ k.transpose(2, 3) * q.shape[-1] ** -0.5 + bias).softmax(-1) @ v  # as transformers writes it
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=self.kind == "causal")
        return mixed.transpose(1, 2).contiguous().flatten(2)


def export(module: nn.Module, inputs: tuple[torch.Tensor, ...], path: pathlib.Path, **settings: Any) -> pathlib.Path:
    """Writes an export by dynamo, unless it is there."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
            program: Any = torch.onnx.export(module.eval(), inputs, dynamo=True, opset_version=18, verbose=False, **settings)
            program.save(str(path))
    return path


def _dims() -> dict[int, Any]:
    return {0: torch.export.Dim("b", min=1, max=4096), 1: torch.export.Dim("s", min=2, max=65536)}


def attention(folder: pathlib.Path, kind: str, heads: int, head: int, dtype: str) -> pathlib.Path:
    """Four attentions under a mask."""
    import onnx_ir as ir
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    element = getattr(torch, dtype)
    tensors = [torch.randn(2, 48, heads * head).to(element) for _ in range(3 * LAYERS)]
    names = ["mask", *(f"{name}{layer}" for layer in range(LAYERS) for name in "qkv")]
    dims = _dims()
    shapes = {"mask": dims, "tensors": tuple(dims for _ in tensors)}
    inputs = (torch.ones(2, 48, dtype=torch.int64), *tensors)
    path = folder / f"{kind}-{heads}x{head}-{dtype}.onnx"
    export(Attentions(kind, heads, element), inputs, path, input_names=names, dynamic_shapes=shapes)
    other = path.with_suffix(".onnxscript.onnx")
    if not other.exists():
        ir.save(optimize_for_ort(ir.load(path))[0], other)
    return path


def jobs(family: str, folder: pathlib.Path) -> dict[str, Callable[[], pathlib.Path]]:
    """What is exported of a family, by name."""
    if family == "whole":
        from benchmarks.whole import exports, zoo

        folder.mkdir(parents=True, exist_ok=True)
        return {name: lambda whole=whole: exports.export(whole, folder) for name, whole in zoo.models(small=False).items()}
    return {
        f"{kind}-{n}x{h}-{dtype}": lambda kind=kind, n=n, h=h, dtype=dtype: attention(folder, kind, n, h, dtype)
        for n, h in ((32, 128), (12, 64))
        for dtype in ("float16", "bfloat16", "float32")
        for kind in KINDS
    }


@click.command()
@click.argument("family", type=click.Choice(["attention", "whole"]))
@click.argument("folder", type=pathlib.Path)
@click.option("--only", default="", help="A part of the names.")
def main(family: str, folder: pathlib.Path, only: str) -> None:
    """Exports the models of a family."""
    with quietly():
        for name, make in jobs(family, folder).items():
            if only in name:
                click.echo(f"{name}: {tried(make)}")


if __name__ == "__main__":
    main()
