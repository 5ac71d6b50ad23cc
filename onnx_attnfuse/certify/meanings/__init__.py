"""The semantics of operators, element by element, from ONNX's definitions and ONNX Runtime's: `of` finds that of a node."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnx_attnfuse.bodies.fused_node import FusedNode, alone
from onnx_attnfuse.bodies.table import BODIES, NORMS, body_of
from onnx_attnfuse.certify import arithmetic, arrays
from onnx_attnfuse.certify.arrays import Array, Unsupported
from onnx_attnfuse.certify.meanings import elements, reductions, views
from onnx_attnfuse.certify.meanings.call import Call, Meaning
from onnx_attnfuse.certify.terms import MASKLIKE, ONE, ZERO, Term, disjoin, element, ite, number, polynomial
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.constants import attribute, constant_tensor
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import CONTRIB, is_contrib, read_as
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.reasons import Refused

_STANDARD = {**views.MEANINGS, **elements.MEANINGS, **reductions.MEANINGS}
_CONTRIB = {**views.CONTRIB_MEANINGS, **elements.CONTRIB_MEANINGS, **reductions.CONTRIB_MEANINGS}
JOINED = frozenset(["BranchwiseRMSNorm", *elements.CONTRIB_MEANINGS, *(op for domain, op in NORMS if domain)])
"""Operators of which each does the work of several of the standard: where one model has one, the other has a sum or a product."""
HEAVY = JOINED.union(
    ["MatMul", "FusedMatMul", "Gemm", "Einsum", "Softmax", "Attention", "MultiHeadAttention", "GroupQueryAttention"],
    ["LayerNormalization", "Gelu", "InstanceNormalization"],
    (op for _, op in NORMS),
)
"""Operators whose results are left uninterpreted where both models have them."""
_COUNTED = 16
"""The input of GroupQueryAttention with the number of new tokens of each entry."""


def of(node: ir.Node) -> Meaning | None:
    """The meaning of the node's operator; None if there is none here."""
    domain, op = read_as(node)
    found = {"": _STANDARD, CONTRIB: _CONTRIB}.get(domain, {}).get(op)
    return found or (_by_its_body if (domain, op) in BODIES or (domain, op) in NORMS else None)


def is_plain_product(node: ir.Node) -> bool:
    """Whether a FusedMatMul neither turns nor scales, as a MatMul."""
    return is_contrib(node, "FusedMatMul") and all(
        attribute(node, name, default) == default for name, default in reductions.UNCHANGED.items()
    )


def _by_its_body(call: Call) -> Sequence[Array | None]:
    """The outputs of a fused operator, by executing the nodes of its body; rows of the first that it leaves open are 0.

    Raises:
        Unsupported: Its body cannot be written, takes lengths to be equal that may not be, or has a node without a meaning.
    """
    fused = _fused(call)
    try:
        body = body_of(fused)
    except Refused as refused:
        raise Unsupported(refused.reason.message) from refused
    if any(one != other for one, other in fused.equal):
        raise Unsupported(f"lengths that {call.node.op_type} takes to be equal")
    known = {
        value: array for value, array in zip(fused.inputs, call.inputs, strict=True) if value is not None and array is not None
    }

    def array_of(value: ir.Value) -> Array:
        tensor = constant_tensor(value)
        return known[value] if tensor is None else _constant(tensor)

    for node in fused.build.added:
        meaning = of(node)
        if meaning is None:
            raise Unsupported(f"{node.op_type} in the body of {call.node.op_type}")
        given = [None if item is None else array_of(item) for item in node.inputs]
        results = zip(node.outputs, meaning(Call(node, given, call.opset)), strict=False)
        known.update((output, array) for output, array in results if array is not None)
    outputs = [None if value is None else array_of(value) for value in body.values[: len(call.node.outputs)]]
    defined = body.defined[0] if body.defined else None
    if defined is not None and outputs[0] is not None:
        outputs[0] = arrays.elementwise([array_of(defined), outputs[0]], outputs[0].dtype, _or_zero)
    taken = _taken(call)
    return outputs if taken is None else [None if output is None else _where(taken, output) for output in outputs]


def _constant(tensor: ir.TensorProtocol) -> Array:
    content = tensor.numpy()
    return arrays.constant(content, f"{MASKLIKE}{content.tobytes().hex()}", tensor.dtype)


def _or_zero(test: Term, item: Term) -> Term:
    return ite(test, item, number(0, "Real"))


def _fused(call: Call) -> FusedNode:
    """The node alone in a graph, whose inputs have the shapes and types of the arrays."""
    node = call.node
    call.asked.update(range(len(call.inputs)), node.attributes)
    dtypes = [None if array is None else array.dtype for array in call.inputs]
    attributes = {name: attribute(node, name) for name in node.attributes}
    fused = alone((node.domain, node.op_type), dtypes, attributes, len(node.outputs), call.opset)
    pairs = zip(fused.inputs, call.inputs, strict=True)
    _record(fused.build.facts, [(value, array) for value, array in pairs if value is not None and array is not None])
    return fused


def _record(facts: Facts, given: Sequence[tuple[ir.Value, Array]]) -> None:
    """Makes shapes known: numbers as numbers, equal terms as equal sizes, sums of lengths as sums."""
    lengths = [(value, axis, term) for value, array in given for axis, term in enumerate(array.shape) if term.op != "const"]
    symbols: dict[Term, Dim] = {}
    for value, axis, term in sorted(lengths, key=lambda item: item[2].op == "poly"):
        if term.op == "poly" and all(atom in symbols for atoms in polynomial(term) for atom in atoms):
            symbols.setdefault(term, _sum(term, symbols))
        elif term not in symbols:
            name = f"{value.name}.{axis}"
            symbols[term], facts.origins[name] = sizes.symbol(name), (value, axis)
    for value, array in given:
        facts.record(value, [int(term.data) if term.op == "const" else symbols[term] for term in array.shape], array.dtype)


def _sum(term: Term, symbols: dict[Term, Dim]) -> Dim:
    total: Dim = 0
    for atoms, factor in polynomial(term).items():
        part: Dim = int(factor)
        for atom in atoms:
            part = part * symbols[atom]
        total = total + part
    return total


def _taken(call: Call) -> Term | None:
    """Whether the kernel takes its operands, of several entries with a past only one new token each; None: whatever they are."""
    if call.node.op_type != "GroupQueryAttention":
        return None
    batch, rows, *_ = call.array(0).shape
    longest = call.array(6)
    prompt = arithmetic.equals(rows, longest.at(*[ZERO] * longest.rank))
    if call.optional(3) is None:
        return prompt
    if call.optional(_COUNTED) is not None:
        return None
    return disjoin(arithmetic.at_most(batch, ONE), arithmetic.at_most(rows, ONE), prompt)


def _where(taken: Term, array: Array) -> Array:
    return Array(array.shape, array.dtype, lambda at: ite(taken, array.at(*at), element("refused", array.sort, at)))
