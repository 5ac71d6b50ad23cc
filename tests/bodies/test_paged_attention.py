"""The body of PagedAttention beside attention in NumPy, request by request."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest

from onnx_attnfuse.bodies.fused_node import alone
from onnx_attnfuse.bodies.paged_attention import put_in_place
from onnx_attnfuse.reasons import Refused
from tests.support.decoder_loops import session

Array = npt.NDArray[Any]
_HEADS, _KEYS, _SIZE, _PAGE, _PAGES = 4, 2, 8, 4, 12
_NEW, _PAST = (3, 1, 0, 5), (0, 6, 2, 4)
_TABLE = [[7, -1, -1], [2, 9, -1], [11, -1, -1], [5, 0, 3]]
_FLOAT, _INT = ir.DataType.FLOAT, ir.DataType.INT32


def _inputs(*, packed: bool) -> dict[str, Array]:
    """Pages hold NaN but for the positions of the past."""
    rng = np.random.default_rng(0)
    tokens = sum(_NEW)
    widths = (_HEADS * _SIZE, _KEYS * _SIZE, _KEYS * _SIZE)
    query, key, value = (rng.standard_normal((tokens, width)).astype(np.float32) for width in widths)
    pools = [np.full((_PAGES, _PAGE, _KEYS, _SIZE), np.nan, np.float32) for _ in range(2)]
    for pages, past in zip(_TABLE, _PAST, strict=True):
        for place in range(past):
            for pool in pools:
                pool[pages[place // _PAGE], place % _PAGE] = rng.standard_normal((_KEYS, _SIZE))
    operands = {"query": np.concatenate([query, key, value], 1)} if packed else {"query": query, "key": key, "value": value}
    lengths = {"starts": np.cumsum([0, *_NEW], dtype=np.int32), "past": np.array(_PAST, np.int32)}
    return {**operands, "key_cache": pools[0], "value_cache": pools[1], **lengths, "table": np.array(_TABLE, np.int32)}


def _ran(inputs: dict[str, Array], sink: Array | None, attributes: dict[str, Any]) -> list[Array]:
    """The body in ONNX Runtime."""
    order = ["query", "key", "value", "key_cache", "value_cache", "starts", "past", "table", "", "", "", "sink"]
    given = inputs | ({} if sink is None else {"sink": sink})
    order = order[:8] if sink is None else order
    types = [None if name not in given else _INT if given[name].dtype == np.int32 else _FLOAT for name in order]
    fused = alone(("com.microsoft", "PagedAttention"), types, attributes, 3, 18)
    values = dict(zip(order, fused.inputs, strict=True))
    for name, array in given.items():
        value = values[name]
        assert value is not None
        fused.build.facts.record(value, array.shape, value.dtype)
        value.name, value.shape = name, ir.Shape(array.shape)
    for place, output in enumerate(fused.node.outputs):
        output.name, output.dtype = f"result{place}", _FLOAT
    put_in_place(fused.build, fused.node)
    model = ir.to_proto(ir.Model(fused.build.graph, ir_version=9))
    names = {item.name for item in model.graph.input}
    return session(model).run(None, {name: array for name, array in given.items() if name in names})


def _wanted(inputs: dict[str, Array], sink: Array | None, *, scale: float, window: int, cap: float) -> list[Array]:
    """Attention of each token to the positions of its request up to its own."""
    if "key" in inputs:
        query, key, value = inputs["query"], inputs["key"], inputs["value"]
    else:
        query, key, value = np.split(inputs["query"], [_HEADS * _SIZE, (_HEADS + _KEYS) * _SIZE], 1)
    pools, rows = [inputs["key_cache"].copy(), inputs["value_cache"].copy()], list[Array]()
    for request, (new, past) in enumerate(zip(_NEW, _PAST, strict=True)):
        for place in range(new):
            token, position = inputs["starts"][request] + place, past + place
            slots = [(_TABLE[request][at // _PAGE], at % _PAGE) for at in range(position + 1)]
            for pool, item in zip(pools, (key, value), strict=True):
                pool[slots[-1]] = item[token].reshape(_KEYS, _SIZE)
            near = slots if window < 0 else slots[-window:]
            keys, values = (np.stack([pool[slot] for slot in near]).repeat(_HEADS // _KEYS, 1) for pool in pools)
            scores = np.einsum("nh,tnh->nt", query[token].reshape(_HEADS, _SIZE), keys) * scale
            scores = cap * np.tanh(scores / cap) if cap else scores
            weights = np.exp(scores)
            total = weights.sum(1) + (0 if sink is None else np.exp(sink))
            rows.append(np.einsum("nt,tnh->nh", weights / total[:, None], values).ravel())
    return [np.stack(rows), *pools]


@pytest.mark.parametrize("packed", [False, True], ids=["three operands", "one operand"])
@pytest.mark.parametrize("window", [-1, 3])
@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("with_sink", [False, True])
def test_each_request_attends_to_its_own_pages(*, packed: bool, window: int, cap: float, with_sink: bool) -> None:
    inputs, sink = _inputs(packed=packed), np.linspace(-1, 2, _HEADS, dtype=np.float32) if with_sink else None
    attributes = {"num_heads": _HEADS, "kv_num_heads": _KEYS, "scale": 0.4, "local_window_size": window, "softcap": cap}
    for got, wanted in zip(_ran(inputs, sink, attributes), _wanted(inputs, sink, scale=0.4, window=window, cap=cap), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_a_token_of_another_request_changes_nothing_and_its_own_does() -> None:
    inputs = _inputs(packed=False)
    attributes = {"num_heads": _HEADS, "kv_num_heads": _KEYS}
    before = _ran(inputs, None, attributes)[0]
    inputs["value"][3] += 1
    changed = np.abs(_ran(inputs, None, attributes)[0] - before).max(1) > 0
    assert changed.tolist() == [False] * 3 + [True] + [False] * 5


@pytest.mark.parametrize("attributes", [{"do_rotary": 1}, {"is_causal": 0}, {"local_window_size": 0}], ids=str)
def test_what_the_body_does_not_compute_is_refused(attributes: dict[str, int]) -> None:
    types = [_FLOAT] * 5 + [_INT] * 3
    dims: list[list[int]] = [[9, 32], [9, 16], [9, 16], [12, 4, 2, 8], [12, 4, 2, 8], [5], [4], [4, 3]]
    given = {"num_heads": _HEADS, "kv_num_heads": _KEYS, **attributes}
    fused = alone(("com.microsoft", "PagedAttention"), types, given, 3, 18)
    for value, shape in zip(fused.inputs, dims, strict=True):
        assert value is not None
        fused.build.facts.record(value, shape, value.dtype)
    with pytest.raises(Refused):
        put_in_place(fused.build, fused.node)
