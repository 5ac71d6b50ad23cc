"""Views and selections of PyTorch in ONNX: operators that only move, take, repeat or look up elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
import torch

from onnx_attnfuse.training.pytorch.emitter import DTYPES

if TYPE_CHECKING:
    from onnx_attnfuse.training.pytorch.trace import Recorder

Arguments = Mapping[str, Any]
Rule = Callable[["Recorder", Arguments, torch.Tensor], "ir.Value | None"]


def _view(recorder: Recorder, given: Arguments, result: torch.Tensor) -> ir.Value:
    return recorder.emitter.op("Reshape", [recorder.value(given["self"]), recorder.emitter.shape(result.shape)], None, result)


def _same(recorder: Recorder, given: Arguments, result: torch.Tensor) -> ir.Value:
    source = recorder.value(given["self"])
    value = recorder.emitter.cast(source, DTYPES[result.dtype])
    return recorder.emitter.op("Identity", [source], None, result) if value is source else value


def _expand(recorder: Recorder, given: Arguments, result: torch.Tensor) -> ir.Value:
    if given["self"].dim() == result.dim() and all(map(_is_same, given["self"].shape, result.shape)):
        return _same(recorder, given, result)
    return recorder.emitter.op("Expand", [recorder.value(given["self"]), recorder.emitter.shape(result.shape)], None, result)


def _is_same(one: Any, other: Any) -> bool:
    """Whether two lengths are the same without a doubt."""
    plain = [item if isinstance(item, int) else str(item.node.expr) for item in (one, other)]
    return plain[0] == plain[1]


def _permuted(recorder: Recorder, given: Arguments, result: torch.Tensor) -> ir.Value:
    rank = given["self"].dim()
    order = list(range(rank))
    if "dims" in given:
        order = [dim % rank for dim in given["dims"]]
    elif rank > 1:
        first, second = given.get("dim0", 0) % rank, given.get("dim1", 1) % rank
        order[first], order[second] = order[second], order[first]
    return recorder.emitter.op("Transpose", [recorder.value(given["self"])], {"perm": order}, result)


def _unsqueeze(recorder: Recorder, given: Arguments, result: torch.Tensor) -> ir.Value:
    axis = recorder.emitter.whole([given["dim"] % result.dim()])
    return recorder.emitter.op("Unsqueeze", [recorder.value(given["self"]), axis], None, result)


def _slice(recorder: Recorder, given: Arguments, result: torch.Tensor) -> ir.Value | None:
    source, axis = given["self"], given["dim"] % given["self"].dim()
    length, start, step = source.shape[axis], given["start"] or 0, given["step"]
    end = length if given["end"] is None or (isinstance(given["end"], int) and given["end"] > 1 << 40) else given["end"]
    emitter = recorder.emitter
    if _is_same(result.shape[axis], length) and step == 1:
        return emitter.op("Identity", [recorder.value(source)], None, result)
    bounds = [emitter.shape([item]) for item in (start, end)]
    return emitter.op("Slice", [recorder.value(source), *bounds, emitter.whole([axis]), emitter.whole([step])], None, result)


def _select(recorder: Recorder, given: Arguments, result: torch.Tensor) -> ir.Value | None:
    index, axis = given["index"], given["dim"] % given["self"].dim()
    if not isinstance(index, int):
        return None
    number = recorder.emitter.number(index, ir.DataType.INT64)
    return recorder.emitter.op("Gather", [recorder.value(given["self"]), number], {"axis": axis}, result)


def _cat(recorder: Recorder, given: Arguments, result: torch.Tensor) -> ir.Value | None:
    tensors = given["tensors"]
    if any(item.dtype != result.dtype or item.dim() != result.dim() for item in tensors):
        return None
    axis = {"axis": given["dim"] % result.dim()}
    return recorder.emitter.op("Concat", [recorder.value(item) for item in tensors], axis, result)


def _split(recorder: Recorder, given: Arguments, results: Sequence[torch.Tensor]) -> list[ir.Value] | None:
    """Parts of a tensor along one axis, each as long as its result."""
    source, axis, emitter = given["self"], given["dim"] % given["self"].dim(), recorder.emitter
    lengths: list[Any] = [item.shape[axis] for item in results]
    if not all(isinstance(length, int) for length in lengths) or not isinstance(source.shape[axis], int):
        return None
    node = ir.node(
        "Split",
        [recorder.value(source), emitter.whole(lengths)],
        {"axis": axis},
        num_outputs=len(results),
        name=emitter.fresh("Split"),
    )
    for index, (value, tensor) in enumerate(zip(node.outputs, results, strict=True)):
        value.name = f"{node.name}.{index}"
        emitter.describe(value, tensor)
    emitter.nodes.append(node)
    return list(node.outputs)


def _unbind(recorder: Recorder, given: Arguments, results: Sequence[torch.Tensor]) -> list[ir.Value] | None:
    source, axis = given["self"], given["dim"] % given["self"].dim()
    taken = [_select(recorder, {"self": source, "dim": axis, "index": index}, item) for index, item in enumerate(results)]
    return [value for value in taken if value is not None]


def _gather(recorder: Recorder, source: torch.Tensor, index: torch.Tensor, axis: int, result: torch.Tensor) -> ir.Value | None:
    if index.dtype not in {torch.int64, torch.int32}:
        return None
    return recorder.emitter.op("Gather", [recorder.value(source), recorder.value(index)], {"axis": axis}, result)


def _indexed(recorder: Recorder, given: Arguments, result: torch.Tensor) -> ir.Value | None:
    """`x[:, index]` with one tensor, or indices along the first axes, as transformers reads padding."""
    source, indices = given["self"], given["indices"]
    places = [place for place, item in enumerate(indices) if item is not None]
    if any(indices[place].dtype not in {torch.int64, torch.int32} for place in places):
        return None
    if len(places) == 1:
        return _gather(recorder, source, indices[places[0]], places[0], result)
    if places != list(range(len(places))):
        return None
    shape = result.shape[: result.dim() - (source.dim() - len(places))]
    emitter, parts = recorder.emitter, list[ir.Value]()
    last = emitter.whole([len(shape)])
    for place in places:
        index = emitter.cast(recorder.value(indices[place]), ir.DataType.INT64)
        full = emitter.op("Expand", [index, emitter.shape(shape)], dtype=ir.DataType.INT64)
        parts.append(emitter.op("Unsqueeze", [full, last], dtype=ir.DataType.INT64))
    joined = emitter.op("Concat", parts, {"axis": len(shape)}, dtype=ir.DataType.INT64)
    return emitter.op("GatherND", [recorder.value(source), joined], None, result)


def _embedding(recorder: Recorder, given: Arguments, result: torch.Tensor) -> ir.Value | None:
    return _gather(recorder, given["weight"], given["indices"], 0, result)


def _index_select(recorder: Recorder, given: Arguments, result: torch.Tensor) -> ir.Value | None:
    return _gather(recorder, given["self"], given["index"], given["dim"] % result.dim(), result)


def _repeat(recorder: Recorder, given: Arguments, result: torch.Tensor) -> ir.Value | None:
    source, repeats = given["self"], given["repeats"]
    if len(repeats) != source.dim() or not all(isinstance(item, int) for item in repeats):
        return None
    return recorder.emitter.op("Tile", [recorder.value(source), recorder.emitter.whole(repeats)], None, result)


VIEWS: dict[str, Rule] = {
    **dict.fromkeys(["view", "_unsafe_view", "reshape", "squeeze"], _view),
    **dict.fromkeys(["clone", "alias", "detach", "contiguous", "_to_copy", "positive"], _same),
    **dict.fromkeys(["permute", "transpose", "t"], _permuted),
    "cat": _cat,
    "embedding": _embedding,
    "expand": _expand,
    "index": _indexed,
    "index_select": _index_select,
    "repeat": _repeat,
    "select": _select,
    "slice": _slice,
    "unsqueeze": _unsqueeze,
}
PARTS = {"split": _split, "split_with_sizes": _split, "unbind": _unbind, "chunk": _split}
"""Operators with several results."""
