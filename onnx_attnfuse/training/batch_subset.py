"""Computing something again for some entries of a batch: ORTModule's executor takes no `If`, so they are picked by index.

There is always one at least: kernels are not made for empty batches.
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.graph.build import Builder

_INDEX = ir.DataType.INT64


def entries_with(builder: Builder, tests: ir.Value) -> ir.Value:
    """The entries for which a test holds anywhere, as indices; the first entry if there are none.

    Args:
        builder: What to build with.
        tests: Truth values of shape (b, n, s, 1), n and s possibly 1.
    """
    holds = builder.holds_along(tests, [1, 2, 3], keep=False)
    places = builder.node("NonZero", [holds], dtype=_INDEX)
    builder.facts.record(places, [1, builder.facts.fresh(places, 1)], _INDEX)
    found = builder.node("Reshape", [places, builder.constant([-1])], dtype=_INDEX)
    builder.facts.record(found, [builder.facts.fresh(found, 0)], _INDEX)
    one = builder.constant([1])
    count = builder.node("Shape", [found], dims=[1], dtype=_INDEX)
    none = builder.node("Sub", [one, builder.node("Min", [count, one], dims=[1], dtype=_INDEX)], dims=[1], dtype=_INDEX)
    spare = builder.node("Slice", [builder.constant([0]), builder.constant([0]), none, builder.constant([0])], dtype=_INDEX)
    entries = builder.node("Concat", [found, spare], {"axis": 0}, dtype=_INDEX)
    builder.facts.record(entries, [builder.facts.fresh(entries, 0)], _INDEX)
    return entries


def taken(builder: Builder, value: ir.Value, entries: ir.Value | None) -> ir.Value:
    """Some entries of a value, or all of one that is the same for all."""
    dims, dtype = builder.facts.dims(value), builder.facts.dtype(value)
    if entries is None or (dims is not None and dims[0] == 1):
        return value
    picked = builder.node("Gather", [value, entries], {"axis": 0}, dtype=dtype)
    count = builder.facts.dims(entries)
    assert count is not None
    builder.facts.record(picked, None if dims is None else [*count, *dims[1:]], dtype)
    return picked


def added_to(builder: Builder, value: ir.Value, more: ir.Value, entries: ir.Value | None, dtype: ir.DataType) -> ir.Value:
    """`value` with `more` added to some of its entries, or all."""
    own = taken(builder, value, entries)
    total = builder.elementwise("Add", [own, more], dtype)
    if entries is None or own is value:
        return total
    indices = builder.node("Unsqueeze", [entries, builder.constant([1])], dtype=_INDEX)
    dims = builder.facts.dims(value)
    return builder.node("ScatterND", [value, indices, total], dims=dims, dtype=dtype)
