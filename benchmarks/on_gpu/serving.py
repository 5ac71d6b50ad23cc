"""Decoders in the form that serves: steps and prompts, the cache growing or in one buffer, launched and as a CUDA graph.

The models are those of `python -m benchmarks.exports whole FOLDER`. A step is one new token of each entry on top of 512, a prompt
512 tokens on top of none; the buffer has 1024 positions, all in memory of the device. Logits are compared with the first form's.
"""

# pyright: basic, reportMissingTypeStubs=false
from __future__ import annotations

import functools
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

import onnx_attnfuse
from benchmarks.harness import Benchmark, Race, Setting
from benchmarks.on_gpu.whole import sources
from benchmarks.sessions import Device, session_of
from onnx_attnfuse.serving.decoder import ServedDecoder

FORMS = ("growing", "one buffer", "one buffer, CUDA graph")


class Served:
    """A form of a decoder with its inputs, its cache and its logits on the device."""

    def __init__(self, source: pathlib.Path, form: str, size: tuple[int, int, int, int], setting: Setting) -> None:
        """Writes a form for entries, positions before, new tokens and positions in the buffer, and loads it."""
        batch, past, tokens, room = size
        fixed, served = form.endswith("graph"), form != FORMS[0]
        length = room if fixed and past else past + tokens  # a graph has one length for all steps
        choices: dict[str, Any] = {"ep": setting.provider, "verify": "none", **({"arch": setting.arch} if setting.cuda else {})}
        choices |= {"cache": "shared"} if served else {}
        if fixed:
            dims = {"batch": batch, "seq": tokens, "past_plus_seq": length, "max_sequence_length": room}
            choices |= {"cuda_graph": setting.cuda, "dim": dims}
        result = onnx_attnfuse.optimize(source, **choices)
        path = source.with_suffix(f".{FORMS.index(form)}.{batch}x{tokens}.onnx")
        result.save(path)
        decoder: ServedDecoder | None = result.report.decoder if served else None
        self.session = session_of(path, setting.provider, graph=fixed and setting.cuda)
        device, self.binding = Device(setting.provider), self.session.io_binding()
        feeds = self._feeds(size, length, room if decoder is not None else past)
        held = {name: device.holding(array) for name, array in feeds.items()}
        pairs: dict[str, str] = {}
        if decoder is not None:
            presents, pasts = decoder.present_keys + decoder.present_values, decoder.past_keys + decoder.past_values
            pairs = dict(zip(presents, pasts, strict=True))
        for name, array in feeds.items():
            self.binding.bind_input(name, setting.provider, 0, array.dtype.type, array.shape, held[name].data_ptr())
        first, *rest = self.session.get_outputs()
        self.kept, self.logits = device, device.room((batch, tokens, int(first.shape[-1])), np.float16)
        self.binding.bind_ortvalue_output(first.name, self.logits)
        for item in rest:
            grown = (batch, item.shape[1], past + tokens, item.shape[3])
            self.binding.bind_ortvalue_output(item.name, held[pairs[item.name]] if pairs else device.room(grown, np.float16))

    def _feeds(self, size: tuple[int, int, int, int], length: int, room: int) -> dict[str, Any]:
        """The inputs of a run: real tokens at the end of the mask, and a cache of noise, the same in every form."""
        batch, past, tokens, _ = size
        random, mask = np.random.default_rng(0), np.zeros((batch, length), np.int64)
        mask[:, length - past - tokens :] = 1
        places = np.broadcast_to(np.arange(past, past + tokens), (batch, tokens))
        plain = {"input_ids": 7 + places % 1000, "position_ids": places, "attention_mask": mask}
        feeds: dict[str, Any] = {}
        for item in self.session.get_inputs():
            if len(item.shape) == 2:
                feeds[item.name] = plain[item.name].astype(np.int64)
                continue
            shape = (batch, item.shape[1], past, item.shape[3])
            kept = random.standard_normal(shape).astype(np.float16) * np.float16(0.3)
            feeds[item.name] = np.zeros((batch, item.shape[1], room, item.shape[3]), np.float16)
            feeds[item.name][:, :, :past] = kept
        return feeds

    def __call__(self) -> None:
        self.session.run_with_iobinding(self.binding)
        self.binding.synchronize_outputs()

    def output(self) -> Any:
        """The last logits."""
        return self.logits.numpy()[:, -1]


def races(setting: Setting) -> Iterator[Race]:
    """A row for steps and prompts, of one entry and of eight."""
    past, room = (16, 32) if setting.quick else (512, 1024)
    for name, (whole, source) in sources(setting, quick="llama-1b").items():
        if not any("past" in port.name for port in whole.inputs):
            continue
        for (before, tokens), batch in itertools.product(((past, 1), (0, past)), (1, 8)):
            load = functools.partial(Served, source, size=(batch, before, tokens, room), setting=setting)
            words = f"{name}, {batch}x{tokens}" + f" at {before}" * bool(before)
            yield Race(words, {form: functools.partial(load, form=form) for form in FORMS})


BENCHMARK = Benchmark("Decoders in the form that serves", races)
