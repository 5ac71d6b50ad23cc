"""How operators are handed a mask: not at all, as lengths, by an attribute, as a bias; and the padding that lengths can express.

Nothing is assumed of a mask that is data. Nodes emitted here compute at run time whether the padding of a batch is on the right,
with a key left in every entry (`right_padded`), or whether there is none (`unpadded`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import length
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.masks.classify import Meaning
from onnx_attnfuse.attention.masks.mask_terms import (
    elements_of,
    is_comparison,
    linear,
    negation,
    nonzero,
    parts_of,
    position,
    value_of,
)
from onnx_attnfuse.attention.masks.predicates import Causal, Padding, Predicate
from onnx_attnfuse.attention.spec import AttentionSpec, Axes4
from onnx_attnfuse.certify.terms import Term, conjoin
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.build import Builder, dims_of
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.graph.sweep import sweep_unused
from onnx_attnfuse.graph.uses import reads_input
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.targets.base import BuildContext, MaskEncoding, Precondition
from onnx_attnfuse.targets.bias import bias_emitter, letters_of
from onnx_attnfuse.targets.gather_as_broadcast import laid_out

_TRUTH, _INTEGER, _SMALL = ir.DataType.BOOL, ir.DataType.INT64, ir.DataType.INT32


def is_padding(predicates: Sequence[Predicate], spec: AttentionSpec) -> bool:
    """Whether keys are forbidden by padding only, in every row the same."""
    unconditional = all(rule.condition is None for rule in spec.row_rules)
    return bool(predicates) and unconditional and all(isinstance(item, Padding) for item in predicates)


def is_given(meaning: Meaning) -> bool:
    """Whether the padding is an input of the model: of a mask that it computes by itself a caller can say nothing."""
    paddings = [item.predicate for item in meaning.predicates if isinstance(item, Padding)]
    return all(any(reads_input(value_of(element)) for element in elements_of(item)) for item in paddings)


@dataclasses.dataclass(frozen=True)
class KeyPadding:
    """The padding of a batch, as values of the graph."""

    builder: Builder
    batch: Dim
    rows: Dim
    columns: Dim
    keep: ir.Value
    """Truth values (b, t): the key is seen."""
    clean: ir.Value | None
    """Truth values that broadcast to (b, t): the mask equals `keep`; None where that is certain."""
    of_scores: bool = False
    """The padding was read off the bias of the scores, which must be nothing else then."""

    def lengths(self) -> ir.Value:
        """How many keys are kept, (b) int32."""
        return self.builder.reduce("ReduceSum", self.builder.cast(self.keep, _SMALL), [1], keep=False)

    def ranges(self) -> ir.Value:
        """Lengths, where the queries of each entry begin when entries follow each other, and its keys; (3b + 2) int32."""
        build, entries = self.builder, self.builder.counting(self.batch + 1)
        begins = [build.elementwise("Mul", [entries, build.shape([size])]) for size in (self.rows, self.columns)]
        offsets = [build.cast(value, _SMALL) for value in begins]
        return build.node("Concat", [self.lengths(), *offsets], {"axis": 0})

    def exact(self, when: Precondition) -> ir.Value:
        """One truth value: the batch is as `when` says."""
        build = self.builder
        if when == "unpadded":
            held = self.keep
        else:
            places = build.reshape(build.counting(self.columns), [1, self.columns])
            counts = build.reshape(build.cast(self.lengths(), _INTEGER), [self.batch, 1])
            inside = build.elementwise("Less", [places, counts])
            has_key = build.elementwise("Greater", [counts, build.constant([0])])
            same = build.elementwise("Equal", [inside, self.keep])
            held = build.elementwise("And", [same, has_key])
        if self.clean is not None:
            held = build.elementwise("And", [held, self.clean])
        return build.cast(build.reduce("ReduceMin", build.cast(held, _SMALL), [0, 1], keep=False), _TRUTH)


def read_padding(spec: AttentionSpec, meaning: Meaning, context: BuildContext) -> KeyPadding:
    """Emits which keys are kept.

    Raises:
        Refused: The mask gives no such thing.
    """
    builder, axes = context.builder, spec.axes
    padded = conjoin(*(item.predicate for item in meaning.predicates if isinstance(item, Padding)))
    emitter, before = _Emitter(builder, axes), len(builder.added)
    keep, clean = emitter.truth(padded), None
    of_scores = keep is None
    if keep is None:
        sweep_unused(builder.added[before:])
        keep, clean = _last_row(spec, meaning, context)
    else:
        clean = builder.chained("And", emitter.clean) if emitter.clean else None
    batch, columns = length(axes.b), length(axes.j)
    if builder.facts.dims(keep) != (batch, columns):
        keep = builder.expand(keep, [batch, columns], [True, True])
    return KeyPadding(builder, batch, length(axes.i), columns, keep, clean, of_scores)


def _last_row(spec: AttentionSpec, meaning: Meaning, context: BuildContext) -> tuple[ir.Value, ir.Value]:
    """From the mask itself: its last row sees every key that is not padding."""
    builder = context.builder
    value = bias_emitter(spec, meaning, context).compact(spec.mask).value
    dims = dims_of(builder, value)
    for axis in (1, 2):
        if dims[axis] != 1:
            value = builder.slice(value, axis, -1, None)
    row = builder.cast(builder.reshape(value, [dims[0], dims[3]]), ir.DataType.FLOAT)
    zero, low = (builder.scalar(number, ir.DataType.FLOAT) for number in (0.0, context.bounds.masked_from))
    keep = builder.elementwise("Equal", [row, zero])
    forbidden = builder.elementwise("LessOrEqual", [row, low])
    return keep, builder.elementwise("Or", [keep, forbidden])


def at_least(builder: Builder, dim: Dim, least: int) -> ir.Value | None:
    """One truth value: a size is `least` or more; None where that is certain."""
    if sizes.least(dim) >= least:
        return None
    seen = builder.elementwise("GreaterOrEqual", [builder.shape([dim]), builder.constant([least])])
    return builder.reshape(seen, [])


class _Emitter:
    """Truth values over (b, t) from a term that reads elements at (b, j); None if it cannot emit that."""

    def __init__(self, builder: Builder, axes: Axes4) -> None:
        self._builder, self._axes = builder, axes
        self._batch, self._column = position(axes.b), position(axes.j)
        self._dims = length(axes.b), length(axes.j)
        self.clean: list[ir.Value] = []
        """Truth values: a number read as a truth value is 0 or 1, as a source that computes with it takes it to be."""

    def truth(self, part: Term) -> ir.Value | None:
        element = nonzero(part)
        if element is not None:
            value = self._element(element)
            return None if value is None else self._as_truth(value)
        if part.op in {"and", "or"}:
            return self._joined(part.op.capitalize(), parts_of(part))
        if is_comparison(part):
            value, operator = self._form(part.args[0]), "Equal" if part.op == "eq0" else "LessOrEqual"
            return None if value is None else self._builder.elementwise(operator, [value, self._builder.constant([0])])
        if part.op == "not" or nonzero(negation(part)) is not None:
            value = self.truth(negation(part))
            return None if value is None else self._builder.elementwise("Not", [value])
        return None

    def _joined(self, operator: str, parts: Sequence[Term]) -> ir.Value | None:
        values = list(map(self.truth, parts))
        emitted = [item for item in values if item is not None]
        return None if len(emitted) < len(values) else self._builder.chained(operator, emitted)

    def _as_truth(self, value: ir.Value) -> ir.Value:
        truth, dtype = self._builder.cast(value, _TRUTH), self._builder.facts.dtype(value)
        if dtype is not None and dtype != _TRUTH:
            self.clean.append(self._builder.elementwise("Equal", [self._builder.cast(truth, dtype), value]))
        return truth

    def _form(self, form: Term) -> ir.Value | None:
        parts, rest = linear(form)
        total = self._builder.reshape(self._builder.shape([rest]), [1, 1])
        for atom, coefficient in parts:
            value = self._index(atom) if atom.op == "index" else self._element(atom)
            if value is None or atom.sort == "Real":
                return None
            product = [self._builder.cast(value, _INTEGER), self._builder.shape([coefficient])]
            term = product[0] if coefficient == 1 else self._builder.elementwise("Mul", product)
            total = self._builder.elementwise("Add", [total, term])
        return total

    def _index(self, atom: Term) -> ir.Value | None:
        for axis, form in enumerate((self._batch, self._column)):
            if form is atom:
                shape = [self._dims[0], 1] if axis == 0 else [1, self._dims[1]]
                return self._builder.reshape(self._builder.counting(self._dims[axis]), shape)
        return None

    def _element(self, element: Term) -> ir.Value | None:
        """A value that is long enough to be read at (b, j), at (b) or at (j)."""
        found = laid_out(self._builder, element, (self._axes.b, self._axes.j)) if element.op == "element" else None
        return None if found is None else found.value


def refuse_scores(spec: AttentionSpec, op: str) -> Reason | None:
    """Why neither operator can compute the steps of the scores of `spec`, or None."""
    if spec.softcap is not None:
        return Reason("no-softcap", f"{op} cannot cap scores by tanh")
    if spec.causal and (spec.mask or length(spec.axes.i) != length(spec.axes.j)):
        message = "causal by attribute, with another mask, or without a proof that there are as many queries as keys"
        return Reason("unproven-square", message)
    return None


def encodings(spec: AttentionSpec, meaning: Meaning) -> tuple[MaskEncoding, ...]:
    """Every way to pass the mask, and for which batches each is exact.

    The kernels align the causal triangle differently where there are more keys than queries: both must be proven equal in number.
    """
    axes = spec.axes
    triangles = [item for item in meaning.predicates if isinstance(item, Causal)]
    causal = len(triangles) == 1 and triangles[0].offset == 0 and length(axes.i) == length(axes.j)
    rest = [item for item in meaning.predicates if item not in triangles]
    if spec.sink is not None:
        return (MaskEncoding("bias"),)
    if meaning.is_trivial:
        return (MaskEncoding("none"),)
    if causal and meaning.only_causal:  # a triangle of the mask may be a bias where there is no attribute for it
        return (MaskEncoding("none", causal=True), *([MaskEncoding("bias")] if spec.mask else []))
    if meaning.biases or (triangles and not causal) or not is_padding(rest, spec):
        return (MaskEncoding("bias"),)
    padded = (
        MaskEncoding("lengths", causal, "right_padded"),
        MaskEncoding("ranges", causal, "right_padded"),
        MaskEncoding("none", causal, "unpadded"),
    )
    return (*padded, MaskEncoding("bias"))


def shown(encoding: MaskEncoding, bias: IndexedValue | None, lengths: str) -> str:
    """The form in which the mask is passed; `lengths` is the input that takes lengths."""
    words = ["unidirectional"] if encoding.causal else []
    if bias is not None:
        words.append(f"attention_bias {letters_of(bias)}")
    elif encoding.mask != "none":
        words.append(f"{lengths} {'b' if encoding.mask == 'lengths' else '3b+2'}")
    return " + ".join(words) or "none"
