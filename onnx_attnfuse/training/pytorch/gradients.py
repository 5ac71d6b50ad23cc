"""Where gradients end inside of a captured graph: at `detach`, and at values computed while none are recorded.

A fused call has the gradient of all that it replaces. A value that a gradient would pass through, and does not, is no part of an
attention: where it is looked at while gradients are recorded, it is a tensor of its own, like the result of an unknown operator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

_DETACHING = frozenset(["aten::detach", "aten::detach_", "aten::detach_copy"])
_LITERAL = frozenset(["aten::lift_fresh", "aten::lift_fresh_copy"])


class Gradients:
    """Which tensors of a run gradients reach, and in which they end."""

    def __init__(self, free: Iterable[Any], *, recorded: bool) -> None:
        """Begins.

        Args:
            free: Tensors that no gradient reaches. Of others that are not computed here nothing is known.
            recorded: Gradients are recorded where the graph begins.
        """
        self.recorded = recorded
        """The mode that the graph has switched to."""
        self._free = {id(item) for item in free}
        self._ended: set[int] = set()

    @classmethod
    def of(cls, inputs: Sequence[Any]) -> Gradients:
        """The gradients wanted in a graph that is called now, with these inputs."""
        free = [item for item in inputs if isinstance(item, torch.Tensor) and not item.requires_grad]
        return cls(free, recorded=torch.is_grad_enabled())

    def inside(self, inputs: Sequence[Any]) -> Gradients:
        """The gradients wanted in a graph inside, which is called here with these inputs."""
        free = [item for item in inputs if isinstance(item, torch.Tensor) and not self.reach(item)]
        return Gradients(free, recorded=self.are_recorded)

    @property
    def are_recorded(self) -> bool:
        """Whether values computed now have a gradient."""
        return self.recorded and not torch.is_inference_mode_enabled()

    def reach(self, tensor: torch.Tensor) -> bool:
        """Whether a gradient may pass through a tensor."""
        has_one = tensor.is_floating_point() or tensor.is_complex()
        return has_one and id(tensor) not in self._free and id(tensor) not in self._ended

    def has_ended(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has no gradient, though its operand has one."""
        return id(tensor) in self._ended

    def end_in(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has no gradient here, though its operand has one."""
        return self.has_ended(tensor) and self.are_recorded

    def is_apart(self, tensor: torch.Tensor) -> None:
        """Notes that a tensor is taken by itself from now on, whatever it was computed from."""
        self._ended.discard(id(tensor))
        self._free.add(id(tensor))

    def forget(self, mark: int) -> None:
        """Forgets the facts about a tensor, by its id: it shares its memory with one that was written to."""
        self._free.discard(mark)
        self._ended.discard(mark)

    def follow(self, name: str, read: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        """Notes the effect of an operator that writes to none of its operands."""
        reached = name not in _LITERAL and any(self.reach(item) or id(item) in self._ended for item in read)
        passed = self.are_recorded and name not in _DETACHING
        for item in results:
            self.forget(id(item))
            if not reached:
                self._free.add(id(item))
            elif not passed:
                self._ended.add(id(item))

    def written(self, name: str, read: Sequence[torch.Tensor], target: torch.Tensor) -> bool:
        """Notes the effect of an operator that writes to a tensor; whether the gradient of that is still the operator's."""
        if self.are_recorded and name not in _DETACHING:
            self.follow(name, read, [target])
            return True
        if self.reach(target):
            return False
        self.follow(name, read, [target])
        return True
