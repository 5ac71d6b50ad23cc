"""The attention of a Llama-like decoder by itself, with rotary embedding, grouped heads and a cache, exported.

    python benchmarks/decoder_models.py FOLDER [--heads 32x8x128] [--dtypes float16,bfloat16]

Four attentions with operands and caches of their own under one mask; batch, new and cached length are dynamic. Beside every
export lies what onnxscript makes of it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import pathlib

import torch
from torch import nn
from torch.nn import functional

from benchmarks.attention_models import by_onnxscript, count

LAYERS = 4
NAMES = ("q", "k", "v", "past_k", "past_v")


class Decoder(nn.Module):
    """Several attentions over new positions and cached ones."""

    def __init__(self, heads: int, kv_heads: int, head_size: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        self.register_buffer("frequencies", 10000.0 ** (-torch.arange(0, head_size, 2).float() / head_size))

    def forward(self, mask: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """One result, its keys and its values for every five tensors; `mask` of shape (b, p + s) says which keys are there."""
        past = tensors[3].shape[2]
        places = past + torch.arange(tensors[0].shape[1], device=mask.device)
        angles = places[:, None].float() * self.get_buffer("frequencies")
        angles = torch.cat([angles, angles], -1)
        cos, sin = (values.to(tensors[0].dtype) for values in (angles.cos(), angles.sin()))
        seen = (torch.arange(mask.shape[1], device=mask.device) <= places[:, None]) & (mask[:, None, None, :] != 0)
        found: list[torch.Tensor] = []
        for at in range(0, len(tensors), len(NAMES)):
            found += self.one(seen, cos, sin, *tensors[at : at + len(NAMES)])
        return found

    def one(self, seen: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """One attention."""
        query, key, value = (
            item.unflatten(-1, (heads, -1)).transpose(1, 2)
            for item, heads in zip(tensors[:3], (self.heads, self.kv_heads, self.kv_heads), strict=True)
        )
        query, key = (item * cos + half_turned(item) * sin for item in (query, key))
        key, value = torch.cat([tensors[3], key], 2), torch.cat([tensors[4], value], 2)
        repeated = (item.repeat_interleave(self.heads // self.kv_heads, 1) for item in (key, value))
        mixed = functional.scaled_dot_product_attention(query, *repeated, attn_mask=seen)
        return [mixed.transpose(1, 2).flatten(2), key, value]


def half_turned(value: torch.Tensor) -> torch.Tensor:
    """The halves of the channels exchanged, the second negated."""
    first, second = value.chunk(2, -1)
    return torch.cat([-second, first], -1)


def example(heads: int, kv_heads: int, head_size: int, size: tuple[int, int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Tensors for a batch, a number of new positions and of cached ones, after the mask."""
    batch, new, past = size
    widths = [(batch, new, count * head_size) for count in (heads, kv_heads, kv_heads)]
    shapes = [*widths, *[(batch, kv_heads, past, head_size)] * 2]
    tensors = [torch.randn(shape).to(dtype) for _ in range(LAYERS) for shape in shapes]
    return [torch.ones(batch, past + new, dtype=torch.int64), *tensors]


def export(path: pathlib.Path, heads: int, kv_heads: int, head_size: int, dtype: torch.dtype) -> None:
    """Writes one model."""
    given = example(heads, kv_heads, head_size, (2, 5, 7), dtype)
    shapes = [{0: "b", 1: "s"}] * 3 + [{0: "b", 2: "p"}] * 2
    program = torch.onnx.export(
        Decoder(heads, kv_heads, head_size).eval(),
        tuple(given),
        dynamo=True,
        opset_version=18,
        verbose=False,
        input_names=["mask", *(f"{name}{layer}" for layer in range(LAYERS) for name in NAMES)],
        output_names=[f"{name}{layer}" for layer in range(LAYERS) for name in ("out", "key", "value")],
        dynamic_shapes={"mask": {0: "b", 1: "t"}, "tensors": tuple(shapes * LAYERS)},
    )
    assert program is not None
    program.save(str(path))


def main() -> None:
    """Writes everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--heads", default="32x8x128")
    parser.add_argument("--dtypes", default="float16,bfloat16")
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    logging.disable(logging.WARNING)
    for text in chosen.heads.split(","):
        heads, kv_heads, head_size = map(int, text.split("x"))
        for name in chosen.dtypes.split(","):
            path = chosen.folder / f"decoder-{text}-{name}.onnx"
            with contextlib.redirect_stdout(io.StringIO()):
                export(path, heads, kv_heads, head_size, getattr(torch, name))
                by_onnxscript(path, path.with_suffix(".onnxscript.onnx"), heads)
            for found in sorted(chosen.folder.glob(f"{path.stem}*.onnx")):
                print(found.stem, count(found))


if __name__ == "__main__":
    main()
