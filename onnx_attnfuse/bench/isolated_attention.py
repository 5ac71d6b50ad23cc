"""One attention of a model as a model of its own, spelled out as the exporter wrote it, mask arithmetic included."""

from __future__ import annotations

import dataclasses
from collections import Counter

import onnx
import onnx_ir as ir

from onnx_attnfuse.attention.match.candidates import find_candidates
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.graph.scopes import Scope, scopes
from onnx_attnfuse.language.registry.discovery import load
from onnx_attnfuse.options import Options
from onnx_attnfuse.reasons import Reason, Refused
from onnx_attnfuse.verify.subgraph import extract
from onnx_attnfuse.verify.submodel import Submodel


@dataclasses.dataclass(frozen=True)
class Alone:
    """An attention that was cut out."""

    name: str
    """The site's name."""
    alike: int
    """How many sites have the same sizes, type and kind of operators."""
    proto: onnx.ModelProto


def cut_attention(model: ir.Model) -> Alone | Reason:
    """The attention that the model has most of, cut out; or why it cannot be."""
    readers = load(Options()).readers
    found: dict[object, list[tuple[Scope, AttentionSpec]]] = {}
    for scope in scopes(model):
        for candidate in find_candidates(scope, readers, keep_outputs=True):
            if candidate.spec is not None:
                found.setdefault(_kind(candidate.spec, scope), []).append((scope, candidate.spec))
    if not found:
        return Reason("no-attention", "no attention in the model could be read")
    most = max(found.values(), key=len)
    scope, spec = most[0]
    try:
        return Alone(spec.name, len(most), _standalone(spec, scope, model))
    except Refused as refused:
        return refused.reason


def _kind(spec: AttentionSpec, scope: Scope) -> object:
    dims = [str(scope.facts.dims(operand[-1].indexed.value)) for operand in spec.operands()]
    return spec.dtype, not spec.mask, *dims, tuple(sorted(Counter(node.op_type for node in spec.nodes).items()))


def _standalone(spec: AttentionSpec, scope: Scope, model: ir.Model) -> onnx.ModelProto:
    """The model, its inputs with the symbolic sizes that they have in the source.

    Raises:
        Refused: It cannot be cut out.
    """
    frontier = [operand[-1].indexed.value for operand in spec.operands()]
    piece = extract((spec.output[-1].value,), frontier, scope.facts)
    opsets = scope.graph.opset_imports or model.opset_imports
    proto = Submodel(piece, opsets, model.functions, widened=False).proto
    for item, entry in zip(piece.inputs, proto.graph.input, strict=True):
        for dim, size in zip(entry.type.tensor_type.shape.dim, item.dims, strict=True):
            if not isinstance(size, int):
                dim.dim_param = str(size)
    return proto
