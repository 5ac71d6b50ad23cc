"""Attention by itself, exported once per kind of mask, then fused by the other tools.

    python benchmarks/attention_models.py FOLDER [--heads 32x128,12x64] [--dtypes float16,bfloat16,float32]

Each model holds four attentions with inputs of their own, so that nothing is shared between them but the mask; batch and length
are dynamic. Beside every export lie `.onnxscript.onnx` and `.onnxruntime.onnx`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import pathlib
from collections.abc import Callable

import onnx
import torch
from torch import nn
from torch.nn import functional

LAYERS = 4
WINDOW = 256
KINDS = ("none", "causal", "padding", "padding_causal", "window", "alibi", "t5")


def bias_of(kind: str, mask: torch.Tensor, rows: int, heads: nn.Module, dtype: torch.dtype) -> torch.Tensor | None:
    """What is added to the scores, or which keys are seen; None for no mask and for the plain triangle."""
    place = torch.arange(rows, device=mask.device)
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
    """Several attentions under one mask."""

    def __init__(self, kind: str, num_heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.kind, self.num_heads, self.dtype = kind, num_heads, dtype
        self.register_buffer("slopes", torch.tensor([2.0 ** (-8 * (n + 1) / num_heads) for n in range(num_heads)]))
        if kind == "t5":
            self.table = nn.Embedding(32, num_heads)

    def forward(self, mask: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """One result for every three tensors of shape (b, s, n·h)."""
        bias = bias_of(self.kind, mask, mask.shape[1], self, self.dtype)
        return [self.one(bias, *tensors[at : at + 3]) for at in range(0, len(tensors), 3)]

    def one(self, bias: torch.Tensor | None, *operands: torch.Tensor) -> torch.Tensor:
        """One attention."""
        q, k, v = (item.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for item in operands)
        causal = self.kind == "causal"
        if self.kind == "t5" and torch.onnx.is_in_onnx_export():
            mixed = (q @ k.transpose(2, 3) * q.shape[-1] ** -0.5 + bias).softmax(-1) @ v  # as transformers writes it
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal)
        return mixed.transpose(1, 2).contiguous().flatten(2)


def export(path: pathlib.Path, kind: str, num_heads: int, head_size: int, dtype: torch.dtype) -> None:
    """Writes one model."""
    tensors = [torch.randn(2, 48, num_heads * head_size).to(dtype) for _ in range(3 * LAYERS)]
    mask = torch.ones(2, 48, dtype=torch.int64)
    batch, length = torch.export.Dim("b", min=1, max=4096), torch.export.Dim("s", min=2, max=65536)
    dims = {0: batch, 1: length}
    program = torch.onnx.export(
        Attentions(kind, num_heads, dtype).eval(),
        (mask, *tensors),
        dynamo=True,
        opset_version=18,
        verbose=False,
        input_names=["mask", *(f"{name}{layer}" for layer in range(LAYERS) for name in "qkv")],
        dynamic_shapes={"mask": dims, "tensors": tuple(dims for _ in tensors)},
    )
    assert program is not None
    program.save(str(path))


def by_onnxscript(source: pathlib.Path, target: pathlib.Path, num_heads: int) -> None:
    """What onnxscript makes of it."""
    import onnx_ir as ir
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    del num_heads
    model, _ = optimize_for_ort(ir.load(source))
    ir.save(model, target)


def by_onnxruntime(source: pathlib.Path, target: pathlib.Path, num_heads: int) -> None:
    """What the optimizer of ONNX Runtime makes of it."""
    from onnxruntime.transformers import optimizer

    model = optimizer.optimize_model(str(source), "bert", num_heads=num_heads, hidden_size=0, use_gpu=True, opt_level=0)
    model.save_model_to_file(str(target))


def main() -> None:
    """Writes everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--heads", default="32x128,12x64")
    parser.add_argument("--dtypes", default="float16,bfloat16,float32")
    parser.add_argument("--kinds", default=",".join(KINDS))
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    logging.disable(logging.WARNING)
    others: dict[str, Callable[[pathlib.Path, pathlib.Path, int], None]] = {
        ".onnxscript": by_onnxscript,
        ".onnxruntime": by_onnxruntime,
    }
    for heads in chosen.heads.split(","):
        num_heads, head_size = map(int, heads.split("x"))
        for name in chosen.dtypes.split(","):
            for kind in chosen.kinds.split(","):
                path = chosen.folder / f"{kind}-{heads}-{name}.onnx"
                with contextlib.redirect_stdout(io.StringIO()):
                    export(path, kind, num_heads, head_size, getattr(torch, name))
                for suffix, tool in others.items():
                    with contextlib.redirect_stdout(io.StringIO()):
                        tool(path, path.with_suffix(f"{suffix}.onnx"), num_heads)
                for found in sorted(chosen.folder.glob(f"{path.stem}*.onnx")):
                    print(found.stem, count(found))


def count(path: pathlib.Path) -> str:
    """How many attentions are spelled out, and how many are operators."""

    def operators(graph: onnx.GraphProto) -> list[str]:
        inner = [name for node in graph.node for attribute in node.attribute for name in operators(attribute.g)]
        return [node.op_type for node in graph.node] + inner

    names = operators(onnx.load(path, load_external_data=False).graph)
    return f"{names.count('Softmax')}+{sum('Attention' in name for name in names)}"


if __name__ == "__main__":
    main()
