"""Minimum cut: the fewest values through which everything passes from some values to others."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping

import onnx_ir as ir

_Place = tuple[ir.Value | None, int]
_SOURCE: _Place = (None, 0)
_SINK: _Place = (None, 1)


def least_cut(
    ahead: Mapping[ir.Value, Collection[ir.Value]],
    sources: Iterable[ir.Value],
    sinks: Iterable[ir.Value],
    cuttable: Collection[ir.Value],
    *,
    latest: bool,
) -> set[ir.Value] | None:
    """The fewest values that every way from a source to a sink goes through; None if there are none.

    Args:
        ahead: For each value those that are computed from it.
        sources: Where ways begin; they may be cut themselves.
        sinks: Where they end; the same.
        cuttable: The values that may be cut.
        latest: Of several answers the one nearest to the sinks, else nearest to the sources.
    """
    room: dict[_Place, dict[_Place, float]] = {}

    def connect(one: _Place, other: _Place, capacity: float) -> None:
        room.setdefault(one, {})[other] = capacity
        room.setdefault(other, {}).setdefault(one, 0.0)

    values = {
        *ahead,
        *(value for found in ahead.values() for value in found),
        *(sources := list(sources)),
        *(sinks := list(sinks)),
    }
    for value in values:
        connect((value, 0), (value, 1), 1.0 if value in cuttable else math.inf)
    for value, found in ahead.items():
        for other in found:
            connect((value, 1), (other, 0), math.inf)
    for value in sources:
        connect(_SOURCE, (value, 0), math.inf)
    for value in sinks:
        connect((value, 1), _SINK, math.inf)
    for _ in range(len(cuttable) + 1):
        reached = _reached(room, _SOURCE)
        if _SINK not in reached:
            break
        _push(room, reached)
    else:
        return None
    if not latest:
        return {value for value in values if (value, 0) in reached and (value, 1) not in reached}
    reverse = {place: {other: room[other].get(place, 0.0) for other in found} for place, found in room.items()}
    leading = _reached(reverse, _SINK)
    return {value for value in values if (value, 1) in leading and (value, 0) not in leading}


def _reached(room: Mapping[_Place, Mapping[_Place, float]], start: _Place) -> dict[_Place, _Place]:
    """Every place that has a way from `start` with room left, and the one before it."""
    before = {start: start}
    pending = deque([start])
    while pending:
        place = pending.popleft()
        for other, left in room.get(place, {}).items():
            if left > 0 and other not in before:
                before[other] = place
                pending.append(other)
    return before


def _push(room: dict[_Place, dict[_Place, float]], before: Mapping[_Place, _Place]) -> None:
    """Uses up one unit of a way from source to sink."""
    place = _SINK
    while place != _SOURCE:
        previous = before[place]
        room[previous][place] -= 1.0
        room[place][previous] += 1.0
        place = previous
