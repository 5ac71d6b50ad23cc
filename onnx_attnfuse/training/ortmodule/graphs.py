"""A graph for each form of the inputs of a module, and for the content of its buffers.

ORTModule exports a module at its first step and looks at nothing afterwards: a mask that was None then is ignored when it is
given later, and a buffer that was replaced by another tensor stays as it was. Here the inputs of each step are looked at, and
those of another form have a graph of their own, which is kept beside the first: a step that has yet to be differentiated stays
valid.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from onnx_attnfuse.training.report import tell

if TYPE_CHECKING:
    import torch

    from onnx_attnfuse.graph.constants import Array

_LEAST_AXES = 2
"""Buffers with fewer axes are no masks, and stay inputs."""


class Graphs:
    """The graphs of one module, as managers of ORTModule."""

    def __init__(self, wrapped: Any) -> None:
        """Begins with no graph.

        Args:
            wrapped: The module's runner inside ORTModule.
        """
        self._wrapped = wrapped
        self._graphs: dict[tuple[bool, object, object], _Graph] = {}
        self._last: _Graph | None = None
        self._changing: set[str] = set()

    def select(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Lets ORTModule run its next step on the graph for these inputs, which it builds if there is none."""
        training = bool(self._wrapped.is_training())
        form = training, _form(tuple(inputs)), _form(dict(named))
        found = self._graphs.get(form)
        changed = () if found is None else found.changed(self._buffers())
        if changed:
            self._changing.update(changed)
            tell([f"attnfuse: {', '.join(map(_short, changed))} changed, which a mask was read from; another graph is built"])
        if found is None and any(mode == training for mode, *_ in self._graphs):
            tell([f"attnfuse: {self._difference(inputs, named)}; another graph is built for that"])
        if found is None or changed:
            found = self._graphs[form] = _Graph(self._manager(), inputs, named)
        found.refresh(self._buffers())
        self._last = found
        self._wrapped._execution_manager = found.manager

    def contents(self) -> dict[str, Array]:
        """The contents of buffers by the names of inputs, as far as they may be taken for constants."""
        found: dict[str, Array] = {}
        for name, tensor in self._buffers().items():
            if name not in self._changing and tensor.ndim >= _LEAST_AXES and not bool(tensor.isnan().any()):
                found[name] = tensor.detach().cpu().numpy().copy()
        return found

    def hold(self, names: Sequence[str]) -> None:
        """Checks the graph of the last step against the present contents of buffers.

        Args:
            names: The buffers, by the names of inputs.
        """
        if self._last is not None:
            buffers = self._buffers()
            self._last.held = {name: buffers[name].detach().clone() for name in names}

    def _buffers(self) -> dict[str, torch.Tensor]:
        return dict(self._wrapped._flattened_module.named_buffers())

    def _manager(self) -> Any:
        """ORTModule's own for the first graph, and another like it for each that follows."""
        first = self._wrapped._execution_manager
        if not self._graphs:
            return first
        inner = first(True)
        parts = (inner._flattened_module, inner._debug_options, inner._fallback_manager, inner._logger)
        return type(first)(*parts)

    def _difference(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> str:
        """How inputs differ from those of the last step."""
        assert self._last is not None
        module = self._wrapped._original_module
        parameters = [name for name in inspect.signature(module.forward).parameters if name not in named]
        names = [*parameters, *(f"input {place}" for place in range(len(parameters), len(inputs)))]
        now = {**dict(zip(names, inputs, strict=False)), **named}
        forms = {name: _form(value) for name, value in now.items()}
        before = self._last.named_forms(names)
        other = [name for name in {**before, **forms} if before.get(name) != forms.get(name)]
        return f"{', '.join(other) or 'an input'} has another form than in the step before"


class _Graph:
    """A graph that ORTModule runs, or will build at the next step."""

    def __init__(self, manager: Any, inputs: Sequence[Any], named: Mapping[str, Any]) -> None:
        self.manager = manager
        self.held: dict[str, torch.Tensor] = {}
        """The buffers that attention was read with, as they were."""
        self._inputs = tuple(map(_form, inputs))
        self._named = {name: _form(value) for name, value in named.items()}
        self._given: dict[str, int] = {}

    def named_forms(self, names: Sequence[str]) -> dict[str, object]:
        """The forms of its inputs by name."""
        return {**dict(zip(names, self._inputs, strict=False)), **self._named}

    def changed(self, buffers: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
        """The names of buffers that hold something else than the graph was built for."""
        return tuple(name for name, held in self.held.items() if name not in buffers or not _same(buffers[name], held))

    def refresh(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Lets ORTModule look for its buffers again where one of them is another tensor now."""
        given = {name: id(tensor) for name, tensor in buffers.items()}
        if self._given not in ({}, given):
            for training in (True, False):
                info = self.manager(training)._graph_transition_manager._post_export_processed_model_info
                if info is not None:
                    info._buffer_for_ort_runs = None
        self._given = given


def _same(now: torch.Tensor, held: torch.Tensor) -> bool:
    alike = now.shape == held.shape and now.dtype == held.dtype
    return alike and bool((now.to(held.device) == held).all())


def _short(name: str) -> str:
    return f"buffer '{name.removeprefix('_original_module.')}'"


def _form(value: Any) -> object:
    """The properties of an input, besides its numbers, that a graph depends on; hashable."""
    import torch

    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "bool", value
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype), value.ndim, value.requires_grad
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return "mapping", frozenset((str(key), _form(item)) for key, item in items)
    if isinstance(value, Sequence):
        return "sequence", tuple(map(_form, cast("Sequence[Any]", value)))
    return type(value).__qualname__
