"""The exports that live in the repository, and how they are kept small."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx

FOLDER = Path(__file__).parent / "bundled"
#: Enough variety for a demonstration and quick tests.
NAMES = (
    "bert__dyn18__sdpa",
    "bert__dyn23__sdpa",
    "bert__ts17__eager",
    "gpt2__ts17__eager",
    "llama_past__dyn18__sdpa",
    "t5__dyn18__eager",
    "vit__dyn18__sdpa",
    "whisper_decoder__dyn18__sdpa",
    "swin__dyn18__sdpa",
)


def slim(name: str) -> None:
    """Makes the files of one bundled export smaller; what they compute stays as it is.

    The dynamo exporter notes for every node which line of Python it comes from, with the paths
    of the machine; that is half of a small file. Of the cases, masks at other sizes go.

    Args:
        name: Name of the files, without suffix.
    """
    model = onnx.load(FOLDER / f"{name}.onnx")
    for node in model.graph.node:
        kept = [entry for entry in node.metadata_props if not entry.key.startswith("pkg.torch.onnx.")]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
    onnx.save(model, FOLDER / f"{name}.onnx")
    path = FOLDER / f"{name}.npz"
    with np.load(path) as arrays:
        kept_arrays = {key: arrays[key] for key in arrays.files if not key.startswith(("resized-", "step-"))}
    np.savez_compressed(path, **kept_arrays)  # type: ignore[arg-type]
