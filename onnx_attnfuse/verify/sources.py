"""Whole models in ONNX Runtime, whatever they come as, with inner values as outputs if asked."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable
from typing import TypeAlias, cast

import onnx
import onnx_ir as ir

from onnx_attnfuse.errors import ModelError
from onnx_attnfuse.graph import io
from onnx_attnfuse.graph.tensors import external_tensors
from onnx_attnfuse.verify.runtime import Session

Source: TypeAlias = "str | os.PathLike[str] | onnx.ModelProto | ir.Model"


def read(source: Source) -> ir.Model:
    """The model, to look at.

    Raises:
        ModelError: It cannot be read.
    """
    if isinstance(source, ir.Model):
        return source
    return ir.from_proto(source) if isinstance(source, onnx.ModelProto) else io.load(source)


def session(source: Source, inner: Iterable[str] = ()) -> Session:
    """The model in ONNX Runtime, with nothing optimised.

    Args:
        source: The model.
        inner: Names of inner values that it is to give out too.

    Raises:
        ModelError: It is too large to be handed over.
        RuntimeRefusal: ONNX Runtime does not take it.
    """
    inner = list(inner)
    if isinstance(source, (str, os.PathLike)) and not inner:
        return Session(str(source))
    folder = None
    if isinstance(source, (str, os.PathLike)):
        folder = pathlib.Path(source).absolute().parent
        source = onnx.ModelProto.FromString(pathlib.Path(source).read_bytes())
    elif isinstance(source, ir.Model):
        folder, source = _data_folder(source), ir.to_proto(source)
    if inner:
        source = _giving_out(source, inner)
    try:
        serialized = source.SerializeToString()
    except ValueError as error:
        raise ModelError("the model is larger than one protobuf can be; save it and pass the path") from error
    return Session(serialized, folder)


def _giving_out(model: onnx.ModelProto, inner: list[str]) -> onnx.ModelProto:
    """A copy of the model with more outputs."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    known = {output.name for output in copy.graph.output}
    copy.graph.output.extend(onnx.ValueInfoProto(name=name) for name in inner if name not in known)
    return copy


def _data_folder(model: ir.Model) -> pathlib.Path | None:
    for tensor in external_tensors(model):
        return pathlib.Path(cast("str | os.PathLike[str]", tensor.base_dir))
    return None
