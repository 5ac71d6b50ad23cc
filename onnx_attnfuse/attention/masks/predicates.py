"""Predicates that masks are made of: kinds that have a name, how each is read, and how a mask is written for a reader.

A kind is a dataclass with its name, and a line of `read`; a meaning (`classify.py`) is a conjunction of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

from onnx_attnfuse.attention.axes.factors import Axis, Factor, leaves, length
from onnx_attnfuse.attention.masks.mask_terms import (
    bare,
    compared,
    constant_of,
    dim_of,
    elements_of,
    factor_of,
    factors_of,
    is_comparison,
    linear,
    nonzero,
    parts_of,
    value_of,
)
from onnx_attnfuse.attention.masks.operators import is_measure
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.certify.terms import Term, subtract
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.constants import constant_tensor
from onnx_attnfuse.graph.sizes import Dim


@dataclasses.dataclass(frozen=True)
class Causal:
    """`j <= i + offset`."""

    offset: Dim


@dataclasses.dataclass(frozen=True)
class Window:
    """`i <= j + reach`: keys further back than `reach` (plus the causal offset) are not seen."""

    reach: Dim


@dataclasses.dataclass(frozen=True)
class Padding:
    """A key is seen or not by all rows and heads of a batch entry alike, as data says that is no constant of the model."""

    predicate: Term


@dataclasses.dataclass(frozen=True)
class Segments:
    """Rows see keys of their own segment."""

    name: ClassVar[str] = "segments"


@dataclasses.dataclass(frozen=True)
class QueryPadding:
    """A row sees its keys or none, as data says."""

    predicate: Term
    name: ClassVar[str] = "query_padding"


@dataclasses.dataclass(frozen=True)
class Prefix:
    """Keys up to a number are seen by all rows, later ones by later rows only."""

    predicate: Term
    name: ClassVar[str] = "prefix"


@dataclasses.dataclass(frozen=True)
class Other:
    """A predicate of no known kind."""

    predicate: Term
    name: ClassVar[str] = "arbitrary"


Predicate = Causal | Window | Padding | QueryPadding | Segments | Prefix | Other
_NAMED = (Segments, QueryPadding, Prefix, Other)
"""Kinds that are reported by their own name, in this order; the names of the others depend on their company."""


def read(part: Term, row: Term, column: Term, heads: Axis) -> Predicate:
    """The predicate that one part of a conjunction is.

    Args:
        part: Where a key is seen.
        row: The position of the row, as a form over its factors.
        column: The position of the key.
        heads: The axis of heads.
    """
    used = factors_of(part)
    read_at = [element for element in elements_of(part) if factors_of(element)]
    is_data = bool(read_at) and all(constant_tensor(value_of(element)) is None for element in read_at)
    if is_data and used & factors_of(column) and not used & (factors_of(row) | set(heads)):
        return Padding(part)
    if used & factors_of(row) and not used & (factors_of(column) | set(heads)) and elements_of(part):
        return QueryPadding(part)
    if part.op == "or" and _is_prefix(part, row, column):
        return Prefix(part)
    if not is_comparison(part):
        return Other(part)
    if part.op == "eq0":
        return Segments() if _is_segments(part.args[0], row, column) else Other(part)
    past = subtract(subtract(column, row), part.args[0])
    ahead = subtract(subtract(row, column), part.args[0])
    if is_measure(past):
        return Causal(dim_of(past))
    return Window(dim_of(ahead)) if is_measure(ahead) else Other(part)


def _is_prefix(part: Term, row: Term, column: Term) -> bool:
    """`j <= i or j < number`, the number one for each batch entry at most."""
    forms = [item.args[0] for item in part.args if item.op == "le0"]
    triangles = [form for form in forms if is_measure(subtract(subtract(column, row), form))]
    rest = [subtract(form, column) for form in forms if form not in triangles]
    counted = [form for form in rest if not factors_of(form) & (factors_of(row) | factors_of(column))]
    return len(part.args) == len(forms) == 2 and len(triangles) == len(counted) == 1


def _is_segments(form: Term, row: Term, column: Term) -> bool:
    parts, rest = linear(form)
    if rest != 0 or [atom.op for atom, _ in parts] != ["element", "element"]:
        return False
    (first, one), (second, other) = parts
    is_of_row = [item.args[-1:] == (row,) for item in (first, second)]
    return first.data == second.data and one == other * -1 and sum(is_of_row) == 1 and column in {*first.args, *second.args}


def kinds(predicates: Sequence[Predicate], spec: AttentionSpec) -> list[str]:
    """The names of predicates, as reports have them."""
    causal = next((item for item in predicates if isinstance(item, Causal)), None)
    window = any(isinstance(item, Window) for item in predicates)
    padding = any(isinstance(item, Padding) for item in predicates)
    triangle = None if causal is None else _triangle(causal, spec)
    names: list[str] = []
    if window and triangle == "causal_shifted":
        triangle = None
        names.append("two_sided_window")
    elif window:
        names.append("sliding_window" if triangle else "anticausal")
    if triangle:
        names.append(f"padding_{triangle}" if padding else triangle)
    elif padding:
        names.append("padding")
    return [*names, *dict.fromkeys(item.name for kind in _NAMED for item in predicates if isinstance(item, kind))]


def _triangle(causal: Causal, spec: AttentionSpec) -> str:
    if causal.offset == 0:
        return "causal"
    bottom_right = causal.offset == length(spec.key_axis) - length(spec.query_axis)
    return "causal_bottom_right" if bottom_right else "causal_shifted"


def _is_never_negative(dim: Dim, spec: AttentionSpec) -> bool:
    """Whether a size is at least 0; its symbols may be 0 unless the attention had no rows or no entries then."""
    certain = {leaf.size for axis in spec.axes.scores[:3] for leaf in leaves(axis)}
    return sizes.least(dim, {name for name in sizes.symbols(dim) if sizes.symbol(name) not in certain}) >= 0


def rows_see_a_key(predicates: Sequence[Predicate], spec: AttentionSpec) -> bool:
    """Whether a key at one distance from its row is there and allowed in every row, or key 0 is, without a window."""
    causal = [item for item in predicates if isinstance(item, Causal)]
    windows = [item for item in predicates if isinstance(item, Window)]
    if len(causal) + len(windows) < len(predicates) or len(causal) > 1 or len(windows) > 1:
        return False
    ahead = causal[0].offset if causal else 0
    room = length(spec.key_axis) - length(spec.query_axis)
    distances = [ahead, *(end for item in windows for end in (room, item.reach + ahead, item.reach + room))]
    return all(_is_never_negative(dim, spec) for dim in distances)


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
