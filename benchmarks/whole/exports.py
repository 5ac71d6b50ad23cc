"""Exports a whole model in float16 without its weights ever being made, and writes the graph without them."""

from __future__ import annotations

import contextlib
import io
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from benchmarks.whole import spec as specs
from benchmarks.whole.spec import Spec
from benchmarks.whole.weights import PAGE, PLACE
from benchmarks.whole.zoo import Whole

OPSET = 20
"""What torch's exporter takes by itself."""
SMALLEST_OUTSIDE = 512
"""Weights of fewer bytes stay in the graph."""
LARGEST_INSIDE = 1 << 20
"""Constants are kept as they are; one of more bytes would be a weight that was not recognised."""


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


def module_of(build: Callable[[], nn.Module]) -> nn.Module:
    """A module in float16 whose large parameters are zeros, in memory that is never written to and so takes no room.

    The first number of each differs: the exporter makes one of parameters that are alike.
    """
    torch.set_default_dtype(torch.float16)
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
                value = np.zeros(parameter.shape, np.float16)
                touched = value.reshape(-1)[: None if value.ndim < 2 else 1]
                touched[:] = 1 + 0.1 * random.standard_normal(touched.shape)
                made[id(parameter)] = nn.Parameter(torch.from_numpy(value), requires_grad=False)
            setattr(part, name, made[id(parameter)])
    return module.eval()


def export(whole: Whole, opset: int = OPSET) -> ir.Model:
    """What torch's exporter makes of a model, batch and length dynamic where they are in the specification."""
    spec = whole.spec
    example = {"batch": 2, "seq": 9, "past": 5}
    values = [torch.from_numpy(value) for value in specs.feeds(spec, specs.Case("", example)).values()]
    shapes = tuple(
        {at: axis.replace("+", "_plus_") for at, axis in enumerate(port.shape) if isinstance(axis, str)} for port in spec.inputs
    )
    module = module_of(whole.build)
    with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
        program: Any = torch.onnx.export(
            module,
            tuple(values),
            dynamo=True,
            opset_version=opset,
            input_names=[port.name for port in spec.inputs],
            output_names=[port.name for port in spec.outputs],
            dynamic_shapes=(shapes,),
            verbose=False,
        )
    strip(program.model, spec, {name for name, _ in module.named_parameters(remove_duplicate=False)})
    return program.model


def strip(model: ir.Model, spec: Spec, parameters: set[str]) -> None:
    """Leaves of every parameter a place in a data file that is not written, and no notes on where nodes come from.

    `model` is changed.
    """
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        for result in node.outputs:
            result.metadata_props.clear()
    offset = 0
    for value in model.graph.initializers.values():
        tensor = value.const_value
        assert tensor is not None
        if tensor.nbytes < SMALLEST_OUTSIDE or not (value.name in parameters or _untouched(tensor)):
            if tensor.nbytes > LARGEST_INSIDE:
                raise ValueError(f"{spec.name}: {value.name} of {tensor.nbytes} bytes is no parameter; say where it comes from")
            continue
        value.const_value = ir.ExternalTensor(
            PLACE.format(spec.name), offset, tensor.nbytes, tensor.dtype, shape=tensor.shape, name=value.name, base_dir="."
        )
        offset += -(-tensor.nbytes // PAGE) * PAGE


def _untouched(tensor: Any) -> bool:
    """Whether it is made of a large parameter, which the exporter has transposed, say: those are zeros, all but one."""
    return tensor.dtype == ir.DataType.FLOAT16 and np.count_nonzero(tensor.numpy()) < 2


def write(whole: Whole, folder: pathlib.Path, opset: int = OPSET) -> pathlib.Path:
    """Writes the graph and, beside it, the specification."""
    path = folder / f"{whole.spec.name}.onnx"
    ir.save(export(whole, opset), path)
    whole.spec.write(folder)
    return path
