"""A graph executed symbolically: the values of a piece as arrays of terms, from the values at which the piece ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from onnx_attnfuse.certify import arithmetic, arrays, meanings
from onnx_attnfuse.certify.arrays import Array, Index, Unsupported
from onnx_attnfuse.certify.meanings.call import Call
from onnx_attnfuse.certify.meanings.reductions import of_the_sum, sum_beside
from onnx_attnfuse.certify.terms import Term, add, element, ite, multiply, number, size, substitute, truth
from onnx_attnfuse.graph.constants import constant_tensor
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import is_standard
from onnx_attnfuse.graph.sizes import Dim

_MAX_READ_BYTES = 1 << 22
UNKNOWN = (Unsupported, ArithmeticError, AssertionError, LookupError, TypeError, ValueError)
"""Exceptions for a node that has no meaning here, or that no valid model has: its results are uninterpreted."""


Symbols = Callable[[str], Term]
"""The term of a symbol for a size."""


def length_of(dim: Dim, symbols: Symbols = size) -> Term:
    """A length as a term."""
    if isinstance(dim, int):
        return number(dim)
    result = number(dim.factor)
    for atom in dim.atoms:
        parts = [length_of(part, symbols) for part in atom.parts]
        if atom.evaluate is sum:
            item = add(*parts)
        elif atom.evaluate is max or atom.evaluate is min:
            choose = arithmetic.larger if atom.evaluate is max else arithmetic.smaller
            item = parts[0]
            for part in parts[1:]:
                item = choose(item, part)
        elif " // " in atom.key and len(parts) == 2:
            item = arithmetic.divide(*parts)
        else:
            item = symbols(atom.key)
        result = multiply(result, item)
    return result


class Execution:
    """One graph, executed as far as it is asked for.

    Args:
        facts: Facts about the shapes and types of its values.
        names: The name of a value as an uninterpreted array; values of one name are equal.
        leaves: The shapes of values at which execution ends, by their names.
        ends: Whether execution ends at a value.
        opset: The opset of the standard.
        symbols: The term of a symbol for a size.
    """

    def __init__(
        self,
        facts: Facts,
        names: Callable[[ir.Value], str],
        leaves: Mapping[str, Array],
        ends: Callable[[ir.Value], bool],
        opset: int,
        symbols: Symbols,
    ) -> None:
        self._facts, self._names, self._leaves, self._ends, self._opset, self._symbols = (
            facts, names, leaves, ends, opset, symbols
        )  # fmt: skip
        self._arrays: dict[ir.Value, Array] = {}
        self._tests: dict[object, tuple[ir.Value | None, bool]] = {}
        """Of a branch, the test that chooses it, and whether it is the one for true."""
        self.read: dict[str, ir.Value] = {}
        """The values at which execution ended, by their names."""
        self.weights: dict[str, ir.TensorProtocol] = {}
        """Constants, by their names."""

    def array(self, wanted: ir.Value, *, beyond: bool = False) -> Array:
        """The value as an array.

        Args:
            wanted: The value.
            beyond: Executes its node even if execution ends at the value.

        Raises:
            Unsupported: Nothing is known of a value, not even its rank.
        """
        pending: list[tuple[ir.Value, bool]] = [(wanted, False)]
        while pending:
            value, ready = pending.pop()
            if value in self._arrays:
                continue
            inputs = self._above(value, beyond=beyond and value is wanted)
            if ready or not inputs:
                self._execute(value, inputs)
                continue
            pending.append((value, True))
            pending.extend((item, False) for item in reversed(inputs) if item is not None)  # a test before its branches
        return self._arrays[wanted]

    def _above(self, value: ir.Value, *, beyond: bool) -> Sequence[ir.Value | None] | None:
        """The inputs of the node that is executed for a value; None if execution ends there."""
        node = value.producer()
        if node is None or constant_tensor(value) is not None or (self._ends(value) and not beyond):
            return None
        if is_standard(node, "If"):
            graphs = [node.attributes[name].as_graph() for name in ("then_branch", "else_branch")]
            self._tests.update((graph, (node.inputs[0], place == 0)) for place, graph in enumerate(graphs))
            return [node.inputs[0], *(graph.outputs[value.index() or 0] for graph in graphs)]
        if meanings.of(node) is None:
            return None
        total = sum_beside(value)
        return node.inputs if total is None or not self._ends(total) else of_the_sum(node, total)

    def _execute(self, value: ir.Value, inputs: Sequence[ir.Value | None] | None) -> None:
        node = value.producer()
        if inputs is None or node is None:
            self._arrays[value] = self._end(value)
            return
        given = [None if item is None else self._seen_in(node, self._arrays[item]) for item in inputs]
        try:
            results = self._computed(node, given)
        except UNKNOWN:
            results = list[Array]()
        outputs = [value] if node.op_type == "If" else node.outputs
        for output, result in zip(outputs, results, strict=False):
            if result is not None:
                self._arrays.setdefault(output, self._guarded(output, result))
        if value not in self._arrays:
            self._arrays[value] = self._end(value)

    def _seen_in(self, node: ir.Node, array: Array) -> Array:
        """An array as the node of a branch sees it: where its shape depends on the branch's test, that is decided."""
        condition, holds = self._tests.get(node.graph, (None, False))
        if condition is None or not any(length.op == "ite" for length in array.shape):
            return array
        known = {self._arrays[condition].at(*[number(0)] * self._arrays[condition].rank): truth(holds)}
        shape = [substitute(length, known) for length in array.shape]
        return Array(shape, array.dtype, lambda at: substitute(array.at(*at), known))

    def _computed(self, node: ir.Node, given: list[Array | None]) -> Sequence[Array | None]:
        if node.op_type == "If":
            condition, *branches = given
            first, second = (branch for branch in branches if branch is not None)
            assert condition is not None
            test = condition.at(*[number(0)] * condition.rank)
            if first.rank != second.rank:
                raise Unsupported("branches of other ranks")
            shape = [ite(test, *lengths) for lengths in zip(first.shape, second.shape, strict=True)]
            return [Array(shape, first.dtype, lambda at: ite(test, first.at(*at), second.at(*at)))]
        meaning = meanings.of(node)
        assert meaning is not None
        call = Call(node, given, self._opset)
        results = meaning(call)
        call.finish()
        return results

    def _guarded(self, value: ir.Value, array: Array) -> Array:
        """The array, with elements whose meaning turns out to be unknown left uninterpreted."""
        name = self._names(value)

        def read(at: Index) -> Term:
            try:
                return array.at(*at)
            except UNKNOWN:
                return element(name, array.sort, at)

        return Array(array.shape, array.dtype, read)

    def _end(self, value: ir.Value) -> Array:
        name = self._names(value)
        tensor = constant_tensor(value)
        if tensor is not None:
            self.weights[name] = tensor
        if tensor is not None and tensor.nbytes <= _MAX_READ_BYTES:
            return arrays.constant(tensor.numpy(), name, tensor.dtype)
        self.read.setdefault(name, value)
        if name in self._leaves:
            return self._leaves[name]
        if tensor is not None:
            return arrays.unknown(name, [number(int(length)) for length in tensor.shape.numpy()], tensor.dtype)
        dims, dtype = self._facts.dims(value), self._facts.dtype(value)
        if dims is None or dtype is None:
            raise Unsupported(f"nothing is known of {value.name}")
        return arrays.unknown(name, [length_of(dim, self._symbols) for dim in dims], dtype)
