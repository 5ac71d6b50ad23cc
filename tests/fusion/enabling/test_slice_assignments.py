"""Assignments to slices that together are a whole tensor, as keys of latents are put together by an exporter."""

from __future__ import annotations

import numpy as np
import pytest

import onnx_attnfuse
from tests.support.bundled import run
from tests.support.small_models import HEADER, parsed

_TEXT = f"""{HEADER}
keys (float[b, 2, s, 8] q, float[b, 2, t, {{first}}] x, float[b, 2, t, {{second}}] y, float[b, 2, t, 8] v)
    => (float[b, 2, s, 8] out)
<int64 zero = {{{{0}}}}, int64 one = {{{{1}}}}, int64 size = {{{{8}}}}, int64[1] last = {{{{-1}}}}, int64[1] from0 = {{{{0}}}},
 int64[1] to0 = {{{{{{end}}}}}}, int64[1] from1 = {{{{{{start}}}}}}, int64[1] to1 = {{{{8}}}}>
{{{{
    like = Shape(v)
    zeros = ConstantOfShape(like)
    turned = Transpose<perm = [3, 1, 2, 0]>(zeros)
    places = Range(zero, size, one)
    early = Slice(places, from0, to0)
    early1 = Unsqueeze(early, last)
    late = Slice(places, from1, to1)
    late1 = Unsqueeze(late, last)
    xt = Transpose<perm = [3, 1, 2, 0]>(x)
    yt = Transpose<perm = [3, 1, 2, 0]>(y)
    first = ScatterND(turned, {{order[0]}})
    back = Transpose<perm = {{back}}>(first)
    again = Transpose<perm = [3, 1, 2, 0]>(back)
    second = ScatterND{{reduction}}(again, {{order[1]}})
    keys = Transpose<perm = [3, 1, 2, 0]>(second)
    kt = Transpose<perm = [0, 1, 3, 2]>(keys)
    scores = MatMul(q, kt)
    weights = Softmax<axis = -1>(scores)
    out = MatMul(weights, v)
}}}}"""
_IN_ORDER = "early1, xt", "late1, yt"


def _nodes(
    first: int = 5,
    second: int = 3,
    end: int = 5,
    start: int = 5,
    order: tuple[str, str] = _IN_ORDER,
    back: str = "[3, 1, 2, 0]",
    reduction: str = "",
) -> set[str]:
    """The operators of what is written, which gives what the source gives."""
    traits = {"first": first, "second": second, "end": end, "start": start, "order": order, "back": back, "reduction": reduction}
    source = parsed(_TEXT.format(**traits))
    model = onnx_attnfuse.optimize(source, ep="cpu").model
    rng = np.random.default_rng(0)
    sizes = {"b": 2, "s": 3, "t": 4 if back == "[3, 1, 2, 0]" else 2}
    feeds = {
        item.name: rng.standard_normal(
            [sizes.get(dim.dim_param, dim.dim_value) for dim in item.type.tensor_type.shape.dim], np.float32
        )
        for item in source.graph.input
    }
    np.testing.assert_allclose(run(model, feeds)["out"], run(source, feeds)["out"], rtol=1e-5, atol=1e-6)
    return {node.op_type for node in model.graph.node}


@pytest.mark.parametrize("order", [_IN_ORDER, _IN_ORDER[::-1]])
def test_they_are_joined_in_any_order(order: tuple[str, str]) -> None:
    assert not {"ScatterND", "ConstantOfShape"} & _nodes(order=order)


@pytest.mark.parametrize(
    "near_miss",
    [
        {"first": 4, "end": 4},
        {"first": 6, "end": 6},
        {"reduction": '<reduction = "add">'},
        {"back": "[3, 2, 1, 0]"},
    ],
    ids=["a gap", "written twice", "added", "axes in another order"],
)
def test_others_stay(near_miss: dict[str, int | str]) -> None:
    assert "ScatterND" in _nodes(**near_miss)  # pyright: ignore[reportArgumentType]
