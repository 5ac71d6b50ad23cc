"""Operands of normalizations, for an execution provider that merges them in and is wrong then.

Reciprocal(Sqrt(x))                                              Div(1, Sqrt(x))            a root mean square
Add(x, table)                          (b, s, c) and (1, s, c)   Add(x, Expand(table))      positions that all entries share
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.containment import Subject
from onnx_attnfuse.graph.constants import is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.facts_view import Dims
from onnx_attnfuse.graph.ops import CASTS, REARRANGES
from onnx_attnfuse.rewriting import GraphContext

_WRITING = Subject("keeping a normalization apart")
_NORMS = frozenset(["LayerNormalization", "RMSNormalization"])
_REACHES = REARRANGES | CASTS | {"Add", "Sub", "Mul", "MatMul", "Gemm"}
"""Operators through which a normalization was seen to take a sum or product in; after others it is right."""
_TABLE_AXES = 2


def keep_apart(graph: GraphContext) -> int:
    """Rewrites operands of normalizations, in place, each verified; the number of nodes."""
    done, facts, builder = 0, graph.scope.facts, graph.builder
    for node in tuple(graph.scope.graph):
        operands = [value for value in node.inputs if value is not None]
        dtype = facts.dtype(node.outputs[0]) if node.outputs else None
        if dtype is None or not dtype.is_floating_point():
            continue
        if _is_of_root(node):
            with graph.rewrite(node, _WRITING) as edit:
                quotient = builder.elementwise("Div", [builder.scalar(1.0, dtype), *operands])
                edit.replace([(node.outputs[0], quotient)], operands)
                done += 1
            continue
        places = _shared(node, facts)
        dims = facts.dims(node.outputs[0])
        if not places or dims is None or not _reaches_norm(node):
            continue
        with graph.rewrite(node, _WRITING) as edit:
            whole = [
                builder.expand(value, dims, [True] * len(dims)) if place in places else value
                for place, value in enumerate(operands)
            ]
            edit.replace([(node.outputs[0], builder.elementwise(node.op_type, whole))], operands)
            done += 1
    return done


def _is_of_root(node: ir.Node) -> bool:
    """Whether a node is the Reciprocal of a Sqrt."""
    source = node.inputs[0] if is_standard(node, "Reciprocal") else None
    root = None if source is None else source.producer()
    return root is not None and is_standard(root, "Sqrt")


def _shared(node: ir.Node, facts: Facts) -> list[int]:
    """The operands of a sum or product that are the same for all entries, and have all the other axes."""
    dims = facts.dims(node.outputs[0])
    if not is_standard(node, "Add", "Mul") or dims is None or any(not isinstance(dim, int) for dim in dims):
        return []
    return [place for place, value in enumerate(node.inputs) if value is not None and _is_table(facts.dims(value), dims)]


def _is_table(dims: Dims | None, whole: Dims) -> bool:
    if dims is None or len(dims) > len(whole):
        return False
    laid = (*(1,) * (len(whole) - len(dims)), *dims)
    own = next((axis for axis, dim in enumerate(laid) if dim != 1), len(laid))
    return laid[own:] == whole[own:] and len(whole) - own >= _TABLE_AXES and any(dim != 1 for dim in whole[:own])


def _reaches_norm(node: ir.Node) -> bool:
    """Whether a normalization reads a node's result, by way of sums, products and views only."""
    left, seen = [node], {node}
    while left:
        for value in left.pop().outputs:
            for reader in {use.node for use in value.uses()} - seen:
                if is_standard(reader, *_NORMS):
                    return True
                if is_standard(reader, *_REACHES):
                    seen.add(reader)
                    left.append(reader)
    return False
