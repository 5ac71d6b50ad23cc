"""Operators of PyTorch in ONNX: a rule for each that masks and attention are made of, by its name without the overload.

A rule gets the recorder, the arguments by the names of the schema, and the fake result. It returns the value of the result, or
None for a call it cannot express: that is then an opaque node, and nothing is claimed of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
import torch
from torch._subclasses.fake_tensor import FakeTensor

from onnx_attnfuse.training.pytorch.emitter import DTYPES, without_modes
from onnx_attnfuse.training.pytorch.runtime_calls import spread
from onnx_attnfuse.training.pytorch.views import PARTS, VIEWS, Arguments, Rule

_MOST_LITERAL = 1024

if TYPE_CHECKING:
    from onnx_attnfuse.training.pytorch.trace import Recorder


def named_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names that the operator's schema has for them, defaults included."""
    names = [item.name for item in func._schema.arguments]
    defaults = {item.name: item.default_value for item in func._schema.arguments if item.has_default_value()}
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def translate(func: Any, given: Arguments, results: Sequence[torch.Tensor], recorder: Recorder) -> list[ir.Value] | None:
    """The values of a call's results, or None where ONNX has no such operator or no rule knows it."""
    name = func._schema.name.removeprefix("aten::")
    in_place = name.endswith("_") and not name.endswith("__")
    many = (PARTS | {"max": _largest}).get(name)
    if many is not None:
        return many(recorder, given, results)
    rule = RULES.get(name.removesuffix("_") if in_place else name)
    if rule is None or len(results) != 1 or results[0].dtype not in DTYPES:
        return None
    value = rule(recorder, given, results[0])
    return None if value is None else [value]


def attention(
    recorder: Recorder,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[torch.Tensor, ir.Node] | None:
    """`scaled_dot_product_attention`, decomposed; None without four axes.

    Returns:
        The fake result, and the softmax inside.
    """
    if not query.dim() == key.dim() == value.dim() == 4:
        return None
    emitter, rows, keys = recorder.emitter, query.shape[-2], key.shape[-2]
    groups = query.shape[1] // key.shape[1] if enable_gqa else 1
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    outer = [spread(item, groups) for item in (key, value)] if groups != 1 else [key, value]
    scores = torch.matmul(query, outer[0].transpose(-1, -2)) * factor
    if is_causal:
        scores = scores.masked_fill(torch.ones(rows, keys, dtype=torch.bool).tril().logical_not(), -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = torch.where(attn_mask, scores, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = torch.softmax(scores, -1).to(query.dtype)
    softmax = next(node for node in reversed(emitter.nodes) if node.op_type == "Softmax")
    return torch.matmul(dropout(recorder, weights, dropout_p), outer[1]), softmax


def dropout(
    recorder: Recorder,
    input: torch.Tensor,  # noqa: A002 - as PyTorch calls it
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> torch.Tensor:
    """A dropout: its operand, with a note of the share."""
    with recorder.quiet():
        result = torch.empty_like(input)
    value = recorder.emitter.op("Identity", [recorder.value(input)], None, result)
    node = value.producer()
    assert node is not None
    recorder.traced.drops[node] = (float(p), bool(training))
    recorder.bind(result, value)
    recorder.gradients.follow("dropout", [input], [result])
    return result


def _operand(recorder: Recorder, item: Any, dtype: ir.DataType) -> ir.Value | None:
    if isinstance(item, torch.Tensor):
        return recorder.emitter.cast(recorder.value(item), dtype) if item.dtype in DTYPES else None
    if isinstance(item, torch.SymInt):
        return recorder.emitter.cast(recorder.emitter.size(item), dtype)
    return recorder.emitter.number(item, dtype) if isinstance(item, (int, float, bool)) else None


def _promoted(given: Arguments, *names: str) -> ir.DataType | None:
    """The type that operands are brought to."""
    items = [given[name] for name in names]
    try:
        found = items[0] if len(items) == 1 else torch.result_type(items[0], items[1])
    except (RuntimeError, TypeError):
        return None
    return DTYPES.get(found.dtype if isinstance(found, torch.Tensor) else found)


def _binary(name: str) -> Rule:
    def rule(recorder: Recorder, given: Arguments, result: torch.Tensor) -> ir.Value | None:
        dtype = _promoted(given, "self", "other")
        if given.get("rounding_mode") == "floor":
            return _floor_divided(recorder, given, result)
        if dtype is None or given.get("rounding_mode") is not None:
            return None
        if name not in _COMPARISONS:
            dtype = DTYPES[result.dtype]
        left, right = (_operand(recorder, given[item], dtype) for item in ("self", "other"))
        if left is None or right is None or (name in {"And", "Or", "Xor"} and dtype != ir.DataType.BOOL):
            return None
        alpha = given.get("alpha", 1)
        if alpha != 1:
            right = recorder.emitter.op("Mul", [right, recorder.emitter.number(alpha, dtype)], dtype=dtype)
            right.shape = None if not isinstance(given["other"], torch.Tensor) else recorder.value(given["other"]).shape
        return recorder.emitter.op(name, [left, right], None, result)

    return rule


def _remainder(recorder: Recorder, given: Arguments, result: torch.Tensor) -> ir.Value | None:
    """The remainder of integers, with the sign of the divisor."""
    return None if result.is_floating_point() else _binary("Mod")(recorder, given, result)


def _floor_divided(recorder: Recorder, given: Arguments, result: torch.Tensor) -> ir.Value | None:
    """`(a - a mod b) / b` of integers, which has no remainder that could be rounded."""
    rest, dtype = _remainder(recorder, given, result), DTYPES[result.dtype]
    left, right = (_operand(recorder, given[item], dtype) for item in ("self", "other"))
    if rest is None or left is None or right is None:
        return None
    return recorder.emitter.op("Div", [recorder.emitter.op("Sub", [left, rest], None, result), right], None, result)


def _without_nan(recorder: Recorder, given: Arguments, result: torch.Tensor) -> ir.Value | None:
    """`nan_to_num`: numbers in the place of NaN and of both infinities."""
    emitter, value, dtype = recorder.emitter, recorder.value(given["self"]), DTYPES[result.dtype]
    if not result.is_floating_point():
        return None
    ends = torch.finfo(result.dtype)
    truth = result.new_empty(result.shape, dtype=torch.bool)
    value = emitter.op(
        "Where", [emitter.op("IsNaN", [value], None, truth), emitter.number(given["nan"] or 0, dtype), value], None, result
    )
    for name, side, end in (("posinf", "Greater", ends.max), ("neginf", "Less", ends.min)):
        found = end if given[name] is None else given[name]
        sides = [emitter.op("IsInf", [value], None, truth), emitter.op(side, [value, emitter.number(0, dtype)], None, truth)]
        value = emitter.op("Where", [emitter.op("And", sides, None, truth), emitter.number(found, dtype), value], None, result)
    return value


def _padded(recorder: Recorder, given: Arguments, result: torch.Tensor) -> ir.Value | None:
    """A tensor with a number before it, after it, or both, along one axis."""
    pads = given["pad"]
    axes = [place // 2 for place, size in enumerate(pads) if not isinstance(size, int) or size != 0]
    if len(set(axes)) != 1 or not all(isinstance(size, int) and size >= 0 for size in pads):
        return None
    axis, emitter, number = (
        result.dim() - 1 - axes[0],
        recorder.emitter,
        recorder.emitter.number(given["value"], DTYPES[result.dtype]),
    )
    parts: list[ir.Value] = []
    for size in (pads[2 * axes[0]], None, pads[2 * axes[0] + 1]):
        if size is None:
            parts.append(recorder.value(given["self"]))
        elif size:
            like = result.narrow(axis, 0, size)
            parts.append(emitter.op("Expand", [number, emitter.shape(like.shape)], None, like))
    return emitter.op("Concat", parts, {"axis": axis}, result)


_COMPARISONS = {"Equal": "eq", "Less": "lt", "LessOrEqual": "le", "Greater": "gt", "GreaterOrEqual": "ge"}


def _not_equal(recorder: Recorder, given: Arguments, result: torch.Tensor) -> ir.Value | None:
    value = _binary("Equal")(recorder, given, result)
    return None if value is None else recorder.emitter.op("Not", [value], None, result)


def _reversed(recorder: Recorder, given: Arguments, result: torch.Tensor) -> ir.Value | None:
    if given.get("alpha", 1) != 1:
        return None
    return (
        _binary("Sub")(recorder, {"self": given["other"], "other": given["self"]} | {"alpha": 1}, result)
        if isinstance(given["other"], torch.Tensor)
        else _from_number(recorder, given, result)
    )


def _from_number(recorder: Recorder, given: Arguments, result: torch.Tensor) -> ir.Value | None:
    dtype = DTYPES[result.dtype]
    left, right = (_operand(recorder, given[name], dtype) for name in ("other", "self"))
    return None if left is None or right is None else recorder.emitter.op("Sub", [left, right], None, result)


def _unary(name: str) -> Rule:
    def rule(recorder: Recorder, given: Arguments, result: torch.Tensor) -> ir.Value | None:
        source = recorder.emitter.cast(recorder.value(given["self"]), DTYPES[result.dtype])
        return recorder.emitter.op(name, [source], None, result)

    return rule


def _is_nan(recorder: Recorder, given: Arguments, result: torch.Tensor) -> ir.Value | None:
    return recorder.emitter.op("IsNaN", [recorder.value(given["self"])], None, result)


def _not(recorder: Recorder, given: Arguments, result: torch.Tensor) -> ir.Value | None:
    source = given["self"]
    if result.dtype != torch.bool:
        return None
    return recorder.emitter.op("Not", [recorder.emitter.cast(recorder.value(source), ir.DataType.BOOL)], None, result)


def _where(recorder: Recorder, given: Arguments, result: torch.Tensor) -> ir.Value | None:
    dtype = DTYPES[result.dtype]
    condition = recorder.emitter.cast(recorder.value(given["condition"]), ir.DataType.BOOL)
    chosen, other = (_operand(recorder, given[name], dtype) for name in ("self", "other"))
    return None if chosen is None or other is None else recorder.emitter.op("Where", [condition, chosen, other], None, result)


def _masked_fill(recorder: Recorder, given: Arguments, result: torch.Tensor) -> ir.Value | None:
    fill = _operand(recorder, given["value"], DTYPES[result.dtype])
    if fill is None:
        return None
    inputs = [recorder.value(given["mask"]), fill, recorder.value(given["self"])]
    return recorder.emitter.op("Where", inputs, None, result)


def _full(fill: float | None = None) -> Rule:
    def rule(recorder: Recorder, given: Arguments, result: torch.Tensor) -> ir.Value | None:
        number = given["fill_value"] if fill is None and "fill_value" in given else given["s"] if fill is None else fill
        value = _operand(recorder, number, DTYPES[result.dtype])
        if value is None or not result.dim():
            return value
        return recorder.emitter.op("Expand", [value, recorder.emitter.shape(result.shape)], None, result)

    return rule


def _arange(recorder: Recorder, given: Arguments, result: torch.Tensor) -> ir.Value | None:
    dtype, emitter = DTYPES[result.dtype], recorder.emitter
    ends = [given.get("start", 0) or 0, given["end"], given.get("step", 1)]
    if dtype not in {ir.DataType.INT64, ir.DataType.INT32, ir.DataType.FLOAT}:
        return None
    whole = dtype == ir.DataType.FLOAT and all(isinstance(item, (int, torch.SymInt)) for item in ends)
    kept = ir.DataType.INT64 if whole else dtype
    bounds = [_operand(recorder, item, kept) for item in ends]
    found = emitter.op("Range", bounds, None, result)
    found.dtype = kept
    return emitter.cast(found, dtype)


def _triangle(upper: int) -> Rule:
    def rule(recorder: Recorder, given: Arguments, result: torch.Tensor) -> ir.Value | None:
        if not isinstance(given["diagonal"], (int, torch.SymInt)):
            return None
        offset = recorder.emitter.size(given["diagonal"])
        return recorder.emitter.op("Trilu", [recorder.value(given["self"]), offset], {"upper": upper}, result)

    return rule


def _cumsum(recorder: Recorder, given: Arguments, result: torch.Tensor) -> ir.Value | None:
    source = recorder.emitter.cast(recorder.value(given["self"]), DTYPES[result.dtype])
    if source.dtype == ir.DataType.BOOL:
        return None
    axis = recorder.emitter.number(given["dim"] % result.dim(), ir.DataType.INT64)
    return recorder.emitter.op("CumSum", [source, axis], None, result)


def _product(recorder: Recorder, given: Arguments, result: torch.Tensor) -> ir.Value:
    return recorder.emitter.op("MatMul", [recorder.value(given["self"]), recorder.value(given["mat2"])], None, result)


def _sum_and_product(first: str, second: str) -> Rule:
    """`beta * self + alpha * (first @ second)`."""

    def rule(recorder: Recorder, given: Arguments, result: torch.Tensor) -> ir.Value:
        emitter, dtype = recorder.emitter, DTYPES[result.dtype]
        product = emitter.op("MatMul", [recorder.value(given[first]), recorder.value(given[second])], None, result)
        if given["alpha"] != 1:
            product = emitter.op("Mul", [product, emitter.number(given["alpha"], dtype)], None, result)
        if given["beta"] == 0:
            return product
        added = recorder.value(given["self"])
        if given["beta"] != 1:
            added = emitter.op("Mul", [added, emitter.number(given["beta"], dtype)], None, given["self"])
        return emitter.op("Add", [product, added], None, result)

    return rule


def _softmax(name: str) -> Rule:
    def rule(recorder: Recorder, given: Arguments, result: torch.Tensor) -> ir.Value | None:
        source = recorder.emitter.cast(recorder.value(given["self"]), DTYPES[result.dtype])
        return recorder.emitter.op(name, [source], {"axis": given["dim"] % result.dim()}, result)

    return rule


def _reduction(name: str) -> Rule:
    def rule(recorder: Recorder, given: Arguments, result: torch.Tensor) -> ir.Value | None:
        source, axes = recorder.emitter.cast(recorder.value(given["self"]), DTYPES[result.dtype]), given["dim"]
        if axes is None or source.dtype == ir.DataType.BOOL:
            return None
        where = [axis % given["self"].dim() for axis in ([axes] if isinstance(axes, int) else axes)]
        inputs = [source, recorder.emitter.constant(np.asarray(where, np.int64), "axes", ir.DataType.INT64)]
        return recorder.emitter.op(name, inputs, {"keepdims": int(given["keepdim"])}, result) if where else None

    return rule


def _largest(recorder: Recorder, given: Arguments, results: Sequence[torch.Tensor]) -> list[ir.Value] | None:
    """The largest elements along an axis, and their places, which no rule reads."""
    if "dim" not in given or len(results) != 2 or results[0].dtype not in DTYPES:
        return None
    value = _reduction("ReduceMax")(recorder, given, results[0])
    places = recorder.emitter.op("opaque", [recorder.value(given["self"])], None, results[1], domain="aten")
    return None if value is None else [value, places]


def _tensor_constant(recorder: Recorder, given: Arguments, result: torch.Tensor) -> ir.Value | None:
    """Numbers that the code of the module holds."""
    source: torch.Tensor = given["self"]
    held = getattr(result, "constant", None) if isinstance(source, FakeTensor) else source
    if held is None or held.numel() > _MOST_LITERAL:
        return None
    with without_modes():
        numbers = held.cpu().double().numpy() if held.is_floating_point() else held.cpu().numpy()
    dtype = DTYPES[result.dtype]
    return recorder.emitter.constant(np.asarray(numbers, dtype.numpy()), "literal", dtype)


RULES: dict[str, Rule] = {
    **VIEWS,
    **{name: _binary(onnx) for onnx, name in _COMPARISONS.items()},
    **dict.fromkeys(["logical_and", "bitwise_and", "__and__"], _binary("And")),
    **dict.fromkeys(["logical_or", "bitwise_or", "__or__"], _binary("Or")),
    **dict.fromkeys(["logical_xor", "bitwise_xor"], _binary("Xor")),
    **dict.fromkeys(["logical_not", "bitwise_not"], _not),
    **dict.fromkeys(["full", "full_like", "new_full", "scalar_tensor"], _full()),
    **dict.fromkeys(["ones", "ones_like", "new_ones"], _full(1)),
    **dict.fromkeys(["zeros", "zeros_like", "new_zeros"], _full(0)),
    **{name: _unary(name.capitalize()) for name in ("neg", "abs", "exp", "tanh", "sqrt", "floor", "log", "sigmoid")},
    **{name: _binary(name.capitalize()) for name in ("add", "sub", "mul", "div")},
    "_log_softmax": _softmax("LogSoftmax"),
    "_softmax": _softmax("Softmax"),
    "amax": _reduction("ReduceMax"),
    "amin": _reduction("ReduceMin"),
    "logsumexp": _reduction("ReduceLogSumExp"),
    "sum": _reduction("ReduceSum"),
    "addmm": _sum_and_product("mat1", "mat2"),
    "arange": _arange,
    "constant_pad_nd": _padded,
    "floor_divide": _floor_divided,
    "nan_to_num": _without_nan,
    "remainder": _remainder,
    "baddbmm": _sum_and_product("batch1", "batch2"),
    "bmm": _product,
    "cumsum": _cumsum,
    "isnan": _is_nan,
    **dict.fromkeys(["lift_fresh", "lift_fresh_copy"], _tensor_constant),
    "masked_fill": _masked_fill,
    "maximum": _binary("Max"),
    "minimum": _binary("Min"),
    "mm": _product,
    "ne": _not_equal,
    "rsub": _reversed,
    "tril": _triangle(0),
    "triu": _triangle(1),
    "where": _where,
}
