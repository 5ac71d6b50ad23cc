"""Terms as objects, of which there is one for each way to write a term."""

from __future__ import annotations

import hashlib
import weakref
from typing import Any, Literal

Sort = Literal["Int", "Real", "Bool"]


class Term:
    """A term; equal terms of one normal form are one object."""

    __slots__ = ("__weakref__", "args", "data", "digest", "memo", "op", "sort")

    def __init__(self, op: str, sort: Sort, args: tuple[Term, ...], data: Any, digest: bytes) -> None:
        self.op = op
        self.sort: Sort = sort
        self.args = args
        self.data = data
        self.digest = digest
        self.memo: dict[Any, Any] = {}
        """What was computed from the term, by what it is."""

    def __lt__(self, other: Term) -> bool:
        return self.digest < other.digest

    def __repr__(self) -> str:
        inner = " ".join(map(repr, self.args))
        return f"({self.op}{'' if self.data is None else ' ' + str(self.data)}{' ' + inner if inner else ''})"


_KEPT: weakref.WeakValueDictionary[tuple[object, ...], Term] = weakref.WeakValueDictionary()
_HELD: list[Term] = []
"""The terms made since `restart`, so that none is made twice for one proof."""
COMPUTED: dict[tuple[object, ...], Term] = {}
"""Sums and products since `restart`, by what they are of."""


def make(op: str, sort: Sort, args: tuple[Term, ...] = (), data: Any = None) -> Term:
    """The term of these parts, as it is written; the functions of `terms` simplify."""
    key = (op, sort, args, data)
    found = _KEPT.get(key)
    if found is None:
        hashed = hashlib.blake2b(f"{op}|{sort}|{data}|".encode(), digest_size=16)
        for item in args:
            hashed.update(item.digest)
        found = _KEPT[key] = Term(op, sort, args, data, hashed.digest())
        _HELD.append(found)
    return found


def forget() -> None:
    """Lets go of the terms that nothing else holds."""
    COMPUTED.clear()
    _HELD.clear()
