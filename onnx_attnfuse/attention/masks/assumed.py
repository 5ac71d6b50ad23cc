"""Assumptions that the reading of one attention makes: each is named, reported with the site, and taken back by `--assume`."""

from __future__ import annotations

from collections.abc import Iterator

from onnx_attnfuse.attention.axes.factors import length
from onnx_attnfuse.attention.masks.classify import Meaning
from onnx_attnfuse.attention.masks.mask_terms import elements_of
from onnx_attnfuse.attention.spec import AttentionSpec, Floored
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.assumptions import AssumptionName, named_in_order
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.thresholds import MASKS_ANY_SCORE


def assumed_by(spec: AttentionSpec, meaning: Meaning, facts: Facts) -> tuple[AssumptionName, ...]:
    """The assumptions that the reading of `spec` and its mask rests on, in the order in which they are documented."""
    return named_in_order(*_assumed(spec, meaning, facts))


def _assumed(spec: AttentionSpec, meaning: Meaning, facts: Facts) -> Iterator[AssumptionName]:
    if any(fill > MASKS_ANY_SCORE for fill in meaning.fills):
        yield "large-fills"
        yield "bounded-scores"
    if any(isinstance(step, Floored) for step in spec.mask) or (meaning.biases and not meaning.is_trivial):
        yield "bounded-scores"
    axes = spec.axes
    names = [name for axis in (axes.b, axes.i, axes.j) for name in sorted(sizes.symbols(length(axis)))]
    if any(map(facts.is_shared, names)):
        yield "named-sizes"
    for name in names:
        yield from facts.assumed_equal(name)
    if not all(isinstance(length(axis), int) for axis in (axes.b, axes.i, axes.j)):
        yield "nonempty-axes"
    if spec.wider:
        yield "masks-fit"
    elements = [element for part in (meaning.allowed, *meaning.biases) for element in elements_of(part)]
    if any(elements_of(place) for element in elements for place in element.args) or any(
        facts.is_span(length(axis)) for axis in (axes.i, axes.j)
    ):
        yield "indices-in-range"
    if spec.unshifted:
        yield "finite-exponentials"
    if spec.renormalized is not None:
        yield "kept-weights"
