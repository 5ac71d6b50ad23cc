"""Support for fused operators by execution providers: `support(op, provider)` is the one place to ask.

`provider("webgpu,wasm")` is one record for several (`together`): a model for all of them, so that only forms that are right on
each are written. A refusal of one refuses for all, and an operator that one wants decomposed is decomposed. Of the forms that
are right on all, the one with the best worst time is taken (`kernels/forecast.py`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from onnx_attnfuse.kernels.conditions import AttentionParams
from onnx_attnfuse.kernels.execution_provider import UNFUSED, ExecutionProvider, OpSupport
from onnx_attnfuse.kernels.operators import by_key
from onnx_attnfuse.reasons import Reason, Refused


def support(op: str, provider: ExecutionProvider) -> OpSupport | Reason:
    """The support that an execution provider has for an operator, or why the operator is not used there.

    The provider's record is asked first, then the operator's own: a new provider tells of operators that it finds, a new operator
    of providers.

    Args:
        op: The operator, `onnx.` before it if it is a standard one; or `UNFUSED`.
        provider: The execution provider.
    """
    if op == UNFUSED:
        own = provider.unfused_form
        return (
            Reason("no-kernel-for-device", f"{provider.name} is not known to fuse attention itself")
            if own is None
            else own.support
        )
    info = by_key().get(op)
    of_operator = None if info is None else info.support.get(provider.name)
    if op not in provider.operators:
        unknown = Reason("no-kernel-for-device", f"it is not known whether {op} has a kernel on {provider.name}")
        return unknown if of_operator is None else of_operator()
    found = provider.operators[op]
    return Reason("no-kernel-for-device", f"{op} has no kernel on {provider.name}") if found is None else found


def supported(op: str, provider: ExecutionProvider) -> OpSupport:
    """The support that an execution provider has for an operator that is planned or built for it.

    Raises:
        Refused: The operator is not used there.
    """
    found = support(op, provider)
    if isinstance(found, Reason):
        raise Refused(found.code, found.message)
    return found


@functools.cache
def together(members: tuple[ExecutionProvider, ...]) -> ExecutionProvider:
    """The record of several execution providers; sessions are started as the first one wants it."""
    first = members[0]
    graphics = next((item for item in members if item.architectures), first)
    return dataclasses.replace(
        first,
        name=",".join(item.name for item in members),
        known_from="; ".join(f"{item.name}: {item.known_from}" for item in members),
        operators={op: _common(op, members) for op in by_key()},
        members=members,
        architectures=graphics.architectures,
        default_architecture=graphics.default_architecture,
        architecture_here=graphics.architecture_here,
        is_preferred=False,
        unfused_form=next((item.unfused_form for item in members if item.unfused_form is not None), None),
        skip_norms=next((kind for kind in ("none", "without sum") if any(item.skip_norms == kind for item in members)), None),
        decomposed_norms=frozenset[str]().union(*(item.decomposed_norms for item in members)),
        any_by="ReduceMax" if any(item.any_by == "ReduceMax" for item in members) else "ReduceSum",
        pays=first.pays.intersection(*(item.pays for item in members)),
        options_for_if={},
        unfused_time=None,
        switching=None,
        capture=None,
        **_merged(all, members, "keeps_fused", "rotates", "shares_cache", "rotates_each_token", "takes_if"),
        **_merged(any, members, "fixed_sizes", "mixes_up_inputs", "computes_in_float16", "gathers_flat", "merges_into_norms"),
        **_merged(_agreed, members, "rounds_float16", "keeps_nan_rows"),
    )


def _merged(rule: Callable[[list[Any]], Any], records: Sequence[object], *names: str) -> dict[str, Any]:
    """Facts of several records, each made one by a rule."""
    return {name: rule([getattr(item, name) for item in records]) for name in names}


def _agreed(facts: Sequence[bool | None]) -> bool | None:
    """A fact that is the same on all providers; None, not known, where they disagree."""
    return facts[0] if len(set(facts)) == 1 else None


def _common(op: str, members: Sequence[ExecutionProvider]) -> OpSupport | Reason:
    """The support that all members have for an operator, or the first reason why one has none."""
    found: list[OpSupport] = []
    for member in members:
        known = support(op, member)
        if isinstance(known, Reason):
            return known
        found.append(known)
    return OpSupport(
        known_from="; ".join(f"{member.name}: {item.known_from}" for member, item in zip(members, found, strict=True)),
        is_wrong=_any([item.is_wrong for item in found]),
        assumes=_any([item.assumes for item in found]),
        **_merged(lambda sets: sets[0].intersection(*sets), found, "runs", "written", "masks"),
        **_merged(all, found, "causal", "by_default", "packed_inputs", "keys_by_head", "broadcasts_bias", "rotates_inside"),
        **_merged(all, found, "math_is_safe"),
    )


_Answer = TypeVar("_Answer")


def _any(tests: Sequence[Callable[[AttentionParams], _Answer | None] | None]) -> Callable[[AttentionParams], _Answer | None]:
    """The first answer that any member has to an attention."""
    asked = [test for test in tests if test is not None]
    return lambda params: next((answer for test in asked if (answer := test(params)) is not None), None)
