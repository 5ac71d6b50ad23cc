"""Making a recipe as simple as it can be while something stays true of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests.fuzz.recipe import CHOICES, MASK_CHOICES, Mask, Recipe, Table, consistent

_NUMBERS = 6
"""Seeds that are tried in the end."""


def shrink(recipe: Recipe, holds: Callable[[Recipe], bool], most: int = 250) -> Recipe:
    """The simplest recipe found of which `holds` is true; asks it at most `most` times.

    Args:
        recipe: One of which it is true.
        holds: What has to stay true.
        most: How often it may be asked.
    """
    asked = 0
    tried: set[Recipe] = {recipe}
    smaller = True
    while smaller:
        smaller = False
        for candidate in simpler(recipe):
            if candidate in tried or asked >= most:
                continue
            tried.add(candidate)
            asked += 1
            if holds(candidate):
                recipe, smaller = candidate, True
                break
    return recipe


def simpler(recipe: Recipe) -> Iterator[Recipe]:
    """Recipes that differ in one choice, which is simpler; the boldest first."""
    for candidate in _steps(recipe):
        settled = consistent(candidate)
        if cost(settled) < cost(recipe):
            yield settled


def _steps(recipe: Recipe) -> Iterator[Recipe]:
    for index in range(len(recipe.masks)):
        yield dataclasses.replace(recipe, masks=recipe.masks[:index] + recipe.masks[index + 1 :])
    for name, value in _simpler_values(recipe, CHOICES):
        yield dataclasses.replace(recipe, **{name: value})
    for index, mask in enumerate(recipe.masks):
        for name, value in _simpler_values(mask, MASK_CHOICES):
            changed = dataclasses.replace(mask, **{name: value})
            yield dataclasses.replace(recipe, masks=(*recipe.masks[:index], changed, *recipe.masks[index + 1 :]))
    for number in range(min(recipe.numbers, _NUMBERS)):
        yield dataclasses.replace(recipe, numbers=number)


def _simpler_values(item: Recipe | Mask, table: Table) -> Iterator[tuple[str, object]]:
    """The simplest value of each choice, then the others before the one that it has."""
    for name, choices in table.items():
        place = _place(item, name, choices)
        if place:
            yield name, choices[0]
    for name, choices in table.items():
        for value in choices[1 : _place(item, name, choices)]:
            yield name, value


def cost(recipe: Recipe) -> tuple[int, int, int]:
    """How far a recipe is from the simplest: masks, choices that are not the simplest, and how far these are."""
    places = [_place(recipe, name, choices) for name, choices in CHOICES.items()]
    for mask in recipe.masks:
        places += [_place(mask, name, choices) for name, choices in MASK_CHOICES.items()]
    return len(recipe.masks) + sum(map(bool, places)), sum(places), recipe.numbers


def _place(item: Recipe | Mask, name: str, choices: Sequence[Any]) -> int:
    """How far a choice is from the simplest; what is none of them is furthest."""
    value = getattr(item, name)
    return choices.index(value) if value in choices else len(choices)
