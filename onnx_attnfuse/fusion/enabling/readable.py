"""Rewrites of attentions that could not be read, after which they may be.

    where(hidden, scores - 1e9, scores)           is    scores + where(hidden, 0 - 1e9, 0)        Keras
    reduce_sum(q[:, :, None] * k[:, None])        is    einsum("bsh,bth->bst", q, k)
    reduce_sum(weights[..., None] * v[:, None])   is    einsum("bst,btc->bsc", weights, v)
    weights @ v1, weights @ v2                    is    Split(weights @ Concat(v1, v2))           values in two parts
    (weights - others) @ v                        is    weights @ v - others @ v                  differential attention
    q @ k1, q @ k2 side by side                   is    q @ Concat(k1, k2)                        see `key_blocks`
    q1 @ k1 + q2 @ k2                             is    Concat(q1, q2) @ Concat(k1, k2)           see `summed_products`
    Pad(scores, one column of c)                  is    Concat(scores, c)                         see `sinks`

Scores get a normal form: a multiple of the product of queries and keys, and a bias, whatever nodes compute them. Those between
product and softmax are executed symbolically. Where each case of the result is `factor · product + rest`, the same nodes give
`rest` when the product is 0: they are written again, with a 0 in its place.
"""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Callable, Collection, Iterator, Sequence

import onnx_ir as ir

from onnx_attnfuse.attention.match.contractions import read_contraction
from onnx_attnfuse.attention.match.normal_form import MOST_NODES, Reading, is_product, nodes_between
from onnx_attnfuse.attention.match.softmax import Softmax
from onnx_attnfuse.certify.arrays import aligned, axes_of
from onnx_attnfuse.certify.execution import UNKNOWN, Execution
from onnx_attnfuse.certify.interned import aside
from onnx_attnfuse.certify.magnitudes import are_small
from onnx_attnfuse.certify.terms import (
    NINF,
    ZERO,
    Number,
    Polynomial,
    Term,
    multiply,
    number,
    polynomial,
    substitute,
    truth,
    walk,
)
from onnx_attnfuse.fusion.enabling.key_blocks import below, with_blocks_joined
from onnx_attnfuse.fusion.enabling.rule import EnablingChange
from onnx_attnfuse.fusion.enabling.sinks import with_column_joined, with_factor_inside
from onnx_attnfuse.fusion.enabling.summed_products import with_products_joined
from onnx_attnfuse.graph.assumptions import AssumptionName
from onnx_attnfuse.graph.build import Builder, dims_of
from onnx_attnfuse.graph.constants import attributes, given, is_constant, is_standard
from onnx_attnfuse.graph.dtypes import FLOATS
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import ELEMENTWISE, REARRANGES, REPEATS
from onnx_attnfuse.graph.thresholds import MASKS, ORDINARY
from onnx_attnfuse.graph.uses import is_read_once, sources

_CHOOSES = frozenset(["Clip", "Max", "Min", "Where"])
"""Operators whose result is one of their inputs."""
_MOST_CASES = 6
"""Choices in a factor, one inside of another, that are taken apart."""


@dataclasses.dataclass(frozen=True)
class _Product:
    """The product of queries and keys that scores are made of."""

    value: ir.Value
    operands: tuple[ir.Value, ...]
    equation: str = ""
    """The Einsum that it is, without axes of operands of length 1; empty where it is a product of matrices as it is."""

    def written(self, builder: Builder) -> ir.Value:
        """The product as one node."""
        if not self.equation:
            return self.value
        terms = self.equation.split("->")[0].split(",")
        shapes = [dims_of(builder, item) for item in self.operands]
        inputs = [
            item if len(term) == len(dims) else builder.reshape(item, [dim for dim in dims if dim != 1])
            for item, term, dims in zip(self.operands, terms, shapes, strict=True)
        ]
        made = builder.node("Einsum", inputs, {"equation": self.equation})
        return builder.reshape(made, dims_of(builder, self.value))


@dataclasses.dataclass(frozen=True)
class _Form:
    """Scores as `factor · product + rest`."""

    factor: Number
    ends: tuple[ir.Value, ...] = ()
    """The values that all is computed from."""
    has_rest: bool = False
    fill: Number | None = None
    """The number that masks and is all there is in some cases; None where there are none."""
    assumes: tuple[AssumptionName, ...] = ()
    """0 times an unchosen number is 0 where that is finite, and no score lies beyond a number that masks."""


def with_plain_scores(scores: ir.Value, builder: Builder) -> EnablingChange | None:
    """The scores that a Softmax is given as a sum of a product and a mask."""
    if builder.facts.dims(scores) is None or scores.producer() is None:
        return None
    with aside():
        found = (_rewritten(scores, product, builder) for product in _products(scores, builder.facts))
        return next((change for change in found if change is not None), None)


def _products(scores: ir.Value, facts: Facts) -> Iterator[_Product]:
    """The products of the shape of scores above them without another one between."""
    pending, dims = [scores], facts.dims(scores)
    for value in pending:
        node = value.producer()
        if node is None or len(pending) > MOST_NODES:
            continue
        product, is_like = None, facts.dims(value) == dims
        if read_contraction(node, facts) is not None:
            product = _Product(value, ()) if is_like and is_product(value, facts) else None
        elif not (is_like and is_standard(node, "ReduceSum") and (product := _summed(node, facts))):
            pending += [item for item in node.inputs if item is not None and facts.dtype(item) in FLOATS and item not in pending]
        if product is not None:
            yield product


def _summed(node: ir.Node, facts: Facts) -> _Product | None:
    """A sum of products of elements as an Einsum of two operands, before all views or before those that add axes of length 1."""
    follows = REARRANGES | REPEATS | {"Mul"}
    found = (_einsum(node, _factors(node, ops), facts) for ops in (follows, follows - {"Reshape"}))
    return next((product for product in found if product is not None), None)


def _factors(node: ir.Node, follows: Collection[str]) -> list[ir.Value]:
    """The values that the elements of a sum are products of."""
    factors, pending = list[ir.Value](), [*node.inputs[:1]]
    for value in pending:
        above = None if value is None else value.producer()
        if above is not None and is_standard(above, *follows):
            pending += above.inputs if above.op_type == "Mul" else above.inputs[:1]
        elif value is not None:
            factors.append(value)
    return factors


def _einsum(node: ir.Node, factors: Sequence[ir.Value], facts: Facts) -> _Product | None:
    """A sum of products of the elements of two factors, whose letters are the indices that both are read at."""
    dims = facts.dims(node.outputs[0])
    if len(factors) != 2 or any(map(is_constant, factors)) or dims is None:
        return None
    reading = Reading(facts, factors)
    try:
        array = reading.array(node.outputs[0], beyond=True)
        place = axes_of(array)
        term = array.at(*place)
    except UNKNOWN:
        return None
    if term.op != "sum" or term.args[1].op != "poly":
        return None
    bound, body = term.args
    letters = dict(zip((*place, bound), string.ascii_lowercase, strict=False))
    ((atoms, number), *more) = polynomial(body).items()
    if more or number != 1 or len(atoms) != 2 or {atom.data for atom in atoms} != {reading.names[item] for item in factors}:
        return None
    read = {str(atom.data): [item for item in atom.args if item is not ZERO] for atom in atoms}
    places = [read[reading.names[item]] for item in factors]
    used = {item for at in places for item in at}
    if not used <= set(letters) or any(len(set(at)) < len(at) for at in places):
        return None
    ones = [(facts.dims(item) or ()).count(1) for item in factors]
    if any(facts.rank(item) not in {len(at), len(at) + count} for item, at, count in zip(factors, places, ones, strict=True)):
        return None
    if any(item not in used and dim != 1 for item, dim in zip(place, dims, strict=True)):
        return None
    sides = ",".join("".join(letters[item] for item in at) for at in places)
    return _Product(node.outputs[0], tuple(factors), f"{sides}->{''.join(letters[item] for item in place if item in used)}")


def _rewritten(scores: ir.Value, product: _Product, builder: Builder) -> EnablingChange | None:
    """Scores as a multiple of a product and what the nodes between make of 0; None where they are something else."""
    facts = builder.facts
    nodes = nodes_between(product.value, scores)
    if nodes is None or not (nodes or product.equation):
        return None
    results = [output for node in nodes for output in node.outputs]
    if len(results) > len(nodes) or any(facts.dtype(item) != facts.dtype(product.value) for item in results):
        return None  # scores are cut, compared, rounded or counted
    form = _form(scores, product.value, nodes, facts) if nodes else _Form(1)
    if form is None or not facts.assumed.names.issuperset(form.assumes):
        return None
    made, dtype = product.written(builder), facts.dtype(scores)
    made = builder.times(made, float(form.factor))
    frontier = [*product.operands] if product.equation else [product.value]
    ends = [item for item in form.ends if not is_constant(item) and item is not product.value]
    frontier += ends
    if form.has_rest or ends:
        rest = _copied(nodes, product.value, scores, builder, 0.0)
        made = builder.node("Add", [made, rest], hint=f"{scores.name}/masked")
        if form.fill is not None:
            other = _copied(nodes, product.value, scores, builder, 1.0)
            is_fill = builder.elementwise("Equal", [rest, other])
            made = builder.elementwise("Where", [is_fill, builder.scalar(float(form.fill), dtype), made])
    return EnablingChange(((scores, made),), tuple(dict.fromkeys(frontier)), form.assumes)


def _form(scores: ir.Value, product: ir.Value, nodes: Sequence[ir.Node], facts: Facts) -> _Form | None:
    """The form of scores as a multiple of a product and a rest; None if they are something else."""
    reading = Reading(facts, [product])
    try:
        array, own = reading.array(scores, beyond=True), reading.array(product)
        place = aligned(axes_of(array), array.shape)
        term, score = array.at(*place), own.at(*aligned(place, own.shape))
    except UNKNOWN:
        return None
    unread = {name for value, name in reading.names.items() if value.producer() in nodes}
    tests = {test: truth(answer) for test in walk(term) if (answer := _known(test, score)) is not None}
    term = substitute(term, tests)
    if any(item.sort == "Bool" and score in walk(item) for item in walk(term)):
        return None
    factors, fills, has_rest, is_large, is_bounded = set[Number](), set[Number](), False, False, bool(tests)
    for (case,), depth in _cases((term,)):
        parts = dict(polynomial(case))
        factor = parts.pop((score,), 0)
        if not factor and set(parts) == {()} and parts[()] <= MASKS:
            fills.add(parts[()])
        elif factor and _is_added(parts, score, unread):
            factors.add(factor)
        elif case is not NINF:
            return None
        has_rest, is_bounded = has_rest or bool(parts), is_bounded or depth > 0
        is_large = is_large or case is NINF or (factor != 0 and _large(case))
    if len(factors) != 1 or len(fills) > (not is_large) or not all(_is_exact(node, score, reading) for node in nodes):
        return None
    assumes: tuple[AssumptionName, ...] = ("large-fills", "bounded-scores") if is_bounded else ()
    return _Form(factors.pop(), tuple(reading.read.values()), has_rest, fills.pop() if fills else None, assumes)


def _is_exact(node: ir.Node, score: Term, reading: Execution) -> bool:
    """Whether floats give the result of real numbers: a score is moved alone beside a large number, and has no other use."""
    arrays = [reading.array(item) for item in (node.outputs[0], *node.inputs) if item is not None]
    place, moves = axes_of(arrays[0]), node.op_type in ELEMENTWISE and node.op_type not in _CHOOSES
    terms = (array.at(*aligned(place, array.shape)) for array in (arrays if moves else arrays[:1]))
    for (made, *operands), _ in _cases(tuple(terms)):
        atoms = [atom for atoms in polynomial(made) for atom in atoms if len(atoms) > 1 or atom.op != "element"]
        if any(item.op == "element" and item.data == score.data for atom in atoms for item in walk(atom)):
            return False
        moved = moves and polynomial(made) and not {made, multiply(number(-1, made.sort), made)}.intersection(operands)
        mixed = any(len(parts) > 1 and _has_score(parts, score) for parts in map(polynomial, operands))
        if moved and mixed and any(map(_large, (made, *operands))):
            return False
    return True


def _has_score(parts: Polynomial, score: Term) -> bool:
    """Whether a score is among the summands, at whichever place it is read there: views between have other indices."""
    return any(len(atoms) == 1 and atoms[0].op == "element" and atoms[0].data == score.data for atoms in parts)


def _large(term: Term) -> bool:
    """Whether a number may mask."""
    return term.sort == "Real" and not all(are_small(atoms, factor) for atoms, factor in polynomial(term).items())


def _cases(terms: tuple[Term, ...], depth: int = 0) -> Iterator[tuple[tuple[Term, ...], int]]:
    """Numbers in each case of their choices, with the number of choices that are made in factors."""
    whole = [term for term in terms if term.op == "ite"]
    choices = whole or [atom for term in terms for atoms in polynomial(term) for atom in atoms if atom.op == "ite"]
    if not choices or depth > _MOST_CASES:
        yield terms, depth
        return
    for answer in (True, False):
        chosen = {choices[0].args[0]: truth(answer)}
        yield from _cases(tuple(substitute(term, chosen) for term in terms), depth + (not whole))


def _known(test: Term, score: Term) -> bool | None:
    """Whether an ordinary score is below a number, or above it; None where it may be either."""
    parts = dict(polynomial(test.args[0])) if test.op in {"le0", "lt0"} else {}
    factor, number = parts.pop((score,), 0), parts.pop((), 0)
    return number < 0 if factor and not parts and abs(number) > abs(factor) * ORDINARY else None


def _is_added(parts: Polynomial, score: Term, unread: set[str]) -> bool:
    """Whether numbers beside a score have nothing of it in them, and are ordinary, or a single one, which rounds it once."""
    read = {item.data for atoms in parts for atom in atoms for item in walk(atom) if item.op == "element"}
    large = sum(not are_small(atoms, factor) for atoms, factor in parts.items())
    return score.data not in read and unread.isdisjoint(read) and (large == 0 or len(parts) == 1)


def _copied(nodes: Sequence[ir.Node], product: ir.Value, scores: ir.Value, builder: Builder, number: float) -> ir.Value:
    """The scores that the nodes between would make of a product that is one number everywhere."""
    facts, dtype = builder.facts, builder.facts.dtype(product)
    is_elementwise = all(node.op_type in ELEMENTWISE for node in nodes)
    scalar, dims = builder.scalar(number, dtype), facts.dims(product)
    made = {product: scalar if is_elementwise or dims is None else builder.expand(scalar, dims)}
    for node in nodes:
        inputs = [None if item is None else made.get(item, item) for item in node.inputs]
        copy = builder.node(node.op_type, inputs, attributes(node), domain=node.domain)
        known = facts.number(copy) if is_elementwise and all(map(is_constant, filter(None, inputs))) else None
        made[node.outputs[0]] = copy if known is None else builder.scalar(known, dtype)
    return made[scores]


def with_values_joined(softmax: Softmax, builder: Builder) -> EnablingChange | None:
    """The products of one attention's weights with several values as one product with all of them."""
    facts = builder.facts
    found = (
        (value, [node for node, place in value.uses() if is_standard(node, "MatMul") and place == 0])
        for value in below(softmax.weights)
    )
    weights, products = next((item for item in found if item[1]), (softmax.weights, list[ir.Node]()))
    values = [node.inputs[1] for node in products if node.inputs[1] is not None]
    shapes = [facts.dims(value) or () for value in values]
    widths = [dims[-1] for dims in shapes if len(dims) > 1 and isinstance(dims[-1], int)]
    if len(products) < 2 or len(widths) < len(products) or len({dims[:-1] for dims in shapes}) > 1:
        return None
    places = {node: place for place, node in enumerate(products[0].graph or ())}
    first, last = (pick(products, key=lambda node: places.get(node, -1)) for pick in (min, max))
    above = sources(values, lambda _, node: places.get(node, -1) > places.get(first, -1))
    if any(value.producer() in products for value in above):
        return None  # a value depends on another product
    results = [node.outputs[0] for node in products]
    builder.at(last)
    value = builder.node("Concat", values, {"axis": len(shapes[0]) - 1})
    product = builder.node("MatMul", [weights, value])
    axis = len(dims_of(builder, product)) - 1
    pairs, start = list[tuple[ir.Value, ir.Value]](), 0
    for result, width in zip(results, widths, strict=True):
        pairs.append((result, builder.slice(product, axis, start, start + width)))
        start += width
    return EnablingChange(tuple(pairs), (weights, *dict.fromkeys(values)))


def with_sum_as_product(softmax: Softmax, builder: Builder) -> EnablingChange | None:
    """Weights that are multiplied with values, element by element, and summed over the keys, as a product of both.

    Weights of one query stay: on a CPU the sum takes 0.7 of the time of an attention to 128 to 512 keys of 256 channels.
    """
    facts = builder.facts
    for value in below(softmax.weights):
        node = value.producer()
        product = _summed(node, facts) if is_standard(node, "ReduceSum") else None
        if node is None or product is None or softmax.weights not in product.operands:
            continue
        terms = dict(zip(product.operands, product.equation.split("->")[0].split(","), strict=True))
        others = {letter for operand, term in terms.items() if operand is not softmax.weights for letter in term}
        if others.issuperset(terms[softmax.weights]):
            return None
        builder.at(node)
        return EnablingChange(((value, product.written(builder)),), product.operands)
    return None


def with_sums_as_products(softmax: Softmax, builder: Builder) -> EnablingChange | None:
    """Scores in normal form, and the sum of weighted values as a product, where neither is enough."""
    scores = with_plain_scores(softmax.scores, builder)
    result = None if scores is None else with_sum_as_product(softmax, builder)
    if scores is None or result is None:
        return None
    frontier = tuple(dict.fromkeys((*scores.frontier, *result.frontier)))
    return EnablingChange((*scores.results, *result.results), frontier, scores.assumes)


def with_terms_apart(softmax: Softmax, builder: Builder) -> EnablingChange | None:
    """The product of a sum of weights and others with values as a sum of products."""
    facts = builder.facts
    for total in below(softmax.weights):
        node, users = total.producer(), [user for user, place in total.uses() if place == 0]
        if not is_standard(node, "Add", "Sub") or len(users) != 1 or not is_read_once(total):
            continue
        product = users[0]
        terms, values, dims = [item for item in node.inputs if item is not None], given(product, 1), facts.dims(total)
        if not is_standard(product, "MatMul") or values is None or dims is None or len(terms) < 2:
            continue
        if any((facts.dims(term) or ())[-2:] != dims[-2:] for term in terms) or (facts.dims(values) or ())[:-2] != dims[:-2]:
            continue
        builder.at(product)
        result = product.outputs[0]
        parts = [builder.node("MatMul", [term, values]) for term in terms]
        return EnablingChange(((result, builder.elementwise(node.op_type, parts)),), (*terms, values))
    return None


REWRITES: tuple[Callable[[Softmax, Builder], EnablingChange | None], ...] = (
    lambda softmax, builder: with_plain_scores(softmax.scores, builder),
    with_factor_inside,
    with_column_joined,
    with_values_joined,
    with_sum_as_product,
    with_sums_as_products,
    with_terms_apart,
    with_blocks_joined,
    with_products_joined,
)
"""Rewrites tried in sequence until an attention can be read."""
