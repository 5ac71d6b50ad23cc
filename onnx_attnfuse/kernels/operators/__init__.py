"""Fused operators: one module each, with its record as `INFO`; whatever deals with operators in general reads the records.

    found = info_of(node)    # a record, or None
    found.input(node, "past_key")

A new module is found by itself.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from typing import TYPE_CHECKING

from onnx_attnfuse.graph.ops import plain_domain
from onnx_attnfuse.kernels.operators.record import OpInfo, qualified

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["OpInfo", "by_key", "find", "info_of", "qualified", "ranked", "records", "target_names"]


@functools.cache
def records() -> Mapping[tuple[str, str], OpInfo]:
    """Every record, by domain and name."""
    names = (found.name for found in pkgutil.iter_modules(__path__) if found.name != "record")
    infos: list[OpInfo] = [importlib.import_module(f"{__name__}.{name}").INFO for name in names]
    return {(info.domain, info.name): info for info in infos}


@functools.cache
def by_key() -> Mapping[str, OpInfo]:
    """Every record, by the operator's name among fused operators."""
    return {info.key: info for info in records().values()}


def find(domain: str, op: str) -> OpInfo | None:
    """The record of an operator, or None."""
    return records().get((plain_domain(domain), op))


def info_of(node: ir.Node) -> OpInfo | None:
    """The record of a node's operator, or None."""
    return find(node.domain, node.op_type)


def ranked() -> list[OpInfo]:
    """The operators that are planned site by site, in the order in which they are taken where they are equally fast."""
    return sorted((info for info in records().values() if info.rank is not None), key=lambda info: info.rank or 0)


def target_names() -> tuple[str, ...]:
    """The names that `--target` takes: `auto`, fused operators, of which those of ai.onnx come last, and packed attention."""
    asked = [info.key for info in sorted(ranked(), key=lambda info: not info.domain)]
    return ("auto", *asked, *(info.option for info in records().values() if info.option is not None))
