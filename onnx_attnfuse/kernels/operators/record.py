"""The record of a fused operator; records are data, and importing one imports nothing heavy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

from onnx_attnfuse.graph.ops import CONTRIB, plain_domain

if TYPE_CHECKING:
    import onnx_ir as ir

    from onnx_attnfuse.kernels.conditions import AttentionParams
    from onnx_attnfuse.kernels.execution_provider import OpSupport
    from onnx_attnfuse.kernels.op_node import OpNode

Role = Literal[
    "input", "query", "key", "value", "weights", "projection bias",
    "mask", "bias", "lengths", "last", "total", "rows", "positions", "past", "cos", "sin", "sink", "offsets", "other",
]  # fmt: skip
"""The role of an input, whatever name the operator gives it.

A mask tells which keys count, by lengths or by 0 and 1; a bias is added to the scores. Lengths count the keys of each entry, last
is the place of its last key, total how many keys the longest has, rows how many of its new ones are tokens. Past keys and values
may be empty. Offsets tell where tokens without padding come from.
"""
OnCpu = Literal["all forms", "some forms", "no kernel"]
"""The forms of an operator that ONNX Runtime's CPU runs; the reference runs the rest."""


@dataclasses.dataclass(frozen=True)
class OpInfo:
    """A fused operator: its signature, the facts about its kernels, and the module of its target."""

    name: str
    inputs: Mapping[str, Role]
    """All inputs in order, by the name that the operator's schema has for them."""
    domain: str = CONTRIB
    since: int = 1
    """The version of its domain from which on the operator is there."""
    runtime: tuple[int, int] = (0, 0)
    """The version of ONNX Runtime from which on it has the operator, where that is later than the oldest one supported."""
    kind: Literal["attention", "rotation", "padding", "normalization", "activation", "view", "recurrence"] = "attention"
    packed: bool = False
    """Whether it works on tokens without padding, whose number no shape tells."""
    on_cpu: OnCpu = "all forms"
    not_on_cpu: frozenset[str] = frozenset()
    """Inputs that the CPU's kernel refuses where they are given."""
    fragile: bool = True
    """Whether its CPU kernel may end the process where an operand other than the past is empty."""
    rank: int | None = None
    """Its rank among the targets that are equally fast, 1 the first; None: it is not planned site by site."""
    option: str | None = None
    """Its name for callers, where that is not its key."""
    target: str | None = None
    """A module: why it cannot compute an attention, how it is handed a mask, how it is built; see `targets.Target`."""
    support: Mapping[str, Callable[[], OpSupport]] = dataclasses.field(default_factory=dict[str, "Callable[[], OpSupport]"])
    """The support of execution providers, by their names; their own records have the oldest operators.

    Functions, as the facts name element types, and the record itself imports nothing heavy."""
    describe: Callable[[OpNode], AttentionParams] | None = None
    """The parameters of a node that exists in a model; it may raise Refused. None: its kernels are not forecast."""

    @property
    def key(self) -> str:
        """The operator's name among fused operators: `onnx.` before it if it is a standard one."""
        return qualified(self.name, self.domain)

    def place(self, name: str) -> int:
        """The place of an input."""
        return list(self.inputs).index(name)

    def role(self, place: int) -> Role:
        """The role of the input at a place; `other` beyond the inputs that the operator has."""
        roles = list(self.inputs.values())
        return roles[place] if place < len(roles) else "other"

    def input(self, node: ir.Node, name: str) -> ir.Value | None:
        """An input of one of its nodes, or None if it is left out."""
        place = self.place(name)
        return node.inputs[place] if place < len(node.inputs) else None

    def first(self, node: ir.Node, role: Role) -> ir.Value | None:
        """The first input of one of its nodes that is given and has a role, or None."""
        given = (value for value, found in zip(node.inputs, self.inputs.values(), strict=False) if found == role)
        return next((value for value in given if value is not None), None)

    def arranged(self, given: Mapping[str, ir.Value | None]) -> list[ir.Value | None]:
        """Inputs by name as a node takes them: in order, None for those between that are left out."""
        last = max(self.place(name) for name, value in given.items() if value is not None)
        return [given.get(name) for name in list(self.inputs)[: last + 1]]


def recurrence_on_cpu() -> OpSupport:
    """The record of the CPU for operators of recurrences."""
    import onnx_ir as ir

    from onnx_attnfuse.kernels.execution_provider import OpSupport

    float32 = frozenset([ir.DataType.FLOAT])
    return OpSupport("measured with ONNX Runtime 1.31 and 1.32 (docs/targets.md)", float32, float32)


def qualified(op: str, domain: str) -> str:
    """The name of an operator among fused operators."""
    return op if plain_domain(domain) else f"onnx.{op}"
