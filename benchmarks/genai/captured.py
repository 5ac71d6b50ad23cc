"""A decoder fed as onnxruntime-genai feeds one whose steps it captures: a mask as long as the buffer, zeros behind the text.

Captured is only what runs on a GPU; what is handed in can be had anywhere, and is here given to ONNX Runtime by itself.
"""

from __future__ import annotations

import pathlib

import numpy as np
import onnx
import onnxruntime

import onnx_attnfuse
from benchmarks.genai import runs
from onnx_attnfuse.errors import ModelError


class Captured:
    """A model for padding on the right, in ONNX Runtime."""

    def __init__(self, export: pathlib.Path) -> None:
        """Fuses an export.

        Raises:
            ModelError: Its cache is as it was, or its mask has to end with the text.
        """
        made = onnx_attnfuse.optimize(onnx.load(export), ep="cpu", cache="shared", padding="assume-right")
        decoder = made.report.decoder
        if decoder is None or not decoder.mask_ends_anywhere:
            raise ModelError("the mask ends with the text")
        self._decoder = decoder
        self._session = onnxruntime.InferenceSession(made.model.SerializeToString(), providers=["CPUExecutionProvider"])

    def generated(self, given: list[int], steps: int) -> runs.Generated:
        """The tokens that follow a prompt, the end of the text being ruled out."""
        decoder, length = self._decoder, len(given) + steps
        mask = np.zeros((1, length), np.int64)
        shape = (1, decoder.kv_heads, length, decoder.head_size)
        cache = {name: np.zeros(shape, np.float32) for name in decoder.past_keys + decoder.past_values}
        presents = decoder.present_keys + decoder.present_values
        tokens, logits = list(given), list[np.ndarray]()
        new = given
        for _ in range(steps):
            places = np.arange(len(tokens) - len(new), len(tokens))
            mask[0, places] = 1
            feeds = {decoder.input_ids: np.array([new]), decoder.attention_mask: mask}
            if decoder.position_ids is not None:
                feeds[decoder.position_ids] = places[None]
            found = self._session.run([decoder.logits, *presents], feeds | cache)
            cache = dict(zip(cache, found[1:], strict=True))
            logits.append(found[0][:, -1])
            logits[-1][..., runs.EOS] = -np.inf
            new = [int(logits[-1].argmax())]
            tokens += new
        return runs.Generated([tokens[len(given) :]], np.stack(logits, 1))
