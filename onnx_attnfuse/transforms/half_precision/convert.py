"""A model to a half type: functions opened, islands found, everything else narrowed, the result compared with the model."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Mapping

import onnx_ir as ir
import onnx_ir.passes.common

from onnx_attnfuse.errors import MissingDependencyError, ModelError, OptionError, VerificationError
from onnx_attnfuse.graph.constants import constant_tensor
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import is_attention
from onnx_attnfuse.graph.scopes import all_names
from onnx_attnfuse.json_report import JsonReport
from onnx_attnfuse.transforms.half_precision.cast_graph import Narrowing
from onnx_attnfuse.transforms.half_precision.keep_float32 import find_islands, ordered
from onnx_attnfuse.transforms.half_precision.options import Conversion
from onnx_attnfuse.verify.compare_models import verify_models
from onnx_attnfuse.verify.input_kinds import kinds
from onnx_attnfuse.verify.runtime import available
from onnx_attnfuse.verify.verdict import Verification


@dataclasses.dataclass(frozen=True)
class ConversionReport(JsonReport):
    """Report of a conversion: counts of operators, casts and weights, and how far the result is from the original."""

    dtype: str
    nodes: int
    """Operators that compute in the half type."""
    islands: Mapping[str, int]
    """Operators that stay float32, by operator."""
    casts: int
    """Casts that were added."""
    bytes_before: int
    """Size of all weights."""
    bytes_after: int
    seconds: float
    verification: Verification | None = None
    """The result against the model; None if they were not compared."""
    notes: tuple[str, ...] = ()


_DTYPES = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
_SINCE = {"float16": 11, "bfloat16": 13}
"""The opset from which on the operators written here take a type."""
_MAX_COMPARED_WEIGHT_BYTES = 1 << 30
"""Bytes of weights of a model that is still compared in memory."""


def verified(before: str | ir.Model, model: ir.Model, conversion: Conversion) -> ConversionReport:
    """Converts in place, and compares the result with the model as it was.

    Args:
        before: The model as it was, or its file.
        model: The model to convert.
        conversion: Choices.

    Raises:
        MissingDependencyError: It is to be compared, and onnxruntime is absent.
        ModelError: It cannot be converted.
        OptionError: A choice cannot be had.
        VerificationError: The result differs.
    """
    if conversion.verify not in {None, "none", "model"}:
        raise OptionError(f"verify is {conversion.verify!r}; choose none or model")
    if conversion.verify == "model" and not available():
        raise MissingDependencyError(
            "verification needs onnxruntime; run pip install 'onnx-attnfuse[cpu]', or pass --verify none"
        )
    report = convert(model, conversion)
    if conversion.verify == "none" or not available():
        return report
    if report.bytes_before > _MAX_COMPARED_WEIGHT_BYTES:
        note = f"not compared: weights of {report.bytes_before >> 20} MB are too many to be held twice; compare the files"
        return dataclasses.replace(report, notes=(note,))
    try:
        found = verify_models(before, model)
    except ModelError as error:
        return dataclasses.replace(report, notes=(f"not compared: {error}",))
    if not found.equal:
        raise VerificationError(f"the converted model differs: {found.detail}; {_remedy(model)}")
    return dataclasses.replace(report, verification=found)


def _remedy(model: ir.Model) -> str:
    """Advice about a difference: fused attention adds masks in the half type, which shows in fully masked rows."""
    if any(is_attention(node) for node in model.graph.all_nodes()):
        return "unfuse its attention with attnfuse unfuse, convert the result and fuse it again"
    return "pass --verify none to have it all the same"


def convert(model: ir.Model, conversion: Conversion) -> ConversionReport:
    """Converts in place.

    Raises:
        ModelError: Nothing in the model is float32, or a type in it is unknown.
        OptionError: The type is not one of those offered, or the model's opset lacks it.
    """
    start, before = time.perf_counter(), _weight_bytes(model)
    dtype = _DTYPES.get(conversion.dtype)
    if dtype is None:
        raise OptionError(f"dtype is {conversion.dtype!r}; choose float16 or bfloat16")
    opset = model.opset_imports.get("", 0)
    if opset < _SINCE[conversion.dtype]:
        least = _SINCE[conversion.dtype]
        raise OptionError(f"{conversion.dtype} needs opset {least}, and the model has {opset}; export it with {least} or later")
    if model.functions:
        onnx_ir.passes.common.InlinePass()(model)
    facts = Facts(model.graph)
    _check(model.graph, facts)
    input_kinds = kinds(model.graph, facts)
    masks = frozenset(
        value for value in model.graph.inputs if value.name in input_kinds and input_kinds[value.name].name == "bias"
    )
    islands = find_islands(model.graph, facts, opset, dtype, masks)
    nodes = [node for node in ordered(model.graph) if _is_float(node, facts)]
    narrowing = Narrowing(model.graph, facts, opset, dtype, islands, all_names(model), conversion.keep_io_types)
    narrowing.go()
    wide = [node.op_type for node in nodes if node in islands.nodes]
    return ConversionReport(
        conversion.dtype,
        len(nodes) - len(wide),
        Counter(wide),
        narrowing.casts,
        before,
        _weight_bytes(model),
        time.perf_counter() - start,
    )


def _is_float(node: ir.Node, facts: Facts) -> bool:
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    return node.op_type != "Constant" and any(facts.dtype(value) == ir.DataType.FLOAT for value in values)


def _check(graph: ir.Graph, facts: Facts) -> None:
    """Refuses models without float32, and those with a value of unknown type."""
    used = [value for node in ordered(graph) for value in node.outputs if value.uses() or value.is_graph_output()]
    for value in used:
        if facts.dtype(value) is None and not isinstance(value.type, (ir.SequenceType, ir.OptionalType)):
            raise ModelError(f"the element type of {value.name!r} is unknown; run onnx.shape_inference on the model first")
    values = (*graph.inputs, *used, *graph.initializers.values())
    if not any(facts.dtype(value) == ir.DataType.FLOAT for value in values):
        raise ModelError("nothing in the model is float32; there is nothing to convert")


def _weight_bytes(model: ir.Model) -> int:
    values = [value for graph in model.graphs() for value in graph.initializers.values()]
    values += [value for node in model.graph.all_nodes() if node.op_type == "Constant" for value in node.outputs]
    tensors = (constant_tensor(value) or value.const_value for value in values)
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
