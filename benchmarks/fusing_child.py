"""Children of `benchmarks.fusing`: `export EXPORTER LAYERS SIZE FILE`, `outcome MODEL OUTPUT SIZE`, `onnxscript MODEL OUTPUT`.

A function imports what it needs: the time of `onnxscript` is its tool's. The decoder is a Llama of transformers with random
weights: rotary embedding, grouped keys and values, causal and padding mask. `small` is narrow, so that its file holds mostly
graph. `large` has the width of a 1.1 B model; its weights are never made: they are a hole in a data file, which takes no room on
the disk and reads as zeros.
"""

# pyright: basic, reportMissingTypeStubs=false
from __future__ import annotations

import collections
import json
import pathlib
import sys
import warnings
from typing import Any

import onnx_ir as ir

SIZES = {
    "small": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
    },
    "large": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
    },
}
EXPORTERS = {"ts17": "eager", "dyn18": "sdpa"}
_PAGE = 4096


def decoder(size: str, layers: int, attention: str) -> Any:
    """A Llama whose logits are a function of ids and mask alone; in the large one parameters are memory that is never written."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from models.adapters import Flat, logits

    more: dict[str, Any] = {"num_hidden_layers": layers, "max_position_embeddings": 128, "attn_implementation": attention}
    config = LlamaConfig(**SIZES[size], **more)
    torch.manual_seed(0)
    with torch.device("cpu" if size == "small" else "meta"):
        model: Any = LlamaForCausalLM(config).eval()
    if size != "small":
        model = model.to_empty(device="cpu")
        model.model.rotary_emb = LlamaRotaryEmbedding(config)
    return Flat(model, ("input_ids", "attention_mask"), logits, use_cache=False)


def export(exporter: str, layers: str, size: str, file: str) -> None:
    """Exports with dynamic batch and length."""
    import torch

    from models.exporters import export_module
    from models.recipe import Recipe
    from models.recipes_text import IDS, MASK

    warnings.filterwarnings("ignore")
    path, module = pathlib.Path(file), decoder(size, int(layers), EXPORTERS[exporter])
    path.parent.mkdir(parents=True, exist_ok=True)
    example = {"input_ids": torch.arange(20).reshape(2, 10), "attention_mask": torch.ones(2, 10, dtype=torch.long)}
    if size == "small":
        recipe = Recipe("llama", lambda attention: module, (IDS, MASK), ("logits",))
        part = path.with_suffix(".part")
        export_module(recipe, module, example, exporter, part, dynamic=frozenset(["batch", "seq"]))
        part.replace(path)
        return
    shape = {0: torch.export.Dim("batch"), 1: torch.export.Dim("seq")}
    program: Any = torch.onnx.export(
        module,
        tuple(example.values()),
        dynamo=True,
        opset_version=18,
        input_names=list(example),
        dynamic_shapes=((shape, shape),),
    )
    save_with_hole(program.model, path)


def save_with_hole(model: ir.Model, path: pathlib.Path) -> None:
    """Writes a model whose weights are a hole in a data file; `model` is changed so that it refers to it."""
    offset, data = 0, path.with_name(f"{path.name}.data")
    for value in model.graph.initializers.values():
        tensor: Any = value.const_value
        if tensor.nbytes >= _PAGE:
            place: dict[str, Any] = {"shape": tensor.shape, "name": value.name, "base_dir": path.parent}
            value.const_value = ir.ExternalTensor(data.name, offset, tensor.nbytes, tensor.dtype, **place)
            offset += -(-tensor.nbytes // _PAGE) * _PAGE
    with data.open("wb") as file:
        file.truncate(offset)
    ir.save(model, path)


def outcome(model: str, output: str, size: str) -> None:
    """Prints fused operators of a file, whether ONNX Runtime loads it, and how far its results are from the model's, as JSON."""
    import numpy as np
    import onnx

    found = collections.Counter(node.op_type for node in onnx.load(output, load_external_data=False).graph.node)
    fused = {name: count for name, count in sorted(found.items()) if name.endswith("Attention")}
    try:
        if size == "large":
            session(output, plain=True)
            said = {"loads": "yes"}
        else:
            said = {"loads": "yes", "difference": float(np.abs(logits(output) - logits(model)).max())}
    except Exception as error:  # noqa: BLE001 - the runtime's error is the result
        said = {"loads": f"no: {str(error).strip().splitlines()[0][:120]}"}
    print(json.dumps({"fused": fused, **said}))


def session(path: str, *, plain: bool) -> Any:
    """Loads a model; plain leaves graph and weights as they are in the file, as a large model would be copied otherwise."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if plain:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.disable_prepacking", "1")
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def logits(path: str) -> Any:
    """The outputs for two sequences, the second of them padded at its end."""
    import numpy as np

    mask = np.ones((2, 12), np.int64)
    mask[1, 9:] = 0
    ids = np.random.default_rng(0).integers(0, 1000, mask.shape)
    return session(path, plain=False).run(None, {"input_ids": ids, "attention_mask": mask})[0]


def onnxscript(model: str, output: str) -> None:
    """The fusions of onnxscript, which has no command for them."""
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    ir.save(optimize_for_ort(ir.load(model))[0], output)


if __name__ == "__main__":
    {"export": export, "outcome": outcome, "onnxscript": onnxscript}[sys.argv[1]](*sys.argv[2:])
