"""Operands that a graph may lack: parameters with the default None, as the optional inputs of an operator have it.

    @pattern
    def gated(scores, v, gate=None):
        weights = softmax(scores)
        return (weights if gate is None else weights * gate) @ v

The function is asked once for each combination; its results become one formula with the alternatives `gate=given` and
`gate=none`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from onnx_attnfuse.language.expression import Tensor, any_of, variable

GIVEN, NONE = "given", "none"
_Returned = TypeVar("_Returned")
Asked = Callable[[Mapping[str, "Tensor | None"]], _Returned]


def combined(
    ask: Asked[_Returned],
    operands: Sequence[str],
    optional: Sequence[str],
    join: Callable[[str, _Returned, _Returned], _Returned],
) -> _Returned:
    """The return values of a function of operands, with and without each optional one, joined to one.

    Args:
        ask: The function, of operands by name.
        operands: Their names.
        optional: The names of those that may be None.
        join: Makes one of what was returned with an operand, whose name comes first, and without it.
    """
    return _combined(ask, {name: variable(name) for name in operands}, tuple(optional), join)


def _combined(
    ask: Asked[_Returned],
    given: Mapping[str, Tensor | None],
    open_: tuple[str, ...],
    join: Callable[[str, _Returned, _Returned], _Returned],
) -> _Returned:
    if not open_:
        return ask(given)
    first, *rest = open_
    return join(
        first,
        _combined(ask, given, tuple(rest), join),
        _combined(ask, {**given, first: None}, tuple(rest), join),
    )


def either(operand: str, with_it: Tensor, without: Tensor) -> Tensor:
    """A formula with two spellings, by whether an operand is given."""
    return any_of(operand, **{GIVEN: with_it, NONE: without})
