"""`attnfuse optimize`: fuse, verify, write, report."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import click

from onnx_attnfuse.options import Options
from onnx_attnfuse_cli import certificates, folders, genai
from onnx_attnfuse_cli.endings import ended_by, failed
from onnx_attnfuse_cli.files import STREAM, SUFFIX, Files, are_several, check_there, located, piped, several
from onnx_attnfuse_cli.manual import Example, Manual
from onnx_attnfuse_cli.options import SECTIONS, derived_options, taken
from onnx_attnfuse_cli.policy import policy_options, warn_of_variables
from onnx_attnfuse_cli.show import Format, progress_bar, show, show_findings, show_summary, show_verdict, start_logging
from onnx_attnfuse_cli.terminal import MEANINGS, Exit, echo

if TYPE_CHECKING:
    from onnx_attnfuse.report.model import Report


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """Options of `attnfuse optimize` besides the fields of `onnx_attnfuse.Options`."""

    output: pathlib.Path | None = dataclasses.field(default=None, metadata={"short": "o"})
    """Output path: a file, - for standard output, or a folder for several models.  [default: MODEL's name with .attnfuse.onnx]"""
    report: pathlib.Path | None = None
    """Write a report: an HTML page with pictures if the name ends in .html, else JSON. For several models a folder with both."""
    hf_config: pathlib.Path | None = None
    """The model's config.json from Hugging Face: tokens and lengths for the genai_config.json that --cache shared writes."""
    certify: pathlib.Path | None = dataclasses.field(default=None, metadata={"metavar": "FILE"})
    """Write a proof certificate that covers every rewritten value, for all sizes and masks."""
    require_proof: bool = False
    """Leave unfused what cannot be proved (`unproved`)."""
    solver: Literal["z3", "cvc5"] = "z3"
    """SMT solver for --certify and --require-proof."""
    min_fused: int = dataclasses.field(default=0, metadata={"metavar": "N", "least": 0})
    """Exit with 1 if fewer than N attentions are fused."""
    require_all: bool = False
    """Exit with 1 if any attention is left unfused or is not --target."""
    bench: bool = False
    """Measure the result against the model where it will run, if that is here, and print one line. See `attnfuse bench`."""
    dry_run: bool = False
    """Do everything except writing the model."""
    format: Format = "text"
    """Format of the report. `github`: text, an annotation for each kind of unfused attention, and the job summary. `sarif`: SARIF
    2.1.0 only, for code scanning."""
    verbose: int = dataclasses.field(default=0, metadata={"short": "v", "count": True})
    """Report each attention on its own, even where several are alike, and log to stderr. -vv: also what each pattern did."""
    quiet: bool = dataclasses.field(default=False, metadata={"short": "q"})
    """Print only problems."""

    @property
    def shows_text(self) -> bool:
        """Whether the report is printed for a reader."""
        return not self.quiet and self.format != "sarif"


_EXAMPLES = [
    Example("attnfuse optimize model.onnx", "Writes model.attnfuse.onnx and reports each attention."),
    Example("attnfuse optimize model.onnx -o fused.onnx --report report.html", "The same with another name and an HTML report."),
    Example("attnfuse optimize model.onnx --ep cuda --arch sm90 --dim seq=2048", "For an H100 and sequences of about 2048."),
    Example("attnfuse optimize model.onnx --require-all -q", "In CI: exits with 1 if an attention is left unfused."),
    Example(
        "attnfuse optimize models --dry-run --require-all --format github", "In GitHub Actions: annotations of a pull request."
    ),
    Example("attnfuse optimize exported -o fused", "The whole folder of an export, with its configuration and tokenizer."),
    Example(
        "attnfuse optimize exports 'more/**/*.onnx' -o fused --report reports",
        "A folder and a pattern, with separate folders for results and reports.",
    ),
]


@click.command(
    "optimize",
    cls=Manual,
    short_help="Fuse attention exactly, and report why or why not.",
    examples=_EXAMPLES,
    sections=SECTIONS,
    statuses=MEANINGS,
)
@click.argument("model", nargs=-1, required=True, type=click.Path(path_type=pathlib.Path))
@derived_options(_Wanted)
@derived_options(Options)
@policy_options
@click.pass_context
def command(context: click.Context, *, model: Sequence[pathlib.Path], **chosen: Any) -> int:
    """Fuse every attention of MODEL that can be fused exactly, and report why or why not.

    The result is written even if --min-fused or --require-all is not met. Attention that is already fused counts as fused.

    MODEL may be several files, folders and quoted patterns. Each then has its own result, a failure of one does not stop the
    others, and the exit status is the highest of all. Of a folder with a config.json, -o also copies the other files. The id of a
    model on Hugging Face names its folder in the local cache. - is standard input, and -o - is standard output.
    """
    wanted: _Wanted = taken(_Wanted, chosen)
    if wanted.verbose and wanted.quiet:
        raise click.UsageError("-v and -q contradict each other; choose one")
    asked, model = model, tuple(map(located, model))
    if asked != model and wanted.output is None and not wanted.dry_run:
        raise click.UsageError(f"{asked[0]} is in the cache of Hugging Face, where no result belongs; give a folder with -o")
    several_models = are_several(model)
    whole = folders.folder_of_model(model, wanted.output)
    config = genai.hf_config(wanted.hf_config, chosen["cache"], several=several_models and whole is None)
    config = config or folders.config_of(whole, chosen["cache"])
    chosen["context_length"] = chosen["context_length"] or genai.context_length(config)
    chosen["past_length"] = chosen["past_length"] or genai.tells_past_length(config)
    proofs = certificates.Wanted(wanted.certify, wanted.require_proof, wanted.solver)
    if wanted.bench and (several_models or wanted.dry_run or STREAM in (*model, wanted.output)):
        raise click.UsageError("--bench is for one model that is written to a file; run `attnfuse bench` for another")
    if STREAM in (*model, wanted.output):
        return _streamed(model, wanted, chosen, context.obj)
    out = None if wanted.dry_run or several_models else wanted.output or model[0].with_name(f"{model[0].stem}{SUFFIX}")
    proofs.check(model[0], out, Options(**chosen), several=several_models)
    if several_models:
        files = several(model, wanted.output, wanted.report, dry_run=wanted.dry_run, whole=whole)
        if whole and len(files) == 1:
            genai.check(files[0].out, chosen["cache"])
            files = [dataclasses.replace(files[0], hf_config=config, is_alone=True)]
        start_logging(verbose=wanted.verbose)
        return _all(files, wanted, chosen, context.obj, whole)
    check_there(model[0])
    files = Files(model[0], out, (wanted.report,) if wanted.report else ())
    files.check()
    genai.check(out, chosen["cache"])
    start_logging(verbose=wanted.verbose)
    return _one(dataclasses.replace(files, hf_config=config, is_alone=True), wanted, chosen, context.obj)


def _streamed(models: Sequence[pathlib.Path], wanted: _Wanted, chosen: Mapping[str, Any], args: Sequence[str]) -> Exit:
    """A run on standard input or output; where that is the result, the report goes to stderr."""
    if len(models) > 1:
        raise click.UsageError("- is one model, and there are several; give one model")
    if wanted.format != "text":
        raise click.UsageError("--format needs files; give files instead of -")
    if wanted.certify or wanted.require_proof or chosen["cache"] != "as-is":
        raise click.UsageError("proofs and --cache write files next to the model; give files instead of -")
    if wanted.output is None and not wanted.dry_run:
        raise click.UsageError("a model from standard input has no name; give the result's with -o, which may be -")
    with piped(models[0], None if wanted.dry_run else wanted.output) as (model, out):
        files = Files(model, out, (wanted.report,) if wanted.report else ())
        files.check()
        start_logging(verbose=wanted.verbose)
        report, files = _optimized(files, wanted, chosen)
        if not wanted.quiet:
            is_result = wanted.output == STREAM and not wanted.dry_run
            show(report, verb="fused", verbose=wanted.verbose, err=is_result)
            echo(*([] if is_result else [files.written]), err=True)
        return max(_status(report, wanted), failed(report.failures, args))


def _one(files: Files, wanted: _Wanted, chosen: Mapping[str, Any], args: Sequence[str]) -> Exit:
    try:
        report, files = _optimized(files, wanted, chosen)
    except Exception:
        show_findings({files.model: None}, wanted.format, is_required=wanted.require_all)
        raise
    if wanted.shows_text:
        show(report, verb="fused", verbose=wanted.verbose)
        echo(files.written, *files.notes, err=True)
    if wanted.bench and files.out:
        from onnx_attnfuse.bench.run import Bench

        echo(Bench(Options(**chosen)).gain(files.model, files.out, report))
    show_findings({files.model: report}, wanted.format, is_required=wanted.require_all)
    return max(_status(report, wanted), failed(report.failures, args))


def _all(
    files: Sequence[Files], wanted: _Wanted, chosen: Mapping[str, Any], args: Sequence[str], whole: pathlib.Path | None
) -> Exit:
    """Each model by itself; an error in one does not end the others. A whole folder gets the other files, too."""
    for item in files:
        item.check_packages()
    output = None if wanted.dry_run else wanted.output
    if whole and output:
        folders.check_free(whole, output, {item.model for item in files})
    reported: dict[str, Report | None] = {}
    worst = Exit.DONE
    for item in files:
        try:
            report, item = _optimized(item, wanted, chosen)  # noqa: PLW2901 - the same model, now written
        except Exception as error:  # noqa: BLE001 - the others are to be done all the same
            reported[item.title] = None
            worst = max(worst, ended_by(error, args, str(item.model)))
            continue
        reported[item.title] = report
        if wanted.shows_text:
            show_verdict(item, report, verbose=wanted.verbose)
        about = str(item.model)
        worst = max(worst, _status(report, wanted, about), failed(report.failures, args, about))
    if wanted.report:
        from onnx_attnfuse.report.files import write_index

        write_index(reported, wanted.report / "index.html")
    copied = ""
    if whole and output and any(reported.values()):
        done = {item.model for item in files if reported[item.title] is not None}
        copied = folders.copy_others(whole, output, done, {item.model for item in files} - done)
    if wanted.shows_text:
        show_summary(reported.values())
        echo(*filter(None, [copied]))
    show_findings({item.model: reported[item.title] for item in files}, wanted.format, is_required=wanted.require_all)
    return worst


def _optimized(files: Files, wanted: _Wanted, chosen: Mapping[str, Any]) -> tuple[Report, Files]:
    """Optimizes one model and writes its files; gives the files as they were written, too."""
    import onnx_attnfuse
    from onnx_attnfuse.containment import Subject, collecting, contained

    with progress_bar(shown=not wanted.quiet) as progress:
        options = onnx_attnfuse.Options(**chosen, pictures=files.has_page, progress=progress)
        proofs = certificates.Wanted(wanted.certify, wanted.require_proof, wanted.solver)
        result = certificates.proved(files.model, options, proofs)
        planned, notes = genai.plan(result.report, files.out, files.hf_config) if files.is_alone else (None, ())
        for path in filter(None, (files.out, *files.reports)):
            path.parent.mkdir(parents=True, exist_ok=True)
        if files.out:
            progress("write the model", 0, 1)
            shared = result.save(files.out)
            files = dataclasses.replace(files, shared=shared, notes=(*notes, *certificates.write(files.model, files.out, proofs)))
        if planned:
            planned.write()
    report = dataclasses.replace(result.report, output=str(files.out) if files.out else None)
    with collecting() as failures:
        for path in files.reports:
            with contained(Subject("writing a report"), str(path)):
                onnx_attnfuse.write_report(report, path, files.title or files.model.name)
    return dataclasses.replace(report, failures=(*report.failures, *failures.all())), files


def _status(report: Report, wanted: _Wanted, model: str = "") -> Exit:
    fused = report.fused + report.already_fused + report.decomposed
    about = f"Error: {model}: " if model else "Error: "
    warn_of_variables(report)
    from onnx_attnfuse.verify.verifier import NOT_VERIFIED

    if not wanted.shows_text and NOT_VERIFIED in report.notes:
        echo(f"{about.replace('Error', 'Warning', 1)}{NOT_VERIFIED}", err=True)
    if report.differing:
        rewrites = f"{report.differing} rewrite{'s' * (report.differing != 1)}"
        verb = "was" if report.differing == 1 else "were"
        left = f"that leaves {report.differing_sites} of {report.candidates} attentions unfused"
        echo(f"{about}{rewrites} differed in verification and {verb} undone; {left}", err=True)
        return Exit.DIFFERS
    if report.unshared is not None:
        echo(f"{about}--cache shared was not applied: {report.unshared}", err=True)
        return Exit.TOO_FEW
    if wanted.require_all and not report.candidates:
        echo(f"{about}no attention was found, and --require-all needs one; `attnfuse explain -v` lists what was read", err=True)
        return Exit.TOO_FEW
    if fused < wanted.min_fused:
        echo(f"{about}{fused} of {report.candidates} attentions are fused, and --min-fused needs {wanted.min_fused}", err=True)
        return Exit.TOO_FEW
    if report.off_target:
        off = (
            f"{report.off_target} of {report.candidates} attentions are not the --target; `attnfuse explain -v` gives the reasons"
        )
        is_error = wanted.require_all or report.off_target == report.candidates
        echo(f"{about if is_error else about.replace('Error', 'Warning', 1)}{off}", err=True)
        return Exit.TOO_FEW if is_error else Exit.DONE
    if wanted.require_all and report.skipped:
        echo(f"{about}{report.skipped} of {report.candidates} attentions are not fused, and --require-all needs all", err=True)
        return Exit.TOO_FEW
    return Exit.DONE
