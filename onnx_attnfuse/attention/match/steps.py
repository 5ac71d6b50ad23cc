"""Steps between Q·Kᵀ and Softmax, and between Softmax and the product with the values.

A *step reader* looks at one node and says which of its inputs carries the scores and what it does to them. Readers come from the
pattern pack by `score_step` and `weight_step`; the walks through scores and weights (`paths`) know no operator by
themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar, Generic, TypeAlias, TypeVar

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes
from onnx_attnfuse.attention.axes.views import IndexedValue, aligned
from onnx_attnfuse.attention.spec import Role
from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import read_as
from onnx_attnfuse.graph.rounding import QdqPair
from onnx_attnfuse.reasons import Refused


class Step:
    """The effect of a node, with the role of its nodes in an attention."""

    role: ClassVar[Role]

    @property
    def further(self) -> tuple[ir.Node, ...]:
        """Further nodes that belong to the step: its `also`, if it has that."""
        return getattr(self, "also", ())


@dataclasses.dataclass(frozen=True)
class Passed(Step):
    """The scores come out as they went in."""

    role = "view"
    scores: ir.Value
    also: tuple[ir.Node, ...] = ()
    """Further nodes that belong to the step."""


@dataclasses.dataclass(frozen=True)
class Scaled(Step):
    """The scores are multiplied or divided by `operand`."""

    role = "scale"
    scores: ir.Value
    operand: ir.Value
    divide: bool = False


@dataclasses.dataclass(frozen=True)
class Negated(Step):
    """The scores change their sign."""

    role = "scale"
    scores: ir.Value


@dataclasses.dataclass(frozen=True)
class Added(Step):
    """`operand` is added to the scores, or subtracted from them."""

    role = "mask"
    scores: ir.Value
    operand: ir.Value
    negative: bool = False


@dataclasses.dataclass(frozen=True)
class Replaced(Step):
    """The scores become `fill` where `condition` is not `keep_where`."""

    role = "mask"
    scores: ir.Value
    condition: ir.Value
    keep_where: bool
    fill: float


@dataclasses.dataclass(frozen=True)
class Floored(Step):
    """The scores are held at or above `low`."""

    role = "mask"
    scores: ir.Value
    low: float


@dataclasses.dataclass(frozen=True)
class Shifted(Step):
    """The largest score is subtracted, which a softmax without a sink does not see where it is one number for all keys."""

    role = "softmax"
    scores: ir.Value
    largest: ir.Value
    """The largest of the scores along some axes; those have to be the keys', which only the walk knows."""
    also: tuple[ir.Node, ...] = ()
    """The nodes that find it."""


@dataclasses.dataclass(frozen=True)
class Squashed(Step):
    """tanh of the scores, as in a soft cap."""

    role = "softcap"
    scores: ir.Value


@dataclasses.dataclass(frozen=True)
class Rounded(Step):
    """The scores are rounded to a grid, as between two operators of a quantised model."""

    role = "rounding"
    pair: QdqPair

    @property
    def scores(self) -> ir.Value:
        """The scores before."""
        return self.pair.before

    @property
    def also(self) -> tuple[ir.Node, ...]:
        """Further nodes that belong to the step."""
        return (self.pair.quantize,)


ScoreStep: TypeAlias = Passed | Scaled | Negated | Added | Replaced | Floored | Shifted | Squashed | Rounded


@dataclasses.dataclass(frozen=True)
class Kept(Step):
    """The attention weights go on in `output` unchanged."""

    role = "view"
    output: ir.Value
    also: tuple[ir.Node, ...] = ()


@dataclasses.dataclass(frozen=True)
class NaNZeroed(Step):
    """Weights that are NaN become zero in `output`."""

    role = "guard"
    output: ir.Value
    also: tuple[ir.Node, ...] = ()


@dataclasses.dataclass(frozen=True)
class LowZeroed(Step):
    """Weights become zero in `output` in rows whose largest score is `bound` or less, or NaN."""

    role = "guard"
    output: ir.Value
    largest: ir.Value
    """The largest of the scores along some axes; those have to be the keys', which only the walk knows."""
    bound: float
    also: tuple[ir.Node, ...] = ()


@dataclasses.dataclass(frozen=True)
class Zeroed(Step):
    """Weights become zero in `output` where `condition` is not `keep_where`."""

    role = "guard"
    output: ir.Value
    condition: ir.Value
    keep_where: bool


@dataclasses.dataclass(frozen=True)
class Weighted(Step):
    """Weights are multiplied or divided by `operand`, which is the same for all keys."""

    role = "scale"
    output: ir.Value
    operand: ir.Value
    divide: bool = False


@dataclasses.dataclass(frozen=True)
class Renormalized(Step):
    """Weights are divided by their sum, which a mask after Softmax has lowered."""

    role = "softmax"
    output: ir.Value
    reduction: ir.Node
    """The node that sums; it has to do so along the keys, which only the walk knows."""
    zeroes: bool
    """Rows of which nothing is left become 0, else NaN."""
    softened: float = 0.0
    """A number that is added to the sum, or its least, to keep it from being 0."""
    also: tuple[ir.Node, ...] = ()


@dataclasses.dataclass(frozen=True)
class Voided(Step):
    """Weights become NaN in `output` in rows whose scores are all so low that their exponentials are 0."""

    role = "guard"
    output: ir.Value
    also: tuple[ir.Node, ...] = ()
    defined: bool = True
    """Whether they are NaN; else they depend on the form of the exponentials."""


@dataclasses.dataclass(frozen=True)
class RoundedWeights(Step):
    """The attention weights are rounded to a grid."""

    role = "rounding"
    pair: QdqPair

    @property
    def output(self) -> ir.Value:
        """The weights after it."""
        return self.pair.after

    @property
    def also(self) -> tuple[ir.Node, ...]:
        """Further nodes that belong to the step."""
        return (self.pair.dequantize,)


WeightStep: TypeAlias = Kept | NaNZeroed | LowZeroed | Zeroed | Weighted | Renormalized | Voided | RoundedWeights

_Step = TypeVar("_Step", ScoreStep, WeightStep)


@dataclasses.dataclass(frozen=True)
class Taken(Generic[_Step]):
    """A step where the walk met it."""

    step: _Step
    node: ir.Node
    axes: Axes
    """The axes of the scores, or weights, there."""

    def beside(self, value: ir.Value, facts: Facts) -> IndexedValue:
        """An operand of the step, laid out as the scores or weights that it meets.

        Raises:
            Refused: That is not known.
        """
        indexed = aligned(value, self.axes, facts)
        if indexed is None:
            message = f"the rank of '{value.name}' is unknown, or larger than that of the scores"
            raise Refused("unknown-rank", message, self.node.name)
        return indexed


ScoreReader: TypeAlias = Callable[[ir.Node, Facts], Sequence[ScoreStep]]
"""Says how a node changes the scores; several answers if either input may carry them, none if it cannot be read."""
WeightReader: TypeAlias = Callable[[ir.Node, ir.Value, Facts], "WeightStep | None"]
"""Reads the effect of a consumer of the attention weights."""


_Read = TypeVar("_Read", ScoreReader, WeightReader)


@dataclasses.dataclass(frozen=True)
class StepReader(Generic[_Read]):
    """A reader of the effect of operators."""

    name: str
    domain: str
    ops: tuple[str, ...]
    read: _Read
    doc: str
    home: str


class ScoreStepReader(StepReader[ScoreReader]):
    """A reader of the effect of operators on attention scores."""


class WeightStepReader(StepReader[WeightReader]):
    """A reader of the effect of operators on attention weights."""


_Entry = TypeVar("_Entry", ScoreStepReader, WeightStepReader)


@dataclasses.dataclass(frozen=True)
class Readers:
    """Readers of score steps and weight steps, by domain and operator."""

    scores: Mapping[tuple[str, str], ScoreStepReader]
    weights: Mapping[tuple[str, str], WeightStepReader]

    @staticmethod
    def of(entries: Iterable[object]) -> Readers:
        """The readers among `entries`.

        Raises:
            OptionError: Two read the same operator.
        """
        found = list(entries)
        scores = [entry for entry in found if isinstance(entry, ScoreStepReader)]
        weights = [entry for entry in found if isinstance(entry, WeightStepReader)]
        return Readers(_by_operator(scores), _by_operator(weights))

    def score(self, node: ir.Node) -> ScoreReader | None:
        """The reader of this node's effect on scores, if there is one."""
        found = self.scores.get(read_as(node))
        return None if found is None else found.read

    def weight(self, node: ir.Node) -> WeightReader | None:
        """The reader of this node's effect on weights, if there is one."""
        found = self.weights.get(read_as(node))
        return None if found is None else found.read


def _by_operator(entries: Iterable[_Entry]) -> dict[tuple[str, str], _Entry]:
    found: dict[tuple[str, str], _Entry] = {}
    for entry in entries:
        for op in entry.ops:
            other = found.setdefault((entry.domain, op), entry)
            if other is not entry:
                where = f"{entry.domain or 'ai.onnx'}::{op}"
                raise OptionError(f"two patterns read {where}: {other.home} and {entry.home}; skip one of them")
    return found
