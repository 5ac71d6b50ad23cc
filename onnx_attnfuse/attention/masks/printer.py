"""Writing masks as a reader would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnx_attnfuse.attention.axes.factors import Factor
from onnx_attnfuse.attention.masks.mask_terms import (
    bare,
    compared,
    constant_of,
    factor_of,
    is_comparison,
    linear,
    nonzero,
    parts_of,
    value_of,
)
from onnx_attnfuse.certify.terms import Term
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.sizes import Dim

_Parts = Sequence[tuple[Term, Dim]]


class Printer:
    """Writes terms with given names for the indices."""

    def __init__(self, names: Mapping[Factor, str]) -> None:
        self._names = names

    def write(self, part: Term) -> str:
        """The term on one line."""
        value, read = constant_of(part), nonzero(part)
        if value is not None:
            return f"{value:g}" if part.sort == "Real" else str(part.data)
        if read is not None:
            return self._atom(read)
        match part.op:
            case "const":
                return "true" if part.data else "false"
            case "not":
                return f"not {self._grouped(part.args[0])}"
            case "and" | "or":
                return f" {part.op} ".join(map(self._grouped, parts_of(part)))
            case "eq0" if not is_comparison(part):
                inner = self.write(part.args[0])
                return f"not {inner}" if part.args[0].op == "element" else f"equal({inner}, 0)"
            case "eq0" | "le0":
                return self._comparison(part)
            case "ite":
                condition, chosen, other = map(self.write, part.args)
                return f"({condition} ? {chosen} : {other})"
            case "apply" | "element" | "index":
                return self._atom(part)
            case _:
                return self._sum(*linear(bare(part)))

    def _grouped(self, part: Term) -> str:
        text = self.write(part)
        return f"({text})" if part.op in {"and", "or"} else text

    def _atom(self, atom: Term) -> str:
        if atom.op == "index":
            return self._names.get(factor_of(atom), "?")
        parts = ", ".join(map(self.write, atom.args))
        if atom.op == "element":
            return f"{value_of(atom).name}[{parts}]"
        return f"{(atom.data if atom.op == 'apply' else atom.op).lower()}({parts})"

    def _sum(self, parts: _Parts, rest: Dim) -> str:
        words: list[str] = []
        for atom, coefficient in parts:
            name = self._atom(atom)
            text = name if coefficient in {1, -1} else f"{coefficient}*{name}"
            negative = coefficient == -1
            words.append(("- " if negative else "+ ") + text)
        for part in sizes.summands(rest):
            negative = _negative(part)
            words.append(("- " if negative else "+ ") + str(part * -1 if negative else part))
        if not words:
            return "0"
        line = " ".join(words)
        return line[2:] if line.startswith("+ ") else "-" + line[2:]

    def _comparison(self, part: Term) -> str:
        """Positive terms on the left, the others on the right, and an offset of one in the sign."""
        parts, rest = compared(part)
        left = self._sum([item for item in parts if not _negative(item[1])], 0)
        right = [(atom, factor * -1) for atom, factor in parts if _negative(factor)]
        if part.op == "le0" and rest == 1:
            return f"{left} < {self._sum(right, 0)}"
        return f"{left} {'<=' if part.op == 'le0' else '=='} {self._sum(right, rest * -1)}"


def _negative(dim: Dim) -> bool:
    return (dim if isinstance(dim, int) else dim.factor) < 0
