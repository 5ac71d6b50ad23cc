"""Exports a whole model without its weights ever being made, and makes them where it is run: seeded noise."""

# pyright: basic, reportMissingTypeStubs=false
from __future__ import annotations

import contextlib
import io
import math
import pathlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from torch import nn

from benchmarks.whole.spec import Case, Whole

_OPSET = 20
"""What torch's exporter takes by itself."""
_SMALLEST_OUTSIDE, _LARGEST_INSIDE = 512, 1 << 20
"""Weights of fewer bytes stay in the graph; a constant of more bytes would be a weight that was not recognised."""
_PLACE, _PAGE = "{}.onnx.data", 4096
_POOL, _SCALE = 16_777_259, 0.02
"""Different numbers that are drawn; a prime, so that rows of a weight are not alike."""


@contextlib.contextmanager
def unmade() -> Iterator[None]:
    """Parameters that are registered in this block take no memory; buffers are made as ever."""
    kept = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.data.to("meta"), requires_grad=False)
        kept(module, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = kept  # type: ignore[method-assign]


def module_of(build: Callable[[], nn.Module], dtype: str) -> nn.Module:
    """A module in an element type, whose large parameters are zeros, in memory that is never written to and so takes no room.

    The first number of each differs: the exporter makes one of parameters that are alike.
    """
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with unmade():
            module = build()
    finally:
        torch.set_default_dtype(torch.float32)
    random = np.random.default_rng(0)
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if id(parameter) not in made:
                value = np.zeros(parameter.shape, dtype)
                touched = value.reshape(-1)[: None if value.ndim < 2 else 1]
                touched[:] = 1 + 0.1 * random.standard_normal(touched.shape)
                made[id(parameter)] = nn.Parameter(torch.from_numpy(value), requires_grad=False)
            setattr(part, name, made[id(parameter)])
    return module.eval()


def export(whole: Whole, folder: pathlib.Path) -> pathlib.Path:
    """Writes what torch's exporter makes of a model, batch and length dynamic, unless it is there; its weights are left out."""
    path = folder / f"{whole.name}.onnx"
    if path.exists():
        return path
    values = [torch.from_numpy(value) for value in whole.feeds(Case("", {"batch": 2, "seq": 9, "past": 5})).values()]
    shapes = tuple(
        {at: axis.replace("+", "_plus_") for at, axis in enumerate(port.shape) if isinstance(axis, str)} for port in whole.inputs
    )
    module = module_of(whole.build, whole.dtype)
    names: Any = {"input_names": [port.name for port in whole.inputs], "output_names": [port.name for port in whole.outputs]}
    with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
        program: Any = torch.onnx.export(
            module, tuple(values), dynamo=True, opset_version=_OPSET, dynamic_shapes=(shapes,), verbose=False, **names
        )
    strip(program.model, whole.name, {name for name, _ in module.named_parameters(remove_duplicate=False)})
    ir.save(program.model, path)
    return path


def strip(model: ir.Model, name: str, parameters: set[str]) -> int:
    """Leaves of every parameter a place in a data file that is not written, and no notes on where nodes come from.

    `model` is changed. The size of the file is returned.
    """
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        for result in node.outputs:
            result.metadata_props.clear()
    offset = 0
    for value in model.graph.initializers.values():
        tensor: Any = value.const_value
        if tensor.nbytes < _SMALLEST_OUTSIDE or not (value.name in parameters or _untouched(tensor)):
            if tensor.nbytes > _LARGEST_INSIDE:
                raise ValueError(f"{name}: {value.name} of {tensor.nbytes} bytes is no parameter; say where it comes from")
            continue
        value.const_value = ir.ExternalTensor(
            _PLACE.format(name), offset, tensor.nbytes, tensor.dtype, shape=tensor.shape, name=value.name or "", base_dir="."
        )
        offset += -(-tensor.nbytes // _PAGE) * _PAGE
    return offset


def _untouched(tensor: Any) -> bool:
    """Whether it is made of a large parameter, which the exporter has transposed, say: those are zeros, all but one."""
    return tensor.dtype in (ir.DataType.FLOAT16, ir.DataType.FLOAT) and bool(np.count_nonzero(tensor.numpy()) < 2)


def fill(path: pathlib.Path) -> int:
    """Writes the weights of a graph, unless they are there; returns their size in bytes.

    Vectors named ``weight`` scale what was normalised, and are 1. All else is normal with a standard deviation of 0.02.
    """
    tensors = [tensor for tensor in onnx.load(path, load_external_data=False).graph.initializer if tensor.external_data]
    places = [{entry.key: entry.value for entry in tensor.external_data} for tensor in tensors]
    size = max((int(place["offset"]) + int(place["length"]) for place in places), default=0)
    target = path.with_name(_PLACE.format(path.stem))
    if target.exists() and target.stat().st_size == size:
        return size
    pool = np.random.default_rng(0).standard_normal(_POOL, np.float32) * _SCALE
    pools = {onnx.TensorProto.FLOAT16: pool.astype(np.float16), onnx.TensorProto.FLOAT: pool}
    part = target.with_name(f"{target.name}.part")
    with part.open("wb") as file:
        for tensor, place in zip(tensors, places, strict=True):
            file.seek(int(place["offset"]))
            for piece in _pieces(tensor, pools[tensor.data_type]):
                file.write(piece)
        file.truncate(size)
    part.replace(target)
    return size


def _pieces(tensor: onnx.TensorProto, pool: Any) -> list[Any]:
    """What a tensor consists of, as pieces of the pool."""
    count = math.prod(tensor.dims)
    if len(tensor.dims) == 1 and tensor.name.endswith("weight"):
        return [np.ones(count, pool.dtype)]
    start = zlib.crc32(tensor.name.encode()) % _POOL
    pieces = [pool[start : start + count]]
    left = count - pieces[0].size
    pieces += [pool] * (left // _POOL) + [pool[: left % _POOL]]
    return [memoryview(piece) for piece in pieces if piece.size]
