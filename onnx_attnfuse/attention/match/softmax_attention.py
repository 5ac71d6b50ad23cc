"""A whole attention read around its Softmax: both products, everything between them, and their meaning."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, Axis, Factor, leaves, length, new_axes
from onnx_attnfuse.attention.axes.views import IndexedValue, aligned, varies_along
from onnx_attnfuse.attention.masks.classify import element, understand
from onnx_attnfuse.attention.masks.fully_masked import masked_keys
from onnx_attnfuse.attention.masks.index_reader import Reader
from onnx_attnfuse.attention.masks.intervals import Bounds
from onnx_attnfuse.attention.masks.mask_terms import is_binary
from onnx_attnfuse.attention.masks.seen_keys import sees_a_key
from onnx_attnfuse.attention.match import operands, roles
from onnx_attnfuse.attention.match.contractions import is_multiplied, read_contraction
from onnx_attnfuse.attention.match.normal_form import in_front, renormalization
from onnx_attnfuse.attention.match.operands import read_cache, unify_lengths, wider
from onnx_attnfuse.attention.match.paths import Product, ScorePath, WeightPath, read_scores, read_weights
from onnx_attnfuse.attention.match.roles import with_roles
from onnx_attnfuse.attention.match.score_form import fold
from onnx_attnfuse.attention.match.softmax import Softmax, largest_of
from onnx_attnfuse.attention.match.steps import (
    LowZeroed,
    NaNZeroed,
    Readers,
    ScoreStep,
    Shifted,
    Taken,
    Voided,
    Weighted,
    WeightStep,
    Zeroed,
)
from onnx_attnfuse.attention.roundings import Rounding
from onnx_attnfuse.attention.spec import AttentionSpec, Mask, RowRule, ScaleValue, mask_operands
from onnx_attnfuse.graph.constants import has_unknown_attribute, is_standard
from onnx_attnfuse.graph.dtypes import narrows, type_name
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import REARRANGES
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.graph.thresholds import LOWEST_FLOAT32, NEARLY_LOWEST
from onnx_attnfuse.graph.uses import check_inner_uses, viewers
from onnx_attnfuse.reasons import Refused


def read_site(softmax: Softmax, facts: Facts, readers: Readers, keep_outputs: bool = False) -> AttentionSpec:
    """Reads the attention around `softmax`.

    Args:
        softmax: Where to start.
        facts: Shapes of the graph.
        readers: Readers of single steps.
        keep_outputs: Accept that inner values are used elsewhere too.

    Raises:
        Refused: It is no attention (code `not-attention`), or one that cannot be read, with the node that stops it.
    """
    axes, key_axis = _softmax_axes(softmax, facts)
    scores, weights = _both_paths(softmax, axes, key_axis, facts, readers)
    nodes = _own_nodes(softmax, scores, weights, facts, keep_outputs=keep_outputs)
    _check_sink(softmax, scores)
    check_types(scores, weights, softmax.weights, facts)
    voided = _voided(softmax, scores, weights, key_axis, facts)
    product = scores.product
    _fix_lengths(product, weights, key_axis, axes, facts)
    reader = Reader(facts)
    moved = in_front(softmax, scores, weights, key_axis, reader)
    folded, weights = fold(moved.scores, reader, alone=softmax.sink is None and voided is None), moved.weights
    query, key = (operands.sources(indexed, facts, product.head_axis) for indexed in (product.query, product.key))
    value = operands.sources(weights.value, facts)
    output = operands.readings(weights.output, facts)
    queries, keys = [source.indexed for source in query], [source.indexed for operand in (value, key) for source in operand]
    indexed = [*reversed(queries), *reversed(output), *reversed(keys)]
    row_rules, result_scales = _row_rules(weights, key_axis, reader, folded.mask), _result_scales(weights, key_axis, facts)
    beside = (*mask_operands(folded.mask), *_beside((*folded.scale_values, *result_scales), row_rules))
    spec = AttentionSpec(
        name=softmax.node.name or softmax.weights.name or "softmax",
        query=query,
        key=key,
        value=value,
        output=output,
        batch_axis=product.batch_axis,
        query_axis=product.query_axis,
        key_axis=key_axis,
        head_axis=product.head_axis,
        v_head_axis=weights.v_head_axis,
        heads=find_heads(product.batch_axis, (*product.head_axis, *weights.v_head_axis), indexed, axes),
        scale=folded.scale * product.contraction.factor,
        scale_values=folded.scale_values,
        softcap=folded.softcap,
        mask=folded.mask,
        causal=False,
        row_rules=row_rules,
        result_scales=result_scales,
        dtype=facts.dtype(product.query.value),
        output_dtype=facts.dtype(weights.output.value),
        nodes=nodes,
        cache=read_cache(key, value, product.query_axis, key_axis, product.head_axis, facts),
        sink=None if softmax.sink is None else _sink(softmax.sink, axes, softmax, facts),
        unshifted=voided is not None,
        renormalized=renormalization(folded.mask, moved, reader),
        voided=voided is not None and voided.defined,
        roundings=_roundings(scores, weights, facts),
        wider=_wider(beside, key_axis, softmax, facts),
    )
    _check_gate(softmax, spec, reader)
    return with_roles(spec, softmax.nodes, scores, weights, facts)


def _both_paths(softmax: Softmax, axes: Axes, key_axis: Axis, facts: Facts, readers: Readers) -> tuple[ScorePath, WeightPath]:
    """The ways up and down."""
    scores = IndexedValue(softmax.scores, axes)
    weights = read_weights(IndexedValue(softmax.weights, axes), key_axis, facts, readers)
    if not key_axis:
        raise Refused("single-key", "the softmax has one column", softmax.node.name)
    return read_scores(scores, key_axis, facts, readers), weights


def _own_nodes(
    softmax: Softmax, scores: ScorePath, weights: WeightPath, facts: Facts, *, keep_outputs: bool
) -> tuple[ir.Node, ...]:
    """The nodes of an attention, which nothing else may look into unless that is to be kept.

    Two attentions may be of one product, queries to keys and keys to queries: each computes it then.
    """
    nodes = tuple(dict.fromkeys((*scores.nodes, *softmax.nodes, *weights.nodes)))
    _check_parameters(nodes)
    if not keep_outputs:
        check_inner_uses(nodes, weights.output.value, lambda node: _weighs(node, facts))
    return nodes


def _weighs(node: ir.Node, facts: Facts) -> bool:
    """Whether a node is the softmax of an attention, or a view that no other nodes read."""
    if is_standard(node, *REARRANGES):
        users = viewers(node.outputs[0])
        return bool(users) and not node.outputs[0].is_graph_output() and all(_weighs(user, facts) for user in users)
    readers = viewers(node.outputs[0]) if is_standard(node, "Softmax") else []
    return any(read_contraction(user, facts) is not None or is_multiplied(user, facts) for user in readers)


def _softmax_axes(softmax: Softmax, facts: Facts) -> tuple[Axes, Axis]:
    """The axes of the scores, and the one that the softmax runs over."""
    _check_parameters(softmax.nodes)
    dims = facts.dims(softmax.scores)
    if dims is None:
        raise Refused("unknown-rank", f"the rank of the softmax input '{softmax.scores.name}' is unknown", softmax.node.name)
    axes = new_axes(dims)
    return axes, axes[softmax.axis]


def _roundings(scores: ScorePath, weights: WeightPath, facts: Facts) -> tuple[Rounding, ...]:
    """All roundings inside and right beside an attention."""
    product = scores.product
    return (
        *roles.operand_roundings("query", product.query.value, facts),
        *roles.operand_roundings("key", product.key.value, facts),
        *roles.score_roundings(scores.steps),
        *roles.mask_roundings(scores.steps, facts),
        *roles.weight_roundings(weights.steps),
        *roles.operand_roundings("value", weights.value.value, facts),
        *roles.result_roundings(weights.output, facts),
    )


def _check_sink(softmax: Softmax, scores: ScorePath) -> None:
    shifted = next((taken.node for taken in scores.steps if isinstance(taken.step, Shifted)), None)
    if softmax.sink is not None and shifted is not None:
        raise Refused("sink-shifted", "the largest score is subtracted from the scores and not from the sink", shifted.name)


def _check_gate(softmax: Softmax, spec: AttentionSpec, reader: Reader) -> None:
    bounds = Bounds(reader.facts)
    if softmax.is_gated and bounds.lowest(spec.mask) == -math.inf and not sees_a_key(understand(spec, reader), bounds):
        message = "fully masked rows are NaN times the factor of a sink, and would become 0"
        raise Refused("gated-rows", message, softmax.node.name)


def _fix_lengths(product: Product, weights: WeightPath, key_axis: Axis, axes: Axes, facts: Facts) -> None:
    """Determines the lengths of the axes; none may be empty, and values have no axis of rows."""
    if not set(leaves(product.query_axis)).isdisjoint(leaf for axis in weights.value.axes for leaf in leaves(axis)):
        message = "the values differ by row of the scores, as where a product mixes the scores of several heads (talking heads)"
        raise Refused("mixed-heads", message, product.contraction.node.name)
    enforced = weights.contraction.node.op_type != "Einsum"
    unify_lengths(product.query, product.key, weights.value, key_axis, product.head_axis, facts, enforced=enforced)
    _check_lengths((product.query, product.key, weights.value), axes, facts)


def _beside(scales: tuple[ScaleValue, ...], rules: tuple[RowRule, ...]) -> list[IndexedValue]:
    """Values beside the operands: scales of the scores, and conditions of the rules on rows."""
    return [scale.indexed for scale in scales] + [rule.condition for rule in rules if rule.condition is not None]


def _wider(operands: tuple[IndexedValue, ...], key_axis: Axis, softmax: Softmax, facts: Facts) -> tuple[tuple[Dim, Dim], ...]:
    found = wider(operands, key_axis, facts)
    if found and not facts.assumed.masks_fit:
        message = f"a mask of length {found[0][1]} may repeat scores of length {found[0][0]}, which no fused operator does"
        raise Refused("wide-mask", message, softmax.node.name)
    return found


def _check_lengths(operands: tuple[IndexedValue, ...], axes: Axes, facts: Facts) -> None:
    if not facts.assumed.nonempty_axes and not all(isinstance(length(axis), int) for axis in axes):
        raise Refused("empty-axis", "an axis of the scores may have length 0, for which fused operators fail")
    for indexed in operands:
        if 0 in (facts.dims(indexed.value) or ()):
            raise Refused("empty-axis", f"'{indexed.value.name}' has an axis of length 0: there is nothing to compute")


def _sink(value: ir.Value, axes: Axes, softmax: Softmax, facts: Facts) -> IndexedValue:
    """The score that takes weight and has no value, as little repeated as it is anywhere."""
    alone = tuple(() if index == softmax.axis else axis for index, axis in enumerate(axes))
    indexed = aligned(value, alone, facts)
    if indexed is None:
        raise Refused("unknown-rank", f"the rank of '{value.name}' is unknown", softmax.node.name)
    return operands.sources(indexed, facts, plain=True)[-1].indexed


def _voided(softmax: Softmax, scores: ScorePath, weights: WeightPath, key_axis: Axis, facts: Facts) -> Voided | None:
    """The rule for rows whose exponentials are all 0, where the maximum of each row is not subtracted first.

    Such exponentials are NaN where they overflow, which a guard after them sees too. Where the maximum of several rows is, they
    are all 0 beside other rows, and all 1 beside none.
    """
    found = [(taken.step, taken) for taken in weights.steps if isinstance(taken.step, Voided)]
    if not found:
        return None
    voided, taken = found[0]
    test = taken.node.inputs[0]
    if test is not None and varies_along(taken.beside(test, facts), key_axis):
        raise Refused("weights-scaled-by-key", f"weights become NaN by '{test.name}', which differs by key", taken.node.name)
    if any(_is_row_maximum(shift, scores.columns(), facts) for shift in scores.steps):
        return None
    if not facts.assumed.finite_exponentials:
        raise Refused("unshifted-exponentials", "exp may overflow: no maximum is subtracted first", softmax.node.name)
    if any(isinstance(taken.step, (LowZeroed, NaNZeroed)) for taken in weights.steps):
        message = "NaN becomes 0 after exponentials without a subtracted maximum, which overflow where softmax does not"
        raise Refused("guarded-exponentials", message, softmax.node.name)
    is_shifted = any(isinstance(taken.step, Shifted) for taken in scores.steps)
    return dataclasses.replace(voided, defined=voided.defined and not is_shifted)


def _is_row_maximum(taken: Taken[ScoreStep], columns: frozenset[Factor], facts: Facts) -> bool:
    """Whether each row's own maximum is subtracted, and not that of several rows, beside which one of them may vanish."""
    if not isinstance(taken.step, Shifted):
        return False
    others = {leaf for axis in taken.axes for leaf in leaves(axis)} - columns
    largest = largest_of(taken.step, taken.axes, facts)
    return largest is not None and {leaf for axis in largest.axes for leaf in leaves(axis)} == others


def _check_parameters(nodes: tuple[ir.Node, ...]) -> None:
    for node in nodes:
        if has_unknown_attribute(node):
            message = "an attribute is a parameter of the function, so its value is unknown"
            raise Refused("attribute-parameter", message, node.name)


def _row_rules(weights: WeightPath, key_axis: Axis, reader: Reader, mask: Mask) -> tuple[RowRule, ...]:
    facts, rules = reader.facts, list[RowRule]()
    for taken in weights.steps:
        match taken.step:
            case NaNZeroed():
                rules.append(RowRule(None))
            case LowZeroed(_, largest, bound):
                rules.append(_low_rule(taken.beside(largest, facts), bound, taken, key_axis, reader, mask))
            case Zeroed(_, condition, keep_where):
                rules.append(RowRule(taken.beside(condition, facts), keep_where))
            case Weighted(_, operand, divide) if varies_along(taken.beside(operand, facts), key_axis):
                indexed = taken.beside(operand, facts)
                if divide or not is_binary(element(indexed.refined(), reader)):
                    message = f"the weights are multiplied by '{operand.name}', which differs by key and may be neither 0 nor 1"
                    raise Refused("weights-scaled-by-key", message, taken.node.name)
                rules.append(RowRule(indexed, is_product=True))
            case _:
                pass
    return tuple(rules)


def _low_rule(
    largest: IndexedValue, bound: float, taken: Taken[WeightStep], key_axis: Axis, reader: Reader, mask: Mask
) -> RowRule:
    """The rule for rows whose largest score is low: rows without a key, if all masking numbers are as low and nothing else is."""
    others = {leaf for axis in taken.axes for leaf in leaves(axis)} - set(leaves(key_axis))
    keys = masked_keys(mask, reader, Bounds(reader.facts)).keys
    lowest = [key for key in keys if key.high != -math.inf]
    low = all(key.high <= NEARLY_LOWEST for key in lowest) and (not lowest or bound >= LOWEST_FLOAT32)
    if {leaf for axis in largest.axes for leaf in leaves(axis)} != others or bound > reader.facts.assumed.masked_from or not low:
        message = f"the weights are zeroed where '{largest.value.name}' is {bound:g} or less, which rows with a key may be, too"
        raise Refused("weights-zeroed", message, taken.node.name)
    return RowRule(None, lowest=LOWEST_FLOAT32 if lowest else -math.inf)


def _result_scales(weights: WeightPath, key_axis: Axis, facts: Facts) -> tuple[ScaleValue, ...]:
    """Factors of the weights, which are factors of the result where they are the same for all keys."""
    factors = [(taken.step, taken) for taken in weights.steps if isinstance(taken.step, Weighted)]
    scales = [ScaleValue(taken.beside(step.operand, facts), step.divide) for step, taken in factors]
    return tuple(scale for scale in scales if not varies_along(scale.indexed, key_axis))


def find_heads(batch_axis: Axis, channel_axis: Axis, indexed: Iterable[IndexedValue], scores: Axes) -> Axis:
    """The factors that are heads: those which share an axis with the channels somewhere, else the innermost of the batch axes.

    Args:
        batch_axis: All factors that are neither rows nor columns nor channels.
        channel_axis: The factors of the channels of queries, keys and values.
        indexed: Operands and results in all their layouts, those to be believed first, first.
        scores: The axes of the scores.
    """
    batch = leaves(batch_axis)
    channels = set(leaves(channel_axis))
    for candidate in indexed:
        for axis in candidate.axes:
            parts = leaves(axis)
            heads = [part for part in parts if part in batch]
            if heads and not channels.isdisjoint(parts) and all(isinstance(head.size, int) for head in heads):
                return tuple(part for part in batch if part in heads)
    inner = [leaves(axis) for axis in scores if leaves(axis) and set(leaves(axis)) <= set(batch)]
    if len(inner) > 1 and all(isinstance(part.size, int) for part in inner[-1]):
        return inner[-1]
    return ()


def check_types(scores: ScorePath, weights: WeightPath, softmax: ir.Value, facts: Facts) -> None:
    """Refuses an attention that rounds its scores, or rounds its weights and goes on in a wider type.

    Args:
        scores: From the product of queries and keys to the softmax.
        weights: From the softmax to the product with the values.
        softmax: The attention weights as the softmax gives them.
        facts: Types of the graph's values.

    Raises:
        Refused: With the node that rounds, code `narrowed-scores` or `narrowed-weights`.
    """
    for taken in scores.steps:
        before, after = facts.dtype(taken.step.scores), facts.dtype(taken.node.outputs[0])
        if before is not None and after is not None and narrows(before, after):
            message = f"the scores are cast from {type_name(before)} to {type_name(after)}, which rounds them"
            raise Refused("narrowed-scores", message, taken.node.name)
    ends = (facts.dtype(softmax), facts.dtype(weights.value.value))
    for node in weights.nodes:
        inner = facts.dtype(node.outputs[0])
        if inner is not None and all(narrows(end, inner) for end in ends):
            message = f"the weights are cast to {type_name(inner)}, and multiplied with values of a wider type"
            raise Refused("narrowed-weights", message, node.name)
