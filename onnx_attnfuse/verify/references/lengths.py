"""Lengths and positions that an operator can be given: no body checks the content of its inputs."""

from __future__ import annotations

from collections.abc import Sequence

from onnx_attnfuse.kernels.operators import find
from onnx_attnfuse.verify.references.core import Array


def check(domain: str, op: str, inputs: Sequence[Array | None]) -> None:
    """Ends where lengths or positions do not fit the other inputs.

    Raises:
        ValueError: They do not.
    """
    info = find(domain, op)
    roles = {} if info is None else dict(zip(info.inputs.values(), inputs, strict=False))
    query = inputs[0]
    rows = 0 if query is None or query.ndim < 2 else query.shape[-2]
    positions, table = roles.get("positions"), roles.get("cos")
    if positions is not None and table is not None and positions.size:
        last = positions.max() + (rows - 1 if positions.size == 1 and positions.ndim < 2 else 0)
        if not 0 <= positions.min() <= last < len(table):
            raise ValueError(f"positions {positions.min()} to {last}, the caches have {len(table)}")
    last, total = roles.get("last"), roles.get("total")
    if last is not None and total is not None:
        ends, longest = last.reshape(-1) + 1, int(total.reshape(-1)[0])
        starts = 0 * ends if rows == longest else ends - rows
        if starts.min() < 0 or ends.min() < 1 or ends.max() > longest:
            raise ValueError(f"lengths of {ends.tolist()}, the longest {longest}, do not fit {rows} queries")
