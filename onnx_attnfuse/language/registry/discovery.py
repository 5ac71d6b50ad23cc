"""Where patterns come from: installed packs, files and folders, and whatever a program registers.

    catalogue = load(options)
    catalogue.readers, catalogue.net, catalogue.operators, catalogue.rules

A pack is a module; everything in it that a decorator of the language made, and every rewrite rule of onnxscript, is a pattern.
Installed packs are found by the entry point group `onnx_attnfuse.patterns`; the built-in one enters the same way.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import pathlib
import sys
import sysconfig
import types
from collections.abc import Iterator, Sequence
from typing import Any

from onnx_attnfuse.attention.match.steps import ScoreStepReader, WeightStepReader
from onnx_attnfuse.containment import Failure
from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.language.decorators import Operator, Pattern
from onnx_attnfuse.language.registry.registry import BUILT_IN, Catalogue, Entry, rules_in
from onnx_attnfuse.options import Options

GROUP = "onnx_attnfuse.patterns"
VARIABLE = "ATTNFUSE_PATTERNS"
_BUILT_IN = "onnx_attnfuse_patterns"
_HERE = pathlib.Path(__file__).parents[1]
_PYTHON = pathlib.Path(sysconfig.get_path("stdlib")) / "importlib"
_GRAINS = (Pattern, Operator, ScoreStepReader, WeightStepReader)
_registered: list[Entry] = []


def register(*patterns: object) -> None:
    """Adds patterns to every run of this process.

    Args:
        *patterns: Results of a decorator of the language, rules or rule sets of onnxscript, or modules that hold such.

    Raises:
        OptionError: One is none of these.
    """
    _registered.extend(entry for thing in patterns for entry in entries_of(thing, "registered"))


def forget() -> None:
    """Takes back everything that was registered."""
    _registered.clear()


def load(options: Options) -> Catalogue:
    """The patterns that a run under `options` goes by.

    Raises:
        OptionError: One cannot be loaded, two clash, or a name that is skipped or asked for does not exist.
    """
    entries, broken = _installed(options.skip_patterns)
    entries += [*_from_environment(), *_registered]
    for source in options.patterns:
        entries += from_path(source) if isinstance(source, (str, pathlib.PurePath)) else entries_of(source, "given")
    found = Catalogue.of(_selected(entries, options.skip_patterns, options.only_patterns))
    return dataclasses.replace(found, broken=broken)


def from_path(path: str | pathlib.PurePath) -> list[Entry]:
    """The patterns in a file, or in all files of a folder but those whose names begin with `_` or `test_`.

    Raises:
        OptionError: There is no such file, it cannot be run, or it holds no pattern.
    """
    place = pathlib.Path(path)
    if place.is_dir():
        files = [file for file in sorted(place.glob("*.py")) if not file.name.startswith(("_", "test_"))]
        if not files:
            raise OptionError(f"the folder {place} holds no pattern files; put files named *.py into it")
        return [entry for file in files for entry in from_path(file)]
    if not place.is_file():
        raise OptionError(f"there is no file {place}; --patterns takes a Python file or a folder of them")
    return entries_of(_run(place), str(place))


@functools.cache
def installed() -> tuple[tuple[Entry, ...] | Failure, ...]:
    """The patterns of each installed pack, the built-in one first, or why it cannot be loaded.

    In a checkout that is not installed there is no entry point, and the built-in pack is taken from the path.

    Raises:
        OptionError: The built-in pack cannot be loaded.
    """
    points = sorted(importlib.metadata.entry_points(group=GROUP), key=lambda point: (point.value != _BUILT_IN, point.name))
    built_in = [] if any(point.value == _BUILT_IN for point in points) else [entries_of(_load(_BUILT_IN), BUILT_IN)]
    return (*map(tuple, built_in), *map(_pack, points))


def _load(module: str) -> types.ModuleType:
    return importlib.import_module(module)


def _pack(point: importlib.metadata.EntryPoint) -> tuple[Entry, ...] | Failure:
    try:
        return tuple(entries_of(point.load(), f"pack {point.name}"))
    except (Exception, SystemExit) as error:
        if point.value == _BUILT_IN:
            raise OptionError(f"our own patterns cannot be loaded: {error}; install onnx-attnfuse again") from error
        return _broken(_called(point), error)


def _called(point: importlib.metadata.EntryPoint) -> str:
    """The name of an installed pack for people, with the distribution and version that brought it."""
    dist = point.dist
    return f"the installed pack '{point.name}'" + (f" of {dist.name} {dist.version}" if dist is not None else "")


def _broken(pack: str, error: BaseException) -> Failure:
    frames = [frame for frame in _frames(error) if not frame.filename.startswith("<") and not _is_ours(frame.filename)]
    place = (frames[-1].filename, frames[-1].lineno) if frames else (None, None)
    if isinstance(error, SyntaxError):
        place = error.filename, error.lineno
    return Failure("pack", pack, *place, f"{type(error).__name__}: {' '.join(str(error).split())}")


def _is_ours(file: str) -> bool:
    """Whether a file is this library's or Python's, by which packs are loaded."""
    return pathlib.Path(file).is_relative_to(_HERE) or pathlib.Path(file).is_relative_to(_PYTHON)


def _installed(skipped: Sequence[str]) -> tuple[list[Entry], tuple[Failure, ...]]:
    """The patterns of installed packs that go together, and the messages about the other packs."""
    entries, broken = list[Entry](), list[Failure]()
    for pack in installed():
        if isinstance(pack, Failure):
            broken.append(pack)
            continue
        kept = [entry for entry in pack if not any(_is_called(entry, name) for name in skipped)]
        try:
            if entries:
                Catalogue.of([*(entry for entry in entries if not any(_is_called(entry, name) for name in skipped)), *kept])
        except OptionError as error:
            name = pack[0].owner.removeprefix("pack ")
            broken.append(Failure("pack", f"the installed pack '{name}'", pack[0].file, None, f"OptionError: {error}"))
        else:
            entries += pack
    return entries, tuple(broken)


def entries_of(thing: object, owner: str) -> list[Entry]:
    """The patterns that a thing is or holds.

    Raises:
        OptionError: There is none.
    """
    found = [Entry(grain.name, grain, owner) for grain in _grains_in(thing)]
    found += [Entry(rule.name, rule, owner) for rule in rules_in(thing)]
    if not found:
        subject = f"module {thing.__name__}" if isinstance(thing, types.ModuleType) else repr(thing)
        raise OptionError(
            f"{owner}: {subject} holds no pattern; decorate a function with @pattern, @operator, @score_step or @weight_step"
        )
    return found


def _grains_in(thing: object) -> Iterator[Any]:
    if isinstance(thing, _GRAINS):
        yield thing
    elif isinstance(thing, types.ModuleType):
        held = vars(thing).values()
        yield from dict.fromkeys(item for item in held if isinstance(item, _GRAINS))
        inner = (item for item in held if isinstance(item, types.ModuleType) and item.__name__.startswith(f"{thing.__name__}."))
        for module in dict.fromkeys(inner):
            yield from _grains_in(module)


def _run(path: pathlib.Path) -> types.ModuleType:
    name = f"attnfuse_patterns.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.absolute())
    if spec is None or spec.loader is None:
        raise OptionError(f"{path} is no Python file by its name; --patterns takes a file named *.py or a folder of them")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except OptionError as error:
        raise OptionError(f"{_place(error, path)}: {error}") from error
    except SyntaxError as error:
        raise OptionError(f"{_place(error, path)}: SyntaxError: {error.msg}; correct the file") from error
    except (Exception, SystemExit) as error:
        raise OptionError(f"{_place(error, path)}: {type(error).__name__}: {error}; correct the file") from error
    return module


def _frames(error: BaseException) -> Sequence[Any]:
    import traceback

    return traceback.extract_tb(error.__traceback__)


def _place(error: BaseException, path: pathlib.Path) -> str:
    """Where in a file an error comes from, as `file.py:12`; in a file that it imports, where that one is broken."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{error.filename}:{error.lineno}"
    lines = [entry.lineno for entry in _frames(error) if pathlib.Path(entry.filename).absolute() == path.absolute()]
    return f"{path}:{lines[-1]}" if lines else str(path)


def _from_environment() -> list[Entry]:
    paths = filter(None, os.environ.get(VARIABLE, "").split(os.pathsep))
    return [entry for path in paths for entry in from_path(path)]


def _selected(entries: Sequence[Entry], skipped: Sequence[str], only: Sequence[str]) -> list[Entry]:
    """Without skipped entries; with `only`, of whole attentions, operators and rules no others than those."""
    for name in (*skipped, *only):
        if not any(_is_called(entry, name) for entry in entries):
            close = difflib.get_close_matches(name, [entry.name for entry in entries], 1)
            hint = f"did you mean {close[0]}?" if close else "`attnfuse patterns list` shows them"
            raise OptionError(f"no pattern is called {name!r}; {hint}")
    kept = [entry for entry in entries if not any(_is_called(entry, name) for name in skipped)]
    return [entry for entry in kept if not only or entry.is_step or any(_is_called(entry, name) for name in only)]


def _is_called(entry: Entry, name: str) -> bool:
    """Whether a name, a name with wildcards, or the idea that steps belong to, means an entry."""
    return fnmatch.fnmatchcase(entry.name, name) or entry.name.startswith(f"{name}.")
