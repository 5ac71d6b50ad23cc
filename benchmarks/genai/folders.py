"""Folders that onnxruntime-genai runs: an export as it is, and what `attnfuse` and the builder of onnxruntime-genai make."""

from __future__ import annotations

import collections
import contextlib
import io
import json
import pathlib
import shutil

import onnx

from benchmarks.genai import architectures
from benchmarks.genai.architectures import Decoder
from benchmarks.harness import printed
from onnx_attnfuse.serving import genai_config

MODEL = "model.onnx"


def source(decoder: Decoder, folder: pathlib.Path) -> pathlib.Path:
    """The model as transformers saves it, with a tokenizer that calls token 7 `t7`; made once."""
    if not folder.exists():
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast

        words = Tokenizer(
            models.WordLevel({f"t{token}": token for token in range(decoder.settings["vocab_size"])}, unk_token="t0")
        )
        architectures.model(decoder).save_pretrained(folder)
        named = {"pad_token": "t0", "bos_token": "t1", "eos_token": "t1"}
        PreTrainedTokenizerFast(tokenizer_object=words, **named).save_pretrained(folder)
    return folder


def exported(decoder: Decoder, exporter: str, path: pathlib.Path) -> pathlib.Path:
    """An export, made once."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"part-{path.name}")
        with contextlib.redirect_stdout(io.StringIO()):
            architectures.export(decoder, exporter, part)
        part.replace(path)
    return path


def growing(model: pathlib.Path, shared: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """A model whose cache grows, which onnxruntime-genai copies from step to step, with the config of a shared one."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(model, folder / MODEL)
    config = json.loads((shared / genai_config.FILE).read_text(encoding="utf-8"))
    config["search"]["past_present_share_buffer"] = False
    (folder / genai_config.FILE).write_text(json.dumps(config), encoding="utf-8")
    return folder


def shared(model: pathlib.Path, config: pathlib.Path, folder: pathlib.Path, *more: str) -> None:
    """Runs `attnfuse optimize --cache shared`, with more options, on an export.

    Raises:
        RuntimeError: It ends with another status than 0, or without a config.
    """
    folder.mkdir(parents=True, exist_ok=True)
    options = ["--cache", "shared", "--ep", "cpu", "--hf-config", str(config / "config.json"), "-o", str(folder / MODEL), *more]
    _ran("onnx_attnfuse_cli", "optimize", str(model), *options)
    if not (folder / genai_config.FILE).exists():
        raise RuntimeError(f"no {genai_config.FILE}")


def fused(model: pathlib.Path, to: pathlib.Path) -> None:
    """Runs `attnfuse optimize` on an export without a cache."""
    _ran("onnx_attnfuse_cli", "optimize", str(model), "--ep", "cpu", "-o", str(to))


def built(config: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Runs the model builder of onnxruntime-genai on the weights that transformers saved.

    Raises:
        RuntimeError: It ends with another status than 0.
    """
    _ran("onnxruntime_genai.models.builder", "-m", str(config), "-o", str(folder), "-p", "fp32", "-e", "cpu")
    return folder


def operators(folder: pathlib.Path, ending: str = "") -> str:
    """How many nodes of each operator a model has, of those whose names end so."""
    nodes = onnx.load(folder / MODEL, load_external_data=False).graph.node
    counts = collections.Counter(node.op_type for node in nodes if node.op_type.endswith(ending))
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def _ran(*command: str) -> None:
    """Runs a module by itself."""
    printed(*command, environment={"ORT_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "1"})
