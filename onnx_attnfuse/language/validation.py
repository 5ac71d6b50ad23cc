"""Validation of patterns when they are registered: each fault is one line that says the problem and the remedy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.language.expression import NONE, Tensor
from onnx_attnfuse.language.normal_form import Choices, Form, kind_of, names_of, normal, slot_groups, too_many, variants

_DEFINING = {"Rows": "rows", "Columns": "columns", "Rearrange": "rearrange"}


def check_pattern(name: str, operands: Sequence[str], optional: Sequence[str], written: Tensor, meaning: Tensor | None) -> None:
    """Refuses a pattern that could never be found, or that leaves something open.

    Args:
        name: Its name.
        operands: Its operands.
        optional: Those that may be None; there is a choice of the name of each.
        written: The formula in graphs.
        meaning: Its meaning; None if it is refused.

    Raises:
        OptionError: The line that says which.
    """
    for problem in _problems(operands, optional, written, meaning):
        raise OptionError(f"pattern '{name}': {problem}")


def _problems(operands: Sequence[str], optional: Sequence[str], written: Tensor, meaning: Tensor | None) -> Iterator[str]:
    """Faults of a pattern, the most telling first."""
    for operand in filter(kind_of, optional):
        yield f"'{operand}' may be nothing as it is; write it without =None"
    everything = [*_nodes(written), *(() if meaning is None else _nodes(meaning))]
    yield from _choices(everything, operands, optional)
    if too_many(written):
        yield "its alternatives combine to more than 64 formulas; leave to the engine what it does itself, or make two patterns"
    yield from _unused(operands, optional, written)
    yield from _impossible(written)
    for choices, formula in variants(written):
        form = normal(formula)
        yield from _roots(formula, choices)
        yield from _slots(form)
        yield from _squares(formula)
    if meaning is not None:
        yield from _meaning(written, meaning)


def _nodes(tensor: Tensor) -> Iterator[Tensor]:
    yield tensor
    for arg in tensor.args:
        yield from _nodes(arg)


def _choices(nodes: Sequence[Tensor], operands: Sequence[str], optional: Sequence[str]) -> Iterator[str]:
    seen: dict[str, Tensor] = {}
    for node in nodes:
        if node.op != "AnyOf":
            continue
        choice = node.name
        if choice in operands and choice not in optional:
            yield f"any_of({choice!r}) has the name of an operand; give the choice another name"
        if seen.setdefault(choice, node).attribute("names") != node.attribute("names"):
            yield f"any_of({choice!r}) occurs twice with other alternatives; give one of them another name"
        if len(set(node.args)) < len(node.args) and choice not in optional:
            yield f"any_of({choice!r}) has two equal alternatives, of which one can never be found; remove it"


def _unused(operands: Sequence[str], optional: Sequence[str], written: Tensor) -> Iterator[str]:
    for choices, formula in variants(written):
        used = {node.name for node in _nodes(formula) if node.op == "Variable"}
        for operand in operands:
            left_out = operand in optional and choices.get(operand) == NONE
            if operand not in used and not left_out and not (choices and kind_of(operand)):
                where = f" if {', '.join(f'{choice} is {name}' for choice, name in choices.items())}" if choices else ""
                yield f"the operand '{operand}' is not in the written formula{where}; use it or remove it"


def _impossible(written: Tensor) -> Iterator[str]:
    for node in _nodes(written):
        if node.op in _DEFINING:
            yield f"{_DEFINING[node.op]} is for definitions of operators; a written formula can have any layout, so leave it out"
        if node.op == "Softmax" and len(node.args) > 1:
            yield "a sink is for the meaning; the written formula is read as graphs have it, without one"
        if node.op == "Number" and not math.isfinite(node.value):
            yield "it can never be found: a number in it is not finite; a mask of such numbers is the operand 'mask'"
        if node.args and all(arg.op == "Number" for arg in node.args):
            yield f"it can never be found: {node} is a number, which graphs hold as such; write the number"


def _roots(formula: Tensor, choices: Choices) -> Iterator[str]:
    if formula.op in {"Variable", "Number", "T"}:
        where = f", where {' and '.join(f'{choice} is {name}' for choice, name in choices.items())}" if choices else ""
        yield f"it can never be found: {formula} is no operator{where}; write what computes it"


def _slots(form: Form) -> Iterator[str]:
    """Slots are where their steps are: a scale is a factor, a mask is added."""
    for name in sorted(names_of(form)):
        kind = kind_of(name)
        if kind is not None:
            role = "factors: multiply by it or divide by it" if kind == "scale" else "masks: add it"
            yield f"'{name}' names {role}; or call the operand something else"
    groups = slot_groups(form)
    for group in groups:
        if any(other != group and set(other) & set(group) for other in groups):
            yield f"'{group[0]}' is with other slots in two places; number one of them, as in '{group[0]}1'"


def _squares(formula: Tensor) -> Iterator[str]:
    """A product of a tensor with itself whose rows would have to be its columns."""
    for node in _nodes(formula):
        if node.op == "MatMul" and node.args[0] == node.args[1]:
            yield f"it can never be found: {node} multiplies rows with rows of the same tensor; transpose one of them"


def _meaning(written: Tensor, meaning: Tensor) -> Iterator[str]:
    if not any(node.op == "Softmax" for node in _nodes(meaning)):
        yield f"it means {meaning}, which is no attention; write it with softmax(...), or return refusal(...)"
    for node in _nodes(meaning):
        if node.op == "MixHeads":
            yield "heads that are mixed are no attention of theirs; return refusal(...)"
    for choices, formula in variants(written):
        wanted = next((found for taken, found in variants(meaning, choices) if taken.items() >= choices.items()), meaning)
        form, other = normal(formula), normal(wanted)
        for name in sorted(names_of(other) - names_of(form)):
            yield f"the meaning has the operand '{name}', which is not in the written formula; the graph does not give it"
        for group in slot_groups(other) - slot_groups(form):
            yield f"{' and '.join(map(repr, group))} are together in the meaning and not in the written formula; write both alike"
