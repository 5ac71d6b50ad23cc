"""Modules that turn named arguments and structured results into plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers.cache_utils import DynamicCache, StaticLayer

Tensors = tuple[torch.Tensor, ...]


class Flat(nn.Module):
    """Calls a model with named tensors and returns what `select` picks from its result."""

    def __init__(
        self,
        model: nn.Module,
        names: tuple[str, ...],
        select: Callable[[Any], torch.Tensor | Tensors],
        **fixed: Any,
    ) -> None:
        """Wraps a model.

        Args:
            model: The model.
            names: Argument names, in the order of the graph inputs.
            select: Picks the tensors to return.
            **fixed: Further arguments, the same in every call.
        """
        super().__init__()
        self.model, self.names, self.select, self.fixed = model, names, select, fixed

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor | Tensors:
        """Runs the model on the tensors, one per name."""
        given = dict(zip(self.names, tensors, strict=True))
        return self.select(self.model(**given, **self.fixed))


class Cached(nn.Module):
    """Calls a decoder with its past as flat tensors; returns the result and the presents.

    Inputs named ``past_key_0``, ``past_value_0``, … become a cache. With ``cross_key_0``, …
    too it is the two-part cache of an encoder-decoder model, and the cross part is only read.
    """

    def __init__(
        self,
        model: nn.Module,
        names: tuple[str, ...],
        select: Callable[[Any], torch.Tensor],
    ) -> None:
        """Wraps a decoder; `names` and `select` are as for `Flat`."""
        super().__init__()
        self.model, self.names, self.select = model, names, select

    def forward(self, *tensors: torch.Tensor) -> Tensors:
        """Runs one step on top of the past."""
        from transformers.cache_utils import EncoderDecoderCache

        given = dict(zip(self.names, tensors, strict=True))
        past = _cache(given, "past")
        cache = past
        if "cross_key_0" in given:
            cache = EncoderDecoderCache(past, _cache(given, "cross"))
        result = self.model(**given, past_key_values=cache, use_cache=True)
        presents = [part for layer in past.layers for part in (layer.keys, layer.values)]
        return (self.select(result), *presents)


def _cache(given: dict[str, torch.Tensor], prefix: str) -> DynamicCache:
    """Takes the tensors of one cache out of the arguments."""
    from transformers.cache_utils import DynamicCache

    layers = []
    while f"{prefix}_key_{len(layers)}" in given:
        layer = len(layers)
        layers.append((given.pop(f"{prefix}_key_{layer}"), given.pop(f"{prefix}_value_{layer}")))
    return DynamicCache(layers)


def hidden(result: Any) -> torch.Tensor:
    """Picks the last hidden state."""
    return result.last_hidden_state


def logits(result: Any) -> torch.Tensor:
    """Picks the logits."""
    return result.logits


def sample(result: Any) -> torch.Tensor:
    """Picks the sample of a diffusers model."""
    return result.sample


class Static(nn.Module):
    """Calls a decoder with a static cache as flat tensors: buffers that it writes into; returns the result and the buffers.

    Inputs named ``past_key_0``, ``past_value_0``, … are the buffers; ``cache_position`` counts the positions of the new tokens.
    """

    def __init__(self, model: nn.Module, names: tuple[str, ...], select: Callable[[Any], torch.Tensor]) -> None:
        """Wraps a decoder; `names` and `select` are as for `Flat`."""
        super().__init__()
        self.model, self.names, self.select = model, names, select

    def forward(self, *tensors: torch.Tensor) -> Tensors:
        """Runs one step."""
        from transformers.cache_utils import StaticCache

        given = dict(zip(self.names, tensors, strict=True))
        positions = given.pop("cache_position")
        config = self.model.config
        cache = StaticCache(config, given["past_key_0"].shape[2])
        for index in range(len(cache.layers)):
            cache.layers[index] = _filled(given.pop(f"past_key_{index}"), given.pop(f"past_value_{index}"), positions[0])
        result = self.model(**given, position_ids=positions[None], past_key_values=cache, use_cache=True)
        return (self.select(result), *(part for layer in cache.layers for part in (layer.keys, layer.values)))


def _filled(keys: torch.Tensor, values: torch.Tensor, count: torch.Tensor) -> StaticLayer:
    """A layer of a static cache that holds `count` positions already; windows are in the mask, as transformers exports them."""
    from transformers.cache_utils import StaticLayer

    layer = StaticLayer(keys.shape[2])
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values, layer.cumulative_length = keys.clone(), values.clone(), count.clone()
    return layer
