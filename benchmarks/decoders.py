"""Exports the decoders that are fused: ``python benchmarks/decoders.py EXPORTER LAYERS SIZE FILE``.

A Llama of transformers with random weights: rotary embedding, grouped keys and values, causal and padding mask. `small` is
narrow, so that its file holds mostly graph. `large` has the width of a 1.1 B model; its weights are never made: they are a
hole in a data file, which takes no room on the disk and reads as zeros.
"""

from __future__ import annotations

import argparse
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INPUTS = ["input_ids", "attention_mask"]
_PAGE = 4096


@dataclass(frozen=True)
class Size:
    """How wide a decoder is."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocabulary: int


SIZES = {"small": Size(64, 128, 4, 2, 1000), "large": Size(2048, 5632, 32, 4, 32000)}
EXPORTERS = {"ts": "TorchScript, opset 17", "dyn": "dynamo, opset 18"}


def decoder(size: Size, layers: int, attention: str) -> Any:
    """A Llama whose logits are a function of ids and mask alone.

    Args:
        size: Its width.
        layers: How many layers.
        attention: transformers' attention implementation.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    class Logits(torch.nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits

    config = LlamaConfig(
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        vocab_size=size.vocabulary,
        max_position_embeddings=128,
        attn_implementation=attention,
    )
    if size is not SIZES["large"]:
        torch.manual_seed(0)
        return Logits(LlamaForCausalLM(config).eval())
    with torch.device("meta"):
        model = LlamaForCausalLM(config).eval()
    model = model.to_empty(device="cpu")  # memory that is never written to is never taken
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    return Logits(model)


def export(model: Any, exporter: str, path: Path) -> Any:
    """Exports with dynamic batch and length; writes the file, or returns torch's `ONNXProgram` for dynamo."""
    import torch

    arguments = (torch.arange(20).reshape(2, 10), torch.ones(2, 10, dtype=torch.long))
    if exporter == "ts":
        axes = {name: {0: "batch", 1: "seq"} for name in INPUTS}
        torch.onnx.export(model, arguments, path, dynamo=False, opset_version=17, input_names=INPUTS, dynamic_axes=axes)
        return None
    shape = {0: torch.export.Dim("batch"), 1: torch.export.Dim("seq")}
    return torch.onnx.export(
        model, arguments, dynamo=True, opset_version=18, input_names=INPUTS, dynamic_shapes=(shape, shape), verbose=False
    )


def save_with_hole(model: Any, path: Path) -> None:
    """Writes a model whose weights are a hole in a data file; `model` is changed so that it refers to it."""
    import onnx_ir as ir

    offset = 0
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor.nbytes < _PAGE:
            continue
        value.const_value = ir.ExternalTensor(
            f"{path.name}.data", offset, tensor.nbytes, tensor.dtype, shape=tensor.shape, name=value.name, base_dir=path.parent
        )
        offset += -(-tensor.nbytes // _PAGE) * _PAGE
    with path.with_name(f"{path.name}.data").open("wb") as data:
        data.truncate(offset)
    ir.save(model, path)


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("exporter", choices=EXPORTERS)
    parser.add_argument("layers", type=int)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    options.file.parent.mkdir(parents=True, exist_ok=True)
    part = options.file.with_suffix(".part")
    attention = "eager" if options.exporter == "ts" else "sdpa"
    program = export(decoder(SIZES[options.size], options.layers, attention), options.exporter, part)
    if options.size == "large":
        save_with_hole(program.model, options.file)
        return
    if program is not None:
        program.save(part, external_data=False)
    part.replace(options.file)


if __name__ == "__main__":
    main()
