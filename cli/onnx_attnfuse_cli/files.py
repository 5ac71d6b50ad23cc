"""Files that a run reads and writes: one model beside its result, or many, each result in a place of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import importlib
import os
import pathlib
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import click

_Function = TypeVar("_Function", bound=Callable[..., Any])

SUFFIX = ".attnfuse.onnx"
"""The suffix of a result's name, unless chosen."""
_ANY = "*.onnx"
_FEW = 3


@dataclasses.dataclass(frozen=True)
class Files:
    """The model that one run of the command reads, and the files that it writes for it."""

    model: pathlib.Path
    out: pathlib.Path | None
    """None: the model is not written."""
    reports: tuple[pathlib.Path, ...] = ()
    title: str = ""
    """The model's name among others."""
    shared: tuple[pathlib.Path, ...] = ()
    """The data files of the source that the result needs too, once it is written."""
    is_alone: bool = False
    """Whether this is the only model of the run, so that a genai_config.json beside the result is its own."""
    hf_config: Mapping[str, Any] | None = None
    """The Hugging Face config of the model."""
    notes: tuple[str, ...] = ()
    """Lines on other files written."""

    @property
    def written(self) -> str:
        """One line that names the file written, or says that nothing was."""
        return wrote(self.out, self.shared) if self.out else "nothing written (--dry-run)"

    def check(self) -> None:
        """Refuse early what would be refused, or regretted, after the work is done."""
        if self.out and same(self.out, self.model):
            raise click.UsageError(f"-o is the model itself, {self.model}; choose another file")
        for report in self.reports:
            if same(report, self.model) or (self.out and same(report, self.out)):
                raise click.UsageError(f"--report is a model, {report}; choose another file")
        for path in filter(None, (self.out, *self.reports)):
            check_place(path)
        self.check_packages()

    @property
    def has_page(self) -> bool:
        """Whether a report is a page."""
        if not self.reports:
            return False
        from onnx_attnfuse.report.files import is_page

        return any(map(is_page, self.reports))

    def check_packages(self) -> None:
        """Refuse a page that could not be made."""
        if self.has_page:
            from onnx_attnfuse.report.html import check_installed

            check_installed()


def wrote(out: pathlib.Path, shared: Sequence[pathlib.Path]) -> str:
    """One line that names the file written, and the data files of the source that must stay beside it."""
    names = ", ".join(path.name for path in shared[:_FEW]) + (", ..." if len(shared) > _FEW else "")
    return f"wrote {out}, which needs {names} in its folder, as the source does" if shared else f"wrote {out}"


def check_place(path: pathlib.Path) -> None:
    """Refuses early a file that could not be written where it is to go.

    Raises:
        click.UsageError: A folder or a device is there, or there is no folder to put it in.
    """
    if path.is_dir():
        raise click.UsageError(f"{path} is a folder; give the name of a file in it")
    if path.exists() and not path.is_file():
        raise click.UsageError(f"{path} is no regular file; give the name of one")
    if path.parent.exists() and not path.parent.is_dir():
        raise click.UsageError(f"{path.parent} is a file, and {path} cannot be in it; give a folder")
    if not path.parent.is_dir():
        raise click.UsageError(f"the folder {path.parent} does not exist; make it first")


def check_there(model: pathlib.Path) -> None:
    """Refuses a model that does not exist, and says what to type for the name of one on Hugging Face.

    Raises:
        click.UsageError: It does not.
    """
    if model.exists() or model.is_symlink():
        return
    if _is_hub_id(model):
        export = f"optimum-cli export onnx --model {model} exported"
        raise click.UsageError(f"{model} does not exist here; for a model of that name on Hugging Face, run {export} first")
    raise click.UsageError(f"{model} does not exist; check the path")


def located(model: pathlib.Path) -> pathlib.Path:
    """The model, or for the id of one on Hugging Face its folder in the local cache of huggingface_hub; nothing is downloaded."""
    if model.exists() or not _is_hub_id(model):
        return model
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        return pathlib.Path(hub.snapshot_download(str(model), local_files_only=True))
    except (ImportError, OSError, ValueError):  # the package, or the model, is not there
        return model


def _is_hub_id(model: pathlib.Path) -> bool:
    """Whether a name may be that of a model on Hugging Face: `owner/name` without such a folder, or a name without a dot."""
    if re.fullmatch(r"[\w-]+", str(model)):
        return str(model) != STREAM
    is_id = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(model)) is not None
    return is_id and model.suffix != ".onnx" and not model.parent.exists()


def same(one: pathlib.Path, other: pathlib.Path) -> bool:
    """Whether two names are of one file, there or not."""
    return os.path.realpath(one) == os.path.realpath(other) or (one.exists() and other.exists() and one.samefile(other))


def are_several(arguments: Sequence[pathlib.Path]) -> bool:
    """Whether arguments ask for several models: more than one, a folder that holds some, or a pattern."""
    return len(arguments) > 1 or any(_is_pattern(argument) or next(argument.rglob(_ANY), None) for argument in arguments)


def several(
    arguments: Sequence[pathlib.Path],
    output: pathlib.Path | None,
    reports: pathlib.Path | None,
    *,
    dry_run: bool,
    whole: pathlib.Path | None = None,
) -> list[Files]:
    """The files to read and to write for every model that the arguments name.

    Below a folder to write to, a result has the place that its model has below the folder common to all models, so that no
    two results meet. A result of an earlier run is no model of a folder or a pattern.

    Args:
        arguments: Files, folders and patterns.
        output: Folder for the models; None: each beside its source.
        reports: Folder for the reports; None: there are none.
        dry_run: Models are not written.
        whole: The folder of the models, where the output becomes its like; results then keep the names of their models.
    """
    for name, folder in (("-o", output), ("--report", reports)):
        if folder is not None and ((folder.exists() and not folder.is_dir()) or folder.suffix in {".onnx", ".json", ".html"}):
            raise click.UsageError(f"{name} is {folder}, a file, and there are several models; give a folder")
    models = list(dict.fromkeys(path for argument in arguments for path in _models(argument)))
    root = whole.absolute() if whole else pathlib.Path(os.path.commonpath([path.parent.absolute() for path in models]))
    found: list[Files] = []
    for model in models:
        place = model.absolute().relative_to(root)
        out = output / place if output and whole else (output / place if output else model).with_suffix(SUFFIX)
        reported = (reports / place.with_suffix(".html"), reports / place.with_suffix(".json")) if reports else ()
        found.append(Files(model, None if dry_run else out, reported, place.as_posix()))
    _check_apart(found)
    return found


def _models(argument: pathlib.Path) -> Iterator[pathlib.Path]:
    if argument.is_dir():
        paths = sorted(argument.rglob(_ANY))
    elif _is_pattern(argument):
        start = pathlib.Path(argument.anchor)
        paths = sorted(path for path in start.glob(str(argument.relative_to(start))) if path.is_file())
    else:
        yield argument
        return
    kept = [path for path in paths if not path.name.endswith(SUFFIX)]
    if not kept:
        raise click.UsageError(f"there is no model in {argument}; check the path")
    yield from kept


def _is_pattern(argument: pathlib.Path) -> bool:
    return glob.has_magic(str(argument)) and not argument.exists()


def _check_apart(files: Sequence[Files]) -> None:
    """Refuse what would write over a model of the same run, or twice to one file."""
    models = {item.model.resolve(): item.model for item in files}
    written: dict[pathlib.Path, pathlib.Path] = {}
    for item in files:
        for path in filter(None, (item.out, *item.reports)):
            resolved = path.resolve()
            if resolved in models:
                raise click.UsageError(f"{item.model} would be written to {path}, a model of this run too; leave one out")
            if resolved in written:
                raise click.UsageError(f"{item.model} and {written[resolved]} would both be written to {path}; leave one out")
            written[resolved] = item.model


def output_option(suffix: str) -> Callable[[_Function], _Function]:
    """The option `-o`, whose help names where the result goes without it: the model's name with `suffix`."""
    text = f"Where to write.  [default: MODEL's name with {suffix}]"
    return click.option("-o", "--output", type=click.Path(path_type=pathlib.Path), help=text)


def output_for(model: pathlib.Path, output: pathlib.Path | None, suffix: str) -> pathlib.Path:
    """Where one result goes: `output`, or beside the model under its name with `suffix`."""
    path = output or model.with_name(model.stem + suffix)
    Files(model, path).check()
    return path


STREAM = pathlib.Path("-")


@contextlib.contextmanager
def piped(model: pathlib.Path, output: pathlib.Path | None) -> Generator[tuple[pathlib.Path, pathlib.Path | None]]:
    """Files in the place of streams; a result for standard output is written there at the end.

    Args:
        model: The model to read, `-` for standard input.
        output: The file to write, `-` for standard output; None where nothing is written.

    Yields:
        The model and the output as files.

    Raises:
        click.UsageError: Standard output is a terminal, or the result has data files.
    """
    if output == STREAM and sys.stdout.isatty():
        raise click.UsageError("-o - would write a model to the terminal; redirect it to a file or a program")
    with tempfile.TemporaryDirectory() as folder:
        read, written = model, output
        if model == STREAM:
            read = pathlib.Path(folder, "stdin.onnx")
            with read.open("wb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file)
        if output == STREAM:
            written = pathlib.Path(folder, "out", "stdout.onnx")
            written.parent.mkdir()
        yield read, written
        if written is None or output != STREAM or not written.exists():
            return
        if len(list(written.parent.iterdir())) > 1:
            raise click.UsageError("the result has data files, which one stream cannot hold; give a file with -o")
        with written.open("rb") as file:
            shutil.copyfileobj(file, sys.stdout.buffer)
        sys.stdout.buffer.flush()
