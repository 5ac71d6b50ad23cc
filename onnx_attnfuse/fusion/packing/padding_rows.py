"""Where rows of padding, which are 0 once padding was restored, reach: other tokens, outputs, or nothing.

Tokens may be computed one by one, chosen by their first position, multiplied by their mask, be keys under the mask of another
attention, or be pooled. An operator that mixes them and gives tokens again, as a convolution does, differs beside padding from
the source, and is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axis, Factor
from onnx_attnfuse.attention.masks.classify import Meaning
from onnx_attnfuse.attention.masks.index_reader import Reader
from onnx_attnfuse.attention.masks.mask_terms import negation, position, truth
from onnx_attnfuse.attention.masks.predicates import Padding, Predicate
from onnx_attnfuse.attention.masks.seen_keys import implied
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.certify.terms import ZERO, Term, conjoin
from onnx_attnfuse.fusion.packing.region import Region, below, users
from onnx_attnfuse.fusion.packing.tokens import read_marks
from onnx_attnfuse.fusion.packing.tokenwise import Step, read_step
from onnx_attnfuse.graph.along import Marks
from onnx_attnfuse.graph.constants import attribute, constant_array, is_standard
from onnx_attnfuse.graph.ops import read_as
from onnx_attnfuse.graph.rules.reading import slice_bounds
from onnx_attnfuse.reasons import Reason, Refused

_Other = tuple[AttentionSpec, Meaning]


@dataclasses.dataclass(frozen=True)
class Around:
    """The graph of a region."""

    understood: tuple[_Other, ...]
    """All attentions that were understood."""
    attentions: tuple[ir.Node, ...]
    """A node of each attention."""
    graph: ir.Graph


@dataclasses.dataclass(frozen=True)
class Reached:
    """Values that rows of padding may reach."""

    takes_first: bool
    """The first position of entries is read, whether it is padding or not."""
    output: Reason | None
    """Why an output may depend on rows of padding; None: none does."""


def read_padding_rows(region: Region, around: Around, masked_rows: MaskedRows | None = None) -> Reached:
    """Checks the readers of the restored values.

    Args:
        region: The packed region.
        around: Its graph.
        masked_rows: Finds values that are 0 in rows of padding; None: none is known to be.

    Raises:
        Refused: Something mixes positions, and tokens or an attention follow.
    """
    inside = {id(site.spec) for site in region.sites}
    masked = {node: other for other in around.understood if id(other[0]) not in inside for node in _path(other[0])}
    pending = [(node, value, marks) for value, marks in region.exits.items() for node in region.readers[value]]
    seen: set[tuple[ir.Node, ir.Value]] = set()
    by_token, mixing = set[ir.Node](), set[ir.Node]()
    outputs = [value for value in region.exits if value.is_graph_output()]
    takes_first = False
    while pending:
        node, value, marks = pending.pop()
        if (node, value) in seen:
            continue
        seen.add((node, value))
        if masked_rows is not None and masked_rows.forgets(node, value, marks):
            continue
        if _takes_first(node, marks, region):
            takes_first = True
            continue
        found = _results(node, value, marks, region, masked.get(node))
        (mixing if found is None else by_token).add(node)
        pending += [(user, output, own) for output, own in found or () for user in users(output)]
        outputs += [output for output, _ in found or () if output.is_graph_output()]
    later = {value for node in (*by_token, *around.attentions) for value in (*node.inputs, *node.outputs) if value is not None}
    for node in mixing:
        if not later.isdisjoint(below(node.outputs, around.graph)):
            raise Refused("operator-between", f"{node.op_type} mixes positions, and tokens follow", node.name)
    return Reached(takes_first, _reaching(outputs, mixing, [node for node in by_token if node in masked]))


def _reaching(outputs: list[ir.Value], mixing: set[ir.Node], attentions: list[ir.Node]) -> Reason | None:
    """Why an output may depend on rows of padding."""
    if outputs:
        return Reason("padding-returned", f"the output '{outputs[0].name}' has rows of padding")
    node = next(iter(sorted((*mixing, *attentions), key=lambda node: node.name or "")), None)
    return None if node is None else Reason("padding-returned", f"{node.op_type} may read rows of padding", node.name)


def _path(spec: AttentionSpec) -> list[ir.Node]:
    """The nodes of an attention, and those that bring its operands into its layout."""
    views = (source.indexed.value.producer() for operand in spec.operands() for source in operand[:-1])
    return [*spec.nodes, *(node for node in views if node is not None)]


def _results(
    node: ir.Node, value: ir.Value, marks: Marks, region: Region, other: _Other | None
) -> list[tuple[ir.Value, Marks]] | None:
    """The results of a node that have rows of their own for padding; None if the node mixes positions."""
    if other is not None:
        spec, meaning = other
        indexed = spec.output[0]
        own = read_marks(indexed.axes, spec.axes.b, spec.axes.i)
        if own is None or not any(isinstance(item, Padding) for item in meaning.predicates):
            return None
        return [(indexed.value, own)] if region.tokens.is_full(indexed.value, own) else []
    step = read_step(node, value, marks, region.tokens)
    return list(zip(node.outputs, step.outputs, strict=False)) if isinstance(step, Step) else None


def _takes_first(node: ir.Node, marks: Marks, region: Region) -> bool:
    """Whether a node takes the first position."""
    if is_standard(node, "Gather"):
        index = constant_array(node.inputs[1])
        axis: int = attribute(node, "axis", 0)
        return index is not None and not index.any() and marks[axis % len(marks)] == "s"
    if is_standard(node, "Slice"):
        bounds = slice_bounds(node, len(marks), region.tokens.facts)
        return bounds is not None and any(marks[axis] == "s" and bound[:2] == (0, 1) for axis, bound in bounds.items())
    return False


class MaskedRows:
    """The padding of an attention as something to compare other masks with."""

    def __init__(self, reader: Reader, spec: AttentionSpec, predicates: Iterable[Predicate]) -> None:
        self._reader = reader
        self._at = {"b": position(spec.axes.b), "s": position(spec.axes.j)}
        self._kept = conjoin(*(item.predicate for item in predicates if isinstance(item, Padding)))

    def forgets(self, node: ir.Node, value: ir.Value, marks: Marks) -> bool:
        """Whether the result of a node does not depend on rows of padding of one of its inputs.

        Args:
            node: The node.
            value: The input; its rows of padding are finite.
            marks: Its axes.
        """
        match read_as(node):
            case ("", "Mul"):
                others = [item for item in node.inputs if item is not value and item is not None]
                return any(self._keeps(truth(read)) for item in others if (read := self._read(item, marks)) is not None)
            case ("", "Where"):
                condition, chosen, other = node.inputs
                read = None if condition is None else self._read(condition, marks)
                if read is None or (chosen is value) == (other is value):
                    return False
                return self._keeps(read if chosen is value else negation(read))
            case _:
                return False

    def _keeps(self, condition: Term) -> bool:
        """Whether a condition holds at no place of padding."""
        return implied(condition, self._kept)

    def _read(self, value: ir.Value, marks: Marks) -> Term | None:
        """The element of a value that meets a token."""
        dims = self._reader.facts.dims(value)
        if dims is None or len(dims) > len(marks):
            return None
        at: list[Term] = []
        for mark, dim in zip(marks[len(marks) - len(dims) :], dims, strict=True):
            if len(mark) > 1:
                return None
            channels: Axis = (Factor(dim),)
            at.append(ZERO if dim == 1 else self._at[mark] if mark else position(channels))
        return self._reader.element(value, at)
