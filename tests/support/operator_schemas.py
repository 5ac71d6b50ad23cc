"""The table of operators, `graph/schemas.txt`, made anew from the schemas of the installed onnx and onnxruntime.

    python -m tests.support.operator_schemas

What the table says already is kept, also a default that a schema only tells in words. What is new to an operator that it has is
written with a `!`, not read, until somebody has looked at every reader. Run it with the newest versions.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import onnx
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as runtime

import onnx_attnfuse
from onnx_attnfuse.graph.ops import CONTRIB
from onnx_attnfuse.graph.schemas import FILE, OPTIONAL, UNREAD, VARIADIC, table

_TABLE = pathlib.Path(onnx_attnfuse.__file__).parent / "graph" / FILE
_DOMAINS = "", "ai.onnx.preview", CONTRIB
_HEAD = (
    "# Operators as the schemas of onnx {} and onnxruntime {} have them:\n# domain, name, versions, inputs, outputs, attributes\n"
)


def schemas() -> dict[tuple[str, str], list[Any]]:
    """All schemas of an operator by its domain, empty for the standard's, and name, oldest first."""
    found: dict[tuple[str, str], list[Any]] = {}
    for schema in sorted(onnx.defs.get_all_schemas_with_history(), key=lambda item: item.since_version):
        if schema.domain in _DOMAINS:
            found.setdefault((schema.domain, schema.name), []).append(schema)
    standard = set(found)
    for schema in runtime.get_all_operator_schema():
        key = schema.domain, schema.name
        if schema.domain in _DOMAINS and key not in standard:
            found.setdefault(key, []).append(schema)
    return found


def default_of(attribute: Any) -> Any:
    """The default of an attribute of a schema, None if it has none."""
    default = attribute.default_value if isinstance(attribute, onnx.defs.OpSchema.Attribute) else _parsed(attribute)
    if not default.type:
        return None
    value = onnx.helper.get_attribute_value(default)
    if isinstance(value, list):
        return [item.decode() if isinstance(item, bytes) else item for item in value]
    value = value.decode() if isinstance(value, bytes) else value
    return round(value, 9) if isinstance(value, float) else value


def _parsed(attribute: Any) -> onnx.AttributeProto:
    return onnx.AttributeProto.FromString(attribute._default_value)


def parameters(found: Iterable[Any]) -> Iterator[str]:
    """The names of inputs or outputs of a schema, each with what says how often it may be there."""
    for item in found:
        option = str(item.option).rpartition(".")[2].partition(":")[0]
        yield item.name + {"Variadic": VARIADIC, "Optional": OPTIONAL}.get(option, "")


def line(key: tuple[str, str], versions: list[Any]) -> str:
    """The line of one operator."""
    known = table().get(key)
    attributes = {name: default_of(item) for schema in versions for name, item in schema.attributes.items()}
    if known is not None:
        said = {name: item.default for name, item in known.attributes.items()}
        attributes = {name: said.get(name) if default is None else default for name, default in attributes.items()}

    def mark(is_read: bool | None) -> str:
        return "" if known is None or is_read else UNREAD

    parts = [
        ",".join(mark(known and known.versions.get(item.since_version)) + str(item.since_version) for item in versions),
        ",".join(mark(known and known.inputs.get(name.rstrip(OPTIONAL))) + name for name in parameters(longest(versions))) or "-",
        ",".join(name.rstrip(OPTIONAL) for name in parameters(versions[-1].outputs)) or "-",
    ]
    for name, default in sorted(attributes.items()):
        value = "" if default is None else f"={json.dumps(default, separators=(',', ':'))}"
        said = None if known is None else known.attributes.get(name)
        is_read = None if known is None else said is not None and said.is_read
        parts.append(mark(is_read) + name + ("" if said is None else said.kind) + value)
    return " ".join([key[0] or "ai.onnx", key[1], *parts])


def longest(versions: list[Any]) -> Any:
    """The inputs of the version that has most."""
    return max((schema.inputs for schema in reversed(versions)), key=len)


def main() -> None:
    """Writes the file."""
    head = _HEAD.format(onnx.__version__, onnxruntime.__version__)
    lines = [line(key, versions) for key, versions in sorted(schemas().items())]
    _TABLE.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
