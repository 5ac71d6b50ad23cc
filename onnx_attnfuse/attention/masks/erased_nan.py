"""Queries and keys that are NaN where a mask replaces their scores, which ends the NaN; a fused operator adds, and keeps it.

    means = (tokens * mask).sum(1) / mask.sum(1)        NaN for a group of which the mask leaves nothing
    scores = where(mask.any(1), means @ keys.T, -inf)   its scores are replaced

Other activations are taken to be numbers.
"""

from __future__ import annotations

import itertools

import onnx_ir as ir

from onnx_attnfuse.attention.spec import AttentionSpec, Replaced
from onnx_attnfuse.graph.constants import is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import CASTS, REARRANGES, REPEATS, is_attention
from onnx_attnfuse.graph.uses import before, reads_input, sources
from onnx_attnfuse.reasons import Reason

_MOST_VALUES = 256
_VIEWS = REARRANGES | CASTS | REPEATS
_ENDS_NAN = ("IsNaN", "Softmax", "Where")
_COUNTS = ("ReduceMean", "ReduceSum")
_MESSAGE = "queries or keys are divided by '{}', a count that may be 0, and the mask replaces the scores of that NaN"


def erased_nan(spec: AttentionSpec, facts: Facts) -> Reason | None:
    """Why a mask may end a NaN of a query or key, which is divided by a count that may be 0; None if it does not."""
    if any(map(is_attention, spec.nodes)) or not any(isinstance(step, Replaced) for step in spec.mask):
        return None
    operands = [operand[0].indexed.value for operand in (spec.query, spec.key)]
    above = sources(operands, lambda _, node: not is_standard(node, *_ENDS_NAN))
    made = (value.producer() for value in itertools.islice(above, _MOST_VALUES))
    divisors = [node.inputs[1] for node in made if is_standard(node, "Div")]
    divisors += [scale.indexed.value for scale in spec.scale_values if scale.divide]
    counts = (divisor for divisor in divisors if divisor is not None and _is_count(divisor, facts))
    return next((Reason("erased-nan", _MESSAGE.format(count.name)) for count in counts), None)


def _is_count(value: ir.Value, facts: Facts) -> bool:
    """Whether a value counts what a mask keeps; nothing that is added to a count, or a limit of it, is gone through."""
    node = before(value, *_VIEWS, "Sqrt").producer()
    if not is_standard(node, *_COUNTS) or node.inputs[0] is None:
        return False
    counted = before(node.inputs[0], *_VIEWS, "Mul")
    dtype = facts.dtype(counted)
    return dtype is not None and (dtype == ir.DataType.BOOL or dtype.is_integer()) and reads_input(counted)
