"""Models in and out: files, `onnx.ModelProto`, `onnx_ir.Model` and torch's `ONNXProgram`.

`load` and `save` work on files; `from_any` and `to_kind` let a caller get back the kind of object that was handed in.
A model that is loaded and saved unchanged stays the same `ModelProto`, with these exceptions, all but the last onnx-ir's:

* `value_info` is ordered by node and leaves initializers out; metadata entries are ordered by key;
* the default domain is written as an empty name in opset imports and left out of nodes;
* of an external tensor only location, offset and length are kept;
* nodes that come before their inputs are put in order;
* a negative size, with which some tools say that it is not known, is left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pathlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, BinaryIO, Literal, TypeAlias, cast

import google.protobuf.message
import onnx
import onnx_ir as ir

from onnx_attnfuse.errors import ModelError, OptionError
from onnx_attnfuse.graph import external, faults
from onnx_attnfuse.graph.schemas import mark_versions
from onnx_attnfuse.graph.staging import staged
from onnx_attnfuse.graph.tensors import all_graphs, bodies, check_payloads, data_tensors
from onnx_attnfuse.graph.validity import check, check_written

AnyModel: TypeAlias = "str | os.PathLike[str] | onnx.ModelProto | ir.Model | Any"
"""Arguments of `from_any`; the last is any object with an `onnx_ir.Model` as its `model`, such as torch's `ONNXProgram`."""

_SOURCE = "onnx_attnfuse.source"
_INLINE_LIMIT = 2**31 - 2**26
"""Bytes of weights that fit in one protobuf, with room left for the graph."""

_FOREIGN = (
    (0, b"PK\x03\x04", "a zip archive, perhaps a PyTorch checkpoint", "export it with torch.onnx.export first"),
    (0, b"\x80\x02", "a Python pickle, perhaps a PyTorch checkpoint", "export it with torch.onnx.export first"),
    (0, b"version https://git-lfs", "a Git LFS pointer, not the model itself", "run `git lfs pull`"),
    (0, b"GGUF", "a GGUF file", "export the original model to ONNX"),
    (4, b"ORTM", "an ONNX Runtime .ort file", "pass the .onnx file it was made from"),
)

_DEFAULTS_SINCE = 4
"""The IR version from which on an initializer need not be an input."""
_LONGEST_MAGIC = 32
_NAMED = 3
_SECOND_TAGS = b"\x12\x1a\x22\x28\x32\x3a\x42"
"""The tags that a protobuf writer may put after the IR version: those of the fields 2 to 8."""


@dataclasses.dataclass(frozen=True)
class ModelKind:
    """The form of the caller's model, in which the result is given back."""

    name: Literal["path", "proto", "ir", "program"]
    program: Any = None
    """The `ONNXProgram`, for that kind."""


def load(path: str | os.PathLike[str]) -> ir.Model:
    """Read a model and check that it can be worked on; weights in other files are not read.

    Args:
        path: An ONNX file.

    Returns:
        The model. It remembers its file, and `save` refuses to write over it.

    Raises:
        ModelError: There is no usable ONNX model at `path`; the message says the problem and the remedy.
    """
    path = pathlib.Path(path).absolute()
    model, beside = _understood(_parsed(_content(path), path.name), path.name)
    external.bind(beside, path)
    model.meta[_SOURCE] = path
    return model


def save(model: ir.Model, path: str | os.PathLike[str], *, is_result: bool = True) -> tuple[pathlib.Path, ...]:
    """Write a model to a file, which appears whole or not at all.

    Weights in data files stay there: in the model's own folder they are referred to where they lie, in another folder a copy
    is put beside the model, named `<file name>.data`, or `<file name>_data` as in the source. A tensor computed from such
    weights goes to a file of such a name, too, as weights inside the model do when they exceed the limit of one protobuf.
    These files are replaced with the model.

    Args:
        model: The model; unchanged afterwards.
        path: The file to write; replaced if it exists.
        is_result: Check that the model would load; one that is still worked on may lack imports of opsets.

    Returns:
        The data files that were there before and that the file now refers to: it is of no use without them.

    Raises:
        OptionError: `path` cannot be written, is the file the model was loaded from, the disk has no room for the weights, or
            another file is in the place of the data.
        ModelError: The model's data files are gone, or its graph alone exceeds the limit of one protobuf.
    """
    path = pathlib.Path(path).absolute()
    _check_target(model, path)
    try:
        with staged() as stage:
            files = external.data_files(model, path, cast("pathlib.Path", model.meta.get(_SOURCE) or pathlib.Path()).name)
            weights = external.movable_weights(model)
            inside = sum(value.const_value.nbytes for value in weights if value.const_value is not None)
            external.check_room(path, files, inside)
            external.copy(files, stage)
            weights = weights if inside > _INLINE_LIMIT else [value for value in weights if external.lies_beside(value)]
            moved = external.moved_out(weights, _data_path(model, path, files.renamed.values()), stage) if weights else []
            with _holding(weights, moved), stage.temporary(path).open("wb") as file:
                _write(model, files.renamed, file, is_result=is_result)
    except OSError as error:
        raise OptionError(f"cannot write {path}: {error.strerror or error}; choose another place") from error
    return files.shared


def fits_in_one_file(model: ir.Model) -> bool:
    """Whether the weights inside of a model fit in one protobuf."""
    weights = external.movable_weights(model)
    return sum(value.const_value.nbytes for value in weights if value.const_value is not None) <= _INLINE_LIMIT


def from_any(model: AnyModel) -> tuple[ir.Model, ModelKind]:
    """A model to work on, from any form that a caller has, which is not changed.

    A file is loaded. A `ModelProto` is copied. An `onnx_ir.Model`, alone or in an `ONNXProgram`, is cloned: graphs, nodes and
    values are new, tensors are shared.

    Args:
        model: A path, an `onnx.ModelProto`, an `onnx_ir.Model`, or a torch `ONNXProgram`.

    Returns:
        The model and its kind, for `to_kind`.

    Raises:
        ModelError: It is none of these, or not a usable model.
    """
    if isinstance(model, (str, os.PathLike)):
        return load(cast("str | os.PathLike[str]", model)), ModelKind("path")
    if isinstance(model, ir.Model):
        return _copy(model), ModelKind("ir")
    if isinstance(model, onnx.ModelProto):
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        return _understood(copy, "the ModelProto")[0], ModelKind("proto")
    if isinstance(inner := getattr(model, "model", None), ir.Model):
        return _copy(inner), ModelKind("program", model)
    raise ModelError(
        f"a {type(model).__name__} is not a model; pass a path, an onnx.ModelProto, an onnx_ir.Model or an ONNXProgram"
    )


def _copy(model: ir.Model) -> ir.Model:
    copy = model.clone()
    _take_initializers_from_inputs(copy)
    _forget_negative_sizes(copy)
    mark_versions(copy)
    faults.note(copy)
    return copy


def to_kind(model: ir.Model, kind: ModelKind) -> Any:
    """Give a model the form the caller's had.

    Args:
        model: The model.
        kind: The kind that `from_any` returned.

    Returns:
        An `onnx.ModelProto` for one; the same `ONNXProgram`, its `model` replaced and any session on the old one released; else
        `model` itself.
    """
    if kind.name == "proto":
        proto = _to_proto(model)
        check_written(proto)
        faults.check_faults(model)
        return proto
    if kind.name != "program":
        return model
    kind.program.model = model
    if callable(release := getattr(kind.program, "release", None)):
        release()
    return kind.program


def _content(path: pathlib.Path) -> bytes | memoryview:
    if path.is_dir():
        found = sorted(item.name for item in path.glob("*.onnx"))
        remedy = f"pass its .onnx file: {', '.join(found[:_NAMED])}" if found else "it holds no .onnx file; check the path"
        raise ModelError(f"{path} is a folder; {remedy}")
    try:
        data = external.content(path)
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist; check the path") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}; check the file") from error
    if not data:
        raise ModelError(f"{path} is empty; export or download the model again")
    return data


def _parsed(data: bytes | memoryview, where: str) -> onnx.ModelProto:
    head = bytes(data[:_LONGEST_MAGIC])
    for start, magic, what, remedy in _FOREIGN:
        if head.startswith(magic, start):
            raise ModelError(f"{where} is {what}; {remedy}")
    try:
        return onnx.ModelProto.FromString(cast("bytes", data))
    except google.protobuf.message.DecodeError as error:
        if head.startswith(b"\x08") and head[2:3] in _SECOND_TAGS:
            raise ModelError(f"{where} is cut off or damaged; export or download the model again") from error
        raise ModelError(f"{where} is not an ONNX model; pass a file written by an ONNX exporter") from error


def _understood(proto: onnx.ModelProto, where: str) -> tuple[ir.Model, list[ir.ExternalTensor]]:
    """The model, checked and in order, and its tensors whose data lies beside it."""
    try:
        out_of_order = check(proto, where)
        model = ir.from_proto(proto)
        beside = check_payloads(model, where)
    except (ir.serde.SerdeError, NotImplementedError, ValueError, TypeError) as error:
        raise ModelError(f"{where} cannot be read: {_root_cause(error)}; export the model again") from error
    _take_initializers_from_inputs(model)
    _forget_negative_sizes(model)
    if "ai.onnx" in model.opset_imports:
        model.opset_imports.setdefault("", model.opset_imports.pop("ai.onnx"))
    mark_versions(model)
    faults.note(model)
    faults.check_types(model, where)
    if out_of_order is None:
        return model, beside
    try:
        for graph in bodies(model):
            graph.sort()
    except ValueError:
        raise ModelError(
            f"{where}: the graph has a cycle, {out_of_order.node} reads {out_of_order.value!r} before it can be computed; "
            "export the model again"
        ) from None
    return model, beside


def _take_initializers_from_inputs(model: ir.Model) -> None:
    """Before IR version 4 each initializer had to be an input, too, which no caller sets; later such an input is a default."""
    if model.ir_version >= _DEFAULTS_SINCE:
        return
    inputs = model.graph.inputs
    kept = [value for value in inputs if value.name not in model.graph.initializers]
    if len(kept) < len(inputs):
        inputs[:] = kept
        model.ir_version = _DEFAULTS_SINCE


def _forget_negative_sizes(model: ir.Model) -> None:
    """Forget sizes below 0, which ONNX Runtime takes for unknown ones, as the tools that write -1 mean it."""
    for graph in all_graphs(model):
        for value in itertools.chain(graph.inputs, graph.outputs, *(node.outputs for node in graph)):
            if value.shape is not None and any(isinstance(size, int) and size < 0 for size in value.shape):
                value.shape = ir.Shape([None if isinstance(size, int) and size < 0 else size for size in value.shape])


def _root_cause(error: BaseException) -> str:
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return " ".join(str(error).split()).rstrip(".")


def _check_target(model: ir.Model, path: pathlib.Path) -> None:
    if path.is_dir():
        raise OptionError(f"{path} is a folder; give the name of a file in it")
    if not path.parent.is_dir():
        raise OptionError(f"the folder {path.parent} does not exist; make it first")
    if not path.exists():
        return
    source = cast("pathlib.Path | None", model.meta.get(_SOURCE))
    if source is not None and source.exists() and path.samefile(source):
        raise OptionError(f"{path} is the model being optimized; write the result to another file")
    data_files = {pathlib.Path(tensor.path) for tensor in data_tensors(model)}
    if any(file.exists() and path.samefile(file) for file in data_files):
        raise OptionError(f"{path} holds the weights of the model; write the result to another file")


def _data_path(model: ir.Model, path: pathlib.Path, more: Iterable[str]) -> pathlib.Path:
    """The data file for weights that move out of the model; not one where the model already keeps weights, nor one of `more`."""
    target = external.own_file(path, {*more, *map(external.location_of, data_tensors(model))})
    external.check_free(target, path)
    return target


@contextlib.contextmanager
def _holding(values: Sequence[ir.Value], tensors: Sequence[ir.TensorProtocol]) -> Generator[None]:
    """Put other tensors in the place of some weights for the time of a block."""
    kept = [(value, value.const_value) for value, _ in zip(values, tensors, strict=False)]
    try:
        for value, tensor in zip(values, tensors, strict=False):
            value.const_value = tensor
        yield
    finally:
        for value, tensor in kept:
            value.const_value = tensor


def _write(model: ir.Model, renamed: Mapping[str, str], file: BinaryIO, *, is_result: bool) -> None:
    """Writes a model, of its weights one at a time, so that memory holds them once; `renamed` data files by their old names."""
    weights = {
        value.name or "": tensor for value in model.graph.initializers.values() if (tensor := external.inside(value)) is not None
    }
    try:
        with _holding([model.graph.initializers[name] for name in weights], list(map(_without_data, weights.values()))):
            proto = _to_proto(model)
        if is_result:
            check_written(proto)
            faults.check_faults(model)
        for tensor in external.tensors(proto) if renamed else ():
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = renamed.get(entry.value, entry.value)
        initializers = [_with_data(item, weights.get(item.name)) for item in proto.graph.initializer]
        proto.graph.ClearField("initializer")
        external.write(proto, initializers, file)
    except (google.protobuf.message.EncodeError, ir.serde.SerdeError, ValueError) as error:
        raise ModelError(f"the model cannot be written: {_root_cause(error)}; export it again") from error
    if file.tell() >= 2**31:
        raise ModelError("the graph alone exceeds 2 GB, the limit of one ONNX file; keep large constants as initializers")


def _without_data(tensor: ir.TensorProtocol) -> ir.ExternalTensor:
    return ir.ExternalTensor("", 0, 0, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=tensor.name or "")


def _with_data(proto: onnx.TensorProto, tensor: ir.TensorProtocol | None) -> external.Initializer:
    """An initializer; `proto` is the whole of it if there is no tensor, else all of it but its data."""
    if tensor is None:
        return external.Initializer(proto)
    if isinstance(tensor, ir.serde.TensorProtoTensor) and not tensor.raw.HasField("raw_data"):
        whole = ir.serde.serialize_tensor(tensor)
        whole.name = proto.name
        whole.ClearField("metadata_props")
        whole.metadata_props.extend(proto.metadata_props)
        return external.Initializer(whole)
    proto.ClearField("external_data")
    proto.ClearField("data_location")
    if tensor.doc_string:
        proto.doc_string = tensor.doc_string
    return external.Initializer(proto, tensor.nbytes, tensor.tobytes)


def _to_proto(model: ir.Model) -> onnx.ModelProto:
    """The model as a protobuf, without entries that onnx-ir writes twice.

    It adds a `value_info` for each initializer. A tool that later replaces the initializer, as ONNX Runtime's quantiser does,
    leaves that entry, and its shape inference then fails. It also repeats the metadata of a tensor that it has not changed.
    """
    proto = ir.to_proto(model)
    for tensor in proto.graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.metadata_props}
        if len(entries) < len(tensor.metadata_props):
            del tensor.metadata_props[:]
            for key, value in entries.items():
                tensor.metadata_props.add(key=key, value=value)
    _drop_types_of_initializers(proto.graph)
    return proto


def _drop_types_of_initializers(graph: onnx.GraphProto) -> None:
    weights = {tensor.name for tensor in graph.initializer}
    rest = [value for value in graph.value_info if value.name not in weights]
    del graph.value_info[:]
    graph.value_info.extend(rest)
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs:
                _drop_types_of_initializers(inner)
