"""The closed world of operators: one table of the understood part of each, made from the schemas of ONNX and ONNX Runtime.

    why_unknown(node)   # "left_window_size of Attention is not read"; None: every part of the node is understood

A line of `schemas.txt` is an operator's domain and name, its versions, inputs, outputs and attributes with their defaults. A `!`
marks all that is not read: a version in which the operator is unknown, an input that must be left out, an attribute that
must be at its default. A `?` follows an attribute that is 0 or 1, a `+` one that is not negative; kernels disagree on
the meaning of other numbers. A `?` after an input says that it may be left out. Other operators are unknown, too. `graph.ops`
asks it before it calls a node by its name, so no reader takes a node for more than is understood. `python -m
tests.support.operator_schemas` writes it; additions get a `!`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import struct
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx_ir as ir

STANDARD = frozenset(["", "ai.onnx"])
"""The two names of the standard's domain."""
FILE = "schemas.txt"
UNREAD = "!"
"""Marks all that is not read."""
FLAG, COUNT = "?", "+"
"""Follow the names of attributes that are 0 or 1, and of those that are not negative."""
VARIADIC = "*"
"""Follows an input or output of which there may be many."""
OPTIONAL = "?"
"""Follows an input that may be left out."""


@dataclasses.dataclass(frozen=True)
class Attribute:
    """An attribute of an operator."""

    default: Any
    """None where it has none; a list is a tuple, as onnx-ir has it."""
    is_read: bool
    kind: str = ""
    """`FLAG`, `COUNT`, or nothing."""

    def takes(self, given: ir.Attr) -> bool:
        """Whether the value of an attribute of a node is understood."""
        if not self.is_read:
            return is_default(self, given)
        if not self.kind or given.is_ref():
            return True
        return given.value in {0, 1} if self.kind == FLAG else given.value >= 0

    def is_default(self, value: object) -> bool:
        """Whether a value says the same as leaving the attribute out."""
        if isinstance(value, float) and isinstance(self.default, float):
            return struct.pack("f", value) == struct.pack("f", self.default)
        return value is not None and value == self.default


@dataclasses.dataclass(frozen=True)
class Schema:
    """The understood part of an operator."""

    versions: Mapping[int, bool]
    """The versions of its domain in which it was changed, and whether it is understood from there on."""
    inputs: Mapping[str, bool]
    """Its inputs in order, and whether each is read."""
    outputs: tuple[str, ...]
    attributes: Mapping[str, Attribute]
    needed: tuple[int, ...]
    """The places of inputs that may not be left out."""

    @functools.cached_property
    def most(self) -> int:
        """How many inputs there may be without a look at each."""
        read = list(self.inputs.values())
        count = read.index(False) if False in read else len(read)
        return sys.maxsize if count and list(self.inputs)[count - 1].endswith(VARIADIC) else count

    @functools.cached_property
    def free(self) -> frozenset[str]:
        """The attributes that are understood whatever their values."""
        return frozenset(name for name, item in self.attributes.items() if item.is_read and not item.kind)


@functools.cache
def table() -> Mapping[tuple[str, str], Schema]:
    """The schemas by domain, empty for the standard's, and name."""
    lines = importlib.resources.files("onnx_attnfuse.graph").joinpath(FILE).read_text(encoding="utf-8").splitlines()
    return dict(_entry(line) for line in lines if line and not line.startswith("#"))


def _entry(line: str) -> tuple[tuple[str, str], Schema]:
    domain, op, versions, listed, outputs, *attributes = line.split(" ")
    inputs = [item for item in listed.split(",") if item != "-"]
    return ("" if domain in STANDARD else domain, op), Schema(
        {int(item.lstrip(UNREAD)): not item.startswith(UNREAD) for item in versions.split(",")},
        {item.lstrip(UNREAD).rstrip(OPTIONAL): not item.startswith(UNREAD) for item in inputs},
        tuple(item for item in outputs.split(",") if item != "-"),
        dict(_attribute(item) for item in attributes),
        tuple(place for place, item in enumerate(inputs) if not item.endswith((OPTIONAL, VARIADIC))),
    )


def _attribute(item: str) -> tuple[str, Attribute]:
    name, _, default = item.lstrip(UNREAD).partition("=")
    value: Any = json.loads(default or "null")
    listed = tuple(value) if default.startswith("[") else value
    plain = name.rstrip(FLAG + COUNT)
    return plain, Attribute(listed, not item.startswith(UNREAD), name[len(plain) :])


def schema_of(node: ir.Node) -> Schema | None:
    """The schema of a node's operator, or None if the table has none."""
    return table().get(("" if node.domain in STANDARD else node.domain, node.op_type))


def why_unknown(node: ir.Node) -> str | None:
    """The part of a node that is not understood, in words; None if it is understood as a whole.

    Operators of other domains that the table does not have are left to those who define them.
    """
    domain = node.domain
    schema = table().get(("" if domain in STANDARD else domain, node.op_type))
    if schema is None:
        return f"{node.op_type} of ai.onnx is not known" if node.domain in STANDARD else None
    if node.version is not None and not schema.versions.get(node.version, False):
        return f"{node.op_type} of version {node.version} is not known"
    if len(node.inputs) > schema.most and (place := _unread_input(node, schema)) is not None:
        names = list(schema.inputs)
        return f"{names[place] if place < len(names) else f'input {place}'} of {node.op_type} is not read"
    if schema.free.issuperset(node.attributes.data):
        return None
    for name, given in node.attributes.data.items():
        known = schema.attributes.get(name)
        if known is None or not known.takes(given):
            return f"{name} of {node.op_type} is not read"
    return None


def _unread_input(node: ir.Node, schema: Schema) -> int | None:
    """The place of the first input that is given and not read."""
    read = list(schema.inputs.values())
    found = (place for place, value in enumerate(node.inputs) if value is not None)
    return next((place for place in found if place >= len(read) or not read[place]), None)


def is_default(known: Attribute, given: ir.Attr) -> bool:
    """Whether an attribute of a node has its default."""
    return not given.is_ref() and known.is_default(given.value)


def mark_versions(model: ir.Model) -> None:
    """Notes at nodes, in place, the version of their operator where it is not understood; others have none.

    An import that was there before goes: some exporters write the model's opset, not the version of the operator.
    """
    for part in (model.graph, *model.functions.values()):
        imports = part.opset_imports or model.opset_imports
        opsets = {"" if domain in STANDARD else domain: version for domain, version in imports.items()}
        for node in part.all_nodes():
            domain = "" if node.domain in STANDARD else node.domain
            version = _changed(node.op_type, opsets.get(domain, 1), domain)
            schema = table().get((domain, node.op_type))
            is_known = schema is None or schema.versions.get(version, False)
            node.version = None if is_known else version


@functools.cache
def _changed(op: str, opset: int, domain: str) -> int:
    """The version up to `opset` in which the operator was changed last; that of the domain where ONNX does not tell."""
    import onnx

    if not onnx.defs.has(op, opset, domain):
        return opset if domain else 1
    return onnx.defs.get_schema(op, opset, domain).since_version
