"""A whole attention read around its Softmax: both products, everything between them, and what it all means."""

from __future__ import annotations

import math

import onnx_ir as ir

from onnx_attnfuse.axes.factors import Axes, Axis, leaves, new_axes
from onnx_attnfuse.axes.views import Laid, aligned
from onnx_attnfuse.graph.constants import has_unknown_attribute
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.match import operands
from onnx_attnfuse.match.scores import ScorePath, read_scores
from onnx_attnfuse.match.softmax import Softmax
from onnx_attnfuse.match.steps import Added, Floored, NaNZeroed, Negated, Replaced, Scaled, ScoreStep, Squashed, Zeroed
from onnx_attnfuse.match.weights import WeightPath, read_weights
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.spec import AttentionSpec, Floor, Mask, RowRule, ScaleValue, Select, Source, Term, Times, Total

_WEAKEST_FILL = -1e4
"""A score replaced by this or less counts as masked; what is larger is an ordinary value."""


def read_site(softmax: Softmax, facts: Facts, keep_outputs: bool = False) -> AttentionSpec:
    """Reads the attention around `softmax`.

    Args:
        softmax: Where to start.
        facts: Shapes of the graph.
        keep_outputs: Accept that inner values are used elsewhere too.

    Raises:
        Refused: It is no attention (code `not-attention`), or one that cannot be read, with the node that stops it.
    """
    dims = facts.dims(softmax.scores)
    if dims is None:
        raise Refused("unknown-rank", f"the rank of the softmax input '{softmax.scores.name}' is unknown", softmax.node.name)
    axes = new_axes(dims)
    key_axis = axes[softmax.axis]
    if not key_axis:
        raise Refused("single-key", "the softmax runs over one column only", softmax.node.name)
    weights = read_weights(Laid(softmax.weights, axes), key_axis, facts)
    scores = read_scores(Laid(softmax.scores, axes), key_axis, facts)
    nodes = tuple(dict.fromkeys((*scores.nodes, *softmax.nodes, *weights.nodes)))
    _check_parameters(nodes)
    if not keep_outputs:
        _check_inner_uses(nodes, weights)
    folded = _Folded(scores, facts)
    product = scores.product
    query, key, value = (operands.sources(laid, facts) for laid in (product.query, product.key, weights.value))
    output = operands.readings(weights.output, facts)
    return AttentionSpec(
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
        heads=find_heads(query, key, value, output, product.batch_axis, product.head_axis, weights.v_head_axis, axes),
        scale=folded.scale * product.contraction.factor,
        scale_values=tuple(folded.scale_values),
        softcap=folded.softcap,
        mask=folded.mask,
        causal=False,
        row_rules=_row_rules(weights, facts),
        dtype=facts.dtype(product.query.value),
        output_dtype=facts.dtype(weights.output.value),
        nodes=nodes,
    )


def _check_parameters(nodes: tuple[ir.Node, ...]) -> None:
    for node in nodes:
        if has_unknown_attribute(node):
            raise Refused("attribute-parameter", "an attribute is a parameter of the function, so its value is unknown", node.name)


def _check_inner_uses(nodes: tuple[ir.Node, ...], weights: WeightPath) -> None:
    inside = set(nodes)
    for node in nodes:
        for value in node.outputs:
            if value is weights.output.value:
                continue
            outside = [user for user, _ in value.uses() if user not in inside and user.op_type != "Shape"]
            if value.is_graph_output():
                raise Refused("inner-value-used", f"the inner value '{value.name}' is an output of the graph", node.name)
            if outside:
                message = f"the inner value '{value.name}' is also used by {outside[0].op_type} '{outside[0].name}'"
                raise Refused("inner-value-used", message, node.name)


class _Folded:
    """The steps of a score path, folded into scale, soft cap and mask."""

    def __init__(self, path: ScorePath, facts: Facts) -> None:
        self.scale = 1.0
        self.scale_values: list[ScaleValue] = []
        self.softcap: float | None = None
        self.mask: Mask | None = None
        self._facts = facts
        self._squashed = False
        for step, axes in path.steps:
            self._fold(step, axes, path)
        if self._squashed and self.softcap is None:
            self.softcap = 1.0
        if self.softcap is not None:
            self.scale *= self.softcap

    def _fold(self, step: ScoreStep, axes: Axes, path: ScorePath) -> None:
        if isinstance(step, Scaled):
            self._scale(step, axes, path)
        elif isinstance(step, Negated):
            self._multiply(-1.0)
        elif isinstance(step, Added):
            term = Term(self._operand(step.operand, axes))
            if self.mask is None:
                self.mask = Times(term, -1.0) if step.negative else term
            else:
                self.mask = Total(self.mask, term, step.negative)
        elif isinstance(step, Replaced):
            if step.fill > _WEAKEST_FILL:
                raise Refused("soft-fill", f"scores are replaced by {step.fill:g}, which is an ordinary score and no mask")
            self.mask = Select(self._operand(step.condition, axes), step.keep_where, step.fill, self.mask)
        elif isinstance(step, Floored):
            if step.low > _WEAKEST_FILL:
                raise Refused("high-floor", f"scores are held above {step.low:g}, which ordinary scores may reach")
            self.mask = None if self.mask is None else Floor(self.mask, step.low)
        elif isinstance(step, Squashed):
            if self._squashed or self.mask is not None:
                raise Refused("masked-tanh", "tanh is applied to scores that are masked already")
            self._squashed = True

    def _scale(self, step: Scaled, axes: Axes, path: ScorePath) -> None:
        number = self._facts.number(step.operand)
        if number is not None:
            if not math.isfinite(number) or (step.divide and number == 0):
                raise Refused("bad-scale", f"the scores are scaled by {number}")
            self._multiply(1 / number if step.divide else number)
            return
        laid = self._operand(step.operand, axes)
        columns = set(path_columns(path))
        if any(columns & set(leaves(axis)) for axis in laid.axes):
            raise Refused("scale-by-key", f"the scores are multiplied by '{step.operand.name}', which differs by key")
        if self._squashed:
            raise Refused("computed-softcap", f"the soft cap '{step.operand.name}' is computed at run time")
        self.scale_values.append(ScaleValue(laid, step.divide))
        if self.mask is not None:
            self.mask = Times(self.mask, laid, step.divide)

    def _multiply(self, number: float) -> None:
        if self._squashed and self.mask is None:
            self.softcap = (self.softcap or 1.0) * number
        elif self._squashed:
            raise Refused("scaled-softcap", "capped scores are scaled after they were masked")
        else:
            self.scale *= number
        if self.mask is not None:
            self.mask = Times(self.mask, number)

    def _operand(self, value: ir.Value, axes: Axes) -> Laid:
        operand_axes = aligned(value, axes, self._facts)
        if operand_axes is None:
            raise Refused("unknown-rank", f"the rank of '{value.name}' is unknown, or larger than that of the scores")
        return Laid(value, operand_axes)


def path_columns(path: ScorePath) -> Axis:
    """All factors of the scores that only keys run over."""
    product = path.product
    rows = {*leaves(product.query_axis), *leaves(product.batch_axis), *leaves(product.head_axis)}
    return tuple(leaf for axis in product.key.axes for leaf in leaves(axis) if leaf not in rows)


def _row_rules(weights: WeightPath, facts: Facts) -> tuple[RowRule, ...]:
    rules: list[RowRule] = []
    for step, axes in weights.steps:
        if isinstance(step, NaNZeroed):
            rules.append(RowRule(None))
        elif isinstance(step, Zeroed):
            condition = aligned(step.condition, axes, facts)
            if condition is None:
                raise Refused("unknown-rank", f"the rank of '{step.condition.name}' is unknown")
            rules.append(RowRule(Laid(step.condition, condition), step.keep_where))
    return tuple(rules)


def find_heads(
    query: tuple[Source, ...],
    key: tuple[Source, ...],
    value: tuple[Source, ...],
    output: tuple[Laid, ...],
    batch_axis: Axis,
    head_axis: Axis,
    v_head_axis: Axis,
    axes: Axes,
) -> Axis:
    """The factors that are heads: those which share an axis with the channels somewhere, else the innermost of the batch axes."""
    batch = leaves(batch_axis)
    channels = [*leaves(head_axis), *leaves(v_head_axis)]
    laid = [source.laid for operand in (query, key, value) for source in reversed(operand)] + list(reversed(output))
    for candidate in laid:
        for axis in candidate.axes:
            parts = leaves(axis)
            heads = tuple(part for part in parts if part in batch)
            if heads and any(channel in parts for channel in channels) and all(isinstance(head.size, int) for head in heads):
                return tuple(part for part in batch if part in heads)
    inner = [leaves(axis) for axis in axes if leaves(axis) and set(leaves(axis)) <= set(batch)]
    if len(inner) > 1 and all(isinstance(part.size, int) for part in inner[-1]):
        return inner[-1]
    return ()
