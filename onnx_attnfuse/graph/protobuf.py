"""Protobufs that hold much: read from the pages of a file, and written one weight at a time.

A protobuf that is built as a whole takes its size three times: the weights, the message, its bytes. The wire format asks only for
the length of a message in front of it, which is known without the data of its weights.
"""

from __future__ import annotations

import dataclasses
import mmap
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import BinaryIO

import onnx
from google.protobuf.message import Message

_GRAPH = onnx.ModelProto.DESCRIPTOR.fields_by_name["graph"].number
_INITIALIZER = onnx.GraphProto.DESCRIPTOR.fields_by_name["initializer"].number
_RAW_DATA = onnx.TensorProto.DESCRIPTOR.fields_by_name["raw_data"].number


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


@dataclasses.dataclass(frozen=True)
class Initializer:
    """An initializer whose data is asked for when it is written."""

    proto: onnx.TensorProto
    """All of it but the data that is asked for."""
    nbytes: int = 0
    """Bytes of data besides."""
    data: Callable[[], bytes] = bytes


def write(model: onnx.ModelProto, initializers: Sequence[Initializer], file: BinaryIO) -> None:
    """Writes a model, field by field in their order, as protobuf does.

    Args:
        model: The model without initializers in its main graph.
        initializers: These.
        file: Where to.
    """
    heads = [_parted(item.proto, _RAW_DATA) if item.nbytes else (item.proto.SerializeToString(), b"") for item in initializers]
    lengths = [
        len(before) + len(after) + (item.nbytes and len(_begun(_RAW_DATA, item.nbytes)) + item.nbytes)
        for item, (before, after) in zip(initializers, heads, strict=True)
    ]
    (before, after), (first, last) = _parted(model, _GRAPH), _parted(model.graph, _INITIALIZER)
    whole = len(first) + len(last) + sum(len(_begun(_INITIALIZER, length)) + length for length in lengths)
    file.write(before + _begun(_GRAPH, whole) + first)
    for item, (head, rest), length in zip(initializers, heads, lengths, strict=True):
        file.write(_begun(_INITIALIZER, length) + head)
        if item.nbytes:
            file.write(_begun(_RAW_DATA, item.nbytes))
            file.write(item.data())
        file.write(rest)
    file.write(last + after)


def _parted(message: Message, number: int) -> tuple[bytes, bytes]:
    """The bytes before a field of a serialized message, and those after it."""
    before, after = type(message)(), type(message)()
    for part, is_first in ((before, True), (after, False)):
        part.CopyFrom(message)
        for field, _ in message.ListFields():
            if field.number == number or (field.number < number) != is_first:
                part.ClearField(field.name)
    return before.SerializeToString(), after.SerializeToString()


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


def _begun(field: int, length: int) -> bytes:
    """The tag and the length of a field that holds bytes or a message."""
    digits = [length & 0x7F]
    while length := length >> 7:
        digits.append(length & 0x7F)
    return bytes([field << 3 | 2, *(digit | 0x80 for digit in digits[:-1]), digits[-1]])
