"""Entries of a Hugging Face config that no ONNX file holds: tokens that begin, end and pad a text, the most positions."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any, cast

from onnx_attnfuse.errors import OptionError

GENERATION = "generation_config.json"
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
WHISPER = "whisper"
"""The type of models whose decoders onnxruntime-genai runs with what an encoder made of sound."""
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx", "max_target_positions")
"""The names that configs of transformers have for the most positions, the usual one first."""
_WANTED = ("vocab_size", *_LENGTHS, *_IDS)


def read_config(path: pathlib.Path) -> Mapping[str, Any]:
    """The entries of a config.json that the file of a model lacks, by the names `genai_config` asks for.

    Those of a text model inside of another (`text_config`) count where the outer one is silent. A generation_config.json beside
    the file has the last word on token ids, as it has when transformers generates.

    Args:
        path: config.json, or generation_config.json by itself.

    Returns:
        `bos_token_id`, `eos_token_id`, `pad_token_id`, `vocab_size` and `context_length`, those that are there; `model_type` of
        Whisper alone.

    Raises:
        OptionError: A file cannot be read, is no JSON object, or says nothing of all this.
    """
    outer = _object(path)
    inner: Any = outer.get("text_config")
    nested = cast("Mapping[str, Any]", inner) if isinstance(inner, Mapping) else dict[str, Any]()
    layers: list[Mapping[str, Any]] = [nested, outer]
    beside = path.with_name(GENERATION)
    if beside != path and beside.is_file():
        given = _object(beside)
        layers.append({name: given.get(name) for name in _IDS})
    said = {name: layer[name] for layer in layers for name in _WANTED if layer.get(name) is not None}
    if not said:
        names = ", ".join(_IDS)
        raise OptionError(f"{path} has none of {names} or {_LENGTHS[0]}; name the config.json of the model on Hugging Face")
    if outer.get("model_type") == WHISPER:
        said["model_type"] = WHISPER
    lengths = [said.pop(name) for name in _LENGTHS if name in said]
    if lengths:
        said["context_length"] = lengths[0]
    return said


def _object(path: pathlib.Path) -> Mapping[str, Any]:
    """The JSON object in a file."""
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"cannot read {path}: {error.strerror or error}; check the path") from error
    except ValueError as error:
        raise OptionError(f"{path} is no JSON: {error}; name the config.json of the model on Hugging Face") from error
    if not isinstance(found, dict):
        raise OptionError(f"{path} is no JSON object; name the config.json of the model on Hugging Face")
    return cast("dict[str, Any]", found)
