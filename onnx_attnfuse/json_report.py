"""Reports as JSON: one schema number, one way from a frozen dataclass to plain types."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, cast

SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class JsonReport:
    """A report that is written as JSON (schema 1)."""

    _JSON_KEYS: ClassVar[tuple[str, ...]] = ()
    """Fields and properties in the order of the JSON; nothing: all fields."""

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON types, `seconds` to the millisecond."""
        names = self._JSON_KEYS or tuple(field.name for field in dataclasses.fields(self))
        found = {name: _plain(getattr(self, name)) for name in names}
        found |= {"seconds": round(found["seconds"], 3)} if "seconds" in found else {}
        return {"schema": SCHEMA, **found}


def _plain(value: Any) -> Any:
    """A value of a report, by its own `to_dict` if it has one."""
    if isinstance(value, tuple):
        return [_plain(item) for item in cast("tuple[Any, ...]", value)]
    if isinstance(value, Mapping):
        return dict(cast("Mapping[str, Any]", value))
    if hasattr(value, "to_dict"):
        return value.to_dict()
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
