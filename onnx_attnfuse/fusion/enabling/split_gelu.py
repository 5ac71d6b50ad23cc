"""`l · gelu(r)`, where `(l | r)` are the halves of one product and its bias, as com.microsoft BiasSplitGelu.

    MatMul ── Add ── Split ── l ─────────── Mul     becomes     MatMul ── BiasSplitGelu
                       └───── r ── Gelu ──── ┘

So the gate of a diffusion model's MLP, the widest tensor of each of its layers, is read once and written once. The kernel knows
three widths, and the Gelu with the error function; it gates the left half by the right one.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.fusion.enabling.gelu import read_gelu
from onnx_attnfuse.fusion.enabling.helpers import added_bias, halves, only_use
from onnx_attnfuse.fusion.enabling.rule import EnablingChange, enabling
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.ops import CONTRIB
from onnx_attnfuse.graph.uses import viewers
from onnx_attnfuse.kernels.operators.bias_split_gelu import INFO, WIDTHS

_TYPES = frozenset([ir.DataType.FLOAT, ir.DataType.FLOAT16])
_RANK = 3


@enabling("products gated by their own Gelu fused to BiasSplitGelu", "Erf Gelu com.microsoft.Gelu", "split-gelu")
def as_split_gelu(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """The product of one half with the Gelu of the other, from the node that the Gelu starts from."""
    facts = builder.facts
    found = read_gelu(node, facts)
    multiplied = None if found is None else only_use(found[1], "Mul")
    if found is None or multiplied is None:
        return None
    right, gelu = found
    left = next((value for value in multiplied.inputs if value is not gelu), None)
    whole = None if left is None else halves(left, right, facts)
    if left is None or whole is None or not _is_read_here(left, right, multiplied, gelu):
        return None
    dims, dtype = facts.dims(whole), facts.dtype(whole)
    if dims is None or len(dims) != _RANK or dtype is None or dtype not in _TYPES:
        return None
    width = dims[-1]
    if not isinstance(width, int) or width not in WIDTHS:
        return None
    if "nonempty-axes" not in facts.assumed.names and not all(isinstance(dim, int) and dim for dim in dims):
        return None
    is_cut_only = set(viewers(whole)) == {left.producer(), right.producer()} and not whole.is_graph_output()
    biased = added_bias(whole, facts) if is_cut_only else None
    builder.at(multiplied)
    x, bias = (whole, builder.constant(np.zeros(width, dtype.numpy()))) if biased is None else biased
    fused = builder.node(INFO.name, [x, bias], domain=CONTRIB, hint=f"{node.name}/{INFO.name}")
    return EnablingChange(((multiplied.outputs[0], fused),), (x,))


def _is_read_here(left: ir.Value, right: ir.Value, multiplied: ir.Node, gelu: ir.Value) -> bool:
    """Whether nothing but the Gelu and the product with it looks at the halves."""
    inner, pending = {multiplied}, [gelu]
    while pending:
        value = pending.pop()
        node = value.producer()
        if node is None or value is right or node in inner:
            continue
        inner.add(node)
        pending += [item for item in node.inputs if item is not None]
    return not any(value.is_graph_output() for value in (left, right)) and {*viewers(left), *viewers(right)} <= inner
