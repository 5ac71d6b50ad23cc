"""Small tensors computed from constants alone, such as the slopes of ALiBi: the range of their numbers.

They are computed on the host while the graph is run on fakes. Other devices round otherwise, so that they tell intervals only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch

from onnx_attnfuse.training.pytorch.emitter import without_modes

_MOST = 1024
_ROUNDING = 1e-3


class Numbers:
    """The contents of a run's tensors, as far as they are known."""

    def __init__(self) -> None:
        self._held: dict[int, torch.Tensor] = {}

    def forget(self, mark: int) -> None:
        """Forgets a tensor, by its id: it is written to."""
        self._held.pop(mark, None)

    def follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> tuple[float, float] | None:
        """Computes an operator's result; the interval that its numbers lie in, or None where that is not known.

        Args:
            func: The operator.
            args: Its arguments, fakes among them.
            kwargs: Those with names.
            result: Its fake result.
        """
        if not isinstance(result, torch.Tensor) or any(isinstance(size, torch.SymInt) for size in result.shape):
            return None
        writes = any(item.alias_info and item.alias_info.is_write for item in func._schema.arguments)
        if writes or torch.Tag.nondeterministic_seeded in func.tags or "empty" in func._schema.name:
            return None
        if not 0 < result.numel() <= _MOST or result.is_complex():
            return None
        try:
            given, named = self._real(args), {name: self._real(item) for name, item in kwargs.items()}
            with without_modes(), torch.no_grad():
                held = func(*given, **named)
                low, high = float(held.min()), float(held.max())
        except Exception:  # noqa: BLE001 - unknown ranges are not used
            return None
        if held.shape != result.shape or held.dtype != result.dtype:
            return None
        self._held[id(result)] = held
        if not (math.isfinite(low) and math.isfinite(high)):
            return None
        return low - _ROUNDING * abs(low), high + _ROUNDING * abs(high)

    def _real(self, item: Any) -> Any:
        """An argument with real tensors in the place of fakes.

        Raises:
            KeyError: One is not known.
        """
        if isinstance(item, torch.Tensor):
            found = getattr(item, "constant", None)
            return self._held[id(item)] if found is None else found.cpu()
        if isinstance(item, (list, tuple)):
            return [self._real(part) for part in cast("Sequence[Any]", item)]
        if type(item).__name__.startswith("Sym"):
            raise KeyError(item)
        return torch.device("cpu") if isinstance(item, torch.device) else item
