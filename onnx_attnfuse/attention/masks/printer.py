"""Writing mask expressions as a reader would."""

from __future__ import annotations

from collections.abc import Mapping

from onnx_attnfuse.attention.axes.factors import Factor
from onnx_attnfuse.attention.masks.expression import (
    And,
    Apply,
    Choice,
    Compare,
    Element,
    Expression,
    Index,
    Linear,
    NonZero,
    Not,
    Number,
    Or,
    Truth,
)
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.sizes import Dim


class Printer:
    """Writes expressions with given names for the index variables."""

    def __init__(self, names: Mapping[Factor, str]) -> None:
        self._names = names

    def write(self, part: Expression) -> str:
        """The expression on one line."""
        if isinstance(part, Linear):
            return self._linear(part)
        if isinstance(part, Element):
            return f"{part.value.name}[{', '.join(self.write(item) for item in part.at)}]"
        if isinstance(part, Number):
            return f"{part.value:g}"
        if isinstance(part, Truth):
            return "true" if part.value else "false"
        if isinstance(part, Compare):
            return self._comparison(part)
        if isinstance(part, NonZero):
            return self.write(part.element)
        if isinstance(part, Not):
            return f"not {self._grouped(part.inner)}"
        if isinstance(part, (And, Or)):
            return (" and " if isinstance(part, And) else " or ").join(self._grouped(item) for item in part.parts)
        if isinstance(part, Choice):
            return f"({self.write(part.condition)} ? {self.write(part.chosen)} : {self.write(part.other)})"
        assert isinstance(part, Apply)
        return f"{part.op.lower()}({', '.join(self.write(item) for item in part.arguments)})"

    def _grouped(self, part: Expression) -> str:
        text = self.write(part)
        return f"({text})" if isinstance(part, (And, Or)) else text

    def _atom(self, atom: Index | Element) -> str:
        return self._names.get(atom.factor, "?") if isinstance(atom, Index) else self.write(atom)

    def _linear(self, form: Linear) -> str:
        words: list[str] = []
        for atom, coefficient in form.terms:
            name = self._atom(atom)
            text = name if coefficient in {1, -1} else f"{coefficient}*{name}"
            negative = coefficient == -1
            words.append(("- " if negative else "+ ") + text)
        for part in sizes.summands(form.offset):
            negative = _negative(part)
            words.append(("- " if negative else "+ ") + str(part * -1 if negative else part))
        if not words:
            return "0"
        line = " ".join(words)
        return line[2:] if line.startswith("+ ") else "-" + line[2:]

    def _comparison(self, part: Compare) -> str:
        """Positive terms on the left, the others on the right, and an offset of one in the sign."""
        left = Linear(tuple(term for term in part.form.terms if not _negative(term[1])))
        right = Linear(tuple((atom, c * -1) for atom, c in part.form.terms if _negative(c)))
        offset = part.form.offset
        if part.equal:
            return f"{self._linear(left)} == {self._linear(Linear(right.terms, offset * -1))}"
        if offset == 1:
            return f"{self._linear(left)} < {self._linear(right)}"
        return f"{self._linear(left)} <= {self._linear(Linear(right.terms, offset * -1))}"


def _negative(dim: Dim) -> bool:
    return (dim if isinstance(dim, int) else dim.factor) < 0
