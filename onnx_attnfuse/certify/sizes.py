"""What symbols for sizes stand for: another size that it meets, or the length of an axis that a node computes."""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.certify.arrays import Unsupported
from onnx_attnfuse.certify.execution import Execution, length_of
from onnx_attnfuse.certify.pairing import Pair
from onnx_attnfuse.certify.terms import Term, polynomial, size, subtract, walk


class Sizes:
    """The symbols of the model before."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        side = pair.before
        self._known: dict[str, Term] = {}
        self._open: set[str] = set()
        self._execution = Execution(side.scope.facts, side.identity_of, {}, side.is_heavy, side.scope.opset, self.term)

    def term(self, name: str) -> Term:
        """The size that a symbol stands for; the symbol itself, if that is not known."""
        if name not in self._known:
            if name in self._open:
                return self._symbol(name)
            self._open.add(name)
            self._known[name] = self._found(name)
            self._open.remove(name)
        return self._known[name]

    def _found(self, name: str) -> Term:
        alias = self._pair.aliases.get(name)
        if alias is not None:
            found = length_of(alias, self.term)
            if all(item.op != "size" or item.data != name for item in walk(found)):
                return found
        origin = self._pair.before.scope.facts.origins.get(name)
        if origin is None or name != f"{origin[0].name}.{origin[1]}":
            return self._symbol(name)
        return self._computed(*origin) or self._symbol(name)

    def named(self) -> dict[Term, Term]:
        """Quotients of which lengths of scores are made, as symbols: of these all that counts is that they are at least 1."""
        found: dict[Term, Term] = {}
        for dim in self._pair.divided:
            length = length_of(dim, self.term)
            parts = polynomial(length)
            quotients = [atoms for atoms, factor in parts.items() if len(atoms) == 1 and atoms[0].op == "div" and factor == 1]
            if len(quotients) == 1 and not any(quotients[0][0] in atoms for atoms in parts if atoms != quotients[0]):
                rest = subtract(length, quotients[0][0])
                found[quotients[0][0]] = subtract(size(str(dim), positive=True), rest)
        return found

    def _symbol(self, name: str) -> Term:
        return size(name, positive=name in self._pair.positive)

    def _computed(self, value: ir.Value, axis: int) -> Term | None:
        """The length of an axis as the node of the value computes it."""
        if value.producer() is None:
            return None
        try:
            shape = self._execution.array(value, beyond=True).shape
        except (Unsupported, RecursionError):
            return None
        return shape[axis] if axis < len(shape) else None
