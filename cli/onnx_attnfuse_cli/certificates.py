"""`attnfuse check-certificate`, and what `attnfuse optimize --certify` writes and tells."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from onnx_attnfuse_cli.files import check_place, same
from onnx_attnfuse_cli.manual import Example, Manual
from onnx_attnfuse_cli.suggestions import Choice
from onnx_attnfuse_cli.terminal import Exit, echo

if TYPE_CHECKING:
    from onnx_attnfuse.api import Result
    from onnx_attnfuse.certify.certificate import Certificate
    from onnx_attnfuse.options import Options

_MAX_ROUNDS = 4
_TRIED = 3
"""How many claims that are not proved are tried on concrete inputs."""
_EXAMPLES = [
    Example(
        "attnfuse check-certificate model.onnx model.attnfuse.onnx model.cert",
        "Exits with 0 if everything is proved, with 3 if not.",
    ),
    Example("attnfuse check-certificate a.onnx b.onnx out.cert --solver cvc5", "Uses another solver."),
]


@click.command("check-certificate", cls=Manual, short_help="Check a proof certificate with z3 or cvc5.", examples=_EXAMPLES)
@click.argument("first", type=click.Path(path_type=pathlib.Path))
@click.argument("second", type=click.Path(path_type=pathlib.Path))
@click.argument("certificate", type=click.Path(path_type=pathlib.Path))
@click.option("--solver", type=Choice(["z3", "cvc5"]), default="z3", show_default=True, help="SMT solver.")
@click.option("-q", "--quiet", is_flag=True, help="Print only problems.")
def command(*, first: pathlib.Path, second: pathlib.Path, certificate: pathlib.Path, solver: Any, quiet: bool) -> int:
    """Derive all claims from FIRST and SECOND again, compare them with CERTIFICATE, and have a solver decide each.

    Exits with 0 if the two models are proved equal under the assumptions of the certificate. Exits with 3 if a claim is not
    proved, with 2 if the certificate is of other models.
    """
    from onnx_attnfuse.certify.certificate import check

    verdict = check(first, second, certificate, solver)
    if not quiet:
        for problem in verdict.problems:
            echo(problem)
        echo(f"{verdict.proved} claims proved by {verdict.obligations} obligations, decided by {verdict.solver}")
    if verdict.problems:
        echo(f"Error: {len(verdict.problems)} of the certificate's parts do not hold: {verdict.problems[0]}", err=True)
    return Exit.DIFFERS if verdict.problems else Exit.DONE


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The proofs that a user asks for."""

    certify: pathlib.Path | None
    require_proof: bool
    solver: Any

    def check(self, model: pathlib.Path, out: pathlib.Path | None, options: Options, *, several: bool) -> None:
        """Refuses early what could not be certified.

        Raises:
            MissingDependencyError: The solver is not installed.
        """
        if not self.certify and not self.require_proof:
            return
        asked = "--certify" if self.certify else "--require-proof"
        if several:
            raise click.UsageError(f"{asked} is for one model; call it once for each")
        if options.cache != "as-is" or options.cuda_graph:
            raise click.UsageError(f"{asked} compares models of one interface; leave --cache shared and --cuda-graph out")
        if self.certify and out is None:
            raise click.UsageError("--certify is about the file that is written; leave --dry-run out")
        if self.certify:
            check_place(self.certify)
            if any(same(self.certify, item) for item in (model, out) if item is not None):
                raise click.UsageError(f"--certify is a model, {self.certify}; choose another file")
        from onnx_attnfuse.certify.solvers import Solver

        Solver(self.solver)


def proved(model: pathlib.Path, options: Options, wanted: Wanted) -> Result:
    """The model fused; with --require-proof only where that is proved, sites that cannot be left as they were."""
    import onnx_attnfuse
    from onnx_attnfuse.certify.certificate import certify

    options = dataclasses.replace(options, provable=wanted.require_proof)
    result = onnx_attnfuse.optimize(model, options=options)
    for _ in range(_MAX_ROUNDS if wanted.require_proof else 0):
        names = {name for claim in certify(model, result.model, wanted.solver).open for name in claim.sites}
        if names <= set(options.unproved):
            break
        options = dataclasses.replace(options, unproved=(*options.unproved, *sorted(names)))
        result = onnx_attnfuse.optimize(model, options=options)
    return result


def write(model: pathlib.Path, out: pathlib.Path, wanted: Wanted) -> tuple[str, ...]:
    """Writes the certificate of a model that was written; returns lines on the proofs."""
    from onnx_attnfuse.certify.certificate import certify
    from onnx_attnfuse.report.files import write_text

    if wanted.certify is None:
        return ()
    found = certify(model, out, wanted.solver)
    write_text(found.text, wanted.certify)
    return (*_differences(model, out, found, wanted), *_lines(found, wanted.certify))


def _differences(model: pathlib.Path, out: pathlib.Path, found: Certificate, wanted: Wanted) -> Iterator[str]:
    """Lines on inputs for which the first claims that are not proved do not hold."""
    if not found.open:
        return
    from onnx_attnfuse.certify.solvers import Solver
    from onnx_attnfuse.graph import io
    from onnx_attnfuse.verify.witness import counterexample

    for claim in found.open[:_TRIED]:
        against = counterexample(io.load(str(model)), io.load(str(out)), claim.name, Solver(wanted.solver))
        if against is not None:
            yield f"'{claim.name}' is wrong: {against}"


def _lines(found: Certificate, path: pathlib.Path) -> Iterator[str]:
    for problem in found.problems:
        yield f"not proved: {problem}"
    for claim in found.open:
        yield f"not proved: '{claim.name}', {claim.before} that became {claim.after}; not shown: {claim.open}"
    count = len(found.claims) - len(found.open)
    yield f"proved {count} of {len(found.claims)} changed values, for all sizes, by {len(found.obligations)} obligations: {path}"
