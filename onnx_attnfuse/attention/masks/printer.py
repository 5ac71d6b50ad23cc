"""Writing mask expressions as a reader would."""

from __future__ import annotations

from collections.abc import Mapping

from onnx_attnfuse.attention.axes.factors import Factor
from onnx_attnfuse.attention.masks import expression as ex
from onnx_attnfuse.attention.masks.expression import Element, Expression, Index
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.sizes import Dim


class Printer:
    """Writes expressions with given names for the index variables."""

    def __init__(self, names: Mapping[Factor, str]) -> None:
        self._names = names

    def write(self, part: Expression) -> str:
        """The expression on one line."""
        match part:
            case ex.Linear():
                return self._linear(part)
            case Element(value, at):
                return f"{value.name}[{', '.join(map(self.write, at))}]"
            case ex.Number(value):
                return f"{value:g}"
            case ex.Truth(value):
                return "true" if value else "false"
            case ex.Compare():
                return self._comparison(part)
            case ex.NonZero(element):
                return self.write(element)
            case ex.Not(inner):
                return f"not {self._grouped(inner)}"
            case ex.And(parts):
                return " and ".join(map(self._grouped, parts))
            case ex.Or(parts):
                return " or ".join(map(self._grouped, parts))
            case ex.Choice(condition, chosen, other):
                return f"({self.write(condition)} ? {self.write(chosen)} : {self.write(other)})"
            case ex.Apply(op, arguments):
                return f"{op.lower()}({', '.join(map(self.write, arguments))})"

    def _grouped(self, part: Expression) -> str:
        text = self.write(part)
        return f"({text})" if isinstance(part, (ex.And, ex.Or)) else text

    def _atom(self, atom: Index | Element) -> str:
        return self._names.get(atom.factor, "?") if isinstance(atom, Index) else self.write(atom)

    def _linear(self, form: ex.Linear) -> str:
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

    def _comparison(self, part: ex.Compare) -> str:
        """Positive terms on the left, the others on the right, and an offset of one in the sign."""
        left = ex.Linear(tuple(term for term in part.form.terms if not _negative(term[1])))
        right = ex.Linear(tuple((atom, c * -1) for atom, c in part.form.terms if _negative(c)))
        offset = part.form.offset
        if part.equal:
            return f"{self._linear(left)} == {self._linear(ex.Linear(right.terms, offset * -1))}"
        if offset == 1:
            return f"{self._linear(left)} < {self._linear(right)}"
        return f"{self._linear(left)} <= {self._linear(ex.Linear(right.terms, offset * -1))}"


def _negative(dim: Dim) -> bool:
    return (dim if isinstance(dim, int) else dim.factor) < 0
