"""Encoders with padding, exported once per size of a layer and fused in every form that padding can be handed over.

    python benchmarks/packing_models.py FOLDER [--heads 12x64,16x64] [--dtypes float16,float32] [--kinds attention,encoder]

`attention` has projections and attention in each layer, `encoder` two further products besides. A line per model says which
operators each form is made of. It needs no GPU.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import logging
import pathlib
from typing import Any

import onnx
import torch
from torch import nn
from torch.nn import functional

LAYERS = 4
KINDS = ("attention", "encoder")
FORMS: dict[str, dict[str, Any]] = {
    "bias": {"target": "MultiHeadAttention", "padding": "exact"},
    "lengths": {"target": "MultiHeadAttention", "padding": "assume-right", "arch": "sm90"},
    "ranges": {"target": "MultiHeadAttention", "padding": "assume-right", "arch": "sm80"},
    "packed": {"target": "packed", "padding": "assume-right"},
    "guarded": {"target": "packed", "padding": "guarded"},
}
"""What gives each form; on cards before Hopper lengths with offsets, (3b+2), are chosen."""


class Layer(nn.Module):
    """One layer, as BERT has it."""

    def __init__(self, kind: str, heads: int, size: int) -> None:
        super().__init__()
        width = heads * size
        self.heads = heads
        self.projections = nn.ModuleList([nn.Linear(width, width) for _ in range(4)])
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.wide = nn.ModuleList([nn.Linear(width, 4 * width), nn.Linear(4 * width, width)] if kind == "encoder" else [])

    def forward(self, x: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        """The same for padded, (b, s, d), and nested tensors, which have no mask."""
        *inner, outer = self.projections
        q, k, v = (item(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for item in inner)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = self.norms[0](x + outer(mixed.transpose(1, 2).flatten(2)))
        if not self.wide:
            return x
        return self.norms[1](x + self.wide[1](functional.gelu(self.wide[0](x))))


class Encoder(nn.Module):
    """Several layers under one padding mask."""

    def __init__(self, kind: str, heads: int, size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(kind, heads, size) for _ in range(LAYERS)])

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Without a mask for nested tensors."""
        seen = None if mask is None else (mask != 0)[:, None, None, :].expand(-1, 1, mask.shape[1], -1)
        for layer in self.layers:
            x = layer(x, seen)
        return x


def export(path: pathlib.Path, kind: str, heads: int, size: int, dtype: torch.dtype) -> None:
    """Writes one model; batch and length are dynamic."""
    batch, length = torch.export.Dim("b", min=1, max=4096), torch.export.Dim("s", min=2, max=65536)
    dims = {0: batch, 1: length}
    program = torch.onnx.export(
        Encoder(kind, heads, size).eval().to(dtype),
        (torch.randn(2, 48, heads * size).to(dtype), torch.ones(2, 48, dtype=torch.int64)),
        dynamo=True,
        opset_version=18,
        verbose=False,
        input_names=["x", "mask"],
        output_names=["out"],
        dynamic_shapes={"x": dims, "mask": dims},
    )
    assert program is not None
    program.save(str(path))


def fuse(source: pathlib.Path, form: str, arch: str) -> tuple[pathlib.Path, str]:
    """A model in one form, and the kernel that is forecast."""
    import onnx_attnfuse

    target = source.with_suffix(f".{form}.onnx")
    choices: dict[str, Any] = {"ep": "cuda", "arch": arch, "verify": "none", **FORMS[form]}
    result = onnx_attnfuse.optimize(source, **choices)
    result.save(target)
    kernel = result.report.sites[0].kernel
    return target, "unfused" if kernel is None else kernel.forecast


def operators(path: pathlib.Path) -> str:
    """The attentions, ways in and ways out of a model, those in branches too."""

    def walk(graph: onnx.GraphProto) -> list[str]:
        return [node.op_type for node in graph.node] + [
            name for node in graph.node for item in node.attribute for name in walk(item.g)
        ]

    counted = collections.Counter(walk(onnx.load(path, load_external_data=False).graph))
    return ", ".join(f"{name} {count}" for name, count in sorted(counted.items()) if "Attention" in name or "Padding" in name)


def main() -> None:
    """Writes everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--heads", default="12x64,16x64")
    parser.add_argument("--dtypes", default="float16,float32")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--arch", default="sm90")
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    logging.disable(logging.WARNING)
    for heads in chosen.heads.split(","):
        for dtype in chosen.dtypes.split(","):
            for kind in chosen.kinds.split(","):
                path = chosen.folder / f"{kind}-{heads}-{dtype}.onnx"
                with contextlib.redirect_stdout(io.StringIO()):
                    export(path, kind, *map(int, heads.split("x")), getattr(torch, dtype))
                for form in FORMS:
                    fused, kernel = fuse(path, form, chosen.arch)
                    print(f"{fused.stem}: {kernel}; {operators(fused)}", flush=True)


if __name__ == "__main__":
    main()
