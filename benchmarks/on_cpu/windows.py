"""Windows on the CPU, as a mask of all keys and in blocks: `python -m benchmarks.on_cpu windows --provider cpu --threads 1`.

Attention alone with padding, and a ModernBERT of random weights from the configuration of transformers.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import onnx_ir as ir
import torch

import onnx_attnfuse
from benchmarks import exports
from benchmarks.harness import Benchmark, Race, Setting
from benchmarks.sessions import Bound
from models.adapters import Flat, hidden

_LAYERS = 2
_NEAR = {
    "on both sides": "far = Abs(away) near = LessOrEqual(far, reach)",
    "behind": "recent = LessOrEqual(away, reach) past = GreaterOrEqual(away, first) near = And(recent, past)",
}
_MASK = """real = Cast<to = 9>(mask) key = Unsqueeze(real, middle) size = Shape<start = 1>(mask) end = Squeeze(size)
    j = Range(first, end, step) i = Unsqueeze(j, last) away = Sub(i, j) {near} allowed = And(near, key)
    m = Where(allowed, zero, fill)"""
_ATTENTION = """q4{i} = Reshape(q{i}, split) k4{i} = Reshape(k{i}, split) v4{i} = Reshape(v{i}, split)
    qt{i} = Transpose<perm = [0, 2, 1, 3]>(q4{i}) kt{i} = Transpose<perm = [0, 2, 3, 1]>(k4{i})
    vt{i} = Transpose<perm = [0, 2, 1, 3]>(v4{i}) raw{i} = MatMul(qt{i}, kt{i}) small{i} = Mul(raw{i}, scale)
    sum{i} = Add(small{i}, m) p{i} = Softmax<axis = -1>(sum{i}) z{i} = MatMul(p{i}, vt{i})
    zt{i} = Transpose<perm = [0, 2, 1, 3]>(z{i}) y{i} = Reshape(zt{i}, flat)"""


def attention(near: str, reach: int) -> ir.Model:
    """Attentions of six heads of 64 under one mask, which see tokens near their row."""
    text = " ".join([_MASK.format(near=near), *(_ATTENTION.format(i=i) for i in range(_LAYERS))])
    inputs = ", ".join(f"float[b, s, 384] {part}{i}" for i in range(_LAYERS) for part in "qkv")
    outputs = ", ".join(f"float[b, s, 384] y{i}" for i in range(_LAYERS))
    places = {"first": 0, "step": 1, "reach": reach, "last": [1], "middle": [1, 2], "split": [0, 0, 6, 64], "flat": [0, 0, 384]}
    factors = {"scale": np.float32(0.125), "zero": np.float32(0), "fill": np.finfo(np.float32).min}
    head = f'<ir_version: 10, opset_import: ["" : 18]> windows (int64[b, s] mask, {inputs}) => ({outputs})'
    made = onnx.parser.parse_model(f"{head} {{ {text} }}")
    numbers = {name: np.asarray(value) for name, value in (places | factors).items()}
    made.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in numbers.items())
    return ir.from_proto(made)


def encoder(folder: pathlib.Path) -> ir.Model:
    """A ModernBERT: six layers of 384, four of which see 64 keys on both sides."""
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 1000, "hidden_size": 384, "intermediate_size": 576, "pad_token_id": 0}
    layers: dict[str, Any] = {"num_hidden_layers": 6, "num_attention_heads": 6, "global_attn_every_n_layers": 3}
    library: Any = transformers
    inner = library.ModernBertModel(library.ModernBertConfig(**sizes, **layers, attn_implementation="sdpa"))
    names, values = ("input_ids", "attention_mask"), (torch.randint(3, 900, (2, 200)), torch.ones(2, 200, dtype=torch.int64))
    dims = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    path = folder / "modernbert-windows.onnx"
    return ir.load(exports.export(Flat(inner, names, hidden), values, path, input_names=names, dynamic_shapes=((dims, dims),)))


def windows(setting: Setting) -> Iterator[Race]:
    """A row for each window and size, and for each length of the model."""
    lengths = (64,) if setting.quick else (64, 128, 256, 512, 1024, 2048)
    for side, reach in setting.some([(side, reach) for side in _NEAR for reach in (64, 128, 256)]):
        forms = _fused(attention(_NEAR[side], reach))
        for batch, length in ((1, 64),) if setting.quick else (*((1, length) for length in lengths), (8, 256)):
            random = np.random.default_rng(0)
            names = [f"{part}{i}" for i in range(_LAYERS) for part in "qkv"]
            feeds = {name: random.standard_normal((batch, length, 384), np.float32) for name in names}
            feeds["mask"] = np.ones((batch, length), np.int64)
            yield Race(f"{reach} {side}, {batch}x{length}", _bound(forms, setting, feeds), each=_LAYERS)
    forms = _fused(encoder(setting.folder))
    for length in lengths:
        feeds = {"input_ids": np.arange(length)[None] % 900 + 3, "attention_mask": np.ones((1, length), np.int64)}
        yield Race(f"ModernBERT, 1x{length}", _bound(forms, setting, feeds))


def _fused(source: ir.Model) -> Mapping[str, bytes]:
    """A model with its windows as masks of all keys, and in blocks, which sizes ask for where the window alone does not."""
    whole = onnx_attnfuse.optimize(source.clone(), ep="cpu", verify="none", provable=True)
    blocks = onnx_attnfuse.optimize(source, ep="cpu", verify="none", dim={} if "s" not in _names(source) else {"s": 4096})
    protos: list[Any] = [ir.to_proto(item.model) for item in (whole, blocks)]
    return {name: proto.SerializeToString() for name, proto in zip(("all keys", "blocks"), protos, strict=True)}


def _names(source: ir.Model) -> set[str]:
    return {str(dim) for item in source.graph.inputs for dim in item.shape or ()}


def _bound(forms: Mapping[str, bytes], setting: Setting, feeds: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: functools.partial(Bound, form, setting, feeds) for name, form in forms.items()}


BENCHMARK = Benchmark("Windows in blocks, on the CPU", windows)
