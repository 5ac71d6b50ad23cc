"""Decoders in the form that serves, on a GPU: steps and prompts with a cache in one buffer, launched and as a CUDA graph.

    python benchmarks/serving_on_gpu.py FOLDER OUT.md [--names llama-1b,qwen2-0.5b] [--room 1024] [--past 512] [--provider cuda]

FOLDER holds what `whole_models.py` wrote; weights and models go to `--work`. A step is one new token of each entry on top of
`--past` ones, a prompt is `--past` tokens on top of none; the buffer has `--room` positions, and everything is bound to memory of
the device. The median of `--rounds` runs. Logits are compared with those of the growing cache.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
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


@dataclasses.dataclass(frozen=True)
class Case:
    """What is run: a form of a model, and the tokens it is given."""

    form: str
    batch: int
    past: int
    tokens: int
    room: int

    @property
    def fixed(self) -> bool:
        return self.form.endswith("graph")

    @property
    def told(self) -> int:
        """Positions that the mask tells of: a graph has one length for all steps."""
        return self.room if self.fixed and self.past else self.past + self.tokens

    @property
    def model(self) -> str:
        """The name of the model that runs it; only a graph has sizes of its own."""
        return self.form.replace(" ", "-").replace(",", "") + (f".{self.batch}x{self.tokens}" if self.fixed else "")

    @property
    def words(self) -> str:
        return f"{self.batch}x{self.tokens}" + (f" at {self.past}" if self.past else "")


def cases(past: int, room: int) -> list[Case]:
    """Steps and prompts of one entry and of eight, in each form."""
    kinds = [(past, 1), (0, past)]
    return [Case(form, batch, *kind, room) for kind, batch, form in itertools.product(kinds, (1, 8), FORMS)]


def made(source: pathlib.Path, case: Case, provider: str, arch: str) -> tuple[pathlib.Path, ServedDecoder | None]:
    """Writes a form of the model beside it; returns where, and what is known of its cache."""
    choices: dict[str, Any] = {"ep": provider, "verify": "none", **({"arch": arch} if arch else {})}
    target = source.with_name(f"{source.stem}.{case.model}.onnx")
    if case.form != "growing":
        choices["cache"] = "shared"
    if case.fixed:
        dims = {"batch": case.batch, "seq": case.tokens, "past_plus_seq": case.told, "max_sequence_length": case.room}
        choices |= {"cuda_graph": True, "dim": dims}
    result = onnx_attnfuse.optimize(source, **choices)
    result.save(target)
    return target, result.report.decoder


def given(session: Any, decoder: ServedDecoder | None, case: Case) -> dict[str, Any]:
    """The inputs of a run: real tokens at the end of the mask, and a cache of noise, the same in every form."""
    random = np.random.default_rng(0)
    mask = np.zeros((case.batch, case.told), np.int64)
    mask[:, case.told - case.past - case.tokens :] = 1
    places = np.broadcast_to(np.arange(case.past, case.past + case.tokens), (case.batch, case.tokens))
    plain = {"input_ids": 7 + places % 1000, "position_ids": places, "attention_mask": mask}
    feeds: dict[str, Any] = {}
    for item in session.get_inputs():
        if len(item.shape) == 2:
            feeds[item.name] = plain[item.name].astype(np.int64)
            continue
        heads, size = item.shape[1], item.shape[3]
        kept = random.standard_normal((case.batch, heads, case.past, size)).astype(np.float16) * np.float16(0.3)
        room = case.past if decoder is None else case.room
        feeds[item.name] = np.zeros((case.batch, heads, room, size), np.float16)
        feeds[item.name][:, :, : case.past] = kept
    return feeds


def measured(path: pathlib.Path, decoder: ServedDecoder | None, case: Case, provider: str, rounds: int) -> dict[str, Any]:
    """Milliseconds of a run, and its last logits."""
    session = session_of(path, provider, graph=case.fixed and provider == "cuda")
    device = Device(provider)
    feeds = given(session, decoder, case)
    held = {name: device.holding(array) for name, array in feeds.items()}
    pairs = {}
    if decoder is not None:
        presents, pasts = decoder.present_keys + decoder.present_values, decoder.past_keys + decoder.past_values
        pairs = dict(zip(presents, pasts, strict=True))
    binding = session.io_binding()
    for name, array in feeds.items():
        binding.bind_input(name, provider, 0, array.dtype.type, array.shape, held[name].data_ptr())
    first = session.get_outputs()[0]
    logits = device.room((case.batch, case.tokens, int(first.shape[-1])), np.float16)
    binding.bind_ortvalue_output(first.name, logits)
    for item in session.get_outputs()[1:]:
        grown = (case.batch, item.shape[1], case.past + case.tokens, item.shape[3])
        binding.bind_ortvalue_output(item.name, held[pairs[item.name]] if pairs else device.room(grown, np.float16))
    times: list[float] = []
    for _ in range(_WARM + rounds):
        start = time.perf_counter()
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        times.append((time.perf_counter() - start) * 1e3)
    return {"ms": statistics.median(times[_WARM:]), "logits": logits.numpy()[:, -1]}


def rows(source: pathlib.Path, chosen: argparse.Namespace) -> Iterator[str]:
    """The lines of the table; all forms are written first, several at a time."""
    several = cases(chosen.past, chosen.room)
    with concurrent.futures.ProcessPoolExecutor(chosen.workers) as pool:
        written = {
            name: pool.submit(made, source, case, chosen.provider, chosen.arch)
            for name, case in {case.model: case for case in several}.items()
        }
        concurrent.futures.wait(written.values())
    truths: dict[str, np.ndarray[Any, Any]] = {}
    for case in several:
        try:
            path, decoder = written[case.model].result()
            found = measured(path, decoder, case, chosen.provider, chosen.rounds)
        except Exception as error:  # noqa: BLE001 - a failure is a result
            why = " ".join(str(error).split())[:300]
            yield f"| {source.stem} | {case.words} | {case.form} | {type(error).__name__}: {why} | |"
            continue
        truth = truths.setdefault(case.words, found["logits"])
        apart = float(np.abs(found["logits"].astype(np.float32) - truth.astype(np.float32)).max())
        yield f"| {source.stem} | {case.words} | {case.form} | {found['ms']:.2f} | {apart:.1e} |"


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--names", default="llama-1b", help="decoders, with commas between")
    parser.add_argument("--provider", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--arch", default="")
    parser.add_argument("--room", type=int, default=1024, help="positions in the buffer")
    parser.add_argument("--past", type=int, default=512, help="positions in use, and tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--workers", type=int, default=4, help="processes that write models")
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()) / "whole_models")
    chosen = parser.parse_args()
    chosen.work.mkdir(parents=True, exist_ok=True)
    lines = [f"onnxruntime {onnxruntime.__version__}, {chosen.past} of {chosen.room} positions in use.", ""]
    lines += ["| decoder | tokens | form | ms | largest difference of logits |", "|---|---|---|---|---|"]
    for name in chosen.names.split(","):
        source = chosen.work / f"{name}.onnx"
        if not source.exists():
            shutil.copyfile(chosen.folder / source.name, source)
        weights.fill(source)
        for line in rows(source, chosen):
            lines.append(line)
            print(line, flush=True)
            chosen.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
