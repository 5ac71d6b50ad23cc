"""Real models whose bias depends on the input, for `bias_on_cpu.py`: three layers, 16 heads of 64, random weights.

    python benchmarks/bias_models.py FOLDER [--only NAME,...]

Each is exported by dynamo and by TorchScript, at a length of 96 that is dynamic but for the picture's.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import pathlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import nn

_LAYERS, _LENGTH = 3, 96
_LARGE = {"num_hidden_layers": _LAYERS, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}


class First(nn.Module):
    """A model with inputs by position and its first result."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        """The hidden states of the last layer."""
        return self.model(**dict(zip(self.names, values, strict=True)))[0]


def _of(name: str, settings: Mapping[str, Any]) -> Any:
    config = getattr(transformers, f"{name}Config")(**settings)
    return getattr(transformers, f"{name}Model")._from_config(config, attn_implementation="eager")


def _speech(name: str, **settings: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model = _of(name, {**_LARGE, "apply_spec_augment": False, **settings})
    if name == "Wav2Vec2Bert":
        return model, {"input_features": torch.randn(1, _LENGTH, 160)}
    return model.encoder, {"hidden_states": torch.randn(1, _LENGTH, 1024)}


def _text(name: str, **settings: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    mask = torch.ones(1, _LENGTH, dtype=torch.int64 if name == "DebertaV2" else torch.float32)
    ids = torch.randint(0, 1000, (1, _LENGTH))
    return _of(name, {"vocab_size": 1000, **settings}), {"input_ids": ids, "attention_mask": mask}


def _picture() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    settings = {**_LARGE, "image_size": 160, "window_size": 0, "global_attn_indexes": list(range(_LAYERS))}
    return _of("SamVision", settings), {"pixel_values": torch.randn(1, 3, 160, 160)}


MODELS: Mapping[str, Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]]] = {
    "wav2vec2-bert-relative-key": lambda: _speech("Wav2Vec2Bert", position_embeddings_type="relative_key"),
    "wav2vec2-bert-relative": lambda: _speech("Wav2Vec2Bert", position_embeddings_type="relative"),
    "wav2vec2-conformer": lambda: _speech("Wav2Vec2Conformer", position_embeddings_type="relative"),
    "wavlm": lambda: _speech("WavLM"),
    "deberta-v2": lambda: _text(
        "DebertaV2",
        **_LARGE,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=256,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        position_biased_input=False,
    ),
    "xlnet": lambda: _text("XLNet", n_layer=_LAYERS),
    "sam-vision": _picture,
}


def export(name: str, folder: pathlib.Path) -> None:
    """Writes both exports of a model."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    module, values, fixed = First(model, tuple(inputs)).eval(), tuple(inputs.values()), name == "sam-vision"
    length = torch.export.Dim("s", min=2, max=512)
    shapes = None if fixed else (tuple({1: length} for _ in values),)
    axes = None if fixed else {name: {1: "s"} for name in inputs}
    with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
        program: Any = torch.onnx.export(
            module, values, dynamo=True, opset_version=18, input_names=list(inputs), dynamic_shapes=shapes, verbose=False
        )
        program.save(folder / f"{name}-dynamo.onnx")
        path = str(folder / f"{name}-torchscript.onnx")
        torch.onnx.export(module, values, path, dynamo=False, opset_version=17, input_names=list(inputs), dynamic_axes=axes)


def main() -> None:
    """Exports everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--only", default=",".join(MODELS), help="names, separated by commas")
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    for name in chosen.only.split(","):
        try:
            export(name, chosen.folder)
            print(name, flush=True)
        except Exception as error:  # noqa: BLE001, PERF203 - the others are exported all the same
            print(name, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)


if __name__ == "__main__":
    main()
