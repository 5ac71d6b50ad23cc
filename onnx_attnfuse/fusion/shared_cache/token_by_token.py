"""A decoder of one entry read token by token: what else its outputs depend on than tokens and their positions.

Paging(builder, new, past, step, positions).prove(attentions, outputs)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Factor
from onnx_attnfuse.attention.masks.index_reader import Reader
from onnx_attnfuse.attention.masks.mask_terms import index, size
from onnx_attnfuse.bodies.core import INTEGER
from onnx_attnfuse.certify.terms import ZERO, add, subtract
from onnx_attnfuse.fusion.packing.tokens import Tokens
from onnx_attnfuse.fusion.packing.tokenwise import read_step
from onnx_attnfuse.graph.along import Marks
from onnx_attnfuse.graph.build import Builder, dims_of
from onnx_attnfuse.graph.constants import is_standard
from onnx_attnfuse.graph.facts_view import Content
from onnx_attnfuse.graph.ops import REARRANGES, SLICES, is_contrib
from onnx_attnfuse.graph.sizes import Dim, Size
from onnx_attnfuse.graph.uses import is_fed, label, sources
from onnx_attnfuse.kernels.operators import rotary_embedding
from onnx_attnfuse.kernels.operators.group_query_attention import INFO
from onnx_attnfuse.reasons import Reason, Refused
from onnx_attnfuse.verify.decoder_feeds import Pages

_TOKEN: Marks = ("", "bs", "")
"""Queries, keys, values and results of attentions, (1, s, channels)."""


@dataclasses.dataclass(frozen=True)
class Step:
    """The inputs of a step, and what the model computes of them."""

    pages: Pages
    cumulative: ir.Value
    past: ir.Value
    table: ir.Value
    given: ir.Value
    """(t): the tokens as a caller gives them, or (t, channels)."""
    tokens: ir.Value
    """(1, t): the tokens, or (1, t, channels)."""
    positions: ir.Value
    """(t): the position of each token in its request."""


def _is_known(content: Content) -> bool:
    """Whether the elements of a value are numbers, whatever a step is."""
    items = content if isinstance(content, tuple) else (content,)
    return all(isinstance(item, (int, float)) for item in items)


class Paging:
    """Proves that a decoder computes token by token, and gives it the positions of tokens in their requests.

    Args:
        builder: The builder.
        new: The number of new positions, a symbol.
        past: The number of earlier ones.
        step: The inputs of a step.
        given: The input with positions, None where the model counts them.
    """

    def __init__(self, builder: Builder, new: Size, past: Size, step: Step, given: ir.Value | None) -> None:
        self._builder, self._new, self._past, self._step = builder, new, past, step
        self._tokens = Tokens(builder.facts, 1, new)
        self._reader = Reader(builder.facts)
        self._seen: dict[ir.Value, Marks] = {}
        self._made: dict[ir.Value, ir.Value] = {}
        """Positions of tokens, by the value that they take the place of."""
        self._ends: set[ir.Value] = set()
        """Values that are known to be of tokens."""
        if given is not None:
            self._made[given] = self._positions(given, 0)

    def prove(self, attentions: Sequence[ir.Node], outputs: Sequence[ir.Value]) -> None:
        """Reads all that the outputs and the attentions are computed from, and puts positions in their places.

        Raises:
            Refused: Something mixes tokens, or asks for what a step of many requests does not have.
        """
        facts = self._builder.facts
        self._ends = {self._step.tokens, *(node.outputs[0] for node in attentions)}
        pending: list[tuple[ir.Value, Marks]] = []
        for value in outputs:
            marks = tuple("bs" if dim == self._new else "" for dim in facts.dims(value) or ())
            if marks[:2] != _TOKEN[:2]:
                raise Refused("not-position-wise", f"the output '{value.name}' is not one for each token, (b, s, ...)")
            pending.append((value, marks))
        for node in attentions:
            pending += [(value, _TOKEN) for value in node.inputs[:3] if value is not None]
            sink = INFO.input(node, "head_sink")
            self._check_free(node, [] if sink is None else [sink])
        for value, marks in pending:
            pending += self._inputs(value, marks)
        for old, new in self._made.items():
            old.replace_all_uses_with(new)

    def _inputs(self, value: ir.Value, marks: Marks) -> list[tuple[ir.Value, Marks]]:
        """The values that one of tokens is computed from, with their marks; none where it is an end, or was read before."""
        marks = marks[len(marks) - (self._builder.facts.rank(value) or 0) :]
        if self._seen.setdefault(value, marks) != marks:
            raise Refused("two-layouts", f"'{value.name}' is used in two layouts")
        if value in self._ends or value in self._made:
            return []
        self._ends.add(value)
        if (made := self._counted(value, marks)) is not None:
            self._made[value] = made
            return []
        node = value.producer()
        if node is None:
            raise Refused("not-position-wise", f"'{value.name}' is not one for each request, as a step of many needs")
        if is_contrib(node, rotary_embedding.INFO.name) and (found := self._rotation(node, marks)) is not None:
            return found
        step = read_step(node, value, marks, self._tokens, in_place=True)
        if isinstance(step, Reason):
            raise Refused(step.code, step.message, label(node))
        if not is_standard(node, *REARRANGES, *SLICES):
            self._check_free(node, step.free())
        return step.inputs()

    def _check_free(self, node: ir.Node, values: Sequence[ir.Value]) -> None:
        """Checks that operands which are the same for all tokens are constants, and no sizes of a step."""
        facts = self._builder.facts
        for value in values:
            made_of = sources([value], lambda item, _: not _is_known(facts.content(item)))
            if facts.number(value) is None and any(map(is_fed, made_of)):
                raise Refused(
                    "not-position-wise", f"'{value.name}' may differ by request, as it depends on an input", label(node)
                )

    def _rotation(self, node: ir.Node, marks: Marks) -> list[tuple[ir.Value, Marks]] | None:
        """A rotation of each token by its own row of tables, or by rows from the length of the past on; None for others."""
        value, places, *tables = node.inputs[:4]
        assert value is not None
        assert places is not None
        facts, here = self._builder.facts, index(Factor(self._new))
        rows = [table for table in tables if table is not None]
        dims = [facts.dims(table) for table in rows]
        rank = facts.rank(places)
        if all(item and item[0] == self._new for item in dims):  # a row for each token
            first = self._reader.element(places, (ZERO,) if rank == 1 else (ZERO, here))
            if subtract(first, ZERO if rank == 1 else here) is not ZERO:
                raise Refused("not-position-wise", "rows of rotations are not those of the tokens", label(node))
            return [(value, marks), *((table, ("bs", "")) for table in rows)]
        if rank != 1:
            return None
        self._check_free(node, rows)
        moved = subtract(self._reader.element(places, (ZERO,)), size(self._past))
        if moved.op != "const":
            raise Refused("not-position-wise", "a rotation does not begin at the length of the past", label(node))
        node.replace_input_with(1, self._as_positions([1, self._new], int(moved.data), INTEGER))
        return [(value, marks)]

    def _counted(self, value: ir.Value, marks: Marks) -> ir.Value | None:
        """The positions of tokens, plus a number, in the place of a value that counts them; rows of a table likewise."""
        facts = self._builder.facts
        dims, dtype = facts.dims(value), facts.dtype(value)
        if dims is None or dtype is None or any(not mark and dim != 1 for mark, dim in zip(marks, dims, strict=True)):
            return None
        if not dtype.is_integer():
            return None
        here = index(Factor(self._new))
        form = self._reader.element(value, [here if mark else ZERO for mark in marks])
        moved = subtract(form, add(size(self._past), here))
        return self._positions(value, int(moved.data)) if moved.op == "const" else None

    def _positions(self, value: ir.Value, moved: int) -> ir.Value:
        """The positions of tokens as another value is laid out."""
        facts = self._builder.facts
        return self._as_positions(dims_of(self._builder, value), moved, facts.dtype(value) or INTEGER)

    def _as_positions(self, dims: Sequence[Dim], moved: int, dtype: ir.DataType) -> ir.Value:
        builder, found = self._builder, self._step.positions
        if moved:
            found = builder.elementwise("Add", [found, builder.constant(np.asarray(moved))])
        return builder.reshape(builder.cast(found, dtype), dims)
