"""Looks at what a tool wrote: ``python benchmarks/outcome.py MODEL OUTPUT [--load-only]`` prints a line of JSON.

It counts the fused operators and the Softmaxes that are left, loads the file in ONNX Runtime, and compares its outputs with
the original's on a batch with a padded sequence.
"""

from __future__ import annotations

import argparse
import collections
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime  # pyright: ignore[reportMissingTypeStubs]

ATTENTION = {
    "Attention",
    "DecoderMaskedMultiHeadAttention",
    "GroupQueryAttention",
    "MultiHeadAttention",
    "PackedAttention",
    "PackedMultiHeadAttention",
}


def counts(path: Path) -> dict[str, Any]:
    """What the graph consists of, as far as attention is concerned."""
    found = collections.Counter(node.op_type for node in onnx.load(path, load_external_data=False).graph.node)
    fused = {name: found[name] for name in sorted(ATTENTION & set(found))}
    return {"fused": fused, "softmax": found["Softmax"], "nodes": found.total()}


def session(path: Path, *, plain: bool) -> onnxruntime.InferenceSession:
    """Loads a model.

    Args:
        path: The file.
        plain: Leave graph and weights as they are in the file; a large model would be copied otherwise.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if plain:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.disable_prepacking", "1")
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def logits(path: Path) -> Any:
    """The outputs for two sequences, the second of them padded at its end."""
    mask = np.ones((2, 12), np.int64)
    mask[1, 9:] = 0
    ids = np.random.default_rng(0).integers(0, 1000, mask.shape)
    return session(path, plain=False).run(None, {"input_ids": ids, "attention_mask": mask})[0]


def loaded(model: Path, output: Path, *, load_only: bool) -> dict[str, Any]:
    """Whether the output loads, and how far its results are from the model's."""
    try:
        if load_only:
            session(output, plain=True)
            return {"loads": True, "difference": None}
        result = logits(output)
    except Exception as error:  # noqa: BLE001 - whatever the runtime says is the result
        return {"loads": False, "difference": None, "error": str(error).strip().splitlines()[0]}
    return {"loads": True, "difference": float(np.abs(result - logits(model)).max())}


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--load-only", action="store_true", help="do not run the models")
    options = parser.parse_args()
    print(json.dumps(counts(options.output) | loaded(options.model, options.output, load_only=options.load_only)))


if __name__ == "__main__":
    main()
