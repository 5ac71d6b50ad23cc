"""Protobufs that hold much: read from the pages of a file, and written one weight at a time.

A protobuf that is built as a whole takes its size three times: the weights, the message, its bytes. The wire format asks only for
the length of a message in front of it, so that is filled in afterwards.
"""

from __future__ import annotations

import mmap
import pathlib
from collections.abc import Iterable, Iterator
from typing import BinaryIO

import onnx

_GRAPH = onnx.ModelProto.DESCRIPTOR.fields_by_name["graph"].number
_INITIALIZER = onnx.GraphProto.DESCRIPTOR.fields_by_name["initializer"].number
_RAW_DATA = onnx.TensorProto.DESCRIPTOR.fields_by_name["raw_data"].number
_BYTES_OF_LENGTH = 5
"""A length of up to 2 GB takes as many, seven bits in each."""


def content(path: pathlib.Path) -> bytes | memoryview:
    """The content of a file, whose pages are read as they are needed.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        try:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (ValueError, OSError):  # an empty file, or one that has no pages, as a pipe
            return file.read()


def write(model: onnx.ModelProto, initializers: Iterable[tuple[onnx.TensorProto, bytes]], file: BinaryIO) -> None:
    """Writes a model.

    Args:
        model: The model without initializers in its main graph.
        initializers: These, each with the data that it lacks; each is asked for when the one before is written.
        file: Where to; it can be sought in.
    """
    around = onnx.ModelProto()
    around.CopyFrom(model)
    around.ClearField("graph")
    file.write(around.SerializeToString())
    file.write(_tag(_GRAPH))
    start = file.tell()
    file.write(bytes(_BYTES_OF_LENGTH))
    file.write(model.graph.SerializeToString())
    for proto, data in initializers:
        head = proto.SerializeToString()
        head += _tag(_RAW_DATA) + _varint(len(data), 1) if data else b""
        file.write(_tag(_INITIALIZER) + _varint(len(head) + len(data), 1) + head)
        file.write(data)
    end = file.tell()
    file.seek(start)
    file.write(_varint(end - start - _BYTES_OF_LENGTH, _BYTES_OF_LENGTH))
    file.seek(end)


def tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor of a model: initializers and attributes, in all graphs and functions."""
    yield from model.graph.initializer
    for nodes in (model.graph.node, *(function.node for function in model.functions)):
        yield from _attributes(nodes)


def _attributes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    for attribute in (item for node in nodes for item in node.attribute):
        yield from (*attribute.tensors, *([attribute.t] if attribute.HasField("t") else ()))
        for graph in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else ())):
            yield from graph.initializer
            yield from _attributes(graph.node)


def _tag(field: int) -> bytes:
    return bytes([field << 3 | 2])


def _varint(number: int, least: int) -> bytes:
    """A number as base 128, lowest digit first, in `least` bytes or more."""
    digits = [number & 0x7F]
    while number := number >> 7:
        digits.append(number & 0x7F)
    digits += [0] * (least - len(digits))
    return bytes([*(digit | 0x80 for digit in digits[:-1]), digits[-1]])
