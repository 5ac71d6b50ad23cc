"""Sizes that are fixed for good: symbols of a model's inputs become numbers, and nodes that read sizes become constants.

    sizes = input_sizes(model)                              # batch, sequence
    fix_sizes(model, {"batch": 1, "sequence": 128})
    fold_sizes(model)                                       # no Shape is left, but of values whose size is not known

A size without a name is called after its place: `input_ids.1` is the second one of that input.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.errors import ModelError, OptionError
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.assumptions import Assumed
from onnx_attnfuse.graph.build import Builder, builder_for
from onnx_attnfuse.graph.constants import Array, all_nodes, attribute, is_constant
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.facts_view import Dims
from onnx_attnfuse.graph.ops import CASTS, ELEMENTWISE, REARRANGES, REPEATS, SLICES, is_standard
from onnx_attnfuse.graph.scopes import all_names, scopes
from onnx_attnfuse.graph.sweep import drop_identities, sweep
from onnx_attnfuse.graph.tensors import bodies

_MOST_NUMBERS = 1 << 12
"""Constants of more numbers are not computed with."""
_ARITHMETIC = REARRANGES | REPEATS | SLICES | CASTS | ELEMENTWISE | frozenset(["Concat", "ConstantOfShape", "Gather", "Range"])
_WHOLE = frozenset([ir.DataType.BOOL, ir.DataType.INT32, ir.DataType.INT64])


def input_sizes(model: ir.Model) -> tuple[str, ...]:
    """The names of all symbolic sizes of a model's inputs, in their order."""
    shapes = (dims for dims in _input_shapes(model).values() if dims is not None)
    return tuple(dict.fromkeys(name for dims in shapes for dim in dims for name in sorted(sizes.symbols(dim))))


def unknown_sizes(model: ir.Model, names: Iterable[str]) -> list[str]:
    """The `names`, sorted, that are no symbolic size of a model's inputs, and none that is computed of these."""
    unknown = set(names) - set(input_sizes(model))
    for scope in scopes(model) if unknown else ():
        results = (value for node in scope.graph for value in node.outputs)
        unknown -= {name for value in results for dim in scope.facts.dims(value) or () for name in sizes.symbols(dim)}
    return sorted(unknown)


def inputs_without_shape(model: ir.Model) -> tuple[str, ...]:
    """The names of those inputs of a model that do not say how many axes they have."""
    return tuple(value.name or "" for value, dims in _input_shapes(model).items() if dims is None)


def _input_shapes(model: ir.Model) -> dict[ir.Value, Dims | None]:
    return {value: _dims(value) for value in model.graph.inputs}


def _dims(value: ir.Value) -> Dims | None:
    """The shape of an input, a symbol for each size that is no number."""
    if value.shape is None:
        return None
    named = ((axis, dim if isinstance(dim, int) else dim.value) for axis, dim in enumerate(value.shape))
    sized = ((axis, sizes.parse(dim) if isinstance(dim, str) else dim) for axis, dim in named)
    return tuple(sizes.symbol(f"{value.name}.{axis}") if dim is None else dim for axis, dim in sized)


def fix_sizes(model: ir.Model, numbers: Mapping[str, int], assumed: Assumed) -> None:
    """Makes the inputs of a model, in place, as long as given, and other values as far as names show their length.

    Args:
        model: The model.
        numbers: A number for each of `input_sizes`.
        assumed: Assumptions: where sizes of one name are one number, values inside the model are fixed as well.

    Raises:
        ModelError: An input does not say how many axes it has.
        OptionError: A size comes to less than 1.
    """
    if unknown := inputs_without_shape(model):
        raise ModelError(f"the input {unknown[0]!r} has no shape; export the model with the shapes of its inputs")
    fixed = {value: _numbers(value, dims, numbers) for value, dims in _input_shapes(model).items() if dims is not None}
    for value, shape in fixed.items():
        value.shape = ir.Shape(shape)
    for node in all_nodes(model.graph) if assumed.named_sizes else ():
        for value in node.outputs:
            if value.shape is not None:
                value.shape = with_numbers(value.shape, numbers)


def _numbers(value: ir.Value, dims: Dims, numbers: Mapping[str, int]) -> list[int]:
    found = [sizes.evaluate(dim, numbers) for dim in dims]
    for axis, (dim, number) in enumerate(zip(dims, found, strict=True)):
        if number < 1 and not isinstance(dim, int):
            raise OptionError(f"{dim}, axis {axis} of {value.name!r}, comes to {number}; choose sizes that make it 1 or more")
    return found


def with_numbers(shape: ir.Shape, numbers: Mapping[str, int]) -> ir.Shape:
    """A shape with numbers in the place of some symbols of its sizes."""
    parsed = [None if isinstance(dim, int) or dim.value is None else sizes.parse(dim.value) for dim in shape]
    found = [None if size is None else sizes.resolved(size, numbers) for size in parsed]
    return ir.Shape([size if isinstance(size, int) else dim for dim, size in zip(shape, found, strict=True)])


def fold_sizes(model: ir.Model, assumed: Assumed) -> int:
    """Makes constants, in place, of numbers that follow from fixed sizes, runs the branches that they choose, and sizes outputs.

    Args:
        model: The model, with fixed sizes.
        assumed: Assumptions about it.

    Returns:
        How many nodes fewer there are.
    """
    from onnxscript import optimizer  # takes longer to import than all else here

    nodes = _count(model)
    left, last = nodes, nodes + 1
    while left < last:
        _fold_known(model, assumed)
        optimizer.fold_constants(model, onnx_shape_inference=False, should_fold=_is_small_whole)
        left, last = _count(model), left
    _drop_empty_parts(model, assumed)
    for graph in bodies(model):
        drop_identities(graph)
    left = _count(model)
    facts = Facts(model.graph, assumed=assumed)
    for value in model.graph.outputs:
        dims = facts.dims(value)
        if dims is not None and all(isinstance(dim, int) for dim in dims):
            value.shape = ir.Shape([dim for dim in dims if isinstance(dim, int)])
    return nodes - left


def _drop_empty_parts(model: ir.Model, assumed: Assumed) -> None:
    """Removes empty inputs of each Concat, as where a rotary embedding leaves no channel alone; QNN takes none."""
    for scope in scopes(model, assumed):
        for node in tuple(scope.graph):
            if not is_standard(node, "Concat"):
                continue
            axis: int = attribute(node, "axis", 0)
            parts = [(value, scope.facts.dims(value)) for value in node.inputs]
            kept = [value for value, dims in parts if not dims or dims[axis] != 0]
            if not kept or len(kept) == len(parts):
                continue
            for place, value in enumerate(kept):
                node.replace_input_with(place, value)
            node.resize_inputs(len(kept))
            if len(kept) == 1:
                node.op_type = "Identity"
                node.attributes.clear()
            sweep(value for value, _ in parts if value not in kept)


def _count(model: ir.Model) -> int:
    return sum(1 for graph in bodies(model) for _ in all_nodes(graph))


def _is_small_whole(node: ir.Node) -> bool:
    """Whether a node on constants is worth a constant: plain arithmetic with few integers or truth values."""
    if not is_standard(node, *_ARITHMETIC):
        return False
    inputs = (value.const_value for value in node.inputs if value is not None)
    few = all(tensor is not None and tensor.size <= _MOST_NUMBERS for tensor in inputs)
    return few and all(value.dtype in _WHOLE for value in node.outputs)


def _fold_known(model: ir.Model, assumed: Assumed) -> None:
    """Puts constants in the place of integers and truth values that facts tell, which know the shapes of fused operators too."""
    names = all_names(model)
    for scope in scopes(model, assumed):
        builder = builder_for(scope, names)
        for node in tuple(scope.graph):
            for output in node.outputs if node.graph is scope.graph else ():
                array = None if is_constant(output) else _known(output, scope.facts)
                if array is not None:
                    _put(array, output, builder)


def _known(value: ir.Value, facts: Facts) -> Array | None:
    content, dtype, dims = facts.content(value), facts.dtype(value), facts.dims(value)
    items = content if isinstance(content, tuple) else (content,)
    if dtype not in _WHOLE or not all(isinstance(item, int) for item in items):
        return None
    assert dtype is not None
    array = np.asarray(content, dtype.numpy())
    return array if dims is None or dims == array.shape else None


def _put(array: Array, value: ir.Value, builder: Builder) -> None:
    """Replaces a value by a constant, through an Identity where the value is an output of its graph."""
    node = value.producer()
    assert node is not None
    builder.at(node)
    if not value.is_graph_output():
        value.replace_all_uses_with(builder.constant(array))
    elif not is_standard(node, "Identity"):
        constant = builder.constant(array)
        answer = builder.node("Identity", [constant], dims=array.shape, dtype=value.dtype, hint=node.name or None)
        answer.name, value.name = value.name, builder.name(f"{value.name}_computed")
        value.replace_all_uses_with(answer, replace_graph_outputs=True)
    sweep([value])
