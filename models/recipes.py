"""Every recipe, by name, the most common families first."""

from __future__ import annotations

from models import (
    recipes_diffusion,
    recipes_handwritten,
    recipes_seq2seq,
    recipes_static,
    recipes_text,
    recipes_torch,
    recipes_vision,
)
from models.recipe import Recipe

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for module in (
        recipes_text,
        recipes_static,
        recipes_seq2seq,
        recipes_vision,
        recipes_torch,
        recipes_handwritten,
        recipes_diffusion,
    )
    for recipe in module.RECIPES
}
