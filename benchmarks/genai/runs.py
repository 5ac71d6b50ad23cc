"""The same prompts continued by transformers and by onnxruntime-genai, greedily, and where the two part.

Batches are padded on the left for transformers, and on the right for onnxruntime-genai: it takes the tokens at the end of a row
that are its padding token as padding, and one sequence by itself as having none.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.harness import WRONG

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # read once, where onnxruntime-genai is imported
PAD, EOS = 0, 1
NEAR = 1e-4
"""Two logits that are nearer are a tie, which rounding decides."""
LENGTHS = (4, 11, 7)
"""Tokens of the prompts of a batch. The longest is neither the first nor the last, and by itself it is the single run."""
Tokens = list[list[int]]


@dataclasses.dataclass(frozen=True)
class Generated:
    """The tokens that follow prompts."""

    tokens: Tokens
    logits: np.ndarray
    """Those that each token is chosen by, rows × steps × vocabulary; the end of the text has -inf."""

    def margin(self, row: int, step: int) -> float:
        """By how much the logit of a token is above the next."""
        second, first = np.sort(self.logits[row, step])[-2:]
        return float(first - second)


def prompts(vocabulary: int, lengths: Sequence[int] = LENGTHS) -> Tokens:
    """Random prompts without padding and end."""
    rng = np.random.default_rng(0)
    return [rng.integers(2, vocabulary, length).tolist() for length in lengths]


def by_torch(model: Any, given: Tokens, steps: int) -> Generated:
    """Tokens of `generate`, the end of the text being ruled out."""
    longest = max(map(len, given))
    ids = torch.tensor([[PAD] * (longest - len(row)) + row for row in given])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in given])
    chosen: dict[str, Any] = {"do_sample": False, "max_new_tokens": steps, "min_new_tokens": steps}
    kept: dict[str, Any] = {"output_logits": True, "return_dict_in_generate": True}
    with torch.no_grad():
        made = model.generate(input_ids=ids, attention_mask=mask, pad_token_id=PAD, eos_token_id=EOS, **chosen, **kept)
    return generated_by_torch(made, longest)


def generated_by_torch(made: Any, length: int) -> Generated:
    """What `generate` of transformers gives behind prompts of a length."""
    return Generated(made.sequences[:, length:].tolist(), _without_end([item.numpy() for item in made.logits]))


def _without_end(logits: Sequence[np.ndarray]) -> np.ndarray:
    """Logits of steps as rows × steps × vocabulary."""
    found = np.stack(logits, 1)
    found[..., EOS] = -np.inf
    return found


class Genai:
    """A model in onnxruntime-genai."""

    def __init__(self, folder: pathlib.Path, threads: int | None = None) -> None:
        import onnxruntime_genai

        self._genai = onnxruntime_genai
        config = onnxruntime_genai.Config(str(folder))
        if threads is not None:
            config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
        self._model = onnxruntime_genai.Model(config)

    def generator(self, given: Tokens, steps: int, inputs: Mapping[str, np.ndarray] | None = None) -> Any:
        """A generator that has read the prompts, and more inputs by name, and may generate a number of tokens more."""
        longest = max(map(len, given))
        length = longest + steps
        chosen = self._genai.GeneratorParams(self._model)
        chosen.set_search_options(batch_size=len(given), max_length=length, min_length=length, do_sample=False)
        made = self._genai.Generator(self._model, chosen)
        for name, array in (inputs or {}).items():
            made.set_model_input(name, array)
        made.append_tokens(np.array([row + [PAD] * (longest - len(row)) for row in given], np.int32))
        return made

    def generated(self, given: Tokens, steps: int, inputs: Mapping[str, np.ndarray] | None = None) -> Generated:
        """The tokens that follow prompts."""
        return _finished(self.generator(given, steps, inputs), max(map(len, given)), len(given))

    def continued(self, given: list[int], first: int, more: list[int], steps: int) -> Generated:
        """The tokens that follow a second prompt on top of a first one and `first` tokens that follow it.

        The last of those is taken back and handed in with the second prompt: what is generated last has not been through the
        model, and onnxruntime-genai goes on without its keys and values.
        """
        generator = self.generator([given], first + len(more) + steps)
        for _ in range(first):
            generator.generate_next_token()
        last = generator.get_sequence(0)[-1]
        generator.rewind_to(generator.token_count() - 1)
        generator.append_tokens(np.array([last, *more], np.int32))
        return _finished(generator, len(given) + first + len(more), 1)


def _finished(generator: Any, length: int, rows: int) -> Generated:
    """The tokens of a generator from a length on."""
    logits: list[np.ndarray] = []
    while not generator.is_done():
        logits.append(generator.get_logits()[:, -1].copy())
        generator.generate_next_token()
    return Generated([generator.get_sequence(row).tolist()[length:] for row in range(rows)], _without_end(logits))


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How far two continuations go together."""

    equal: tuple[int, ...]
    """The tokens of each row up to the first that differs; after that all later ones may."""
    steps: int
    error: float
    """The largest difference of logits up to there, in the largest logit's size."""
    ties: tuple[float, ...]
    """By how much the best logit is above the next where a row differs, as far as that is next to nothing."""

    @property
    def is_equal(self) -> bool:
        """Whether all tokens are equal, or a tie decided where they part."""
        return len(self.ties) == sum(count < self.steps for count in self.equal)

    def __str__(self) -> str:
        counts = sorted(set(self.equal))
        said = ", ".join(map(str, self.equal)) if len(counts) > 1 else str(counts[0])
        said = said if self.is_equal else f"{WRONG} {said}"
        ties = f", tie of {min(self.ties):.0e}" if self.ties else ""
        return f"{said} ({self.error:.0e}{ties})"


def compared(found: Generated, truth: Generated) -> Comparison:
    """Tokens of onnxruntime-genai beside those of transformers."""
    equal: list[int] = []
    ties: list[float] = []
    error = 0.0
    for row, (one, other) in enumerate(zip(found.tokens, truth.tokens, strict=True)):
        count = next((at for at, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), len(other))
        steps = slice(min(count + 1, len(other)))  # where tokens part the logits before are still of the same text
        first, second = (np.delete(item.logits[row, steps], EOS, -1) for item in (found, truth))
        error = max(error, float(np.abs(first - second).max() / np.abs(second).max()))
        equal.append(count)
        if count < len(other) and (margin := truth.margin(row, count)) < NEAR:
            ties.append(margin)
    return Comparison(tuple(equal), len(truth.tokens[0]), error, tuple(ties))
