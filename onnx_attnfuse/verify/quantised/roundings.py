"""Roundings of whole models: left out, counted, and reported for attentions that were fused without theirs."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.errors import ModelError
from onnx_attnfuse.graph.build import Builder, builder_for
from onnx_attnfuse.graph.constants import attributes, constant_array, given, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.quantised_operators import decompose_quantised
from onnx_attnfuse.graph.rounding import QdqPair, read_pair
from onnx_attnfuse.graph.scopes import all_names, scopes
from onnx_attnfuse.graph.uses import reads_input
from onnx_attnfuse.verify.decoder_feeds import Loop

if TYPE_CHECKING:
    from typing_extensions import Self


_ERRORS = "error", "error_on_text"
_PRODUCTS = {"MatMulInteger": "MatMul", "ConvInteger": "Conv"}
"""Products of integers, and the same of floats."""


class MetadataRecord:
    """A frozen dataclass in an entry of a model's metadata."""

    KEY: ClassVar[str]
    """The name of the entry."""

    def write(self, model: ir.Model) -> None:
        """Puts the record into a model's metadata, in place."""
        model.metadata_props[self.KEY] = json.dumps(dataclasses.asdict(cast("Any", self)), sort_keys=True)

    @classmethod
    def read(cls, metadata: Mapping[str, str]) -> Self | None:
        """The record in a model's metadata; None where there is none.

        Raises:
            ModelError: The entry was changed.
        """
        if cls.KEY not in metadata:
            return None
        try:
            return cls._made(json.loads(metadata[cls.KEY]))
        except (ValueError, TypeError, KeyError, AttributeError) as problem:
            raise ModelError(f"the metadata '{cls.KEY}' cannot be read: {problem}; make the model again") from problem

    @classmethod
    def _made(cls, found: dict[str, Any]) -> Self:
        """The record of its content; raises what a changed content raises."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class CacheError:
    """How far the logits of a decoder with a quantised cache are from those of its source, over loops of generated tokens."""

    largest: float
    """The largest difference, as a part of the standard deviation of the source's logits; so is the next."""
    mean: float
    equal_tokens: float
    """The share of tokens after which both have the same largest logit."""
    tokens: int
    """How many tokens there were."""

    def __str__(self) -> str:
        parts = f"largest {self.largest:.2g}, mean {self.mean:.2g} of their spread"
        return f"{parts}; {self.equal_tokens:.1%} of {self.tokens} greedy tokens are the same"


@dataclasses.dataclass(frozen=True)
class QuantisedCache(MetadataRecord):
    """A cache that is kept in fewer bits than it is computed in."""

    KEY = "onnx_attnfuse.kv_cache"

    format: str
    """`int8`, `int4` or `float8`."""
    scales: str
    """The granularity of scales, as the operator calls it: PER_CHANNEL."""
    scales_from: str
    """The calibration data of the scales, in words."""
    bytes_per_position: int
    """The bytes of one position of one entry, in all layers."""
    bytes_before: int
    """The bytes of one position in the type that the model computes in."""
    loop: Loop = dataclasses.field(repr=False)
    """How source and result are run."""
    logits: str
    context_length: int | None = None
    """The most positions, where that is known."""
    error: CacheError | None = None
    """None: it was not measured."""
    error_on_text: CacheError | None = None
    """The error on some text of a file, with scales from its rest; None: there is no file, or it is too short."""

    def lines(self) -> tuple[str, ...]:
        """Lines for a reader."""
        size = f"the cache is {self.format}, {self.bytes_per_position} bytes a position instead of {self.bytes_before}"
        error, name = "not measured" if self.error is None else str(self.error), f"error of the logits by the {self.format} cache"
        lines = f"{size}; scales from {self.scales_from}", f"{name}: {error}"
        if self.error_on_text is None:
            return lines
        return (
            lines[0],
            f"{name} on text of that file, with scales from the rest: {self.error_on_text}",
            f"{name} on random tokens: {error}",
        )

    def to_dict(self) -> dict[str, Any]:
        """The record as plain JSON types, without how it is run."""
        found = dataclasses.asdict(self)
        return {name: item for name, item in found.items() if name not in {"loop", "context_length"}}

    @classmethod
    def _made(cls, found: dict[str, Any]) -> Self:
        loop = found.pop("loop")
        error, on_text = (None if (item := found.pop(name, None)) is None else CacheError(**item) for name in _ERRORS)
        loop |= {name: tuple((old, new) for old, new in loop[name]) for name in ("pasts", "presents")}
        loop |= {name: tuple(loop.get(name, ())) for name in ("outputs", "windows")}
        return cls(**found, loop=Loop(**loop), error=error, error_on_text=on_text)


@dataclasses.dataclass(frozen=True)
class OutputError:
    """How far the outputs of one model are from those of another, over cases that are drawn."""

    largest: float
    """The largest difference, as a part of the standard deviation of the other's output; so is the next."""
    mean: float
    cases: int

    def __str__(self) -> str:
        return f"largest {self.largest:.2g}, mean {self.mean:.2g} of their spread in {self.cases} cases"


@dataclasses.dataclass(frozen=True)
class DequantisedAttention(MetadataRecord):
    """Attentions of a quantised model that were fused without the roundings inside."""

    KEY = "onnx_attnfuse.dequantised_attention"

    sites: int
    roundings: int
    """How many roundings were left out."""
    error: OutputError | None = None
    """The difference of the result from the source; None: it was not measured, or nothing ran."""
    source_error: OutputError | None = None
    """The difference of the source from itself without any rounding; None likewise, or as it does not run so."""
    result_error: OutputError | None = None
    """The difference of the result from the same."""

    def lines(self) -> tuple[str, ...]:
        """Lines for a reader: the roundings left out, and the error that costs."""
        count = f"{self.roundings} roundings inside of {self.sites} attentions are left out"
        if self.error is None:
            return count, "difference of the outputs by that: not measured"
        lines = count, f"difference of the outputs by that: {self.error}"
        if self.source_error is None or self.result_error is None:
            return lines
        means = f"the source's {self.source_error.mean:.2g}, the result's {self.result_error.mean:.2g}"
        return *lines, f"mean difference of the outputs from those without any rounding: {means}"

    def to_dict(self) -> dict[str, Any]:
        """The record as plain JSON types."""
        return dataclasses.asdict(self)

    @classmethod
    def _made(cls, found: dict[str, Any]) -> Self:
        errors = [found.pop(name) for name in ("error", "source_error", "result_error")]
        made = [None if error is None else OutputError(**error) for error in errors]
        return cls(found.pop("sites"), found.pop("roundings"), *made, **found)


def without_roundings(model: ir.Model) -> ir.Model:
    """A copy of a model in which no tensor is rounded to a grid but those that a quantiser has stored rounded.

    Single numbers that are constants stay rounded: they are read as the numbers that they are then.
    """
    copy = decomposed(model)
    names = all_names(copy)
    for pair in _roundings(copy):
        graph, name, before = pair.dequantize.graph, pair.after.name, pair.quantize.inputs[0]
        assert graph is not None
        plain = ir.Node("", "Identity", [before], name=pair.dequantize.name)
        graph.insert_before(pair.dequantize, plain)
        pair.after.name = f"{name}_rounded"
        value = plain.outputs[0]
        value.name, value.shape, value.type = name, pair.after.shape, pair.after.type
        pair.after.replace_all_uses_with(value, replace_graph_outputs=True)
        graph.remove(pair.dequantize, safe=True)
        if not pair.quantize.outputs[0].uses() and pair.quantize.graph is not None:
            pair.quantize.graph.remove(pair.quantize, safe=True)
    for scope in list(scopes(copy)):
        build = builder_for(scope, names)
        for product in [node for node in scope.graph if _integers_of(node) is not None]:
            _compute_in_floats(product, build)
    return copy


def decomposed(model: ir.Model) -> ir.Model:
    """A copy of a model in which operators on quantised numbers are decomposed, those that attentions are made of."""
    copy = model.clone()
    facts = Facts(copy.graph)
    builder = Builder(copy.graph, facts, copy.opset_imports.get("", 0), all_names(copy))
    decompose_quantised(copy.graph, facts, builder)
    return copy


def _integers_of(node: ir.Node) -> ir.Node | None:
    """The DynamicQuantizeLinear whose numbers a product of integers reads, all of whose readers take it as floats."""
    quantize = node.inputs[0].producer() if is_standard(node, *_PRODUCTS) and node.inputs[0] is not None else None
    if not is_standard(quantize, "DynamicQuantizeLinear") or given(node, 2) is not quantize.outputs[2]:
        return None
    product, point = node.outputs[0], constant_array(given(node, 3))
    is_one = given(node, 3) is None or (point is not None and point.size == 1)
    readers = [user for user, _ in product.uses()]
    is_read = not product.is_graph_output() and all(is_standard(user, "Cast") for user in readers)
    return quantize if is_read and (is_one or node.op_type == "MatMulInteger") else None


def _compute_in_floats(node: ir.Node, build: Builder) -> None:
    """Lets a product of integers that were rounded at run time take the floats before the rounding, in the same unit."""
    quantize = _integers_of(node)
    assert quantize is not None
    build.at(node)
    floats, weights, point = quantize.inputs[0], node.inputs[1], given(node, 3)
    assert floats is not None
    assert weights is not None
    steps = build.elementwise("Div", [floats, quantize.outputs[1]])
    levels = build.cast(weights, ir.DataType.FLOAT)
    if point is not None:
        levels = build.elementwise("Sub", [levels, build.cast(point, ir.DataType.FLOAT)])
    product, (value,) = build.node(_PRODUCTS[node.op_type], [steps, levels], attributes(node)), node.outputs
    value.replace_all_uses_with(product)
    build.graph.remove(node, safe=True)
    product.name, value.name = value.name, build.name("rounded")


def added_roundings(source: ir.Model, result: ir.Model) -> int:
    """How many roundings the result has that are none of the source, by the digits of their scales and by their zero points."""
    first, second = (_counted(decomposed(model)) for model in (source, result))
    return (second - first).total()


def same_roundings(source: ir.Model, result: ir.Model) -> bool:
    """Whether two models round at run time, to the same grids and equally often."""
    first, second = (_counted(decomposed(model)) for model in (source, result))
    return bool(first) and first == second


def _counted(model: ir.Model) -> Counter[tuple[object, ...]]:
    """How many roundings there are of each grid."""
    of_products = {found for node in model.graph.all_nodes() if (found := _integers_of(node)) is not None}
    return Counter([*map(_grid, _roundings(model)), *((node.op_type,) for node in of_products)])


def _roundings(model: ir.Model) -> list[QdqPair]:
    facts = Facts(model.graph)
    pairs = (read_pair(node, facts) for node in model.graph.all_nodes())
    return [pair for pair in pairs if pair is not None and (_is_tensor(pair, facts) or reads_input(pair.before))]


def _is_tensor(pair: QdqPair, facts: Facts) -> bool:
    return any(dim != 1 for dim in facts.dims(pair.before) or ())


def _grid(pair: QdqPair) -> tuple[object, ...]:
    """A key of a rounding's grid, without its scale's power of two, as such a factor may be on either side of the rounding."""
    scale, *points = (constant_array(value) for value in pair.dequantize.inputs[1:])
    digits = None if scale is None else np.frexp(scale.astype(np.float64))[0].tobytes()
    return (
        pair.dtype,
        pair.block_size,
        digits,
        *(None if array is None else array.astype(np.float64).tobytes() for array in points),
    )
