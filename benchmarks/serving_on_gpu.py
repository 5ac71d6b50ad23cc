"""A decoder in the form that serves, on a GPU: a step with its cache in one buffer, launched and as a CUDA graph.

    python benchmarks/serving_on_gpu.py FOLDER OUT.md [--name llama-1b] [--room 1024] [--past 512] [--provider cuda]

FOLDER holds what `whole_models.py` wrote; weights and models go to `--work`. A step is one new token of each entry on top of
`--past` ones, with `--room` positions in the buffer and everything bound to memory of the device; the median of `--rounds` runs.
Logits are compared with those of the growing cache.
"""

from __future__ import annotations

import argparse
import pathlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnxruntime

import onnx_attnfuse
from benchmarks.whole import weights
from benchmarks.whole.ort_runs import Device, session_of
from onnx_attnfuse.serving.decoder import ServedDecoder

FORMS = ("growing", "one buffer", "one buffer, CUDA graph")
_WARM = 5


def made(source: pathlib.Path, form: str, batch: int, chosen: argparse.Namespace) -> tuple[pathlib.Path, ServedDecoder | None]:
    """Writes a form of the model beside it; returns where, and what is known of its cache."""
    choices: dict[str, Any] = {"ep": chosen.provider, "verify": "none", **({"arch": chosen.arch} if chosen.arch else {})}
    target = source.with_name(f"{source.stem}.{form.replace(' ', '-').replace(',', '')}.{batch}.onnx")
    if form != "growing":
        choices["cache"] = "shared"
    if form.endswith("graph"):
        room = chosen.room
        choices |= {
            "cuda_graph": True,
            "dim": {"batch": batch, "seq": 1, "past_plus_seq": room, "max_sequence_length": room},
        }
    result = onnx_attnfuse.optimize(source, **choices)
    result.save(target)
    return target, result.report.decoder


def given(session: Any, decoder: ServedDecoder | None, batch: int, chosen: argparse.Namespace, *, fixed: bool) -> dict[str, Any]:
    """The inputs of a step: real tokens at the end of the mask, and a cache of noise, the same in every form."""
    random = np.random.default_rng(0)
    length = chosen.room if fixed else chosen.past + 1
    mask = np.zeros((batch, length), np.int64)
    mask[:, length - chosen.past - 1 :] = 1
    feeds: dict[str, Any] = {}
    for item in session.get_inputs():
        if len(item.shape) == 2:
            plain = {
                "input_ids": np.full((batch, 1), 7),
                "position_ids": np.full((batch, 1), chosen.past),
                "attention_mask": mask,
            }
            feeds[item.name] = plain[item.name].astype(np.int64)
            continue
        heads, size = item.shape[1], item.shape[3]
        kept = random.standard_normal((batch, heads, chosen.past, size)).astype(np.float16) * np.float16(0.3)
        room = chosen.past if decoder is None else chosen.room
        feeds[item.name] = np.zeros((batch, heads, room, size), np.float16)
        feeds[item.name][:, :, : chosen.past] = kept
    return feeds


def measured(
    path: pathlib.Path, form: str, decoder: ServedDecoder | None, batch: int, chosen: argparse.Namespace
) -> dict[str, Any]:
    """Milliseconds and logits of a step."""
    fixed = form.endswith("graph")
    session = session_of(path, chosen.provider, graph=fixed and chosen.provider == "cuda")
    device = Device(chosen.provider)
    feeds = given(session, decoder, batch, chosen, fixed=fixed)
    held = {name: device.holding(array) for name, array in feeds.items()}
    pairs = {}
    if decoder is not None:
        presents, pasts = decoder.present_keys + decoder.present_values, decoder.past_keys + decoder.past_values
        pairs = dict(zip(presents, pasts, strict=True))
    binding = session.io_binding()
    for name, value in held.items():
        binding.bind_ortvalue_input(name, value)
    first = session.get_outputs()[0]
    logits = device.room((batch, 1, int(first.shape[-1])), np.float16)
    binding.bind_ortvalue_output(first.name, logits)
    for item in session.get_outputs()[1:]:
        room = (
            held[pairs[item.name]] if pairs else device.room((batch, item.shape[1], chosen.past + 1, item.shape[3]), np.float16)
        )
        binding.bind_ortvalue_output(item.name, room)
    times: list[float] = []
    for _ in range(_WARM + chosen.rounds):
        start = time.perf_counter()
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        times.append((time.perf_counter() - start) * 1e3)
    return {"ms": statistics.median(times[_WARM:]), "logits": logits.numpy()}


def rows(source: pathlib.Path, chosen: argparse.Namespace) -> Iterator[str]:
    """The lines of the table."""
    for batch in (1, 8):
        truth: np.ndarray[Any, Any] | None = None
        for form in FORMS:
            try:
                path, decoder = made(source, form, batch, chosen)
                found = measured(path, form, decoder, batch, chosen)
            except Exception as error:  # noqa: BLE001 - a failure is a result
                yield f"| {batch} | {form} | {type(error).__name__}: {' '.join(str(error).split())[:300]} | |"
                continue
            truth = found["logits"] if truth is None else truth
            apart = float(np.abs(found["logits"].astype(np.float32) - truth.astype(np.float32)).max())
            yield f"| {batch} | {form} | {found['ms']:.2f} | {apart:.1e} |"


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--name", default="llama-1b")
    parser.add_argument("--provider", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--arch", default="")
    parser.add_argument("--room", type=int, default=1024, help="positions in the buffer")
    parser.add_argument("--past", type=int, default=512, help="positions in use")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()) / "whole_models")
    chosen = parser.parse_args()
    chosen.work.mkdir(parents=True, exist_ok=True)
    source = chosen.work / f"{chosen.name}.onnx"
    if not source.exists():
        shutil.copyfile(chosen.folder / source.name, source)
    weights.fill(source)
    lines = [f"onnxruntime {onnxruntime.__version__}, {chosen.name}, {chosen.past} of {chosen.room} positions in use.", ""]
    lines += ["| entries | form | ms a step | largest difference of logits |", "|---|---|---|---|"]
    for line in rows(source, chosen):
        lines.append(line)
        print(line, flush=True)
    chosen.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
