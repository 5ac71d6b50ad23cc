"""All that a test may call a model, made an `onnx_ir.Model`."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import onnx
import onnx_ir as ir

from onnx_attnfuse.errors import MissingDependencyError, OptionError
from onnx_attnfuse.graph import io

Model: TypeAlias = Any
"""ONNX text, a path, an `onnx.ModelProto`, an `onnx_ir.Model`, or a torch function or module."""


def as_model(model: Model, inputs: Sequence[Any] | None = None, **export: Any) -> ir.Model:
    """The model, read or exported.

    Args:
        model: The model; text differs from a path by line breaks or a `<`.
        inputs: Example inputs of a torch function or module; those of a function with defaults are the defaults.
        **export: More arguments for `torch.onnx.export`, as `dynamic_shapes`.

    Raises:
        MissingDependencyError: A torch function is given and torch is not installed.
        ModelError: It cannot be read.
        OptionError: Inputs are missing, or text is no model.
    """
    if callable(model):
        return _exported(model, inputs, export)
    if isinstance(model, str) and ("\n" in model or model.lstrip().startswith("<")):
        try:
            return ir.from_proto(onnx.parser.parse_model(model))
        except onnx.parser.ParseError as error:
            raise OptionError(f"the text is no model: {error}") from error
    if isinstance(model, (str, os.PathLike, onnx.ModelProto, ir.Model)):
        return io.from_any(model)[0]  # pyright: ignore[reportUnknownArgumentType] - any path will do
    raise OptionError(f"{model!r} is no model; give ONNX text, a path, a model object, or a torch function with inputs")


def _exported(function: Callable[..., Any], inputs: Sequence[Any] | None, export: dict[str, Any]) -> ir.Model:
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError as error:
        raise MissingDependencyError("a torch function needs torch; run pip install 'onnx-attnfuse[torch]'") from error
    if inputs is None:
        inputs = getattr(function, "__defaults__", None) or ()
    if not inputs:
        raise OptionError("a torch function needs example inputs; pass inputs=(...) or give its parameters tensors as defaults")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an exporter warns of itself
        program: Any = torch.onnx.export(_module(function, torch), tuple(inputs), dynamo=True, verbose=False, **export)
    return io.from_any(program)[0]


def _module(function: Callable[..., Any], torch: Any) -> Any:
    if isinstance(function, torch.nn.Module):
        return function.eval()  # pyright: ignore[reportFunctionMemberAccess, reportUnknownMemberType]

    class Wrapped(torch.nn.Module):  # type: ignore[misc]
        def forward(self, *args: Any) -> Any:
            return function(*args)

    return Wrapped().eval()
