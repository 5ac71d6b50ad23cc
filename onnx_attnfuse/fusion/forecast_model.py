"""Forecasts for a model without making anything of it: for other devices, other types, and chosen lengths.

report = forecast(model, ep="cuda", arch="sm80", dtype="float16", length=512)
"""

from __future__ import annotations

import dataclasses
from typing import Any

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import length as length_of
from onnx_attnfuse.attention.match.candidates import find_candidates
from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.fusion.pipeline import Fusion
from onnx_attnfuse.graph import io, sizes
from onnx_attnfuse.graph.scopes import scopes
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.kernels.conditions import AttentionParams
from onnx_attnfuse.kernels.op_node import params_of_node
from onnx_attnfuse.language.registry.discovery import load
from onnx_attnfuse.options import Options
from onnx_attnfuse.report.model import Report

DTYPES = {"float32": ir.DataType.FLOAT, "float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}


def forecast(
    model: io.AnyModel, options: Options | None = None, *, dtype: str | None = None, length: int | None = None, **choices: Any
) -> Report:
    """Which kernel ONNX Runtime will run for each attention, and why not a faster one.

    Args:
        model: As for `optimize`; it stays as it was.
        options: Choices; or give its fields by name. Nothing is verified.
        dtype: Element type to forecast for, `float32`, `float16` or `bfloat16`; the model's own by default.
        length: How many queries and keys there will be; `dim` counts before it.
        **choices: Fields of `Options`.

    Returns:
        A report as of `explain`.

    Raises:
        ModelError: The model cannot be read.
        OptionError: An option has no such value.
    """
    options = dataclasses.replace(options or Options(), **choices, verify="none")
    if dtype is not None and dtype not in DTYPES:
        raise OptionError(f"dtype is {dtype!r}; choose {', '.join(DTYPES)}")
    if length is not None and length < 1:
        raise OptionError(f"the length is {length}; choose one of 1 or more")
    loaded, _ = io.from_any(model)
    if length is not None:
        options = dataclasses.replace(options, dim={**dict.fromkeys(sequence_symbols(loaded), length), **options.dim})
    return Fusion(options, doubts=False).fuse(loaded, dtype=None if dtype is None else DTYPES[dtype])


def sequence_symbols(model: ir.Model) -> set[str]:
    """Symbolic sizes that are the number of queries or of keys of an attention, whatever they are called."""
    readers = load(Options()).readers
    dims: list[Dim] = []
    for scope in scopes(model):
        for candidate in find_candidates(scope, readers, keep_outputs=True):
            if candidate.spec is not None:
                dims += [length_of(candidate.spec.axes.i), length_of(candidate.spec.axes.j)]
            elif candidate.softmax is None:
                params = params_of_node(candidate.node, scope.facts)
                dims += [params.rows, params.columns] if isinstance(params, AttentionParams) else []
    return {name for dim in dims for name in sizes.symbols(dim) if dim == sizes.symbol(name)}
