"""Products of one input apart and as one: a gated MLP, queries, keys and values, a Gelu that gates, and a Llama around them.

    python benchmarks/gated_mlp_on_gpu.py OUT.md [--only mlp,qkv,gelu,llama] [--rows 8x512,1x1] [--ep cuda] [--rounds 60]

The figures behind docs/decisions/0025: what merging gains, and what the Split behind it costs. All forms
of a row are sessions of one process and take turns; times are medians of runs whose input and output are bound to memory of the
device. `captured` is the same as a CUDA graph. The MLP has 2048 channels and 5632 inside; the Llama has 22 such layers, with 32
heads of queries and 4 of keys and values, a buffer of 1024 positions and weights of noise. Weights of a part alone may stay in
the cache of the device between runs, so steps are to be judged by the Llama. A failure costs its own row; the table is written
after each. Needs onnxruntime-gpu, onnx and numpy. `--ep cpu --sizes 128,352,2,2,1` tries it out, in float32.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from benchmarks.bound import PROVIDERS, in_turns

CONTRIB = "com.microsoft"
_WARM, _ROOM, _SEEN, _HEAD = 5, 1024, 512, 64
_KINDS: dict[str, Any] = {"tensor(float16)": np.float16, "tensor(float)": np.float32}
_NOISE, _PAGE, _DRAWN = "weights.bin", 4096, 1 << 22
_LARGEST = 0.05
"""The scale of weights."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a Llama and its MLP."""

    channels: int = 2048
    inner: int = 5632
    layers: int = 22
    heads: int = 32
    kv_heads: int = 4


ROWS = "8x512,1x512,1x1,8x1"


class Graph:
    """A graph in the making; its weights are in a file of noise that all graphs read, each weight at a place of its own."""

    def __init__(self, code: int) -> None:
        self.code, self.count, self.size = code, 0, 0
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []

    def name(self, hint: str) -> str:
        self.count += 1
        return f"{hint}_{self.count}"

    def node(self, op: str, inputs: Sequence[str], outputs: int = 1, domain: str = "", **attributes: Any) -> str:
        """The first output; the others end in 1, 2 and so on."""
        name = self.name(op)
        names = [name, *(f"{name}.{place}" for place in range(1, outputs))]
        self.nodes.append(helper.make_node(op, list(inputs), names, name=name, domain=domain, **attributes))
        return name

    def weight(self, *shape: int) -> str:
        tensor = TensorProto(name=self.name("w"), data_type=self.code, dims=shape, data_location=TensorProto.EXTERNAL)
        size = int(np.prod(shape)) * helper.tensor_dtype_to_np_dtype(self.code).itemsize
        for key, value in {"location": _NOISE, "offset": str(self.size), "length": str(size)}.items():
            tensor.external_data.add(key=key, value=value)
        self.size += -(-size // _PAGE) * _PAGE
        self.weights.append(tensor)
        return tensor.name

    def constant(self, array: Any) -> str:
        self.weights.append(numpy_helper.from_array(np.asarray(array), self.name("c")))
        return self.weights[-1].name

    def products(self, x: str, channels: int, widths: Sequence[int], *, merged: bool) -> list[str]:
        """Products of one input, apart or as parts of one."""
        if not merged:
            return [self.node("MatMul", [x, self.weight(channels, width)]) for width in widths]
        whole = self.node("MatMul", [x, self.weight(channels, sum(widths))])
        first = self.node("Split", [whole, self.constant(list(widths))], len(widths), axis=-1)
        return [first, *(f"{first}.{place}" for place in range(1, len(widths)))]

    def mlp(self, x: str, sizes: Sizes, *, merged: bool) -> str:
        """A gated MLP."""
        up, gate = self.products(x, sizes.channels, [sizes.inner] * 2, merged=merged)
        silu = self.node("Mul", [gate, self.node("Sigmoid", [gate])])
        return self.node("MatMul", [self.node("Mul", [silu, up]), self.weight(sizes.inner, sizes.channels)])

    def take(self, name: str, shape: Sequence[int]) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, self.code, list(shape)))
        return name

    def give(self, value: str, name: str, shape: Sequence[int]) -> None:
        self.nodes.append(helper.make_node("Identity", [value], [name]))
        self.outputs.append(helper.make_tensor_value_info(name, self.code, list(shape)))

    def save(self, folder: pathlib.Path, name: str) -> pathlib.Path:
        graph = helper.make_graph(self.nodes, "products", self.inputs, self.outputs, self.weights)
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid(CONTRIB, 1)]
        path, noise = folder / f"{name}.onnx", folder / _NOISE
        with noise.open("ab") as file:
            while file.tell() < self.size:
                drawn = np.random.default_rng(file.tell()).standard_normal(_DRAWN, np.float32) * _LARGEST
                file.write(drawn.astype(helper.tensor_dtype_to_np_dtype(self.code)).tobytes())
        path.write_bytes(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())
        return path


def mlp(code: int, batch: int, length: int, sizes: Sizes, *, merged: bool) -> Graph:
    """A gated MLP alone."""
    graph, shape = Graph(code), (batch, length, sizes.channels)
    graph.give(graph.mlp(graph.take("x", shape), sizes, merged=merged), "y", shape)
    return graph


def attention(code: int, batch: int, length: int, sizes: Sizes, *, merged: bool) -> Graph:
    """Attention to oneself, with as many heads of keys as of queries."""
    graph, shape = Graph(code), (batch, length, sizes.channels)
    operands = graph.products(graph.take("x", shape), sizes.channels, [sizes.channels] * 3, merged=merged)
    heads = sizes.channels // _HEAD
    graph.give(graph.node("MultiHeadAttention", operands, domain=CONTRIB, num_heads=heads), "y", shape)
    return graph


def gelu(code: int, batch: int, length: int, width: int, *, merged: bool) -> Graph:
    """The first half of the MLP of a UNet, whose layers have an eighth of `width` channels."""
    graph, channels = Graph(code), width // 8
    whole = graph.node("MatMul", [graph.take("x", (batch, length, channels)), graph.weight(channels, width)])
    bias = graph.weight(width)
    if merged:
        result = graph.node("BiasSplitGelu", [whole, bias], domain=CONTRIB)
    else:
        left = graph.node("Split", [graph.node("Add", [whole, bias])], 2, axis=-1, num_outputs=2)
        result = graph.node("Mul", [left, graph.node("Gelu", [f"{left}.1"])])
    graph.give(result, "y", (batch, length, width // 2))
    return graph


def llama(code: int, batch: int, length: int, sizes: Sizes, *, merged: bool, apart: bool = False) -> Graph:
    """The layers of a Llama, its cache in buffers; `apart` writes queries, keys and values as three products."""
    graph, shape = Graph(code), (batch, length, sizes.channels)
    x = graph.take("x", shape)
    count = _SEEN + (length == 1)
    last, total = graph.constant(np.full(batch, count - 1, np.int32)), graph.constant(np.asarray(count, np.int32))
    cos, sin = graph.weight(_ROOM, _HEAD // 2), graph.weight(_ROOM, _HEAD // 2)
    scale = graph.constant(np.ones(sizes.channels, helper.tensor_dtype_to_np_dtype(code)))
    widths = [sizes.heads * _HEAD, sizes.kv_heads * _HEAD, sizes.kv_heads * _HEAD]
    normal, residual = graph.node("SimplifiedLayerNormalization", [x, scale], axis=-1, epsilon=1e-5), x
    for layer in range(sizes.layers):
        buffer = (batch, sizes.kv_heads, _ROOM, _HEAD)
        past = [graph.take(f"past_{part}_{layer}", buffer) for part in ("key", "value")]
        operands = (
            graph.products(normal, sizes.channels, widths, merged=False)
            if apart
            else [*graph.products(normal, sizes.channels, [sum(widths)], merged=False), "", ""]
        )
        heads = {"num_heads": sizes.heads, "kv_num_heads": sizes.kv_heads, "do_rotary": 1}
        seen = graph.node("GroupQueryAttention", [*operands, *past, last, total, cos, sin], 3, CONTRIB, **heads)
        for place, part in enumerate(("key", "value"), 1):
            graph.nodes[-1].output[place] = f"present_{part}_{layer}"
            graph.outputs.append(helper.make_tensor_value_info(f"present_{part}_{layer}", code, list(buffer)))
        mixed = graph.node("MatMul", [seen, graph.weight(widths[0], sizes.channels)])
        normal, residual = skip_norm(graph, mixed, residual, scale)
        normal, residual = skip_norm(graph, graph.mlp(normal, sizes, merged=merged), residual, scale)
    graph.give(normal, "y", shape)
    return graph


def skip_norm(graph: Graph, value: str, residual: str, scale: str) -> tuple[str, str]:
    """A sum with the residual, normalised, and the sum."""
    normal = graph.node("SkipSimplifiedLayerNormalization", [value, residual, scale], 4, CONTRIB, epsilon=1e-5)
    graph.nodes[-1].output[1] = graph.nodes[-1].output[2] = ""
    return normal, f"{normal}.3"


class Session:
    """A model with its inputs and outputs in memory of the device; presents are written over pasts."""

    def __init__(self, path: pathlib.Path, ep: str, threads: int, *, captured: bool) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4
        settings = {"enable_cuda_graph": "1"} if captured else {}
        self.session = onnxruntime.InferenceSession(str(path), options, providers=[(PROVIDERS[ep], settings)])
        if PROVIDERS[ep] not in self.session.get_providers():
            raise RuntimeError(f"ONNX Runtime could not start its {PROVIDERS[ep]}")
        random, held = np.random.default_rng(0), dict[str, Any]()
        self.binding = self.session.io_binding()
        for item in self.session.get_inputs():
            array = random.standard_normal(item.shape) * (item.name == "x")
            held[item.name] = onnxruntime.OrtValue.ortvalue_from_numpy(array.astype(_KINDS[item.type]), ep, 0)
            self.binding.bind_ortvalue_input(item.name, held[item.name])
        for item in self.session.get_outputs():
            past = held.get(item.name.replace("present", "past"))
            room = past or onnxruntime.OrtValue.ortvalue_from_shape_and_type(item.shape, _KINDS[item.type], ep, 0)
            self.binding.bind_ortvalue_output(item.name, room)
            if item.name == "y":
                self.result = room

    def run(self) -> None:
        """Runs the model to its end."""
        self.session.run_with_iobinding(self.binding)
        self.binding.synchronize_outputs()


def cases(
    sizes: Sizes, rows: Sequence[tuple[int, int]], code: int
) -> Iterator[tuple[str, str, bool, Mapping[str, Callable[[], Graph]]]]:
    """What is measured: its part, its row, whether it is captured too, and its forms, the one that is left first."""
    for part, make in {"mlp": mlp, "qkv": attention}.items():
        for batch, length in rows:
            forms = {
                name: lambda make=make, batch=batch, length=length, merged=merged: make(code, batch, length, sizes, merged=merged)
                for name, merged in (("apart", False), ("one product, Split", True))
            }
            yield part, f"{batch}x{length}", length == 1, forms
    for batch, length, width in ((2, 4096, 2560), (2, 1024, 5120), (2, 256, 10240)):
        forms = {
            name: lambda batch=batch, length=length, width=width, merged=merged: gelu(code, batch, length, width, merged=merged)
            for name, merged in (("Split, Gelu, Mul", False), ("BiasSplitGelu", True))
        }
        yield "gelu", f"{batch}x{length}x{width}", False, forms
    choices = {"apart": (False, False), "gate and up as one": (True, False), "apart, q k v too": (False, True)}
    for batch, length in rows:
        forms = {
            name: lambda batch=batch, length=length, merged=merged, apart=apart: llama(
                code, batch, length, sizes, merged=merged, apart=apart
            )
            for name, (merged, apart) in choices.items()
        }
        yield "llama", f"{batch}x{length}", length == 1, forms


def measured(
    forms: Mapping[str, Callable[[], Graph]], folder: pathlib.Path, chosen: argparse.Namespace, *, captured: bool
) -> Iterator[str]:
    """The end of a row of the table for each form."""
    started = {name: warmed(make, folder, chosen, captured=captured) for name, make in forms.items()}
    sessions = {name: session for name, session in started.items() if isinstance(session, Session)}
    times = in_turns({name: session.run for name, session in sessions.items()}, chosen.rounds)
    first = times.get(next(iter(forms)))
    for name, session in started.items():
        if isinstance(session, str):
            yield f"{name} | failed: {session} | |"
            continue
        gain = f"{first / times[name]:.3f}" if first else ""
        finite = "" if np.isfinite(session.result.numpy()).all() else " (not finite)"
        yield f"{name} | {times[name]:.4f}{finite} | {gain} |"


def warmed(make: Callable[[], Graph], folder: pathlib.Path, chosen: argparse.Namespace, *, captured: bool) -> Session | str:
    """A session that has run, or why there is none."""
    try:
        session = Session(make().save(folder, "model"), chosen.ep, chosen.threads, captured=captured)
        for _ in range(_WARM):
            session.run()
    except Exception as error:  # noqa: BLE001 - a failure is a result
        return " ".join(str(error).split())[:160].replace("|", "/")
    return session


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--only", default="mlp,qkv,gelu,llama")
    parser.add_argument("--ep", choices=tuple(PROVIDERS), default="cuda")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=0, help="threads of a CPU; 0 for ONNX Runtime's choice")
    parser.add_argument("--rows", default=ROWS, help="entries x positions, separated by commas")
    parser.add_argument("--sizes", default="2048,5632,22,32,4", help="channels, inside, layers, heads, heads of keys")
    chosen = parser.parse_args()
    if chosen.ep == "cuda" and hasattr(onnxruntime, "preload_dlls"):
        onnxruntime.preload_dlls()
    code = TensorProto.FLOAT16 if chosen.ep == "cuda" else TensorProto.FLOAT
    dtype = helper.tensor_dtype_to_np_dtype(code)
    sizes = Sizes(*map(int, chosen.sizes.split(",")))
    rows = [(int(batch), int(length)) for batch, _, length in (row.partition("x") for row in chosen.rows.split(","))]
    lines = ["# Products of one input, apart and as one", "", "    python benchmarks/gated_mlp_on_gpu.py OUT.md", ""]
    lines += [
        f"{dtype}, {chosen.ep}, ONNX Runtime {onnxruntime.__version__}, {sizes}, threads {chosen.threads or 'by default'}.",
        "",
    ]
    lines += [f"Medians of {chosen.rounds} runs in turns; gain is how many times as fast as the first form.", ""]
    lines += ["| part | rows | run | form | ms | gain |", "|---|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        for part, row, steps, forms in cases(sizes, rows, code):
            if part not in chosen.only.split(","):
                continue
            for captured in (False, True)[: 1 + (steps and chosen.ep == "cuda")]:
                how = "captured" if captured else "launched"
                for end in measured(forms, folder, chosen, captured=captured):
                    lines.append(f"| {part} | {row} | {how} | {end}")
                    print(lines[-1], flush=True)
                chosen.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
