"""Terms as objects, of which there is one for each way to write a term."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import weakref
from collections.abc import Generator
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
        """Results computed from the term, by their kind."""

    def __lt__(self, other: Term) -> bool:
        return self.digest < other.digest

    def __repr__(self) -> str:
        inner = " ".join(map(repr, self.args))
        return f"({self.op}{'' if self.data is None else ' ' + str(self.data)}{' ' + inner if inner else ''})"


_SHARED: dict[tuple[object, ...], Term] = {}
"""The terms that all proofs have in common: constants of modules."""


class Proof(threading.local):
    """The state of the proof that a thread is at work on, so that proofs in two threads know nothing of each other."""

    def __init__(self) -> None:
        self.kept = weakref.WeakValueDictionary[tuple[object, ...], Term](_SHARED)
        """Every term there is, by its parts."""
        self.held: list[Term] = []
        """The terms made since `forget`, so that none is made twice for one proof."""
        self.computed: dict[tuple[object, ...], Term] = {}
        """Sums and products since `forget`, by their operands."""
        self.noted: dict[Term, None] = {}
        """The integers that were taken to be at least 0."""
        self.names: dict[Term, Term] = {}
        """The names of quotients."""
        self.met: dict[tuple[Term, Term], None] = {}
        """Lengths that met."""
        self.indices = 0
        """How many indices were named."""
        self.is_aside = False
        """Whether terms are made `aside` of proofs."""

    def forget(self) -> None:
        """Lets go of the terms that nothing else holds, and names indices from the beginning."""
        self.indices = 0
        self.computed.clear()
        self.held.clear()


PROOF = Proof()
_MAX_COMPUTED = 1 << 14
"""Sums and products that are remembered outside of proofs."""


def make(op: str, sort: Sort, args: tuple[Term, ...] = (), data: Any = None) -> Term:
    """The term of these parts, as it is written; the functions of `terms` simplify."""
    key = (op, sort, args, data)
    found = PROOF.kept.get(key)
    if found is None:
        hashed = hashlib.blake2b(f"{op}|{sort}|{data}|".encode(), digest_size=16)
        for item in args:
            hashed.update(item.digest)
        found = PROOF.kept[key] = Term(op, sort, args, data, hashed.digest())
        PROOF.held.append(found)
    return found


def make_shared(op: str, sort: Sort, data: Any = None) -> Term:
    """A constant of a module, one object for all threads."""
    found = _SHARED[op, sort, (), data] = make(op, sort, (), data)
    return found


@contextlib.contextmanager
def aside() -> Generator[None, None, None]:
    """Has the terms that are made inside be no part of a proof: their side conditions are not noted, and they are not held.

    Sums and products are remembered up to the end of the outermost one.
    """
    outer, held = (PROOF.noted, PROOF.met, PROOF.computed, PROOF.is_aside), len(PROOF.held)
    PROOF.noted, PROOF.met, PROOF.is_aside = {}, {}, True
    if not outer[-1]:
        PROOF.computed = {}
    try:
        yield
    finally:
        PROOF.noted, PROOF.met, PROOF.computed, PROOF.is_aside = outer
        del PROOF.held[held:]
        if len(PROOF.computed) > _MAX_COMPUTED:
            PROOF.computed.clear()
