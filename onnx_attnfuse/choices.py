"""The base of options: a field that does not exist is an error of the caller, with the nearest name."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any, TypeVar, cast

from onnx_attnfuse.errors import OptionError

_Self = TypeVar("_Self", bound="Choices")


class Choices:
    """Base of dataclasses whose fields are options."""

    def __new__(cls: type[_Self], *values: Any, **choices: Any) -> _Self:
        """Options, whose fields the dataclass sets.

        Raises:
            OptionError: There is no field of such a name.
        """
        del values
        names = [field.name for field in dataclasses.fields(cast("Any", cls))]
        for name in choices:
            if name not in names:
                close = difflib.get_close_matches(name, names, n=1)
                remedy = f"did you mean {close[0]!r}?" if close else f"choose {', '.join(names)}"
                raise OptionError(f"{cls.__name__} has no field {name!r}; {remedy}")
        return object.__new__(cls)
