"""`--hf-config`, and the genai_config.json beside a decoder whose cache became one buffer."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from onnx_attnfuse.serving.hugging_face import WHISPER

if TYPE_CHECKING:
    from onnx_attnfuse.report.model import Report
    from onnx_attnfuse.serving.genai_config import Planned


def hf_config(path: pathlib.Path | None, cache: str, *, several: bool) -> Mapping[str, Any] | None:
    """The entries of a Hugging Face config, read before anything is done; None where no config is named.

    Raises:
        click.UsageError: It is named where no genai_config.json is written.
        OptionError: It cannot be used.
    """
    if path is None:
        return None
    if cache == "as-is":
        raise click.UsageError(
            f"--hf-config is for genai_config.json, which goes with --cache shared or paged; add one, or leave out {path}"
        )
    if several:
        raise click.UsageError("--hf-config is of one model, and there are several; give one model")
    from onnx_attnfuse.serving.hugging_face import read_config

    return read_config(path)


def context_length(config: Mapping[str, Any] | None) -> int | None:
    """The most positions that a config tells of; None where it tells none."""
    said = None if config is None else config.get("context_length")
    return said if isinstance(said, int) and said > 0 else None


def tells_past_length(config: Mapping[str, Any] | None) -> bool:
    """Whether onnxruntime-genai tells a decoder its length by a number, as it does for one type of models only."""
    return config is not None and config.get("model_type") == WHISPER


def check(out: pathlib.Path | None, cache: str) -> None:
    """Refuse early a folder whose genai_config.json would be lost.

    Raises:
        OptionError: It is another's.
    """
    if out is not None and cache != "as-is":
        from onnx_attnfuse.serving.genai_config import check_free

        check_free(out.parent)


def plan(report: Report, out: pathlib.Path | None, config: Mapping[str, Any] | None) -> tuple[Planned | None, Sequence[str]]:
    """The genai_config.json that goes beside a model, and the lines to tell of it; neither where no cache became a buffer.

    Raises:
        OptionError: The config contradicts the model, or the folder has a genai_config.json of another.
    """
    decoder, session = report.decoder, report.session
    if decoder is None or session is None or out is None:
        return None, ()
    from onnx_attnfuse.serving import genai_config

    if (reason := genai_config.unfit(decoder, config)) is not None:
        return None, (f"no {genai_config.FILE}: {reason}",)
    planned = genai_config.plan(decoder, session, out, config)
    return planned, (f"wrote {planned.path}", *planned.assumed)
