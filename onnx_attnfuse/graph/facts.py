"""Facts on every value that can be known without running the graph: rank, sizes, element type, and the content of small tensors.

    facts = Facts(graph)
    facts.dims(value)       # (batch, seq, 12, 64), symbols where a size is dynamic, None where even the rank is unknown
    facts.content(value)    # the elements of a shape tensor: (batch, seq, 768)

Exports often carry no shapes (TorchScript) or wrong ones after editing, and global shape inference stops at the first operator it
cannot do. So each operator is read locally, one rule each (`graph.rules`), in one pass over the nodes; values without a rule fall
back to the annotation, and then to a fresh symbol that remembers which axis of which value it names.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import TypeVar, cast

import onnx_ir as ir

from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.assumptions import Assumed, AssumptionName
from onnx_attnfuse.graph.calls import Calls
from onnx_attnfuse.graph.constants import constant_array, has_unknown_attribute, subgraphs
from onnx_attnfuse.graph.equal_sizes import appended, have_new_positions, in_equal_sizes, pasts, said, solved, with_equal
from onnx_attnfuse.graph.facts_view import Content, Dims, Known, Unnoted
from onnx_attnfuse.graph.ops import CONTRIB, is_standard, read_as
from onnx_attnfuse.graph.rules import CONTENTS, infer_dtype, shape_rule
from onnx_attnfuse.graph.sizes import Dim, Size
from onnx_attnfuse.graph.splat import number

_DOMAINS = frozenset(["", CONTRIB])
_LOG = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")
_MAX_CONTENT = 64


class Facts:
    """Facts about the values of one graph and the graphs nested in it."""

    def __init__(
        self,
        graph: ir.Graph,
        inputs: Sequence[tuple[Dims | None, ir.DataType | None]] = (),
        assumed: Assumed = Assumed(),  # noqa: B008 - frozen
        calls: Calls | None = None,
    ) -> None:
        """Reads a graph.

        Args:
            graph: Nodes in topological order.
            inputs: Shape and type of its inputs where the graph itself does not say, as in functions.
            assumed: Assumptions about the model.
            calls: The results of the functions that nodes call.
        """
        self.assumed, self._calls = assumed, calls
        self.opset: int = graph.opset_imports.get("", graph.opset_imports.get("ai.onnx", 0))
        """The version of the standard's operators."""
        self._equal: dict[str, Dim] = {}
        """Sizes that symbols of inputs equal whenever the graph runs, some as far as assumptions hold."""
        self._fitted: set[str] = set()
        """Symbols that are equal to others as no mask is longer than its scores."""
        self._one_past: set[str] = set()
        """Symbols that are equal to others as all attentions have equally many earlier positions."""
        self._begin(graph, inputs)
        while (found := self._solved(graph)) and not found.keys() <= self._equal.keys():
            self._equal = {name: sizes.substituted(dim, found) for name, dim in self._equal.items()} | found
            self._begin(graph, inputs)

    def _solved(self, graph: ir.Graph) -> dict[str, Dim]:
        """Sizes of inputs that follow from others by what has been read, and are not known to yet; fewer each time."""
        shapes = [self._dims.get(value, ()) for value in graph.inputs]
        names = list(dict.fromkeys(name for dims in shapes for dim in dims for name in sorted(sizes.symbols(dim))))
        if found := solved(said(self.assumed.same, names), names):
            return found
        if found := solved((pair for pair, rests in self._enforced.items() if not rests), names):
            return found
        found = solved([*self._enforced, *self._fits], names) if self.assumed.masks_fit else {}
        self._fitted.update(found, *map(sizes.symbols, found.values()))
        if found:
            return found
        met = [*self._met, *appended(graph, self._dims)] if self.assumed.one_cache else self._met
        found = solved(pasts(met), names) if self.assumed.equal_pasts else {}
        self._one_past.update(found, *map(sizes.symbols, found.values()))
        return found

    def _begin(self, graph: ir.Graph, inputs: Sequence[tuple[Dims | None, ir.DataType | None]]) -> None:
        """Reads the graph, from nothing but which sizes are equal."""
        self._dims: dict[ir.Value, Dims] = {}
        self._dtypes: dict[ir.Value, ir.DataType] = {}
        self._content: dict[ir.Value, Content] = {}
        self._made: dict[str, object] = {}
        self.origins: dict[str, tuple[ir.Value, int]] = {}
        """For each symbol's name a value and the axis of it that has this length."""
        self.equalities: dict[tuple[Dim, Dim], None] = {}
        """Pairs of different lengths that meet in an operator which takes equal ones, so that one of them may also be 1."""
        self._shared: Counter[str] = Counter()
        self._enforced: dict[tuple[Dim, Dim], bool] = {}
        """Pairs of lengths that are equal whenever the graph runs, and whether that rests on masks that fit."""
        self._fits: dict[tuple[Dim, Dim], None] = {}
        """Pairs of lengths that are equal where masks fit."""
        self._met: dict[tuple[Dim, Dim], None] = {}
        """The pairs of `equalities` that do not meet in a branch only."""
        self._nested: list[dict[tuple[Dim, Dim], bool]] = []
        """The pairs of `_enforced` of each nested graph that is being read: such a pair holds only where that graph runs."""
        self._spans: set[Dim] = set()
        self._spreads: dict[Dim, set[Dim]] = {}
        """For a length those others that meet it where operands broadcast, so that they may be 1 where it is not."""
        for value in graph.inputs:
            self._set_from_annotation(value)
            noted = {dim.value for dim in value.shape or () if isinstance(dim, ir.SymbolicDim) and dim.value is not None}
            self._shared.update(
                {name for text in noted for name in sizes.symbols(sizes.parse(text) or 0)} if self.assumed.named_sizes else ()
            )
        for value, (dims, dtype) in zip(graph.inputs, inputs, strict=False):
            if dims is not None:
                self._take(value, dims)
            if dtype is not None:
                self._dtypes[value] = dtype
        self._read(graph)

    def is_shared(self, name: str) -> bool:
        """Whether a symbol is a length of several inputs, so that the model itself does not make them equal."""
        equal = (other for other, dim in self._equal.items() if name in sizes.symbols(dim))
        return any(self._shared[other] > 1 for other in (name, *equal))

    def numbers(self, lengths: Mapping[str, int]) -> dict[str, int]:
        """Numbers by names of sizes, and those of the sizes that these are equal to."""
        return with_equal(lengths, self._equal)

    def assumed_equal(self, name: str) -> Iterator[AssumptionName]:
        """The assumptions by which a length of inputs is equal to others, besides that of names."""
        if name in self._fitted:
            yield "masks-fit"
        if name in self._one_past:
            yield "equal-pasts"

    def dims(self, value: ir.Value | None) -> Dims | None:
        """The axis lengths of `value`, or None if there is none or its rank is unknown; so of all that is asked of a value."""
        if value is not None and value not in self._dims:
            self._set_from_annotation(value)
        return None if value is None else self._dims.get(value)

    def rank(self, value: ir.Value | None) -> int | None:
        """The number of axes of `value`, or None."""
        dims = self.dims(value)
        return None if dims is None else len(dims)

    def dtype(self, value: ir.Value | None) -> ir.DataType | None:
        """The element type of `value`, or None."""
        return None if value is None else self._dtypes.get(value) or value.dtype

    def content(self, value: ir.Value | None) -> Content:
        """The elements of a small tensor of rank 0 or 1, or None if nothing is known of them."""
        if value in self._content:
            return self._content[value]
        array = constant_array(value)
        if value is None or array is None or array.ndim > 1 or array.size > _MAX_CONTENT:
            return None
        found: Content = tuple(array.tolist()) if array.ndim else array.item()
        self._content[value] = found
        return found

    def number(self, value: ir.Value | None) -> float | None:
        """The number that every element of `value` is, if that is known."""
        return None if value is None else number(value, self)

    def succeed(self, old: ir.Value, new: ir.Value) -> None:
        """Gives `new` the facts of `old`, which it replaces; sizes are read from it from now on."""
        self.copy(old, new)
        for axis, dim in enumerate(self.dims(old) or ()):
            if self._is_fresh(old, axis, dim):
                assert isinstance(dim, Size)
                self.origins[dim.atoms[0].key] = (new, axis)

    def copy(self, source: ir.Value, target: ir.Value) -> None:
        """Makes `target` known to be shaped and typed like `source`."""
        self.record(target, self.dims(source), self.dtype(source))

    def record(self, value: ir.Value, dims: Iterable[Dim] | None, dtype: ir.DataType | None) -> None:
        """Adds facts about a new value."""
        if dims is not None:
            self._dims[value] = tuple(dims)
        if dtype is not None:
            self._dtypes[value] = dtype

    def meet(self, left: Dim, right: Dim) -> None:
        """Notes that two lengths have to agree at run time."""
        if left == right or 1 in {left, right} or (isinstance(left, int) and isinstance(right, int)):
            return
        self.equalities.setdefault((left, right))
        if not self._nested:
            self._met.setdefault((left, right))

    def enforce(self, left: Dim, right: Dim) -> None:
        """Notes that two lengths are equal whenever the graph runs, as no operator repeats here."""
        self.meet(left, right)
        if left != right:
            self._note(left, right, rests_on_masks=bool(self.shorter(left) or self.shorter(right)))

    def _note(self, left: Dim, right: Dim, *, rests_on_masks: bool) -> None:
        noted = self._nested[-1] if self._nested else self._enforced
        for pair in ((left, right), (right, left)):
            noted.setdefault(pair, rests_on_masks)

    def contract(self, left: Dim, right: Dim) -> None:
        """Notes that a product sums along two lengths, which are equal unless one was repeated on its way."""
        if not (self.shorter(left) or self.shorter(right)):
            self.enforce(left, right)
            return
        self.meet(left, right)
        if have_new_positions((left, right)):
            self.fit(left, right)

    def fit(self, left: Dim, right: Dim) -> None:
        """Notes two lengths that are equal where masks are as long as the scores."""
        if left != right and not self._nested:
            self._fits.setdefault((left, right))

    def same(self, left: Dim, right: Dim) -> bool:
        """Whether two lengths are equal whenever the graph runs."""
        if left != right and self._equal:
            left, right = (sizes.substituted(dim, self._equal) for dim in (left, right))
        return left == right or (left, right) in self._enforced

    def spread(self, dim: Dim, size: Dim) -> None:
        """Notes that an axis of length `dim` is repeated to `size` where it is 1 at run time."""
        if isinstance(dim, Size) and size not in {1, dim}:
            self._spreads.setdefault(size, set()).add(dim)

    def may_exceed(self, one: Dim, other: Dim) -> bool:
        """Whether two lengths have met in a product, so that either may be the longer one where the other is 1."""
        return not self.same(one, other) and any({one, other} <= met for met in self._spreads.values())

    def shorter(self, size: Dim) -> Set[Dim]:
        """The lengths that meet `size` where operands broadcast: each may be 1 where it is not."""
        return {dim for dim in self._spreads.get(size, ()) if not self.same(dim, size)}

    def is_spread(self, dim: Dim) -> bool:
        """Whether `dim` meets another length where operands broadcast."""
        return any(dim == size or dim in others for size, others in self._spreads.items())

    def once(self, name: str, make: Callable[[], _Answer]) -> _Answer:
        """The object that `make` returns, made once for the graph: a reader's memory."""
        if name not in self._made:
            self._made[name] = make()
        return cast("_Answer", self._made[name])

    def fresh(self, value: ir.Value, axis: int) -> Size:
        """A symbol for the unknown length of one axis."""
        name, place = f"{value.name}.{axis}", (value, axis)
        while self.origins.setdefault(name, place) != place:  # the values of two branches may have one name
            name += "'"
        return sizes.symbol(name)

    def span(self, value: ir.Value, axis: int, length: Dim) -> Dim:
        """The length of a slice that starts at a place computed at run time: `length`, unless the axis ends before."""
        if not self.assumed.indices_in_range:
            return self.fresh(value, axis)
        self._spans.add(length)
        return length

    def is_span(self, length: Dim) -> bool:
        """Whether something is taken to be a whole slice of this length that starts at a place computed at run time."""
        return length in self._spans

    def learn(self, node: ir.Node) -> None:
        """Reads a node, again if facts about its inputs have changed."""
        enforced: list[dict[tuple[Dim, Dim], bool]] = []
        for nested in subgraphs(node):
            for value in nested.inputs:
                self._set_from_annotation(value)
            self._nested.append({})
            if is_standard(node, "Loop") and any(value.shape is None for value in nested.inputs[2:]):
                self._read_loop(node, nested)
            else:
                self._read(nested)
            enforced.append(self._nested.pop())
        if is_standard(node, "If") and enforced:
            for pair in (pair for pair in enforced[0] if all(pair in other for other in enforced)):
                self._note(*pair, rests_on_masks=any(other[pair] for other in enforced))
        self._read_node(node, readable=read_as(node)[0] in _DOMAINS and not has_unknown_attribute(node))

    def infer(self, node: ir.Node) -> tuple[Dims | None, ir.DataType | None]:
        """The shape and the element type of the first result of a new node, from those of its inputs."""
        if read_as(node)[0] not in _DOMAINS:
            return None, None
        unnoted, rule = cast("Known", Unnoted(self)), shape_rule(node)
        shapes = None if rule is None else self._ruled(lambda item, _: rule(item, unnoted), node)
        return shapes[0] if shapes else None, infer_dtype(node, 0, unnoted)

    def _read_loop(self, node: ir.Node, body: ir.Graph) -> None:
        """Reads the body of a Loop: a state without a declared shape has the one that it begins with, on axes that keep it."""
        states = list(zip(node.inputs[2:], body.inputs[2:], body.outputs[1:], node.outputs, strict=False))
        undeclared = [item for item in states if item[1].shape is None and item[0] is not None]
        guesses = {inner: None if first is None else self.dims(first) for first, inner, _, _ in undeclared}
        before, stable = self._saved(), False
        while not stable:
            self.__dict__.update(before)
            before = self._saved()
            for first, inner, _, _ in undeclared:
                self.record(inner, None, None if first is None else self.dtype(first))
                if (guess := guesses[inner]) is not None:
                    self._take(inner, guess)
            self._read(body)
            kept = {inner: self._kept(inner, guesses[inner], self.dims(last)) for _, inner, last, _ in undeclared}
            stable, guesses = kept == guesses, kept
        for _, inner, _, result in undeclared:
            dims = guesses[inner]
            if dims is not None and result.shape is None:
                fresh = [self.fresh(result, axis) if self._is_fresh(inner, axis, dim) else dim for axis, dim in enumerate(dims)]
                self._take(result, tuple(fresh))

    def _kept(self, value: ir.Value, dims: Dims | None, after: Dims | None) -> Dims | None:
        """The known part of the shape of a state whose shape changes in an iteration."""
        if dims is None or after is None or len(dims) != len(after):
            return None
        pairs = enumerate(zip(dims, after, strict=True))
        return tuple(dim if dim == other else self.fresh(value, axis) for axis, (dim, other) in pairs)

    def _saved(self) -> dict[str, object]:
        """Copies of all that reading notes."""
        noted: dict[str, object] = {}
        for name, value in cast("dict[str, object]", vars(self)).items():
            if isinstance(value, (dict, set)):
                noted[name] = copy.copy(cast("object", value))
        return {**noted, "_spreads": {dim: set(others) for dim, others in self._spreads.items()}}

    def _read(self, graph: ir.Graph) -> None:
        for node in graph:
            self.learn(node)

    def _read_node(self, node: ir.Node, *, readable: bool) -> None:
        shapes: Sequence[Dims | None] = self._ruled(shape_rule(node) if readable else None, node) or ()
        if self._calls is not None and (called := self._calls.results(node, self)):
            shapes = [dims for dims, _ in called]
            types = zip(node.outputs, (dtype for _, dtype in called), strict=False)
            self._dtypes.update((value, dtype) for value, dtype in types if dtype is not None)
        for index, output in enumerate(node.outputs):
            dtype = output.dtype or (infer_dtype(node, index, self) if readable else None)
            if dtype is not None:
                self._dtypes[output] = dtype
            self._record_shape(output, shapes[index] if index < len(shapes) else None)
        content_rule = CONTENTS.get(node.op_type) if readable else None
        content = self._ruled(content_rule, node)
        if content is not None and not (isinstance(content, tuple) and len(content) > _MAX_CONTENT):
            self._content[node.outputs[0]] = in_equal_sizes(content, self._equal)

    def _ruled(self, rule: Callable[[ir.Node, Facts], _Answer] | None, node: ir.Node) -> _Answer | None:
        """The answer of a shape or content rule; None for operands that no rule expects, as only an invalid model has."""
        if rule is None:
            return None
        try:
            return rule(node, self)
        except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError):
            _LOG.debug("nothing is known of %s '%s', which no rule expects", node.op_type, node.name, exc_info=True)
            return None

    def _record_shape(self, value: ir.Value, inferred: Dims | None) -> None:
        """Takes the rule's answer, refined by the annotation where the rule could only name a fresh symbol."""
        if inferred is None:
            self._set_from_annotation(value)
            return
        annotated = self._annotation(value)
        if annotated is not None and len(annotated) == len(inferred):
            inferred = tuple(
                note if note is not None and self._is_fresh(value, axis, dim) else dim
                for axis, (dim, note) in enumerate(zip(inferred, annotated, strict=True))
            )
        self._take(value, inferred)

    def _is_fresh(self, value: ir.Value, axis: int, dim: Dim) -> bool:
        return isinstance(dim, Size) and len(dim.atoms) == 1 and self.origins.get(dim.atoms[0].key) == (value, axis)

    def _annotation(self, value: ir.Value) -> list[Dim | None] | None:
        if value.shape is None:
            return None
        named = self.assumed.named_sizes
        noted = [
            dim if isinstance(dim, int) else sizes.parse(dim.value) if isinstance(dim.value, str) and named else None
            for dim in value.shape
        ]
        return [None if dim is None else sizes.substituted(dim, self._equal) for dim in noted] if self._equal else noted

    def _set_from_annotation(self, value: ir.Value) -> None:
        array_shape = value.const_value.shape if value.const_value is not None else None
        if array_shape is not None:
            self._dims[value] = tuple(dim if isinstance(dim, int) else 0 for dim in array_shape)
            return
        if (annotated := self._annotation(value)) is not None:
            self._take(value, tuple(self.fresh(value, axis) if dim is None else dim for axis, dim in enumerate(annotated)))

    def _take(self, value: ir.Value, dims: Dims) -> None:
        dims = tuple(sizes.substituted(dim, self._equal) for dim in dims) if self._equal else dims
        self._dims[value] = dims
        for axis, dim in enumerate(dims):
            if isinstance(dim, Size) and len(dim.atoms) == 1 and dim.factor == 1:
                self.origins.setdefault(dim.atoms[0].key, (value, axis))
