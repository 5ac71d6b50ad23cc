"""What whole models are made of: a specification and what builds the module."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.whole.spec import Spec

IDS, MASK = ("batch", "seq"), ("batch", "past+seq")


@dataclasses.dataclass(frozen=True)
class Whole:
    """A model.

    Attributes:
        spec: All but the module.
        build: Makes the module, in the default device and element type; inputs by position, outputs in the order of `spec`.
    """

    spec: Spec
    build: Callable[[], nn.Module]


def of_transformers(model: str, config: str, settings: dict[str, Any]) -> Any:
    """A model of transformers with torch's attention, in the default element type."""
    made = getattr(transformers, config)(**settings)
    return getattr(transformers, model)._from_config(made, attn_implementation="sdpa", dtype=torch.get_default_dtype()).eval()
