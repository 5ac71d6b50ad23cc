"""The meaning of a mask: which keys a row may see, as a conjunction of known predicates, and an additive bias.

The field's names: no_mask, causal, causal_bottom_right, sliding_window, two_sided_window, anticausal, padding, padding_causal,
query_padding, prefix, segments, arbitrary; biases: alibi, relative_position, table, computed. A meaning is for choosing a form
and for telling; the mask itself stays in the `AttentionSpec`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import named
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.masks import predicates
from onnx_attnfuse.attention.masks.index_reader import Reader
from onnx_attnfuse.attention.masks.mask_terms import (
    bare,
    conjuncts,
    constant_of,
    disjunction,
    elements_of,
    factors_of,
    negation,
    parts_of,
    position,
    truth,
    value_of,
)
from onnx_attnfuse.attention.masks.operators import literal, product
from onnx_attnfuse.attention.masks.predicates import Causal, Other, Predicate, Printer
from onnx_attnfuse.attention.spec import Added, AttentionSpec, Axes4, Gain, Mask, Replaced, RowRule, Scaled, step_gains
from onnx_attnfuse.certify.terms import FALSE, TRUE, Term, conjoin, ite, make
from onnx_attnfuse.graph.constants import constant_array, is_constant
from onnx_attnfuse.graph.ops import CASTS, REARRANGES, is_standard
from onnx_attnfuse.graph.uses import before
from onnx_attnfuse.reasons import Reason

_VIEWS = REARRANGES | CASTS | {"Expand", "Slice"}
_TABLE = 1 << 22
_MAX_SHOWN_SLOPES = 3


@dataclasses.dataclass(frozen=True)
class Parts:
    """A mask split into masked keys and added numbers."""

    allowed: Term = TRUE
    biases: tuple[Term, ...] = ()
    fills: frozenset[float] = frozenset()
    """The numbers that masked scores are filled with or have added."""

    @property
    def adds_unread_amount(self) -> bool:
        """Whether a fill is only the factor of something unread."""
        return _is_unread(self.allowed)


@dataclasses.dataclass(frozen=True)
class Meaning:
    """A mask understood."""

    allowed: Term
    """Where a key is seen."""
    predicates: tuple[Predicate, ...]
    """`allowed` as a conjunction of known predicates."""
    biases: tuple[Term, ...]
    text: str
    """The predicate and biases as a reader writes them."""
    kind: str
    """Names of the kinds, joined by ` + `."""
    fills: frozenset[float]
    """The numbers that masked scores are filled with or have added, as far as known."""
    rows_see_a_key: bool
    """Every row certainly sees at least one key."""
    is_distrusted: bool = False
    """The mask turned out to be something else than it was read as."""

    @property
    def is_trivial(self) -> bool:
        """Whether nothing is masked and nothing added."""
        return not self.predicates and not self.biases

    @property
    def nan(self) -> Reason | None:
        """Why a mask with NaN in it cannot be passed, or None."""
        if any(map(has_nan, self.biases)):
            return Reason("nan-fill", "the mask contains NaN, which makes whole rows NaN")
        return None

    @property
    def only_causal(self) -> Causal | None:
        """The causal predicate, if there is nothing else."""
        alone = self.predicates[0] if len(self.predicates) == 1 and not self.biases else None
        return alone if isinstance(alone, Causal) else None


def understand(spec: AttentionSpec, reader: Reader, masked_from: float | None = None) -> Meaning:
    """Reads the mask of `spec`.

    Args:
        spec: The attention.
        reader: Reads the values of its mask.
        masked_from: From here down an added number counts as masking; by default as assumed of the model.
    """
    axes = spec.axes
    heads = axes.n
    wording = Printer(named("bnij", axes.scores))
    parts = split_mask(spec.mask, reader, masked_from)
    row, column = position(spec.query_axis), position(spec.key_axis)
    causal = [Causal(0)] if spec.causal else []
    allowed = () if parts.allowed is TRUE else conjuncts(parts.allowed)
    found = (*causal, *(predicates.read(part, row, column, heads) for part in allowed))
    kinds = predicates.kinds(found, spec) + bias_kinds(parts.biases, axes)
    words = [wording.write(part) for part in ((parts.allowed,) if allowed else ())]
    words = (["j <= i"] if causal else []) + words
    sentence = " and ".join(words)
    text = "; ".join(filter(None, [sentence, *(f"+ {wording.write(bias)}{with_slopes(bias, axes)}" for bias in parts.biases)]))
    return Meaning(
        allowed=parts.allowed,
        predicates=found,
        biases=parts.biases,
        text=text,
        kind=" + ".join(kinds) or "no_mask",
        fills=parts.fills,
        rows_see_a_key=predicates.rows_see_a_key(found, spec),
    )


def distrusted(meaning: Meaning, why: str) -> Meaning:
    """An arbitrary mask in place of what was read and is not so."""
    text, other = f"not {meaning.text}: {why}", Other(meaning.allowed)
    return dataclasses.replace(
        meaning, predicates=(other,), kind="arbitrary", text=text, rows_see_a_key=False, is_distrusted=True
    )


def kept_where(rule: RowRule, reader: Reader) -> Term:
    """Where a rule on rows keeps the weights."""
    assert rule.condition is not None
    return keep_condition(rule.condition, rule.keep_where, reader)


def split_mask(mask: Mask, reader: Reader, masked_from: float | None = None) -> Parts:
    """Keys that all steps of a mask forbid together, and numbers that they add.

    Args:
        mask: The steps.
        reader: Reads their values.
        masked_from: From here down an added number counts as masking; by default as assumed of the model.
    """
    parts = Parts()
    for step, gain in zip(mask, step_gains(mask), strict=True):
        if isinstance(step, Added):
            parts = _joined(parts, split_added(step, gain, reader, masked_from))
        elif isinstance(step, Replaced) and step.fill != 0:
            kept = keep_condition(step.condition, step.keep_where, reader)
            parts = _joined(parts, Parts(kept, fills=frozenset([step.fill * gain.number])))
    return parts


def split_added(step: Added, gain: Gain, reader: Reader, limit: float | None = None) -> Parts:
    """Keys that one added value forbids and numbers that it adds, once later steps have multiplied it.

    Args:
        step: The step.
        gain: The factor of later steps.
        reader: Reads its value.
        limit: From here down a number forbids a key; by default where it is taken to mask.
    """
    part = _multiplied(element(step.indexed, reader), -gain.number if step.negative else gain.number)
    if constant_of(part) == 0 or not gain.values:
        return _split(part, reader.facts.assumed.masked_from if limit is None else limit)
    return Parts(biases=(_scaled(part, gain.values, reader),))


def has_nan(part: Term) -> bool:
    """Whether a term has NaN in it somewhere."""
    return part.op == "nan" or any(map(has_nan, parts_of(part)))


def keep_condition(condition: IndexedValue, keep_where: bool, reader: Reader) -> Term:
    """Where a condition keeps a score or a weight."""
    kept = truth(element(condition, reader))
    return kept if keep_where else negation(kept)


def _scaled(part: Term, factors: Sequence[Scaled], reader: Reader) -> Term:
    """A term times factors that are computed at run time."""
    for step in factors:
        assert isinstance(step.factor, IndexedValue)
        part = _applied("Div" if step.divide else "Mul", part, element(step.factor, reader))
    return part


def _multiplied(part: Term, gain: float) -> Term:
    if gain == 1.0:
        return part
    if part.data == "Add":
        return _applied("Add", *(_multiplied(argument, gain) for argument in part.args))
    return product(part, gain) or _applied("Mul", part, literal(gain))


def _applied(op: str, *items: Term) -> Term:
    return make("apply", "Real", items, op)


def element(indexed: IndexedValue, reader: Reader) -> Term:
    """The element of a laid-out value, as a function of the index variables of its axes."""
    return reader.element(indexed.value, map(position, indexed.axes))


def _joined(left: Parts, right: Parts) -> Parts:
    return Parts(conjoin(left.allowed, right.allowed), (*left.biases, *right.biases), left.fills | right.fills)


def _split(part: Term, limit: float) -> Parts:
    """An added term split into where it forbids keys, being `limit` or less, and the bias it is elsewhere."""
    value = constant_of(part)
    if value is not None:
        if value <= limit:
            return Parts(FALSE, fills=frozenset([value]))
        return Parts() if value == 0 else Parts(biases=(part,))
    if part.data == "Add":
        return _joined(*(_split(argument, limit) for argument in part.args))
    if (size := _magnitude(part)) >= -limit:
        return Parts(make("apply", "Bool", (part,), "Unmasked"), fills=frozenset([-size]))
    if part.op != "ite":
        return Parts(biases=(part,))
    condition, (chosen, other) = part.args[0], (_split(item, limit) for item in part.args[1:])
    opposite = negation(condition)
    allowed = chosen.allowed
    if allowed is not other.allowed:
        allowed = disjunction(conjoin(condition, chosen.allowed), conjoin(opposite, other.allowed))
    fills = chosen.fills | other.fills
    if chosen.allowed is FALSE:
        return Parts(conjoin(opposite, other.allowed), other.biases, fills)
    if other.allowed is FALSE:
        return Parts(conjoin(condition, chosen.allowed), chosen.biases, fills)
    if chosen.biases == other.biases:
        return Parts(allowed, other.biases, fills)
    return Parts(allowed, (ite(condition, _total(chosen.biases), _total(other.biases)),), fills)


def _is_unread(part: Term) -> bool:
    return part.data == "Unmasked" or any(map(_is_unread, parts_of(part)))


def _magnitude(part: Term) -> float:
    """The plain number that something unread is multiplied by."""
    value = constant_of(part)
    if value is not None:
        return abs(value)
    return math.prod(map(_magnitude, part.args)) if part.data == "Mul" else 1.0


def _total(biases: tuple[Term, ...]) -> Term:
    return functools.reduce(functools.partial(_applied, "Add"), biases) if biases else literal(0.0)


def bias_kinds(biases: Sequence[Term], axes: Axes4) -> list[str]:
    """The names of several added terms."""
    kinds = [_kind(bias, axes) for bias in biases]
    if len(biases) == 2 and kinds == ["computed_bias"] * 2 and _part_columns(biases, axes):
        return ["decomposed_relative_position"]
    return kinds


def with_slopes(bias: Term, axes: Axes4) -> str:
    """ALiBi's slopes as words to follow a formula; empty where there are none."""
    slopes = _slopes(bias, axes)
    if slopes is None:
        return ""
    shown = [f"{slope:.4g}" for slope in slopes]
    words = shown if len(shown) <= _MAX_SHOWN_SLOPES else [*shown[: _MAX_SHOWN_SLOPES - 1], "...", shown[-1]]
    return f" (slopes {', '.join(words)})"


def _kind(bias: Term, axes: Axes4) -> str:
    elements = elements_of(bias)
    if not elements:
        return "alibi" if factors_of(bias) else "constant_bias"
    if _slope_element(bias, axes) is not None or _slopes(bias, axes) is not None:
        return "alibi"
    if factors_of(bias) <= {*axes.i, *axes.j, *axes.n}:
        buckets = any(_is_looked_up(value_of(element)) for element in elements)
        return "relative_position_buckets" if buckets else "relative_position"
    return "table" if all(is_constant(value_of(element)) for element in elements) else "computed_bias"


def _slope_element(bias: Term, axes: Axes4) -> Term | None:
    """The factor that differs by head, where the others do not and say something of positions."""
    factors = _factors(bias)
    slopes = [item for item in factors if item.op == "element" and factors_of(item) and factors_of(item) <= {*axes.n}]
    rest = [item for item in factors if item not in slopes]
    places = {factor for item in rest for factor in factors_of(item)}
    if len(slopes) != 1 or not places & {*axes.j} or places & {*axes.n}:
        return None
    return slopes[0]


def _factors(part: Term) -> list[Term]:
    if part.op == "apply" and part.data in {"Mul", "Neg"}:
        return [factor for argument in part.args for factor in _factors(argument)]
    return [bare(part)]


def _slopes(bias: Term, axes: Axes4) -> npt.NDArray[np.float64] | None:
    """The slope for each head: the growth of the bias from key to key."""
    element = _slope_element(bias, axes)
    if element is not None:
        array = _viewed_constant(value_of(element))
        return None if array is None or array.size != axes.num_heads else np.abs(array.reshape(-1))
    if bare(bias).op != "element" or not factors_of(bias) <= {*axes.i, *axes.j, *axes.n}:
        return None
    table = _viewed_constant(value_of(bare(bias)))
    if table is None or table.ndim < 2 or table.size != axes.num_heads * table.shape[-1] or table.shape[-1] < _MAX_SHOWN_SLOPES:
        return None
    steps = np.diff(table.reshape(axes.num_heads, -1), axis=1)
    return steps[:, 0] if np.allclose(steps, steps[:, :1], rtol=1e-3) and steps.any() else None


def _viewed_constant(value: ir.Value | None) -> npt.NDArray[np.float64] | None:
    """The constant that a value is a view of."""
    array = None if value is None else constant_array(before(value, *_VIEWS), limit=_TABLE)
    return None if array is None else np.asarray(array, np.float64)


def _is_looked_up(value: ir.Value) -> bool:
    """Whether the value is rows of a constant table at places that are computed."""
    node = before(value, *_VIEWS).producer()
    if not is_standard(node, "Gather"):
        return False
    return is_constant(node.inputs[0]) and _viewed_constant(node.inputs[1]) is None


def _part_columns(biases: Sequence[Term], axes: Axes4) -> bool:
    """Whether each reads at a part of the key's place only, and all of them together at the whole."""
    parts = [factors_of(bias) & {*axes.j} for bias in biases]
    return all(parts) and not parts[0] & parts[1] and parts[0] | parts[1] == {*axes.j}
