"""The folder of a model, with its configuration and tokenizer: each model is fused, every other file is copied."""

from __future__ import annotations

import filecmp
import pathlib
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import click

from onnx_attnfuse_cli.files import SUFFIX

_CONFIG = "config.json"
_MARKS = (_CONFIG, "genai_config.json", "model_index.json")
"""Files of which transformers, onnxruntime-genai and diffusers each write one into the folder of a model."""
_FEW = 5


def folder_of_model(arguments: Sequence[pathlib.Path], output: pathlib.Path | None) -> pathlib.Path | None:
    """The folder that is to be written anew as a whole; None where the arguments name models only.

    Raises:
        click.UsageError: The output is inside of the folder.
    """
    if output is None or len(arguments) != 1 or not any((arguments[0] / name).is_file() for name in _MARKS):
        return None
    (folder,) = arguments
    if output.absolute().resolve().is_relative_to(folder.resolve()):
        raise click.UsageError(f"-o is {output}, inside of {folder}, whose files are copied; choose a folder outside of it")
    return folder


def config_of(folder: pathlib.Path | None, cache: str) -> Mapping[str, Any] | None:
    """The Hugging Face config in the folder of a decoder whose cache is to be shared; None where it says nothing of use."""
    if folder is None or cache == "as-is" or not (folder / _CONFIG).is_file():
        return None
    from onnx_attnfuse.errors import OptionError
    from onnx_attnfuse.serving.hugging_face import read_config

    try:
        return read_config(folder / _CONFIG)
    except OptionError:
        return None


def check_free(folder: pathlib.Path, output: pathlib.Path, models: Collection[pathlib.Path]) -> None:
    """Refuses early a folder whose own files would be lost.

    Raises:
        click.UsageError: A file there differs from the one that is copied.
    """
    for source, target in _others(folder, output, models):
        if target.is_dir() or (target.exists() and not filecmp.cmp(source, target)):
            raise click.UsageError(f"{target} exists and differs from {source}; choose another folder, or move it away")


def copy_others(
    folder: pathlib.Path, output: pathlib.Path, done: Collection[pathlib.Path], rest: Collection[pathlib.Path]
) -> str:
    """Copies every file that no result replaces; models that could not be fused, and their data, are among them.

    Args:
        folder: The folder of the models.
        output: The folder with the results.
        done: Models that have a result.
        rest: Models without one.

    Returns:
        A line that names the copies.
    """
    replaced = {path for model in done for path in _data_files(model)} - {path for model in rest for path in _data_files(model)}
    copied: list[str] = []
    for source, target in _others(folder, output, done):
        if source.resolve() in replaced or (target.exists() and filecmp.cmp(source, target)):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
        copied.append(target.relative_to(output).as_posix())
    if not copied:
        return f"no other file to copy to {output}"
    names = ", ".join(copied[:_FEW]) + (", ..." if len(copied) > _FEW else "")
    return f"copied {len(copied)} other file{'s' * (len(copied) > 1)} to {output}: {names}"


def _others(
    folder: pathlib.Path, output: pathlib.Path, models: Collection[pathlib.Path]
) -> Iterator[tuple[pathlib.Path, pathlib.Path]]:
    """Every file that is none of these models, and its place in the output; hidden files and earlier results stay out."""
    for source in sorted(folder.rglob("*")):
        place = source.relative_to(folder)
        is_earlier = SUFFIX in source.name
        if source.is_file() and source not in models and not is_earlier and not any(part[0] == "." for part in place.parts):
            yield source, output / place


def _data_files(model: pathlib.Path) -> set[pathlib.Path]:
    """The files in which a model keeps weights; none where it cannot be read."""
    from onnx_attnfuse.errors import ModelError
    from onnx_attnfuse.graph import external, io

    try:
        return {pathlib.Path(tensor.path).resolve() for tensor in external.external_tensors(io.load(model))}
    except ModelError:
        return set()
