"""`attnfuse optimize`: fuse, verify, write, tell."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import TYPE_CHECKING, Any

import click

from onnx_attnfuse_cli.exits import Exit
from onnx_attnfuse_cli.options import derived_options
from onnx_attnfuse_cli.policy import policy_options
from onnx_attnfuse_cli.progress import progress_bar
from onnx_attnfuse_cli.show import show, start_logging, verbose_option

if TYPE_CHECKING:
    from onnx_attnfuse.report.model import Report


@dataclasses.dataclass(frozen=True)
class _Files:
    """What is read and written."""

    model: pathlib.Path
    out: pathlib.Path | None
    """None: the model is not written."""
    report: pathlib.Path | None

    def check(self) -> None:
        """Refuse early what would be refused, or regretted, after the work is done."""
        if self.out and _same(self.out, self.model):
            raise click.UsageError(f"-o is the model itself, {self.model}; choose another file")
        if self.report and (_same(self.report, self.model) or (self.out and _same(self.report, self.out))):
            raise click.UsageError(f"--report is a model, {self.report}; choose another file")
        for path in filter(None, (self.out, self.report)):
            if path.is_dir():
                raise click.UsageError(f"{path} is a folder; give the name of a file in it")
            if not path.parent.is_dir():
                raise click.UsageError(f"the folder {path.parent} does not exist; make it first")


def _same(one: pathlib.Path, other: pathlib.Path) -> bool:
    return one.resolve() == other.resolve() or (one.exists() and other.exists() and one.samefile(other))


@click.command("optimize", short_help="Fuse what can be fused exactly; say why for every site.")
@click.argument("model", type=click.Path(path_type=pathlib.Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=pathlib.Path), help="Where to write.  [default: MODEL's name with .attnfuse.onnx]"
)
@derived_options()
@policy_options
@click.option("--report", "report_path", type=click.Path(path_type=pathlib.Path), help="Write the report there as JSON.")
@click.option("--min-fused", type=click.IntRange(min=0), default=0, metavar="N", help="Exit 1 if fewer than N sites are fused.")
@click.option("--require-all", is_flag=True, help="Exit 1 if any attention is left unfused, or not --target.")
@click.option("--dry-run", is_flag=True, help="Do everything but write the model.")
@verbose_option
@click.option("-q", "--quiet", is_flag=True, help="Print nothing unless something is wrong.")
def command(
    *,
    model: pathlib.Path,
    output: pathlib.Path | None,
    report_path: pathlib.Path | None,
    min_fused: int,
    require_all: bool,
    dry_run: bool,
    verbose: int,
    quiet: bool,
    **chosen: Any,
) -> int:
    """Fuse every attention of MODEL that can be fused exactly, and say why for each.

    The result is written even where --min-fused or --require-all is not met. Sites that were fused before count as fused.
    """
    if verbose and quiet:
        raise click.UsageError("-v and -q contradict each other; choose one")
    files = _Files(model, None if dry_run else output or model.with_name(f"{model.stem}.attnfuse.onnx"), report_path)
    files.check()
    start_logging(verbose=verbose)
    import onnx_attnfuse

    with progress_bar(shown=not quiet) as progress:
        result = onnx_attnfuse.optimize(model, options=onnx_attnfuse.Options(**chosen, progress=progress))
    if files.out:
        result.save(files.out)
    if files.report:
        _write_report(result.report, files.report)
    if not quiet:
        show(result.report, verb="fused", verbose=verbose)
        click.echo(f"wrote {files.out}" if files.out else "nothing written (--dry-run)", err=True)
    return _status(result.report, min_fused=min_fused, require_all=require_all)


def _write_report(report: Report, path: pathlib.Path) -> None:
    try:
        path.write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise click.UsageError(f"cannot write {path}: {error.strerror}; choose another file for --report") from error


def _status(report: Report, *, min_fused: int, require_all: bool) -> Exit:
    fused = report.fused + report.already_fused
    if report.differing:
        click.echo(
            f"Error: {report.differing} of {report.candidates} sites differed when verified and stayed as they were", err=True
        )
        return Exit.DIFFERS
    if fused < min_fused:
        click.echo(f"Error: {fused} of {report.candidates} sites are fused, --min-fused asks for {min_fused}", err=True)
        return Exit.TOO_FEW
    if require_all and report.skipped:
        click.echo(f"Error: {report.skipped} of {report.candidates} sites are not fused, --require-all asks for all", err=True)
        return Exit.TOO_FEW
    return Exit.DONE
