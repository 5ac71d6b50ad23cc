"""The fields of a dataclass as options of a command, so that the two cannot drift apart.

A field's type says what the option takes, its docstring is the option's help. Its metadata may say more: `command`, False for
a field without an option; `short`, a letter; `metavar`, the name of a value; `choices`, a function that returns the choices;
`several`, True where it may be some of them, with commas between; `least`, the smallest number; `count`, True where it says how
often the option is given.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import pathlib
import sys
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import click

from onnx_attnfuse.options import Options
from onnx_attnfuse_cli.suggestions import Choice, Choices

SECTIONS: Mapping[str, Collection[str]] = {
    heading: frozenset(names.split())
    for heading, names in {
        "What to write": "output report format json bench dry_run evidence verbose quiet",
        "Where the model will run": "ep arch onnxruntime dim same cuda_graph",
        "Which operator": (
            "target packed_tokens dequantise_attention conformance always keep_outputs flash efficient sdpa_fallback"
        ),
        "Decoders": "cache context_length past_length window_cache kv_cache calibrate hf_config",
        "Exactness, and for which batches": "padding assume certify require_proof solver verify",
        "Patterns": "patterns skip_patterns only_patterns",
        "In CI": "min_fused require_all",
    }.items()
}
"""The options of fusing by the headings under which help and docs/options.md have them."""
_Function = TypeVar("_Function", bound=Callable[..., Any])


def derived_options(of: type = Options, *, only: Collection[str] | None = None) -> Callable[[_Function], _Function]:
    """A decorator that gives a command one option for each field of a dataclass that a command line can express.

    Args:
        of: The dataclass; the library's options if it is not given.
        only: The fields wanted; all if None.

    Returns:
        The decorator. The command receives the fields as keyword arguments of the same names.
    """
    public = [field for field in dataclasses.fields(of) if field.metadata.get("command", True)]
    fields = [field for field in public if only is None or field.name in only]

    def decorate(command: _Function) -> _Function:
        for field in reversed(fields):
            if (settings := _settings(of, field)) is not None:
                names = [f"--{field.name.replace('_', '-')}", field.name]
                names += [f"-{field.metadata['short']}"] if "short" in field.metadata else []
                command = click.option(*names, **settings)(command)
        return command

    return decorate


def taken(of: type, given: dict[str, Any]) -> Any:
    """An instance of a dataclass, made of what a command was given; that is taken out of `given`."""
    return of(**{field.name: given.pop(field.name) for field in dataclasses.fields(of) if field.name in given})


def _settings(of: type, field: dataclasses.Field[Any]) -> dict[str, Any] | None:
    kind = _plain_type(_field_types(of)[field.name])
    common = {"default": field.default, "help": field_docs(of).get(field.name, "")}
    common["show_default"] = bool(field.default)
    if "metavar" in field.metadata:
        common["metavar"] = field.metadata["metavar"]
    if kind is bool:
        return {**common, "is_flag": True, "show_default": False}
    words = field.metadata["choices"]() if "choices" in field.metadata else ()
    if typing.get_origin(kind) is tuple and words:
        named = f"{common['help']} Names: {', '.join(words)}."
        return {"multiple": True, "metavar": "NAME", "type": Choice(words), "help": named}
    if typing.get_origin(kind) is typing.Literal or words:
        words = words or typing.get_args(kind)
        return {**common, "type": Choices(words) if field.metadata.get("several") else Choice(words)}
    if kind is pathlib.Path:
        return {**common, "type": click.Path(path_type=pathlib.Path)}
    if kind is int and field.metadata.get("count"):
        return {"count": True, "help": common["help"]}
    if kind is int and "least" in field.metadata:
        return {**common, "type": click.IntRange(min=field.metadata["least"])}
    if kind in (int, float, str):
        return {**common, "type": kind}
    if typing.get_origin(kind) is tuple:
        of_paths = typing.get_args(kind)[0] is not str
        takes = click.Path(path_type=pathlib.Path) if of_paths else str
        return {"multiple": True, "metavar": "FILE" if of_paths else "NAME", "type": takes, "help": common["help"]}
    if kind == Mapping[str, int]:
        return {"multiple": True, "metavar": "NAME=N", "callback": _lengths, "help": common["help"]}
    return None


def _lengths(ctx: click.Context, parameter: click.Parameter, given: Sequence[str]) -> dict[str, int]:
    """`batch=4 seq=2048` as a mapping."""
    found: dict[str, int] = {}
    for item in given:
        name, _, number = item.rpartition("=")
        if not name or not number.isdecimal() or int(number) < 1:
            raise click.BadParameter(f"{item!r} is not NAME=N with N from 1 on", ctx, parameter)
        found[name] = int(number)
    return found


def _plain_type(kind: Any) -> Any:
    """`X` for `X | None`."""
    if typing.get_origin(kind) not in (typing.Union, types.UnionType):
        return kind
    rest = [part for part in typing.get_args(kind) if part is not types.NoneType]
    return rest[0] if len(rest) == 1 else kind


@functools.cache
def _field_types(of: type) -> Mapping[str, Any]:
    return typing.get_type_hints(of)


@functools.cache
def field_docs(of: type) -> Mapping[str, str]:
    """The docstring under each field, which Python does not keep; empty where the source is not there."""
    try:
        source = inspect.getsource(sys.modules[of.__module__])  # of the class alone, Python would tokenize all of it once more
    except OSError:
        return {}
    defined = next(item for item in ast.parse(source).body if isinstance(item, ast.ClassDef) and item.name == of.__name__)
    docs: dict[str, str] = {}
    for field, doc in itertools.pairwise(defined.body):
        match field, doc:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = inspect.cleandoc(text)
            case _:
                continue
    return docs
