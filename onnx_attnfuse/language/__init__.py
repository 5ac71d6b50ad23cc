"""The language of patterns: formulas, and the decorators that make them patterns.

    from onnx_attnfuse.language import equation, pattern, softmax

Everything an author needs is here; `docs/write-a-pattern.md` shows how.
"""

from __future__ import annotations

from onnx_attnfuse.attention.match.steps import ScoreStepReader, WeightStepReader
from onnx_attnfuse.language.decorators import (
    Equation,
    Operator,
    Pattern,
    Refusal,
    equation,
    operator,
    pattern,
    refusal,
    score_step,
    weight_step,
)
from onnx_attnfuse.language.expression import (
    Tensor,
    absolute,
    any_of,
    columns,
    concat,
    elu,
    equal,
    erf,
    exp,
    isnan,
    log,
    log_softmax,
    max,  # noqa: A004
    maximum,
    mean,
    minimum,
    mix_heads,
    number,
    rearrange,
    relu,
    rows,
    sigmoid,
    softmax,
    softplus,
    sqrt,
    sum,  # noqa: A004
    tanh,
    where,
)

__all__ = [
    "Equation",
    "Operator",
    "Pattern",
    "Refusal",
    "ScoreStepReader",
    "Tensor",
    "WeightStepReader",
    "absolute",
    "any_of",
    "columns",
    "concat",
    "elu",
    "equal",
    "equation",
    "erf",
    "exp",
    "isnan",
    "log",
    "log_softmax",
    "max",
    "maximum",
    "mean",
    "minimum",
    "mix_heads",
    "number",
    "operator",
    "pattern",
    "rearrange",
    "refusal",
    "relu",
    "rows",
    "score_step",
    "sigmoid",
    "softmax",
    "softplus",
    "sqrt",
    "sum",
    "tanh",
    "weight_step",
    "where",
]
