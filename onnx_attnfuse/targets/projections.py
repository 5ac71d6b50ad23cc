"""Queries, keys and values read as linear functions of one value: `x · weight + bias`, the columns of each weight as factors.

    x ── MatMul(Wq) ── Add ── Reshape ── Transpose ── q          x ── Gemm(W) ── Reshape ── Split ── q, k, v

The factors of a product's last axis are those of the columns of its weight. So any packing of queries, keys and values, heads and
channels is a rearrangement of columns, and needs no rule of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, Axis, Factor, leaves, length, refined, regroup, replaced
from onnx_attnfuse.attention.axes.rearrange import arrange, cost
from onnx_attnfuse.attention.axes.views import IndexedValue, aligned, is_short, views_above
from onnx_attnfuse.attention.match.operands import sources
from onnx_attnfuse.attention.spec import AttentionSpec, Source
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attribute, both_ways, constant_tensor, is_readable, is_standard
from onnx_attnfuse.graph.dtypes import type_name
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.rules.reading import read_part
from onnx_attnfuse.graph.uses import viewers
from onnx_attnfuse.reasons import Refused

_NAMES = ("queries", "keys", "values")


@dataclasses.dataclass(frozen=True)
class ProjectionPart:
    """A part of an axis, such as values that are wider than the queries and keys they are packed with."""

    whole: Factor
    start: int
    end: int
    columns: Axis
    """The part in the terms of the attention."""

    def taken(self, axis: Axis) -> Axis:
        """An axis with the part in place of the whole."""
        return tuple(leaf for item in leaves(axis) for leaf in (leaves(self.columns) if item is self.whole else (item,)))

    def cut(self, builder: Builder, indexed: IndexedValue) -> IndexedValue:
        """Emits the part of a value that runs over the whole, if it does."""
        axes = refined(indexed.axes)
        place = next((index for index, axis in enumerate(axes) if self.whole in axis), None)
        if place is None:
            return indexed
        at = axes[place].index(self.whole)
        before, after = axes[place][:at], axes[place][at + 1 :]
        value = builder.reshape(
            indexed.value, [length(axis) for axis in (*axes[:place], before, (self.whole,), after, *axes[place + 1 :])]
        )
        value = builder.slice(value, place + 1, self.start, self.end)
        return IndexedValue(value, (*axes[:place], before, self.columns, after, *axes[place + 1 :]))


@dataclasses.dataclass(frozen=True)
class LinearProjection:
    """One operand: a number times `x · weight + bias`."""

    inputs: tuple[Source, ...]
    """The value that is multiplied, then the values that it is a view of."""
    weight: IndexedValue
    """A constant over (channels of x, columns), in whichever order it lies."""
    bias: IndexedValue | None
    """A constant over columns."""
    channels: Axis
    """The axis that the product sums over."""
    product: Axis
    """All columns of the weight."""
    part: ProjectionPart | None
    """Which of them are taken, where no factor says it."""
    factor: float
    values: tuple[ir.Value, ...]
    """From the operand up to the product."""

    @property
    def columns(self) -> Axis:
        """The columns of the weight that are the operand's."""
        return leaves(self.product) if self.part is None else self.part.taken(self.product)

    @property
    def all_columns(self) -> set[Factor]:
        """The factors of all columns, and of those that are taken."""
        return {*leaves(self.product), *self.columns}

    def arranged(self, builder: Builder, constant: IndexedValue, target: Axes) -> ir.Value:
        """Emits the columns of a weight or bias in the order of `target`."""
        return arrange(builder, constant if self.part is None else self.part.cut(builder, constant), target)


@dataclasses.dataclass(frozen=True)
class Projections:
    """Queries, keys and values of one input."""

    input: IndexedValue
    operands: tuple[LinearProjection, LinearProjection, LinearProjection]

    @property
    def constants(self) -> list[ir.Value]:
        """Weights and biases, each once."""
        indexed = [item for operand in self.operands for item in (operand.weight, operand.bias) if item is not None]
        return list(dict.fromkeys(item.value for item in indexed))

    @property
    def values(self) -> list[ir.Value]:
        """The values between the input and the attention."""
        return list(dict.fromkeys(value for operand in self.operands for value in operand.values))


def read_projections(spec: AttentionSpec, facts: Facts) -> Projections:
    """Reads the operands of `spec` as projections of one input that nothing else needs.

    Raises:
        Refused: They are none.
    """
    query, key, value = (_linear(operand, name, spec, facts) for operand, name in zip(spec.operands(), _NAMES, strict=True))
    axes = spec.axes
    wanted = ((query, (*axes.n, *axes.h)), (key, (*axes.n, *axes.h)), (value, (*axes.n, *axes.v)))
    for name, (operand, columns) in zip(_NAMES, wanted, strict=True):
        _check_columns(operand, columns, name, axes.n)
    found = Projections(_common_input(query, key, value, spec), (query, key, value))
    _check_uses(found, spec)
    return found


def _linear(operand: tuple[Source, ...], name: str, spec: AttentionSpec, facts: Facts) -> LinearProjection:
    """One operand, followed up to the product that it is made by.

    Raises:
        Refused: It is made by something else.
    """
    chain, factor = list(operand), operand[-1].factor
    bias: IndexedValue | None = None
    part: ProjectionPart | None = None
    while True:
        last = chain[-1].indexed
        if bias is None and (added := _added(last, facts)) is not None:
            inner, bias = added
        elif part is None and (parted := _parted(last, facts)) is not None:
            inner, part = parted
        else:
            break
        chain += sources(inner, facts)
        if bias is not None and chain[-1].factor != 1.0:
            raise Refused("scaled-projection", f"the {name} are scaled before a bias is added to them")
        factor *= chain[-1].factor
    product = chain[-1].indexed
    node = product.value.producer()
    if node is not None and node.graph is not spec.nodes[0].graph:
        raise Refused("not-projected", f"the {name} are computed in another graph than the attention", node.name)
    if not is_standard(node, "MatMul", "Gemm"):
        origin = f"'{product.value.name}'" if node is None else node.op_type
        raise Refused(
            "not-projected", f"the {name} are no projection, they come from {origin}", None if node is None else node.name
        )
    if is_short(product, facts):
        raise Refused("repeated-projection", f"the {name} may be repeated after they are projected", node.name)
    multiplied, weight, own_bias = _factors(node, product, name, facts)
    if bias is not None and own_bias is not None:
        raise Refused("two-biases", f"two biases are added to the {name}", node.name)
    weight, bias = _constant(weight, name, spec, facts), bias or own_bias
    bias = None if bias is None else _constant(bias, name, spec, facts)
    if facts.dtype(multiplied.value) != spec.dtype:
        raise Refused("mixed-types", f"the {name} are a projection of another type than they have", node.name)
    values = tuple(source.indexed.value for source in chain)
    inputs = tuple(source for source in sources(multiplied, facts) if facts.dtype(source.indexed.value) == spec.dtype)
    return LinearProjection(inputs, weight, bias, multiplied.axes[-1], product.axes[-1], part, factor, values)


def _added(indexed: IndexedValue, facts: Facts) -> tuple[IndexedValue, IndexedValue] | None:
    """The two operands of an Add whose second is a constant."""
    for one, other in both_ways(indexed.value.producer(), "Add"):
        if facts.dims(one) != facts.dims(indexed.value):
            continue
        added = aligned(other, indexed.axes, facts)
        if added is not None and _origin(added, facts) is not None:
            return IndexedValue(one, indexed.axes), added
    return None


def _parted(indexed: IndexedValue, facts: Facts) -> tuple[IndexedValue, ProjectionPart] | None:
    """The input of a Split or Slice that takes an uneven part, and the part."""
    part = read_part(indexed.value, facts)
    total = None if part is None else (facts.dims(part.whole) or ())[part.axis]
    if part is None or part.step != 1 or not isinstance(total, int):
        return None
    if not isinstance(part.start, int) or not isinstance(part.stop, int):
        return None
    whole = Factor(total)
    inner = IndexedValue(part.whole, replaced(indexed.axes, part.axis, (whole,)))
    return inner, ProjectionPart(whole, part.start, part.stop, indexed.axes[part.axis])


def _factors(
    node: ir.Node, product: IndexedValue, name: str, facts: Facts
) -> tuple[IndexedValue, IndexedValue, IndexedValue | None]:
    """The input, the weight and the bias of a MatMul or Gemm; None for no bias."""
    multiplied, weight, bias = (*node.inputs, None)[:3]
    dims = facts.dims(weight)
    if multiplied is None or weight is None or dims is None or len(dims) != 2 or facts.rank(multiplied) != len(product.axes):
        raise Refused("not-projected", f"the {name} are no product with a matrix of weights", node.name)
    turned = node.op_type == "Gemm" and bool(attribute(node, "transB", 0))
    summed = (Factor(dims[1 if turned else 0]),)
    columns = product.axes[-1]
    indexed = (
        IndexedValue(multiplied, (*product.axes[:-1], summed)),
        IndexedValue(weight, (columns, summed) if turned else (summed, columns)),
    )
    if node.op_type == "MatMul":
        return *indexed, None
    if attribute(node, "transA", 0) or attribute(node, "alpha", 1.0) != 1.0 or attribute(node, "beta", 1.0) != 1.0:
        raise Refused("scaled-projection", f"the Gemm that makes the {name} scales or transposes", node.name)
    added = aligned(bias, product.axes, facts)
    if bias is not None and added is None:
        raise Refused("unknown-rank", f"the rank of '{bias.name}' is unknown", node.name)
    return *indexed, added


def _origin(indexed: IndexedValue, facts: Facts) -> IndexedValue | None:
    """The constant that a value is a view of."""
    views = views_above(indexed, facts, selecting=True)
    return next((item for item in views if constant_tensor(item.value) is not None), None)


def _constant(indexed: IndexedValue, name: str, spec: AttentionSpec, facts: Facts) -> IndexedValue:
    """The constant that a weight or bias is, in the type of the operand.

    Raises:
        Refused: It is none, or cannot be read.
    """
    found = _origin(indexed, facts)
    tensor = None if found is None else constant_tensor(found.value)
    if found is None or tensor is None:
        node = indexed.value.producer()
        message = f"the weight '{indexed.value.name}' of the {name} is no constant"
        raise Refused("weight-not-constant", message, None if node is None else node.name)
    if tensor.dtype != spec.dtype:
        raise Refused("mixed-types", f"the weight '{found.value.name}' of the {name} is {type_name(tensor.dtype)}")
    if not is_readable(tensor):
        raise Refused("weight-unreadable", f"the data of the weight '{found.value.name}' is not there")
    return found


def _check_columns(operand: LinearProjection, wanted: Axis, name: str, heads: Axis) -> None:
    """The columns of a weight are heads and channels, each once."""
    columns = {leaf for leaf in operand.columns if leaf.position is None}
    added = [] if operand.bias is None else [leaf for axis in refined(operand.bias.axes) for leaf in axis]
    if any(leaf.position is None and leaf not in operand.all_columns for leaf in added):
        raise Refused("not-projected", f"the bias of the {name} differs by batch entry or row")
    if columns == set(wanted):
        return
    if columns < set(wanted) and set(wanted) - columns <= set(heads):
        raise Refused(
            "grouped-heads", f"the {name} have fewer heads than there are; repeated columns would cost more than they save"
        )
    raise Refused("not-projected", f"the {name} are projected to something else than heads and channels")


def _common_input(query: LinearProjection, key: LinearProjection, value: LinearProjection, spec: AttentionSpec) -> IndexedValue:
    """The one value that all three are projections of, as the queries have it laid out.

    Raises:
        Refused: There is none.
    """
    if not _matched(spec.query_axis, spec.key_axis):
        raise Refused("not-self-attention", "there are not as many queries as keys")
    roles = [_roles(spec.query_axis, query), _roles(spec.key_axis, key), _roles(spec.key_axis, value)]
    others = [
        {(source.indexed.value, _named(source.indexed.axes, named)) for source in operand.inputs if source.factor == 1.0}
        for operand, named in zip((key, value), roles[1:], strict=True)
    ]
    own = [source.indexed for source in query.inputs if source.factor == 1.0]
    common = [indexed for indexed in own if all((indexed.value, _named(indexed.axes, roles[0])) in seen for seen in others)]
    if not common:
        names = [item.inputs[0].indexed.value.name for item in (query, key, value)]
        raise Refused("not-self-attention", f"queries, keys and values are projections of {', '.join(map(repr, names))}")
    axes = spec.axes
    target: Axes = (axes.b, axes.i, query.channels)
    best = min(reversed(common), key=lambda indexed: cost(indexed, target))
    present = {leaf for axis in refined(best.axes) for leaf in axis if leaf.position is None}
    if present != {*axes.b, *axes.i, *leaves(query.channels)}:
        raise Refused("not-self-attention", f"'{best.value.name}' has other axes than batch, rows and channels")
    return best


def _matched(rows: Axis, columns: Axis) -> bool:
    """Whether queries and keys are counted alike; splits their factors where only one of the two is split."""
    if length(rows) != length(columns):
        return False
    for one, other in ((rows, columns), (columns, rows)):
        if regroup([one], [leaf.size for leaf in leaves(other)]) is None:
            return False
    return [leaf.size for leaf in leaves(rows)] == [leaf.size for leaf in leaves(columns)]


def _roles(rows: Axis, operand: LinearProjection) -> dict[Factor, tuple[str, int]]:
    """Names for the factors that queries, keys and values have each of their own: rows and channels, by place."""
    found = {leaf: ("row", place) for place, leaf in enumerate(leaves(rows))}
    return found | {leaf: ("channel", place) for place, leaf in enumerate(leaves(operand.channels))}


def _named(axes: Axes, roles: Mapping[Factor, tuple[str, int]]) -> tuple[tuple[object, ...], ...]:
    """A layout that can be compared to that of another operand."""

    def name(leaf: Factor) -> object:
        return (leaf.size, leaf.position) if leaf.position is not None else roles.get(leaf, leaf)

    return tuple(tuple(name(leaf) for leaf in axis) for axis in refined(axes))


def _check_uses(found: Projections, spec: AttentionSpec) -> None:
    """Nothing but the attention looks at the projections: they would be computed twice.

    Raises:
        Refused: Something does.
    """
    values = found.values
    inside = {*spec.nodes, *(value.producer() for value in values)}
    for value in values:
        outside = [node for node in viewers(value) if node not in inside]
        if outside or value.is_graph_output():
            user = f"by {outside[0].op_type}" if outside else "as an output of the graph"
            message = f"the projection '{value.name}' is used {user} too, so it would be computed twice"
            raise Refused("projection-used", message, outside[0].name if outside else None)


def in_order(constants: Sequence[IndexedValue | None], targets: Sequence[Axis], rank: int) -> ir.Value | None:
    """The constant of `rank` axes in which the columns of all operands follow each other as they are wanted, if there is one."""
    first = constants[0]
    for place, (indexed, target) in enumerate(zip(constants, targets, strict=True)):
        if first is None or indexed is None or indexed.value is not first.value or len(indexed.axes) != rank:
            return None
        part, *rest = leaves(indexed.axes[-1]) or (None,)
        if part is None or (part.size, part.position) != (len(constants), place) or tuple(rest) != leaves(target):
            return None
    return None if first is None else first.value


def joined(builder: Builder, parts: Sequence[ir.Value], axis: int) -> ir.Value:
    """Constants one after the other: a node at first, and a constant of its own when all is judged (`graph.folding`)."""
    whole = builder.node("Concat", parts, {"axis": axis})
    builder.rearranged.append(whole)
    return whole
