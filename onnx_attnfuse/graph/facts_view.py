"""The facts that a value may have, and the little that a rule may ask and note while more is being found out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import onnx_ir as ir

from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.assumptions import Assumed
from onnx_attnfuse.graph.sizes import Dim, Size

Dims: TypeAlias = tuple[Dim, ...]
"""The length of each axis."""
Scalar: TypeAlias = int | float | bool | Size | None
"""One element of a small tensor; None where it is unknown."""
Content: TypeAlias = Scalar | tuple[Scalar, ...]
"""The elements of a tensor of rank 0 or 1."""


class Known(Protocol):
    """The facts as rules see them: answers for the inputs of a node, and a place to note implications of its operator."""

    assumed: Assumed
    """Assumptions about the model."""

    def dims(self, value: ir.Value | None) -> Dims | None:
        """The axis lengths of `value`, or None if its rank is unknown."""
        ...

    def dtype(self, value: ir.Value | None) -> ir.DataType | None:
        """The element type of `value`, or None."""
        ...

    def content(self, value: ir.Value | None) -> Content:
        """The elements of a small tensor, or None if nothing is known of them."""
        ...

    def fresh(self, value: ir.Value, axis: int) -> Size:
        """A symbol for the unknown length of one axis."""
        ...

    def span(self, value: ir.Value, axis: int, length: Dim) -> Dim:
        """The length of a slice that starts at a place computed at run time: `length`, unless the axis ends before."""
        ...

    def meet(self, left: Dim, right: Dim) -> None:
        """Notes that two lengths have to agree at run time."""
        ...

    def enforce(self, left: Dim, right: Dim) -> None:
        """Notes that two lengths are equal whenever the graph runs, as no operator repeats here."""
        ...

    def contract(self, left: Dim, right: Dim) -> None:
        """Notes that a product sums along two lengths, which are equal unless one was repeated on its way."""
        ...

    def fit(self, left: Dim, right: Dim) -> None:
        """Notes two lengths that are equal where masks are as long as the scores."""
        ...

    def same(self, left: Dim, right: Dim) -> bool:
        """Whether two lengths are equal whenever the graph runs."""
        ...

    def spread(self, dim: Dim, size: Dim) -> None:
        """Notes that an axis of length `dim` is repeated to `size` where it is 1 at run time."""
        ...


class Unnoted:
    """Facts as rules see them, of a node that is new: what its operator implies of sizes is left, as it is known already."""

    def __init__(self, facts: Known) -> None:
        self._facts = facts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._facts, name)

    def meet(self, left: Dim, right: Dim) -> None:
        """Notes nothing."""

    enforce = contract = fit = spread = meet


def broadcast(shapes: Sequence[Dims | None], facts: Known | None = None, *, exactly: bool = False) -> Dims | None:
    """The shape of an element-wise result.

    A number wins over a symbol, and a symbol of the operand that broadcasts least over others: the scores' own over the mask's.
    That the mask's is not the longer one is taken for granted, as exporters mean it, and `facts` remember who met whom.

    Args:
        shapes: The shapes of the operands.
        facts: Where to note which lengths met.
        exactly: Take nothing for granted: of two different symbols the larger.
    """
    known = [shape for shape in shapes if shape is not None]
    if len(known) != len(shapes) or not known:
        return None
    rank = max(map(len, known))
    first, *others = sorted(known, key=lambda shape: rank - len(shape) + shape.count(1))
    result: list[Dim] = [*[1] * (rank - len(first)), *first]
    for shape in others:
        for axis, dim in enumerate(shape, rank - len(shape)):
            current = result[axis]
            if current == dim:
                continue
            if facts is not None:
                facts.meet(current, dim)
                facts.spread(current, dim)
                facts.spread(dim, current)
            if facts is not None and facts.same(current, dim):
                continue
            either = sizes.broadcast((current, dim))
            if exactly or either in {current, dim}:
                result[axis] = either
            elif (isinstance(current, int) and current == 1) or (isinstance(dim, int) and dim != 1):
                result[axis] = dim
    return tuple(result)
