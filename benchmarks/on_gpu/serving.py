"""Decoders in the form that serves: steps and prompts, the cache growing or in one buffer, launched and as a CUDA graph.

The folder holds what `whole_models.py` wrote. A step is one new token of each entry on top of 512, a prompt 512 tokens on top of
none; the buffer has 1024 positions, all in memory of the device. Logits are compared with those of the growing cache.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

import onnx_attnfuse
from benchmarks.harness import Benchmark, Race, Setting
from benchmarks.whole import weights
from benchmarks.whole.ort_runs import Device, session_of
from onnx_attnfuse.serving.decoder import ServedDecoder

FORMS = ("growing", "one buffer", "one buffer, CUDA graph")
NAMES = ("llama-1b", "qwen2-0.5b", "qwen3-0.6b", "gemma3-1b", "qwen3-moe")


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


def made(source: pathlib.Path, case: Case, setting: Setting) -> tuple[pathlib.Path, ServedDecoder | None]:
    """Writes a form of the model beside it; returns where, and what is known of its cache."""
    choices: dict[str, Any] = {"ep": setting.provider, "verify": "none", **({"arch": setting.arch} if setting.cuda else {})}
    target = source.with_name(f"{source.stem}.{case.model}.onnx")
    if case.form != "growing":
        choices["cache"] = "shared"
    if case.fixed:
        dims = {"batch": case.batch, "seq": case.tokens, "past_plus_seq": case.told, "max_sequence_length": case.room}
        choices |= {"cuda_graph": setting.cuda, "dim": dims}
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


class Served:
    """A form with its inputs, its cache and its logits on the device."""

    def __init__(self, source: pathlib.Path, case: Case, setting: Setting) -> None:
        path, decoder = made(source, case, setting)
        self.session = session_of(path, setting.provider, graph=case.fixed and setting.cuda)
        self.device, self.binding = Device(setting.provider), self.session.io_binding()
        feeds = given(self.session, decoder, case)
        held = {name: self.device.holding(array) for name, array in feeds.items()}
        pairs: dict[str, str] = {}
        if decoder is not None:
            presents, pasts = decoder.present_keys + decoder.present_values, decoder.past_keys + decoder.past_values
            pairs = dict(zip(presents, pasts, strict=True))
        for name, array in feeds.items():
            self.binding.bind_input(name, setting.provider, 0, array.dtype.type, array.shape, held[name].data_ptr())
        first, *rest = self.session.get_outputs()
        self.logits = self.device.room((case.batch, case.tokens, int(first.shape[-1])), np.float16)
        self.binding.bind_ortvalue_output(first.name, self.logits)
        for item in rest:
            grown = (case.batch, item.shape[1], case.past + case.tokens, item.shape[3])
            room = held[pairs[item.name]] if pairs else self.device.room(grown, np.float16)
            self.binding.bind_ortvalue_output(item.name, room)

    def __call__(self) -> None:
        self.session.run_with_iobinding(self.binding)
        self.binding.synchronize_outputs()

    def output(self) -> Any:
        """The last logits."""
        return self.logits.numpy()[:, -1]


def races(setting: Setting) -> Iterator[Race]:
    """A row for steps and prompts, of one entry and of eight."""
    past, room = (16, 32) if setting.quick else (512, 1024)
    for name in NAMES:
        source = setting.folder / f"{name}.onnx"
        if not source.exists():
            continue
        weights.fill(source)
        for (before, tokens), batch in itertools.product(((past, 1), (0, past)), (1, 8)):
            several = [Case(form, batch, before, tokens, room) for form in FORMS]
            variants = {case.form: functools.partial(Served, source, case, setting) for case in several}
            yield Race(f"{name}, {several[0].words}", variants)


BENCHMARK = Benchmark("Decoders in the form that serves", races)
