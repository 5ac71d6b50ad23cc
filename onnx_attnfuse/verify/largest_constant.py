"""How far the constants of a piece reach: a window of 127 shows in no sequence of 64."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from onnx_attnfuse.graph.constants import attribute, constant_array
from onnx_attnfuse.graph.ops import COMPARES

_COUNTING = COMPARES | {"Add", "Sub", "Min", "Max", "Clip", "Trilu"}
_WINDOWS = "left_window_size", "right_window_size", "local_window_size"
_SHOWS, _MOST = 4, 1024
"""Numbers up to the first show at the usual lengths; those above the second would make pieces too large to judge."""


def reach_of(nodes: Iterable[ir.Node]) -> int:
    """The largest number that positions are compared with or moved by, as far as it is worth a longer sequence; else 0."""
    found = 0
    for node in nodes:
        numbers = [attribute(node, name, 0) for name in _WINDOWS if name in node.attributes]
        for value in node.inputs if node.op_type in _COUNTING else ():
            array = constant_array(value, limit=1)
            if array is not None and array.dtype.kind in "iu":
                numbers.append(abs(int(array.reshape(-1)[0])))
        found = max([found, *(number for number in numbers if _SHOWS < number <= _MOST)])
    return found
