"""Where patterns enter: installed packs by entry point, and whatever a program registers.

A pack is a module with the entry point group `onnx_attnfuse.patterns`; importing it runs its decorators. The built-in pack enters
the same way.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Callable, Sequence
from typing import TypeVar

import onnx_ir as ir

from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.match.steps import ScoreStep, WeightStep

GROUP = "onnx_attnfuse.patterns"
_BUILT_IN = "onnx_attnfuse_patterns"

ScoreReader = Callable[[ir.Node, Facts], Sequence[ScoreStep]]
"""Says how a node changes the scores; several answers if either input may carry them, none if it cannot be read."""
WeightReader = Callable[[ir.Node, ir.Value, Facts], "WeightStep | None"]
"""Says what a consumer of the attention weights does to them."""

_Reader = TypeVar("_Reader", ScoreReader, WeightReader)
_score_readers: dict[tuple[str, str], ScoreReader] = {}
_weight_readers: dict[tuple[str, str], WeightReader] = {}


def _register(readers: dict[tuple[str, str], _Reader], ops: Sequence[str], domain: str) -> Callable[[_Reader], _Reader]:
    def decorate(reader: _Reader) -> _Reader:
        for op in ops:
            owner = readers.get((domain, op))
            if owner is not None:
                where = f"{domain or 'ai.onnx'}::{op}"
                raise OptionError(f"two patterns read {where}: {_owner(owner)} and {_owner(reader)}; remove one of them")
            readers[domain, op] = reader
        return reader

    return decorate


def _owner(reader: object) -> str:
    return f"{getattr(reader, '__module__', '?')}.{getattr(reader, '__qualname__', '?')}"


def score_step(*ops: str, domain: str = "") -> Callable[[ScoreReader], ScoreReader]:
    """Registers a reader of what `ops` do to attention scores.

    Args:
        ops: Operator types.
        domain: Their domain.

    Raises:
        OptionError: Another reader has one of them.
    """
    return _register(_score_readers, ops, domain)


def weight_step(*ops: str, domain: str = "") -> Callable[[WeightReader], WeightReader]:
    """Registers a reader of what `ops` do to attention weights; see `score_step`."""
    return _register(_weight_readers, ops, domain)


@functools.cache
def load_packs() -> tuple[str, ...]:
    """Imports every installed pattern pack once; returns their names.

    In a checkout that is not installed there is no entry point, and the built-in pack is taken from the path.
    """
    names: list[str] = []
    for entry in importlib.metadata.entry_points(group=GROUP):
        entry.load()
        names.append(entry.name)
    if not names:
        importlib.import_module(_BUILT_IN)
        names.append("builtin")
    return tuple(names)


def score_reader(node: ir.Node) -> ScoreReader | None:
    """The reader for this node's operator, if there is one."""
    return _score_readers.get((_domain(node), node.op_type))


def weight_reader(node: ir.Node) -> WeightReader | None:
    """The reader for this node's operator, if there is one."""
    return _weight_readers.get((_domain(node), node.op_type))


def _domain(node: ir.Node) -> str:
    return "" if node.domain == "ai.onnx" else node.domain
