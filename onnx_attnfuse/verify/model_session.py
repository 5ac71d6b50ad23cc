"""Whole models in ONNX Runtime, whether two of them can be compared call by call, and where they begin to differ.

The first divergence is the first value that both have by name, in the order of the first. Values are asked for in blocks, in
order, and the search ends with the first block that holds a difference; so a model of any size is run with few of its values at a
time. The attention that it belongs to lies between it and the last equal values, found by walking up: the search knows nothing of
how attentions are read or built.

What GroupQueryAttention does to queries and keys by itself is done before it (`in_front`) for a CPU whose kernel does not:

- Rotations by RotaryEmbedding, so that each token is rotated by its own position. The operator's input `position_ids` has one for
  each token, and the CPU's kernel reads the first alone where nothing is cached yet.
- RMS normalizations of heads, which the CPU's kernel refuses.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias, cast

import google.protobuf.message
import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir

from onnx_attnfuse.errors import ModelError
from onnx_attnfuse.graph import io
from onnx_attnfuse.graph.build import Builder, builder_for
from onnx_attnfuse.graph.constants import attribute, subgraphs
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import CONTRIB, is_attention, is_contrib
from onnx_attnfuse.graph.scopes import all_names, scopes
from onnx_attnfuse.graph.tensors import external_tensors
from onnx_attnfuse.graph.uses import label, producer_of, sources
from onnx_attnfuse.kernels.operators import group_query_attention, rotary_embedding
from onnx_attnfuse.verify.inputs import Array
from onnx_attnfuse.verify.runtime import Operators, PieceSession, Reference, RuntimeRefusal
from onnx_attnfuse.verify.verdict import Divergence, ErrorBounds, compare

Source: TypeAlias = "str | os.PathLike[str] | onnx.ModelProto | ir.Model"

_GROUPED = b"GroupQueryAttention"
"""The operator that may get inputs that its kernel for the CPU refuses."""
_NO_KERNEL = "NOT_IMPLEMENTED"
"""ONNX Runtime's message for an operator that it has no kernel for."""
_TOO_LARGE = "the model is larger than one protobuf can be; save it and pass the path"
_MAX_WEIGHT_BYTES_IN_NUMPY = 1 << 28
"""Bytes of weights of a model that is still run in NumPy."""
_INFO, _ROTATION = group_query_attention.INFO, rotary_embedding.INFO.name
_ROTARY = ("cos_cache", "sin_cache", "position_ids")
_NORMS = ("q_norm_weight", "k_norm_weight")
_HEADS = ("num_heads", "kv_num_heads")
"""Attributes with the heads of queries and of keys, the first two inputs."""
_NORM = "SimplifiedLayerNormalization"
"""ONNX Runtime's name for RMS normalization, which it has among the operators of ai.onnx."""
_VALUES_PER_RUN = 128
"""Values that are looked at in one run."""


def read(source: Source) -> ir.Model:
    """The model, to look at.

    Raises:
        ModelError: It cannot be read.
    """
    if isinstance(source, ir.Model):
        return source
    return ir.from_proto(source) if isinstance(source, onnx.ModelProto) else io.load(source)


def session(source: Source, inner: Iterable[str] = (), operators: Operators = ()) -> PieceSession | Reference:
    """The model in ONNX Runtime, with nothing optimised; a small one that it lacks a kernel for in NumPy.

    Args:
        source: The model.
        inner: Names of inner values that it is to give out too.
        operators: Operators of other domains in NumPy.

    Raises:
        ModelError: It is too large to be passed.
        RuntimeRefusal: ONNX Runtime does not take it.
    """
    inner = list(inner)
    try:
        return _started(_for_cpu(source), inner)
    except RuntimeRefusal as refusal:
        if _NO_KERNEL not in str(refusal) and not operators:
            raise
        try:
            return Reference(_whole(source, inner), operators)
        except RuntimeRefusal:
            raise refusal from None


def _for_cpu(source: Source) -> Source:
    """The model with that done in front of attentions which their kernel for the CPU refuses; as it is if there is nothing."""
    try:
        if isinstance(source, (str, os.PathLike)) and not _mentions(source, _GROUPED):
            return source
        model = read(source)
    except ModelError:  # ONNX Runtime says more
        return source
    return in_front(model, rotations=False) if normalizes_itself(model) else source


def _mentions(path: str | os.PathLike[str], word: bytes) -> bool:
    """Whether a file has a word in it, without reading what may be gigabytes into memory."""
    with (
        contextlib.suppress(OSError, ValueError),
        pathlib.Path(path).open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        return content.find(word) >= 0
    return False


def _whole(source: Source, inner: list[str]) -> onnx.ModelProto:
    """The model with all its weights.

    Raises:
        RuntimeRefusal: They are too many to compute with in NumPy.
    """
    model = read(source)
    weights = (value.const_value for value in model.graph.initializers.values())
    if sum(tensor.nbytes for tensor in weights if tensor is not None) > _MAX_WEIGHT_BYTES_IN_NUMPY:
        raise RuntimeRefusal("the weights are too many to compute with in NumPy")
    folder = _data_folder(model)
    proto = ir.to_proto(model)
    if folder is not None:
        onnx.load_external_data_for_model(proto, str(folder))
    return _giving_out(proto, inner)


def _started(source: Source, inner: list[str]) -> PieceSession:
    if isinstance(source, (str, os.PathLike)) and not inner:
        return PieceSession(str(source))
    folder = None
    if isinstance(source, (str, os.PathLike)):
        folder = pathlib.Path(source).absolute().parent
        source = onnx.ModelProto.FromString(pathlib.Path(source).read_bytes())
    elif isinstance(source, ir.Model):
        if not io.fits_in_one_file(source):
            raise ModelError(_TOO_LARGE)
        folder, source = _data_folder(source), ir.to_proto(source)
    if inner:
        source = _giving_out(source, inner)
    try:
        serialized = source.SerializeToString()
    except (ValueError, google.protobuf.message.EncodeError) as error:  # which of them hangs on how protobuf was built
        raise ModelError(_TOO_LARGE) from error
    return PieceSession(serialized, folder)


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


def check_interfaces(models: tuple[ir.Model, ir.Model]) -> None:
    """Checks that two models may be given the same inputs and give the same outputs.

    Raises:
        ModelError: They may not; the message says how they can be compared, if they can.
    """
    first, second = (model.graph for model in models)
    if _written_in_place(second) > _as_long_as_inputs(first):
        raise ModelError(
            "the second model keeps its cache in one buffer, where that of the first grows, so that their calls differ; "
            "run attnfuse optimize FIRST --cache shared --verify model, which runs both in a decoding loop"
        )
    for what, one, other in (
        ("inputs", _names(_given(first)), _names(_given(second))),
        ("outputs", _names(first.outputs), _names(second.outputs)),
    ):
        if one != other:
            raise ModelError(
                f"the models do not have the same {what}: only one has {', '.join(sorted(one ^ other))}; "
                "compare models of one interface"
            )


def _written_in_place(graph: ir.Graph) -> int:
    """How many caches attentions write in place: outputs of the graph that are as long as an input which the attention reads."""
    facts, given, found = Facts(graph), set(graph.inputs), 0
    for value in graph.outputs:
        node = value.producer()
        if node is not None and is_attention(node):
            found += facts.dims(value) in [facts.dims(item) for item in node.inputs if item in given]
    return found


def _as_long_as_inputs(graph: ir.Graph) -> int:
    """How many outputs of the graph are as long as an input: a cache that grows is not."""
    facts = Facts(graph)
    lengths = {facts.dims(value) for value in graph.inputs}
    return sum(facts.dims(value) in lengths for value in graph.outputs)


def _given(graph: ir.Graph) -> Iterable[ir.Value]:
    return (value for value in graph.inputs if value.const_value is None)


def _names(values: Iterable[ir.Value]) -> set[str]:
    return {value.name or "" for value in values}


def normalizes_itself(model: ir.Model) -> bool:
    """Whether a GroupQueryAttention of the model normalizes queries and keys."""
    return any(_normalizes(node) for node in model.graph.all_nodes())


def _normalizes(node: ir.Node) -> bool:
    is_grouped = is_contrib(node, _INFO.name)
    return is_grouped and all(_INFO.input(node, name) is not None for name in _NORMS)


def in_front(model: ir.Model, *, rotations: bool = True) -> ir.Model:
    """A copy of the model whose GroupQueryAttention nodes do not normalize themselves, nor rotate where `rotations` are moved."""
    copy = model.clone()
    for build, node in grouped(copy):
        if _normalizes(node):
            _normalize(build, node)
        if rotations and attribute(node, "do_rotary", 0):
            _rotate(build, node)
    return copy


def grouped(model: ir.Model) -> Iterator[tuple[Builder, ir.Node]]:
    """Every GroupQueryAttention, with a builder of nodes before it."""
    names = all_names(model)
    for scope in scopes(model):
        build = builder_for(scope, names)
        for node in [item for item in scope.graph if is_contrib(item, _INFO.name)]:
            build.at(node)
            yield build, node


def _normalize(build: Builder, node: ir.Node) -> None:
    unpack(build, node)
    attributes = {"axis": -1, "epsilon": attribute(node, "qk_norm_epsilon", 1e-6), "stash_type": 1}
    for place, name in enumerate(_NORMS):
        whole, heads = node.inputs[place], attribute(node, _HEADS[place], 0)
        dims, dtype = (None, None) if whole is None else (build.facts.dims(whole), build.facts.dtype(whole))
        apart = build.node("Reshape", [whole, build.constant([0, 0, heads, -1])], dtype=dtype)
        normal = build.node(_NORM, [apart, _INFO.input(node, name)], attributes, dtype=dtype)
        joined = build.node("Reshape", [normal, build.constant([0, 0, -1])], dims=dims, dtype=dtype)
        node.replace_input_with(place, joined)
        node.replace_input_with(_INFO.place(name), None)
    node.attributes.pop("qk_norm_epsilon", None)


def _rotate(build: Builder, node: ir.Node) -> None:
    cos, sin, positions = (_INFO.input(node, name) for name in _ROTARY)
    if positions is None or cos is None:
        return
    unpack(build, node)
    for place, name in enumerate(_HEADS):
        heads: int = attribute(node, name, 0)
        attributes: dict[str, int] = {"num_heads": heads, "interleaved": attribute(node, "rotary_interleaved", 0)}
        value = node.inputs[place]
        width, channels = _last(build, cos), _last(build, value)
        if width is not None and channels is not None and 2 * width * heads != channels:
            attributes["rotary_embedding_dim"] = 2 * width
        node.replace_input_with(place, build.node(_ROTATION, [value, positions, cos, sin], attributes, domain=CONTRIB))
    for name in _ROTARY:
        node.replace_input_with(_INFO.place(name), None)
    del node.attributes["do_rotary"]


def unpack(build: Builder, node: ir.Node) -> None:
    """Slices queries, keys and values from the one tensor that they are passed as, if they are."""
    packed, total = node.inputs[0], _last(build, node.inputs[0])
    if node.inputs[1] is not None or packed is None or total is None:
        return
    counts: list[int] = [attribute(node, name, 0) for name in ("num_heads", "kv_num_heads", "kv_num_heads")]
    ends = list(itertools.accumulate(total // sum(counts) * count for count in counts))
    for place, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        node.replace_input_with(place, build.slice(packed, 2, start, end))


def _last(build: Builder, value: ir.Value | None) -> int | None:
    dims = build.facts.dims(value)
    return dims[-1] if dims and isinstance(dims[-1], int) else None


def first_divergence(
    sources: tuple[Source, Source],
    models: tuple[ir.Model, ir.Model],
    inputs: tuple[Mapping[str, Array], Mapping[str, Array]],
    tolerance: float | ErrorBounds,
) -> Divergence | None:
    """The first inner value, or output, that differs; None if none of those that both models have does.

    Args:
        sources: The models as they were handed in.
        models: The same, to look at.
        inputs: A case in which an output differs, for each model.
        tolerance: The largest difference that counts as equal.
    """
    first, second = (_named(model) for model in models)
    shared = [name for name in first if name in second]
    try:
        sessions = [session(source, shared) for source in sources]
    except RuntimeRefusal:
        return None
    known: set[str] = set()
    for name, left, right in _values(sessions, inputs, shared):
        result = compare(*_comparable(left, right), tolerance)
        if not result.equal:
            site = _attention_above(first[name], known) or _attention_above(second[name], known)
            return Divergence(name, _described(first[name]), _described(second[name]), site, result.detail)
        known.add(name)
    return None


def _named(model: ir.Model) -> dict[str, ir.Value]:
    """Everything that the nodes of the main graph give, in order."""
    return {value.name: value for node in model.graph for value in node.outputs if value.name}


def _values(
    sessions: Sequence[PieceSession | Reference], inputs: Sequence[Mapping[str, Array]], names: Sequence[str]
) -> Iterator[tuple[str, Array, Array]]:
    """Values by name, as both models have them; without those of a block that one of them refuses to give."""
    for start in range(0, len(names), _VALUES_PER_RUN):
        block = names[start : start + _VALUES_PER_RUN]
        try:
            left, right = (one.run(block, given) for one, given in zip(sessions, inputs, strict=True))
        except RuntimeRefusal:
            continue
        yield from (item for item in zip(block, left, right, strict=True) if not isinstance(item[1], list))  # sequences


def _comparable(left: Array, right: Array) -> tuple[Array, Array]:
    """Floats of two types as the wider one, bounded by the narrower one's range."""
    if left.dtype == right.dtype or left.dtype.kind not in "fV" or right.dtype.kind not in "fV":
        return left, right
    narrow, wide = sorted((left.dtype, right.dtype), key=lambda dtype: dtype.itemsize)
    most = float(cast("float", ml_dtypes.finfo(narrow).max))
    one, other = (array.astype(wide) for array in (left, right))
    bounded = np.where(np.isfinite(one), np.clip(one, -most, most), one)
    return bounded.astype(wide), other  # NumPy 1 widens a single number


def _described(value: ir.Value) -> str:
    node = producer_of(value)
    return f"{node.name or value.name} ({node.op_type})"


def _attention_above(value: ir.Value, known: set[str]) -> str | None:
    """The nearest attention that the value is computed by from values that are known to be equal."""

    def follows(item: ir.Value, _: ir.Node | None = None) -> bool:
        return item is value or item.name not in known

    for item in filter(follows, sources([value], follows)):
        node = item.producer()
        if node is None:
            continue
        inner = [node, *(found for graph in subgraphs(node) for found in graph.all_nodes())]
        for found in inner:
            if found.op_type == "Softmax" or is_attention(found):
                return label(found)
    return None
