"""Caches in fewer bits: bytes, tokens a second and what the logits lose, beside the shared cache in the type of the model.

    python -m benchmarks.quantised_caches OUT.md [--size small] [--model MODEL.onnx] [--provider cpu] [--types int8,int4,float8]

Without `--model` a Llama of random weights is made and exported, which wants torch and transformers. With it, a decoder whose
cache grows; `--fill` writes the weights of a graph that `whole_models.py` stored without. All models of one batch are loaded side
by side and take turns, so that their times can be compared. The error is measured on the device: a prompt and steps of the same
tokens for each, logits beside those of the cache in the model's type. `int8/tensor` has one scale for all channels. What fails is
told in its row.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

import onnx_attnfuse
from benchmarks.harness import in_turns
from benchmarks.whole.ort_runs import session_of
from onnx_attnfuse.serving.decoder import ServedDecoder

PLAIN = "same"
_PROMPT, _STEPS = 64, 64
_TYPES = {"tensor(float)": 1, "tensor(uint8)": 2, "tensor(int8)": 3, "tensor(float16)": 10, "tensor(float8e4m3fn)": 17}
"""Element types as ONNX numbers them."""


@dataclasses.dataclass(frozen=True)
class Made:
    """A model in a file, and what was told of it."""

    path: pathlib.Path
    decoder: ServedDecoder
    bytes_per_position: int
    scales: str


def source_of(chosen: argparse.Namespace) -> pathlib.Path:
    """The decoder whose cache grows, made where none is named."""
    if chosen.model is None:
        from benchmarks.genai import folders
        from benchmarks.genai_speed import SIZES

        return folders.exported(SIZES[chosen.size], "dyn18", chosen.work / f"{chosen.size}.onnx")
    if not chosen.fill:
        return chosen.model
    from benchmarks.whole import weights

    source = chosen.work / chosen.model.name
    if not source.exists():
        shutil.copyfile(chosen.model, source)
    weights.fill(source)
    return source


def made(source: pathlib.Path, kind: str, chosen: argparse.Namespace) -> Made:
    """Writes the model with one type of cache.

    Raises:
        RuntimeError: The cache was left as it was.
    """
    name, _, scales = kind.partition("/")
    choices: dict[str, Any] = {"ep": chosen.provider, "verify": chosen.verify, "cache": "shared", "kv_cache": name}
    result = onnx_attnfuse.optimize(source, **choices, **({"arch": chosen.arch} if chosen.arch else {}))
    decoder, record = result.report.decoder, result.report.kv_cache
    if decoder is None or (record is None and name != PLAIN):
        raise RuntimeError(next(note for note in reversed(result.report.notes) if "cache" in note))
    if scales:
        one_scale(result.model)
    target = chosen.work / f"{source.stem}.{kind.replace('/', '-')}.onnx"
    result.save(target)
    size = 2 * decoder.layers * decoder.kv_heads * decoder.head_size * _width(result.model, decoder)
    return Made(
        target, decoder, size if record is None else record.bytes_per_position, "" if record is None else record.scales_from
    )


def made_or_why(source: pathlib.Path, kind: str, chosen: argparse.Namespace) -> Made | str:
    """The model with one type of cache, or why there is none: it costs its row."""
    try:
        return made(source, kind, chosen)
    except Exception as error:  # noqa: BLE001 - a failure is a result
        return " ".join(str(error).split())[:300]


def _width(model: ir.Model, decoder: ServedDecoder) -> int:
    """The bytes of a number in the cache."""
    (dtype,) = {value.dtype for value in model.graph.inputs if value.name == decoder.past_keys[0]}
    return 0 if dtype is None else int(dtype.itemsize)


def one_scale(model: ir.Model) -> None:
    """Gives each cache one scale, the largest of its channels, in place."""
    for node in model.graph:
        if node.op_type != "GroupQueryAttention":
            continue
        for place, name in ((12, "k_quant_type"), (13, "v_quant_type")):
            value = node.inputs[place]
            assert value is not None
            assert value.const_value is not None
            number = np.asarray([value.const_value.numpy().max()], np.float32)
            value.const_value, value.shape = ir.tensor(number, name=value.name), ir.Shape([1])
            node.attributes.add(ir.AttrString(name, "PER_TENSOR"))


class Served:
    """A decoder with its buffer on the device."""

    def __init__(self, model: Made, batch: int, chosen: argparse.Namespace) -> None:
        self._model, self._batch, self._provider = model, batch, chosen.provider
        self._session = session_of(model.path, chosen.provider)
        self._inputs = {item.name: item for item in self._session.get_inputs()}
        names = (*model.decoder.past_keys, *model.decoder.past_values)
        self._buffers = {name: self._room(name, chosen.room) for name in names}

    def _room(self, name: str, length: int) -> Any:
        item = self._inputs[name]
        shape = [self._batch, item.shape[1], length, item.shape[3]]
        return onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, _TYPES[item.type], self._provider, 0)

    def bound(self, tokens: np.ndarray[Any, Any], past: int) -> Any:
        """The binding of new tokens on top of so many positions."""
        decoder, binding, total = self._model.decoder, self._session.io_binding(), past + tokens.shape[1]
        fed = {
            decoder.input_ids: tokens,
            decoder.attention_mask: np.ones((self._batch, total)),
            decoder.position_ids: np.broadcast_to(np.arange(past, total), tokens.shape),
        }
        for name, array in fed.items():
            if name in self._inputs:
                value = onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array, np.int64), self._provider, 0)
                binding.bind_ortvalue_input(name, value)
        presents = (*decoder.present_keys, *decoder.present_values)
        binding.bind_output(decoder.logits, self._provider)
        for (past_name, value), present in zip(self._buffers.items(), presents, strict=True):
            binding.bind_ortvalue_input(past_name, value)
            binding.bind_ortvalue_output(present, value)
        return binding

    def run(self, binding: Any) -> Any:
        """Runs to the end; the logits, where they lie."""
        self._session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        return binding.get_outputs()[0]

    def logits(self, tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The logits of a prompt and single tokens, (b, tokens, vocabulary) float32."""
        found = [self.run(self.bound(tokens[:, :_PROMPT], 0)).numpy()]
        found += [self.run(self.bound(tokens[:, at : at + 1], at)).numpy() for at in range(_PROMPT, tokens.shape[1])]
        return np.concatenate([item.astype(np.float32) for item in found], axis=1)


def lost(old: np.ndarray[Any, Any], new: np.ndarray[Any, Any]) -> str:
    """The largest and mean difference by the spread of the logits, and the share of equal greedy tokens, as cells."""
    if not np.isfinite(new).all():
        return "not finite | | "
    apart, spread = np.abs(new - old), float(old.std())
    equal = float((old.argmax(-1) == new.argmax(-1)).mean())
    return f"{apart.max() / spread:.2g} | {apart.mean() / spread:.2g} | {equal:.1%}"


def attempted(
    model: Made | str, batch: int, tokens: np.ndarray[Any, Any], chosen: argparse.Namespace
) -> tuple[Served | None, np.ndarray[Any, Any] | None, str]:
    """A model that is loaded, with its logits; or neither, and why."""
    if isinstance(model, str):
        return None, None, model
    try:
        served = Served(model, batch, chosen)
        logits = served.logits(tokens)
        if batch * chosen.past <= chosen.most_prompt:
            served.run(served.bound(np.full((batch, chosen.past), 7), 0))
    except Exception as error:  # noqa: BLE001 - a failure is a result
        return None, None, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return served, logits, ""


def rows(models: Mapping[str, Made | str], batch: int, chosen: argparse.Namespace) -> Iterator[str]:
    """The rows of one batch: each model by itself for its logits, then all in turns."""
    tokens = np.random.default_rng(0).integers(2, chosen.vocabulary, (batch, _PROMPT + _STEPS))
    started: dict[str, Served] = {}
    told: dict[str, str] = {}
    truth: np.ndarray[Any, Any] | None = None
    for kind, model in models.items():
        served, logits, failure = attempted(model, batch, tokens, chosen)
        if served is None or logits is None:
            told[kind] = failure
            continue
        truth = logits if truth is None else truth
        told[kind], started[kind] = lost(truth, logits), served
    steps = {kind: (served, served.bound(np.full((batch, 1), 7), chosen.past)) for kind, served in started.items()}
    prompted = started if batch * chosen.past <= chosen.most_prompt else {}
    prompts = {kind: (served, served.bound(np.full((batch, chosen.past), 7), 0)) for kind, served in prompted.items()}
    taken = [
        in_turns({kind: lambda pair=pair: pair[0].run(pair[1]) for kind, pair in runs.items()}, rounds)
        for runs, rounds in ((steps, chosen.rounds), (prompts, max(3, chosen.rounds // 10)))
    ]
    for kind, model in models.items():
        if kind not in started or isinstance(model, str):
            yield f"| {batch} | {kind} | {told[kind]} | | | | | | |"
            continue
        held = model.bytes_per_position * chosen.room * batch / 2**20
        step, prompt = (times.get(kind) for times in taken)
        beside = [f"{times[kind].gain:.2f}" if {PLAIN, kind} <= times.keys() else "" for times in taken]
        rate = "" if step is None else f"{batch * 1e3 / step.ms:.1f}"
        speed = f"{rate} | {beside[0]} | {'' if prompt is None else f'{prompt.ms:.1f}'} | {beside[1]}"
        yield f"| {batch} | {kind} | {held:.1f} | {speed} | {told[kind]} |"


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--model", type=pathlib.Path, help="a decoder whose cache grows")
    parser.add_argument("--fill", action="store_true", help="write the weights of a graph without them")
    parser.add_argument("--size", default="small", help="of the Llama that is made: small or large")
    parser.add_argument("--vocabulary", type=int, default=8000, help="tokens below this are drawn")
    parser.add_argument("--provider", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--arch", default="")
    parser.add_argument("--types", default="int8,int8/tensor,int4,float8")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--past", type=int, default=512, help="positions in use")
    parser.add_argument("--room", type=int, default=1024, help="positions in the buffer")
    parser.add_argument("--most-prompt", type=int, default=8192, help="tokens of a prompt, of all entries, that are still timed")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--verify", default="none", help="none, or sites: the library's own judgement too, which takes long")
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()) / "quantised_caches")
    chosen = parser.parse_args()
    chosen.work.mkdir(parents=True, exist_ok=True)
    source = source_of(chosen)
    models = {kind: made_or_why(source, kind, chosen) for kind in (PLAIN, *chosen.types.split(","))}
    where = "" if chosen.provider == "cuda" else " on a CPU"
    scales = {item.scales.split(";")[0] for item in models.values() if not isinstance(item, str) and item.scales}
    lines = [
        f"onnxruntime {onnxruntime.__version__}{where}, {source.stem}, {chosen.past} of {chosen.room} positions in use,"
        f" medians of {chosen.rounds} turns; scales from {', '.join(sorted(scales)) or 'nothing'}.",
        f"Logits of {_PROMPT + _STEPS} tokens of each entry beside those of the cache in the type of the model, by their spread.",
        "",
        "| entries | cache | MiB | tokens a second | times as fast | prompt, ms | times as fast | largest | mean | same tokens |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for batch in map(int, chosen.batches.split(",")):
        for line in rows(models, batch, chosen):
            lines.append(line)
            print(line, flush=True)
            chosen.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
