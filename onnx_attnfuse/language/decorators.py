"""Decorators that register patterns: whole attentions, operators with a meaning, and readers of single steps.

    @pattern                  a formula that is found in graphs, and what it means
    @operator("acme::Attn")   an operator of another domain, and the formula that it computes
    @score_step("Mul")        what a node does to attention scores
    @weight_step("Where")     what a node does to attention weights

A decorated function becomes data; modules that hold it are packs (`onnx_attnfuse.packs`). Nothing happens on import.
A pattern is checked when it is registered: each fault is one line that says the problem and the remedy.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, overload

from onnx_attnfuse.attention.match.steps import ScoreReader, ScoreStepReader, WeightReader, WeightStepReader
from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.graph.ops import STANDARD
from onnx_attnfuse.language.expression import NONE, Tensor, combined, either
from onnx_attnfuse.language.normal_form import Choices, Form, kind_of, names_of, normal, slot_groups, too_many, variants
from onnx_attnfuse.reasons import Reason

Reference: TypeAlias = Callable[..., Any]
"""An operator in NumPy: inputs as arrays (None where left out), attributes by name; returns an array, or a tuple of them."""
_MOST_OPTIONAL = 6
_DEFINING = {"Rows": "rows", "Columns": "columns", "Rearrange": "rearrange"}


@dataclasses.dataclass(frozen=True)
class Equation:
    """A formula as graphs have it, and an equal one that is made of attention."""

    written: Tensor
    meaning: Tensor


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A formula that looks like attention and cannot be fused, with the reason that the report gives."""

    written: Tensor
    code: str
    message: str


def equation(written: Tensor, meaning: Tensor) -> Equation:
    """A pattern's return value where it is fused as another formula; the two are held against each other wherever it is found.

    Args:
        written: The formula in graphs.
        meaning: The same, in terms of `softmax(...) @ v`.
    """
    return Equation(written, meaning)


def refusal(written: Tensor, code: str, message: str) -> Refusal:
    """A pattern's return value where it is only there to say why something is not fused.

    Args:
        written: The formula in graphs.
        code: A stable name of the reason, kebab-case.
        message: One sentence for a reader.
    """
    return Refusal(written, code, message)


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A whole attention."""

    name: str
    written: Tensor
    meaning: Tensor | None
    """None: it is refused."""
    refused: Reason | None
    operands: tuple[str, ...]
    priority: int
    """Of patterns that fit in one place the higher one is taken, of equals the larger formula."""
    doc: str
    home: str
    """Where it is defined, for messages."""

    @property
    def restates(self) -> bool:
        """Whether the pattern only names an attention that is fused anyway."""
        return self.meaning == self.written


@dataclasses.dataclass(frozen=True)
class Operator:
    """An operator of another domain that is taken as the formula it computes."""

    name: str
    domain: str
    op: str
    define: Callable[..., Tensor]
    """Inputs as formulas by position (None where left out), attributes by name; gives the formula of the first output."""
    inputs: tuple[str, ...]
    attributes: Mapping[str, object] = dataclasses.field(compare=False)
    """Defaults of the attributes; `inspect.Parameter.empty` where there is none."""
    reference: Reference | None
    doc: str
    home: str


Definition: TypeAlias = Pattern | Operator | ScoreStepReader | WeightStepReader
_Formula: TypeAlias = Callable[..., "Tensor | Equation | Refusal"]


@overload
def pattern(function: _Formula, /) -> Pattern: ...
@overload
def pattern(*, name: str | None = None, priority: int = 0) -> Callable[[_Formula], Pattern]: ...
def pattern(
    function: _Formula | None = None, /, *, name: str | None = None, priority: int = 0
) -> Pattern | Callable[[_Formula], Pattern]:
    """Makes a function of operands a pattern: it returns a formula, an `equation` or a `refusal`.

    Operands are any tensors. Two names say more: `scale` (also `scale1`, ...) is every factor in front of the scores, 1 if
    there is none, and `mask` everything that is added to or replaces them. An operand with the default None is one
    that a graph may lack.

    Args:
        function: The function.
        name: The pattern's name; by default the function's.
        priority: Of patterns that fit in one place the higher one is taken.

    Raises:
        OptionError: It could never be found, or leaves something open; the message says which.
    """

    def decorate(function: _Formula) -> Pattern:
        given = name or function.__name__
        operands, optional = operands_of(function, given)
        found = combined(lambda values: _returned(function(**values), given), operands, optional, partial(_either, given))
        written = found if isinstance(found, Tensor) else found.written
        meaning = None if isinstance(found, Refusal) else found.meaning if isinstance(found, Equation) else found
        refused = Reason(found.code, found.message) if isinstance(found, Refusal) else None
        for problem in _problems(operands, optional, written, meaning):
            raise OptionError(f"pattern '{given}': {problem}")
        return Pattern(given, written, meaning, refused, operands, priority, inspect.getdoc(function) or "", _home(function))

    return decorate if function is None else decorate(function)


def operator(op: str, *, reference: Reference | None = None) -> Callable[[Callable[..., Tensor]], Operator]:
    """Makes a function the definition of an operator of another domain.

    Its positional parameters are the operator's inputs, optional ones with the default None; those after `*` are its attributes.

    Args:
        op: `domain::Operator`.
        reference: The operator in NumPy; without one there is nothing to hold the definition against, and it is believed.

    Raises:
        OptionError: The name has no domain or is the standard's, or the function has no inputs.
    """
    domain, _, name = op.partition("::")
    if not name or domain in STANDARD:
        raise OptionError(f"operator is given {op!r}; write domain::Operator, of a domain that is not the standard's")

    def decorate(define: Callable[..., Tensor]) -> Operator:
        parameters = inspect.signature(define).parameters.values()
        inputs = tuple(item.name for item in parameters if item.kind is item.POSITIONAL_OR_KEYWORD)
        attributes = {item.name: item.default for item in parameters if item.kind is item.KEYWORD_ONLY}
        if not inputs or len(inputs) + len(attributes) != len(parameters):
            raise OptionError(
                f"the definition of {op} takes its inputs by position and its attributes after *; it has other parameters"
            )
        return Operator(op, domain, name, define, inputs, attributes, reference, inspect.getdoc(define) or "", _home(define))

    return decorate


def score_step(*ops: str, domain: str = "") -> Callable[[ScoreReader], ScoreStepReader]:
    """Makes a function the reader of what `ops` do to attention scores.

    Args:
        ops: Operator types.
        domain: Their domain.
    """
    return lambda read: ScoreStepReader(_short(read), domain, ops, read, inspect.getdoc(read) or "", _home(read))


def weight_step(*ops: str, domain: str = "") -> Callable[[WeightReader], WeightStepReader]:
    """Makes a function the reader of what `ops` do to attention weights; see `score_step`."""
    return lambda read: WeightStepReader(_short(read), domain, ops, read, inspect.getdoc(read) or "", _home(read))


def operands_of(function: _Formula, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The operands, and those of them that may be None."""
    parameters = inspect.signature(function).parameters.values()
    if not parameters or any(
        item.kind is not item.POSITIONAL_OR_KEYWORD or (item.default is not item.empty and item.default is not None)
        for item in parameters
    ):
        raise OptionError(
            f"pattern '{name}' has other parameters than operands; write each as a plain name, with =None if graphs may lack it"
        )
    optional = tuple(item.name for item in parameters if item.default is None)
    if len(optional) > _MOST_OPTIONAL:
        raise OptionError(
            f"pattern '{name}' has {len(optional)} operands that may be None, and {_MOST_OPTIONAL} at most; make two patterns"
        )
    return tuple(item.name for item in parameters), optional


def _returned(found: object, name: str) -> Tensor | Equation | Refusal:
    if not isinstance(found, (Tensor, Equation, Refusal)):
        raise OptionError(f"pattern '{name}' returns {found!r}; return a formula, equation(...) or refusal(...)")
    return found


def _either(
    name: str, operand: str, with_it: Tensor | Equation | Refusal, without: Tensor | Equation | Refusal
) -> Tensor | Equation | Refusal:
    """One pattern of what a function returns with and without an operand."""
    if isinstance(with_it, Tensor) and isinstance(without, Tensor):
        return either(operand, with_it, without)
    if isinstance(with_it, Equation) and isinstance(without, Equation):
        written, meaning = either(operand, with_it.written, without.written), either(operand, with_it.meaning, without.meaning)
        return Equation(written, meaning)
    if isinstance(with_it, Refusal) and isinstance(without, Refusal):
        return dataclasses.replace(with_it, written=either(operand, with_it.written, without.written))
    raise OptionError(
        f"pattern '{name}' returns one thing with '{operand}' and another kind of thing without; return the same kind"
    )


def _home(function: Callable[..., object]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _short(function: Callable[..., object]) -> str:
    """The name of a reader: the idea its module is named after, and the function's own."""
    return f"{function.__module__.rpartition('.')[2]}.{function.__name__}"


def _problems(operands: Sequence[str], optional: Sequence[str], written: Tensor, meaning: Tensor | None) -> Iterator[str]:
    """Faults of a pattern, which could never be found or leaves something open; the most telling first.

    Args:
        operands: Its operands.
        optional: Those that may be None; there is a choice of the name of each.
        written: The formula in graphs.
        meaning: Its meaning; None if it is refused.
    """
    for operand in filter(kind_of, optional):
        yield f"'{operand}' is always optional; write it without =None"
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
