"""What is done to a model: fused, fused twice, fused and spelled out again, converted."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import onnx
import onnx_ir as ir

import onnx_attnfuse
from onnx_attnfuse.fusion import site
from tests.fuzz import gradients
from tests.fuzz.recipe import Recipe

LEVELS = ("none", "sites")


@dataclasses.dataclass(frozen=True)
class Arrived:
    """A model at the end of its journey."""

    model: onnx.ModelProto
    fused: int
    """Attentions that were fused."""
    codes: frozenset[str]
    """Codes of all refusals."""
    again: int = 0
    """Attentions that a second run fused."""
    messages: tuple[str, ...] = ()
    """What was said of sites that differ, and of defects."""
    packed: bool = False
    """Whether rows of padding may come out as 0."""


def travel(recipe: Recipe, model: onnx.ModelProto, level: str) -> Arrived:
    """Takes the journey of a recipe; raises what the library raises."""
    if recipe.journey == "gradients":
        return _trained(recipe, model, level)
    if recipe.journey.startswith("convert"):
        return _converted(recipe, model, level)
    result = _fused(recipe, model, level)
    if recipe.journey == "twice":
        second = _fused(recipe, result.model, level)
        codes, packed = result.codes | second.codes, result.packed or second.packed
        return dataclasses.replace(second, fused=result.fused, again=second.fused, codes=codes, packed=packed)
    if recipe.journey == "unfuse":
        back = onnx_attnfuse.unfuse(result.model, verify=level, ep=recipe.ep)
        reasons = [site.reason for site in back.report.sites if site.reason is not None]
        codes = frozenset(f"unfuse:{reason.code}" if reason.code not in _SERIOUS else reason.code for reason in reasons)
        messages = tuple(reason.message for reason in reasons if reason.code in _SERIOUS)
        return dataclasses.replace(result, model=back.model, codes=result.codes | codes, messages=(*result.messages, *messages))
    return result


_SERIOUS = frozenset(["differs", "defect"])


def _fused(recipe: Recipe, model: onnx.ModelProto, level: str) -> Arrived:
    with _any_size() if recipe.any_size else contextlib.nullcontext():
        result = onnx_attnfuse.optimize(model, verify=level, **choices(recipe))
    reasons = [reason for site in result.report.sites for reason in site.reasons]
    messages = tuple(reason.message for reason in reasons if reason.code in _SERIOUS)
    fused = sum(site.is_rewritten for site in result.report.sites)
    packed = any("padded-rows-unused" in note for note in result.report.notes)
    return Arrived(result.model, fused, frozenset(reason.code for reason in reasons), messages=messages, packed=packed)


def choices(recipe: Recipe) -> dict[str, Any]:
    """The options of a recipe."""
    names = ("batch", "seq", "keys", "past", "total")
    found: dict[str, Any] = {"ep": recipe.ep, "target": recipe.target, "padding": recipe.padding, "always": recipe.always}
    found |= {"keep_outputs": recipe.keep_outputs, "dim": dict.fromkeys(names, recipe.hint) if recipe.hint else {}}
    found |= {"assume": () if recipe.assume == "all" else (recipe.assume,)}
    return found | ({"arch": "sm90"} if recipe.ep == "cuda" else {})


@contextlib.contextmanager
def _any_size() -> Iterator[None]:
    """Lets forms that are faster for large inputs only be selected for small ones."""
    with mock.patch.object(site, "FASTER_FROM", {}), mock.patch.object(site, "LONG", 0):
        yield


def _converted(recipe: Recipe, model: onnx.ModelProto, level: str) -> Arrived:
    verify: Any = "none" if level == "none" else "model"
    result = onnx_attnfuse.convert(model, verify=verify, keep_io_types=bool(recipe.numbers % 2))
    half = result.model if isinstance(result.model, onnx.ModelProto) else ir.to_proto(result.model)
    if recipe.journey == "convert":
        return Arrived(half, 0, frozenset())
    return _fused(recipe, half, level)


def _trained(recipe: Recipe, model: onnx.ModelProto, level: str) -> Arrived:
    """Attention fused in a gradient graph."""
    fused, report = gradients.fused(recipe, model, level)
    reasons = [reason for site in report.sites for reason in (*site.reasons, *(reason for _, reason in site.others))]
    messages = tuple(reason.message for reason in reasons if reason.code in _SERIOUS)
    count = sum(site.kernel is not None for site in report.sites)
    return Arrived(fused, count, frozenset(reason.code for reason in reasons), messages=messages)
