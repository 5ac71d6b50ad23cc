"""Graphs that end the process in ONNX Runtime's CPU kernels instead of an error, as far as is known beforehand.

Found by running every operator of pieces on empty shapes and hostile numbers: kernels of attention and Einsum divide by the
number of heads or channels, integer quotients by whatever they are given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.constants import constant_array, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.sizes import Size
from onnx_attnfuse.kernels.operators import info_of

_QUOTIENTS = frozenset(["Div", "Mod"])
_TRAPS = (0, -1)
"""Divisors that trap: anything by 0, which newer runtimes refuse, and the lowest number by -1."""
_READ = 1 << 20


def is_dangerous(nodes: Iterable[ir.Node], facts: Facts, values: Mapping[str, int]) -> bool:
    """Whether running `nodes` with the symbols of `values` may end the process."""
    return any(_may_divide_by_zero(node, facts, values) or _is_starved(node, facts, values) for node in nodes)


def _is_starved(node: ir.Node, facts: Facts, values: Mapping[str, int]) -> bool:
    """Whether a fragile operator is given something empty that is no past."""
    info = info_of(node)
    if node.op_type != "Einsum" and (info is None or not info.fragile):
        return False
    operands = [value for place, value in enumerate(node.inputs) if info is None or info.role(place) != "past"]
    return any(sizes.evaluate(dim, values) == 0 for value in operands if value is not None for dim in facts.dims(value) or ())


def _may_divide_by_zero(node: ir.Node, facts: Facts, values: Mapping[str, int]) -> bool:
    """Whether a quotient of integers has a divisor that is not known to be harmless."""
    if node.op_type not in _QUOTIENTS or not is_standard(node) or len(node.inputs) < 2:
        return False
    dtype = facts.dtype(node.outputs[0])
    if dtype is None or not dtype.is_integer():
        return False
    divisor = node.inputs[1]
    content = None if divisor is None else facts.content(divisor)
    if content is not None:
        items = content if isinstance(content, tuple) else (content,)
        return any(not isinstance(item, (int, Size)) or sizes.evaluate(item, values) in _TRAPS for item in items)
    array = constant_array(divisor, limit=_READ)
    return array is None or bool(np.isin(array, _TRAPS).any())
