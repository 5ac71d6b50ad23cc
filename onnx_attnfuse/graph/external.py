"""Weights in files beside the model: checked by name and size, copied by the kernel, never read into memory.

A data file belongs to whoever wrote it. A model saved in its folder refers to it. A model saved elsewhere gets files of its own,
named after the model, which are replaced with it. No file of another model is changed or overwritten.

Protobufs that hold much are read from the pages of a file, and written one weight at a time. A protobuf that is built as a whole
takes its size three times: the weights, the message, its bytes. The wire format asks only for the length of a message in front of
it, which is known without the data of its weights.
"""

from __future__ import annotations

import dataclasses
import filecmp
import mmap
import os
import pathlib
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import BinaryIO, cast

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError, Message

from onnx_attnfuse.errors import ModelError, OptionError
from onnx_attnfuse.graph.staging import Stage
from onnx_attnfuse.graph.tensors import Computed, external_tensors

_MIN_MOVED_BYTES = 1024
_GRAPH = onnx.ModelProto.DESCRIPTOR.fields_by_name["graph"].number
_INITIALIZER = onnx.GraphProto.DESCRIPTOR.fields_by_name["initializer"].number
_RAW_DATA = onnx.TensorProto.DESCRIPTOR.fields_by_name["raw_data"].number


def bind(tensors: Iterable[ir.ExternalTensor], model: pathlib.Path) -> None:
    """Give the external tensors of a model the folder it was read from, and check that their data is there.

    Args:
        tensors: The tensors; they get their base directory.
        model: The model file.

    Raises:
        ModelError: A data file is missing, too short, or outside of the model's folder, by its name or by a symbolic link.
    """
    folder, where = model.parent, model.name
    sizes: dict[str, int] = {}
    for tensor in tensors:
        location = location_of(tensor)
        if (tensor.offset or 0) < 0:
            problem = f"External data offset must be non-negative, and that of tensor {tensor.name!r} is {tensor.offset}"
            raise ModelError(f"{where} cannot be read: {problem}; export the model again")
        if location not in sizes:
            sizes[location] = _data_size(model, location)
        end = (tensor.offset or 0) + tensor.nbytes
        if end > sizes[location]:
            raise ModelError(
                f"{where}: tensor {tensor.name!r} ends at byte {end} of {location}, which has only {sizes[location]}; "
                "the file is cut off or belongs to another model, fetch it again"
            )
        tensor.base_dir = folder


def location_of(tensor: ir.ExternalTensor) -> str:
    """The data file's name as the model has it, relative to the model's folder."""
    return os.fsdecode(cast("str | os.PathLike[str]", tensor.location))


def _data_size(model: pathlib.Path, location: str) -> int:
    folder, where = model.parent, model.name
    if not location:
        raise ModelError(f"{where}: an external tensor does not say where its data is; export the model again")
    if not _is_inside(location):
        raise ModelError(
            f"{where} takes weights from {location}, which is outside of its folder; "
            "move the file next to the model and write its plain name into the model"
        )
    path = folder / location
    if not path.is_file():
        raise ModelError(
            f"{where} keeps weights in {location}, which is not in {folder}; put that file there or export the model again"
        )
    if not any(path.resolve().is_relative_to(home) for home in (folder.resolve(), model.resolve().parent)):
        raise ModelError(
            f"{where} takes weights from {location}, a link to a file outside of its folder; put the file itself there"
        )
    return path.stat().st_size


def _is_inside(location: str) -> bool:
    paths = pathlib.PurePosixPath(location), pathlib.PureWindowsPath(location)
    return not any(path.anchor or ".." in path.parts for path in paths)


@dataclasses.dataclass(frozen=True)
class DataFiles:
    """The data files of a model, seen from the folder it is saved to."""

    shared: tuple[pathlib.Path, ...]
    """Data files that lie in the folder already; the model refers to them."""
    copies: Mapping[pathlib.Path, pathlib.Path]
    """Missing data files, each with its source. Never linked: exporters write over a data file in place, and a model
    in another folder must not change with it."""
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    """The names of copies, by the names of the data files in the source."""

    @property
    def nbytes(self) -> int:
        """The size of all copies."""
        return sum(source.stat().st_size for source in self.copies.values())


def data_files(model: ir.Model, path: pathlib.Path, named: str) -> DataFiles:
    """The plan for the data files of a model that is saved: which are shared, which copied.

    Args:
        model: The model.
        path: The file that the model is being saved to.
        named: The name of the file that it was read from, empty if there is none.

    Raises:
        ModelError: A data file is gone.
        OptionError: A file of another model is in the place of a copy.
    """
    sources = {location_of(tensor): tensor for tensor in external_tensors(model)}
    shared: list[pathlib.Path] = []
    copies: dict[pathlib.Path, pathlib.Path] = {}
    renamed: dict[str, str] = {}
    for location, tensor in sources.items():
        source, beside = pathlib.Path(tensor.path), path.parent / location
        if not _is_inside(location):
            raise ModelError(
                f"weights are in {location}, which is outside of the model's folder; move the file next to the model first"
            )
        if not source.is_file() and not beside.is_file():
            raise ModelError(f"the weights in {source} are gone; put the file back and try again")
        if not source.is_file() or path.parent.samefile(os.fspath(tensor.base_dir) or "."):
            shared.append(beside)
            continue
        target = own_file(path, {file.name for file in shared} | set(renamed.values()), _ending(location, named))
        renamed[location] = target.name
        if not target.is_file() or target.samefile(source) or not filecmp.cmp(source, target):
            check_free(target, path)
            copies[target] = source
    return DataFiles(tuple(shared), copies, renamed)


def own_file(path: pathlib.Path, taken: Collection[str], ending: str = ".data") -> pathlib.Path:
    """The data file of the model at `path`: `<file name>.data`, or with a number where that name is taken."""
    name = f"{path.name}{ending}"
    count = 1
    while name in taken:
        count += 1
        name = f"{path.name}.{count}{ending}"
    return path.with_name(name)


def _ending(location: str, named: str) -> str:
    """The ending by which tools may look for a data file beside its model: `_data` of `model.onnx_data`."""
    ending = location.removeprefix(named)
    return ending if ending not in {"", location} and "/" not in ending else ".data"


def check_free(target: pathlib.Path, path: pathlib.Path) -> None:
    """Check that a data file of the model that is written to `path` takes the place of no file but one that was its own.

    Raises:
        OptionError: Another file is there.
    """
    if target.exists() and target.name not in _locations(path):
        raise OptionError(
            f"{target} exists and holds no weights of {path.name}; choose another name or folder, or move that file away"
        )


def _locations(path: pathlib.Path) -> set[str]:
    """The data files that the model at `path` refers to; none where there is no model."""
    try:
        proto = onnx.load_model(path, load_external_data=False)
    except (OSError, DecodeError):
        return set()
    return {entry.value for tensor in tensors(proto) for entry in tensor.external_data if entry.key == "location"}


def check_room(path: pathlib.Path, files: DataFiles, inside: int) -> None:
    """Refuse to begin a copy that the disk has no room for.

    Args:
        path: The model to be written.
        files: Its data files.
        inside: Bytes of weights that are written besides.

    Raises:
        OptionError: There is less room than the weights take.
        OSError: The folder cannot be looked at.
    """
    needed, free = files.nbytes + inside, shutil.disk_usage(path.parent).free
    if needed <= free:
        return
    folders = sorted({str(source.parent) for source in files.copies.values()})
    instead = f"write to {folders[0]}, where the data files are shared" if len(folders) == 1 else "choose another disk"
    raise OptionError(
        f"{path} takes {size_in_words(needed)} of weights, and {path.parent} has {size_in_words(free)} free; "
        f"make room there, or {instead}"
    )


def copy(files: DataFiles, stage: Stage) -> None:
    """Copy the missing data files to the folder that a model is saved to."""
    for target, source in files.copies.items():
        shutil.copy2(source, stage.temporary(target))


def size_in_words(count: int) -> str:
    """A number of bytes for a reader."""
    for unit, size in (("GB", 1 << 30), ("MB", 1 << 20), ("kB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def moved_out(weights: list[ir.Value], path: pathlib.Path, stage: Stage) -> list[ir.ExternalTensor]:
    """Write inline weights to a data file, one after the other.

    Args:
        weights: Initializers with data; not changed.
        path: The data file.
        stage: Where it is written.

    Returns:
        For each initializer the tensor that refers to the file.
    """
    temporary = stage.temporary(path)
    tensors = [value.const_value for value in weights if value.const_value is not None]
    written = ir.external_data.convert_tensors_to_external(tensors, temporary.parent, temporary.name)
    return [
        ir.ExternalTensor(
            path.name,
            tensor.offset,
            tensor.length,
            tensor.dtype,
            shape=tensor.shape,
            name=tensor.name,
            doc_string=tensor.doc_string,
        )
        for tensor in written
    ]


def movable_weights(model: ir.Model) -> list[ir.Value]:
    """Initializers whose data is inside the model and large enough to be worth a reference."""
    values = (value for graph in model.graphs() for value in graph.initializers.values())
    return [value for value in values if inside(value) is not None]


def inside(value: ir.Value) -> ir.TensorProtocol | None:
    """The data of an initializer, if it is inside the model and large enough to be worth a reference."""
    tensor = value.const_value
    if tensor is None or isinstance(tensor, (ir.ExternalTensor, ir.StringTensor)):
        return None
    return tensor if tensor.nbytes >= _MIN_MOVED_BYTES else None


def lies_beside(value: ir.Value) -> bool:
    """Whether an initializer is computed from weights in data files."""
    return isinstance(value.const_value, Computed) and value.const_value.lies_beside


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
