"""Adding nodes to a graph: each new node once, placed before an anchor, its shape and type known.

Two requests for the same operator on the same inputs give the same value, so nodes built for the first layer serve all others.
Requests must come in graph order (`at`), so that a shared node comes before all nodes that share it.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnx_attnfuse.graph.constants import Array
from onnx_attnfuse.graph.dtypes import HALVES, largest
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.facts_view import Dims, broadcast
from onnx_attnfuse.graph.scopes import Scope
from onnx_attnfuse.graph.sizes import Atom, Dim, Size, floor_quotient, summands
from onnx_attnfuse.reasons import Refused

_AXES_ARE_INPUT = {"ReduceSum": 13}
"""The opset from which on a reduction is given its axes as an input, where it is not 18."""
_OPPOSITES, _COMPARED_SINCE = {"LessOrEqual": "Greater", "GreaterOrEqual": "Less"}, 12
_ALLOWS_ZERO_SINCE, _SQUEEZES_BY_INPUT_SINCE, _ASKS_ONE_AXIS_SINCE = 14, 13, 15
_WHICH = {"Max": "Greater", "Min": "Less"}
_END_OF_AXIS = (1 << 63) - 1
_ARITHMETIC: dict[object, str] = {sum: "Add", max: "Max", min: "Min"}
"""The operators that compute atoms; all others are quotients."""


def dims_of(builder: Builder, value: ir.Value) -> Dims:
    """The shape of a value that was built from values of known shapes."""
    dims = builder.facts.dims(value)
    assert dims is not None
    return dims


def _rounding(number: float, dtype: ir.DataType) -> float:
    """How far a number is from that which a float type has, as a part of it."""
    return abs(float(np.asarray(number).astype(dtype.numpy())) / number - 1)


def dtype_of(builder: Builder, value: ir.Value) -> ir.DataType:
    """The element type of a value that was built from values of known types."""
    dtype = builder.facts.dtype(value)
    assert dtype is not None
    return dtype


def new_weight(graph: ir.Graph, name: str, tensor: ir.TensorProtocol) -> ir.Value:
    """A new initializer."""
    shape, kind = ir.Shape(tensor.shape.numpy()), ir.TensorType(tensor.dtype)
    value = ir.Value(name=name, shape=shape, type=kind, const_value=tensor)
    graph.register_initializer(value)
    return value


def builder_for(scope: Scope, names: set[str], opset: int = 0) -> Builder:
    """A builder of the graph of a scope, whose opset is at least `opset`."""
    return Builder(scope.graph, scope.facts, max(scope.opset, opset), names, is_function=scope.is_function)


class Builder:
    """Emits nodes into one graph."""

    def __init__(self, graph: ir.Graph, facts: Facts, opset: int, names: set[str], *, is_function: bool = False) -> None:
        self.graph = graph
        self.is_function = is_function
        """Whether it is the graph of a function, whose constants are nodes."""
        self.facts = facts
        self.opset = opset
        self.names = names
        """Every name in the model; new ones are added."""
        self._counts: Counter[str] = Counter()
        self.anchor: ir.Node | None = None
        """The node that new ones go right before."""
        self._known: dict[tuple[Any, ...], tuple[ir.Value, ...]] = {}
        self.added: list[ir.Node] = []
        """Nodes added since a rewrite began."""
        self.constants: list[ir.Value] = []
        """Initializers added since a rewrite began."""
        self.rearranged: list[ir.Value] = []
        """Values made of constants alone, to be constants themselves once all is judged (`graph.folding`)."""

    def at(self, anchor: ir.Node) -> None:
        """New nodes go right before `anchor`."""
        self.anchor = anchor

    def name(self, hint: str) -> str:
        """A name that nothing in the model has, `hint` if it is free."""
        name = hint
        while name in self.names:
            self._counts[hint] += 1
            name = f"{hint}_{self._counts[hint]}"
        self.names.add(name)
        return name

    def node(
        self,
        op: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Any] | None = None,
        *,
        domain: str = "",
        dims: Sequence[Dim] | None = None,
        dtype: ir.DataType | None = None,
        hint: str | None = None,
        outputs: int = 1,
    ) -> ir.Value:
        """The first output of `op` on `inputs`, from a node that is there already if there is one.

        Args:
            op: Operator type.
            inputs: Its inputs, None for one that is left out.
            attributes: Its attributes.
            domain: Its domain.
            dims: Shape of the output; by default that which the rule of the operator gives.
            dtype: Element type of the outputs; by default likewise.
            hint: Name of the node, made unique; with it the node is always a new one.
            outputs: How many outputs it has.

        Raises:
            Refused: The opset lacks the operator.
        """
        if not domain and onnx.defs.has(op) and not onnx.defs.has(op, self.opset, ""):
            raise Refused("old-opset", f"{op} is not in opset {self.opset}")
        attributes = attributes or {}
        parameters = (_parameter(name, value) for name, value in sorted(attributes.items()))
        key: tuple[Any, ...] = (op, domain, *inputs, *parameters)
        known = self._known.get(key)
        if hint is None and known is not None and known[0].graph is self.graph:
            return known[0]
        assert self.anchor is not None
        name = self.name(hint or f"attnfuse/{op}")
        node = ir.node(op, inputs, attributes, domain=domain, name=name, num_outputs=outputs)
        self.graph.insert_before(self.anchor, node)
        shape, element = self.facts.infer(node) if dims is None or dtype is None else (None, None)
        dims, dtype = shape if dims is None else dims, element if dtype is None else dtype
        for item in node.outputs:
            item.name = self.name(f"{name}_output")
            if dtype is not None:
                item.dtype = dtype
        output = node.outputs[0]
        self.facts.record(output, dims, dtype)
        if dims is not None:
            output.shape = ir.Shape([dim if isinstance(dim, int) else None for dim in dims])
        self.added.append(node)
        self._known[key] = (output,)
        return output

    def constant(self, array: Array | Sequence[int], hint: str = "attnfuse/constant") -> ir.Value:
        """A constant; equal ones are one."""
        content: Array = np.asarray(array, None if isinstance(array, np.ndarray) else np.int64)
        key = ("constant", str(content.dtype), content.shape, content.tobytes())
        known = self._known.get(key)
        if known is not None and (known[0].producer() is None or known[0].graph is self.graph):
            return self._keep(known[0])
        name = self.name(hint)
        tensor = ir.tensor(content, name=name)
        if not self.is_function:
            value = new_weight(self.graph, name, tensor)
            self.constants.append(value)
        else:
            assert self.anchor is not None
            node = ir.node("Constant", [], {"value": tensor}, name=name)
            value = node.outputs[0]
            value.name = self.name(f"{name}_output")
            self.graph.insert_before(self.anchor, node)
            self.added.append(node)
        self.facts.record(value, content.shape, tensor.dtype)
        self._known[key] = (value,)
        return value

    def _keep(self, value: ir.Value) -> ir.Value:
        """A constant that was swept away with an undone site comes back."""
        if value.producer() is None and value.name not in self.graph.initializers:
            self.graph.register_initializer(value)
            self.constants.append(value)
        return value

    def scalar(self, number: float, dtype: ir.DataType | None) -> ir.Value:
        """A rank-0 constant of element type `dtype` (float32 if unknown); numbers that overflow it become its largest."""
        element = dtype or ir.DataType.FLOAT
        if math.isfinite(number):
            number = max(-largest(element), min(largest(element), number))
        return self.constant(np.asarray(number).astype(element.numpy()), "attnfuse/scalar")

    def pad(self, value: ir.Value, axis: int, before: int, after: int) -> ir.Value:
        """`value` with zeros in front of an axis and after it; itself if there are none."""
        if not before and not after:
            return value
        dims = dims_of(self, value)
        ends = [0] * (2 * len(dims))
        ends[axis], ends[len(dims) + axis] = before, after
        new = [dim + before + after if place == axis else dim for place, dim in enumerate(dims)]
        return self.node("Pad", [value, self.constant(ends)], dims=new, dtype=self.facts.dtype(value))

    def times(self, value: ir.Value, factor: float) -> ir.Value:
        """`value` multiplied by a number, or divided by its inverse where a type of 16 bits has that; itself if it is 1."""
        if factor == 1:
            return value
        dtype = self.facts.dtype(value)
        is_divided = (
            dtype is not None and dtype in HALVES and factor != 0 and _rounding(1 / factor, dtype) < _rounding(factor, dtype)
        )
        return self.elementwise("Div" if is_divided else "Mul", [value, self.scalar(1 / factor if is_divided else factor, dtype)])

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """`value` as `dtype`."""
        if self.facts.dtype(value) == dtype:
            return value
        return self.node("Cast", [value], {"to": dtype.value}, dims=self.facts.dims(value), dtype=dtype)

    def transpose(self, value: ir.Value, perm: Sequence[int]) -> ir.Value:
        """`value` with its axes permuted; itself if they stay."""
        if list(perm) == sorted(perm):
            return value
        dims = dims_of(self, value)
        return self.node(
            "Transpose", [value], {"perm": list(perm)}, dims=[dims[axis] for axis in perm], dtype=self.facts.dtype(value)
        )

    def reshape(self, value: ir.Value, dims: Sequence[Dim]) -> ir.Value:
        """`value` with axes of lengths `dims`; itself if they are its own, as they are where one axis at most differs."""
        old = self.facts.dims(value)
        if old is not None and len(old) == len(dims):
            others = [dim for before, dim in zip(old, dims, strict=True) if not self.facts.same(before, dim)]
            if not others or (len(others) == 1 and isinstance(others[0], Size)):
                return value
        if old is not None and self._drops_ones(old, dims):
            leading = self.constant(range(len(old) - len(dims)))
            return self.node("Squeeze", [value, leading], dims=dims, dtype=self.facts.dtype(value))
        shape, attributes = self._reshape_target(old, dims)
        return self.node("Reshape", [value, shape], attributes, dims=dims, dtype=self.facts.dtype(value))

    def _drops_ones(self, old: Sequence[Dim], dims: Sequence[Dim]) -> bool:
        """Whether only leading axes of length 1 go, of a value whose new shape would have to be computed."""
        leading = len(old) - len(dims)
        computed = sum(isinstance(dim, Size) for dim in dims) > 1 and self.opset >= _SQUEEZES_BY_INPUT_SINCE
        return (
            computed and leading > 0 and all(dim == 1 for dim in old[:leading]) and all(map(self.facts.same, old[leading:], dims))
        )

    def _reshape_target(self, old: Sequence[Dim] | None, dims: Sequence[Dim]) -> tuple[ir.Value, dict[str, int]]:
        """The shape and the attributes of a Reshape; in a shape that is computed a 0 is a length, as an empty past has.

        Raises:
            Refused: An axis of length 0 takes another place, and the opset has no way to say so.
        """
        items = [
            0 if isinstance(dim, Size) and old is not None and axis < len(old) and old[axis] == dim else dim
            for axis, dim in enumerate(dims)
        ]
        dynamic = [axis for axis, item in enumerate(items) if isinstance(item, Size)]
        moved = any(dim == 0 and (old is None or axis >= len(old) or old[axis] != 0) for axis, dim in enumerate(dims))
        if moved and self.opset < _ALLOWS_ZERO_SINCE:
            raise Refused("empty-axis", f"before opset {_ALLOWS_ZERO_SINCE} Reshape moves no axis of length 0")
        if len(dynamic) > 1 or moved:
            return self.shape(dims), {"allowzero": 1} if self.opset >= _ALLOWS_ZERO_SINCE else {}
        return self.constant([item if isinstance(item, int) else -1 for item in items]), {}

    def expand(self, value: ir.Value, dims: Sequence[Dim], where: Sequence[bool] | None = None) -> ir.Value:
        """`value` repeated to lengths `dims` along the axes that `where` marks; by default where it is shorter, or itself."""
        if where is None:
            own = (*[None] * (len(dims) - len(dims_of(self, value))), *dims_of(self, value))
            where = [old is None or not self.facts.same(old, dim) for old, dim in zip(own, dims, strict=True)]
            if not any(where):
                return value
        shape = self.shape([dim if marked else 1 for dim, marked in zip(dims, where, strict=True)])
        return self.node("Expand", [value, shape], dims=dims, dtype=self.facts.dtype(value))

    def joined(self, values: Sequence[ir.Value], axis: int) -> ir.Value | None:
        """Values side by side along an axis, each repeated along others where it has length 1; None if they may not fit."""
        shapes = [dims_of(self, value) for value in values]
        axis %= len(shapes[0])
        wanted = broadcast([(*dims[:axis], 1, *dims[axis + 1 :]) for dims in shapes])
        whole = list[ir.Value]()
        for value, dims in zip(values if wanted is not None else (), shapes, strict=False):
            lengths = [dims[axis] if place == axis else dim for place, dim in enumerate(wanted or ())]
            if not all(old == 1 or self.facts.same(old, dim) for old, dim in zip(dims, lengths, strict=True)):
                return None
            whole.append(self.expand(value, lengths))
        return self.node("Concat", whole, {"axis": axis}) if len(whole) > 1 else next(iter(whole), None)

    def slice(self, value: ir.Value, axis: int, start: int, end: Dim | None, step: int = 1) -> ir.Value:
        """`value[start:end:step]` along one axis; a negative start counts from the end, and None is the end."""
        dims = dims_of(self, value)
        stop = self.constant([_END_OF_AXIS]) if end is None else self.shape([end])
        inputs = [value, self.constant([start]), stop, self.constant([axis]), *([] if step == 1 else [self.constant([step])])]
        kept = (dims[axis] if end is None and start >= 0 else 0 if end is None else end) - start
        kept = kept if step == 1 else floor_quotient(kept + (step - 1), step)
        new = [kept if index == axis else dim for index, dim in enumerate(dims)]
        return self.node("Slice", inputs, dims=new, dtype=self.facts.dtype(value))

    def counting(self, size: Dim) -> ir.Value:
        """0, 1, ... up to a size, (size) int64."""
        end = self.constant(np.asarray(size)) if isinstance(size, int) else self.reshape(self.shape([size]), [])
        inputs = [self.constant(np.asarray(0)), end, self.constant(np.asarray(1))]
        return self.node("Range", inputs, dims=[size], dtype=ir.DataType.INT64)

    def elementwise(self, op: str, inputs: Sequence[ir.Value], dtype: ir.DataType | None = None) -> ir.Value:
        """An operator that broadcasts its inputs; a comparison that the opset lacks is the opposite of its opposite."""
        if op in _OPPOSITES and self.opset < _COMPARED_SINCE:
            return self.elementwise("Not", [self.elementwise(_OPPOSITES[op], inputs)])
        return self.node(op, inputs, dims=broadcast([self.facts.dims(value) for value in inputs]), dtype=dtype)

    def chained(self, op: str, values: Iterable[ir.Value]) -> ir.Value:
        """One value or more, joined by an operator of two."""
        return functools.reduce(lambda left, right: self.elementwise(op, [left, right]), values)

    def reduce(self, op: str, value: ir.Value, axes: Sequence[int], *, keep: bool = True) -> ir.Value:
        """`value` reduced along `axes` by an operator, `ReduceMax` for one; they stay with length 1, or go."""
        dims = dims_of(self, value)
        new = [1 if index in axes else dim for index, dim in enumerate(dims) if keep or index not in axes]
        dtype = self.facts.dtype(value)
        if self.opset >= _AXES_ARE_INPUT.get(op, 18):
            return self.node(op, [value, self.constant(axes)], {"keepdims": int(keep)}, dims=new, dtype=dtype)
        return self.node(op, [value], {"axes": list(axes), "keepdims": int(keep)}, dims=new, dtype=dtype)

    def holds_along(self, test: ir.Value, axes: Sequence[int], *, keep: bool = True, by: str = "ReduceSum") -> ir.Value:
        """Whether a truth value holds anywhere along `axes`; they stay with length 1, or go.

        Counted in float32: CUDA's kernel for a maximum takes ten times as long as that for a sum (31 and 3 µs for 8 x 512).
        """
        counts = self.reduce(by, self.cast(test, ir.DataType.FLOAT), axes, keep=keep)
        return self.cast(counts, ir.DataType.BOOL)

    def length(self, value: ir.Value, axis: int) -> ir.Value:
        """The length of an axis as it is at run time, a vector of one element."""
        if self.opset >= _ASKS_ONE_AXIS_SINCE:
            return self.node("Shape", [value], {"start": axis, "end": axis + 1}, dims=[1], dtype=ir.DataType.INT64)
        whole = self.node("Shape", [value], dims=[self.facts.rank(value) or 0], dtype=ir.DataType.INT64)
        return self.slice(whole, 0, axis, axis + 1)

    def shape(self, dims: Sequence[Dim]) -> ir.Value:
        """A vector of sizes, computed at run time where they are symbols."""
        numbers = [dim for dim in dims if isinstance(dim, int)]
        if len(numbers) == len(dims):
            return self.constant(numbers)
        parts: list[ir.Value] = []
        run: list[int] = []
        for dim in dims:
            if isinstance(dim, int):
                run.append(dim)
                continue
            if run:
                parts.append(self.constant(run))
                run = []
            parts.append(self._size(dim))
        if run:
            parts.append(self.constant(run))
        if len(parts) == 1:
            return parts[0]
        return self.node("Concat", parts, {"axis": 0}, dims=[len(dims)], dtype=ir.DataType.INT64)

    def _size(self, dim: Dim) -> ir.Value:
        """One size as a vector of one element."""
        if isinstance(dim, int):
            return self.constant([dim])
        result = self._atom(dim.atoms[0])
        for atom in dim.atoms[1:]:
            result = self._integer("Mul", result, self._atom(atom))
        return result if dim.factor == 1 else self._integer("Mul", result, self.constant([dim.factor]))

    def _atom(self, atom: Atom) -> ir.Value:
        if atom.evaluate is None:
            return self.length(*self.facts.origins[atom.key])
        parts = [self._size(part) for part in atom.parts]
        operator = _ARITHMETIC.get(atom.evaluate, "Div")
        if operator == "Div" and any(isinstance(part, Size) and part.factor < 0 for part in summands(atom.parts[0])):
            parts[0] = self._integer("Sub", parts[0], self._integer("Mod", *parts))  # Div rounds -1 / 2 to 0, a size to -1
        return functools.reduce(lambda left, right: self._integer(operator, left, right), parts)

    def _integer(self, op: str, left: ir.Value, right: ir.Value) -> ir.Value:
        if op in _WHICH and self.opset < _COMPARED_SINCE:
            test = self.node(_WHICH[op], [left, right], dims=[1], dtype=ir.DataType.BOOL)
            return self.node("Where", [test, left, right], dims=[1], dtype=ir.DataType.INT64)
        return self.node(op, [left, right], dims=[1], dtype=ir.DataType.INT64)


def _parameter(name: str, value: Any) -> tuple[str, Any]:
    """An attribute as part of a key."""
    return name, tuple(value) if isinstance(value, list) else value  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
