"""What certificates prove and refute: ``python -m benchmarks.certificates {proofs,wrong,write} ...``.

    proofs FOLDER OUT.jsonl [--only NAME] fuses each model of a folder, proves it with z3, and has both solvers check
    wrong FOLDER OUT.jsonl [--only NAME]   rewrites that are wrong on purpose: proved, refuted, seen by hostile runs
    write OUT.md RECORDS.jsonl...          the table

Times are CPU times of one process, so that other work on the machine does not count. Records are added to those in OUT.jsonl.
"""

# pyright: basic, reportMissingTypeStubs=false
from __future__ import annotations

import concurrent.futures
import json
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import click
import onnx
import onnx_ir as ir

import onnx_attnfuse
from benchmarks.certificates_page import ATTENTIONS, Record, page
from onnx_attnfuse.certify import claims, terms
from onnx_attnfuse.certify.certificate import certify, check
from onnx_attnfuse.certify.pairing import Pair
from onnx_attnfuse.certify.solvers import Solver
from onnx_attnfuse.errors import AttnFuseError
from onnx_attnfuse.graph import io
from onnx_attnfuse.verify.witness import refute

RUNS_EVERY = 8
"""Of how many wrong rewrites one is given to the hostile runs, which take seconds each."""


def _fused(model: pathlib.Path, folder: str, **choices: Any) -> tuple[pathlib.Path, onnx_attnfuse.Report]:
    result = onnx_attnfuse.optimize(model, verify="none", provable=True, **choices)
    out = pathlib.Path(folder) / model.name
    result.save(out)
    return out, result.report


def _operators(before: onnx.ModelProto, after: onnx.ModelProto) -> dict[str, str]:
    """The attention operator that was built for each value of a fused model that has one, also inside of branches."""
    known = {name for node in before.graph.node for name in node.output} | {item.name for item in before.graph.input}
    producers = {name: node for node in after.graph.node for name in node.output}
    found: dict[str, str] = {}
    for value in known.intersection(producers):
        pending, seen = [value], {value}
        while pending:
            node = producers.get(pending.pop())
            if node is None:
                continue
            inner = [node, *(item for part in node.attribute for item in part.g.node)]
            for item in inner:
                if item.op_type in ATTENTIONS and found.get(value) != "GroupQueryAttention":
                    found[value] = item.op_type
            above = {name for item in inner for name in item.input if name not in known | seen}
            seen |= above
            pending += above
    return found


def proofs(model: pathlib.Path, name: str = "", **choices: Any) -> Iterator[Record]:
    """The record of one model: its sites, its claims, and the times of proving and checking."""
    record: Record = {"what": "proofs", "set": name or model.parent.name, "model": model.stem}
    try:
        with tempfile.TemporaryDirectory() as folder:
            out, report = _fused(model, folder, **choices)
            record["sites"] = report.fused
            built = _operators(onnx.load(model, load_external_data=False), onnx.load(out, load_external_data=False))
            start = time.process_time()
            certificate = certify(model, out)
            record["read"] = time.process_time() - start - sum(claim.seconds for claim in certificate.claims)
            record["claims"] = [
                [claim.name, built.get(claim.name, ""), claim.proved, claim.seconds, claim.open] for claim in certificate.claims
            ]
            record["obligations"], record["bytes"] = len(certificate.obligations), len(certificate.text)
            path = pathlib.Path(folder) / "out.cert"
            path.write_text(certificate.text)
            for solver in ("z3", "cvc5"):
                begin = time.process_time()
                verdict = check(model, out, path, solver)
                record[solver] = [time.process_time() - begin, list(verdict.problems)]
    except AttnFuseError as error:
        record["error"] = str(error)
    yield record


def wrong(model: pathlib.Path, name: str = "", **choices: Any) -> Iterator[Record]:
    """One record for each kind of wrong rewrite of a model."""
    from tests.support.wrong_rewrites import wrong_rewrites

    with tempfile.TemporaryDirectory() as folder:
        out, _ = _fused(model, folder, **choices)
        before, seen = io.load(str(model)), set[str]()
        for what, value, changed in wrong_rewrites(onnx.load(model), onnx.load(out)):
            if what in seen:
                continue
            seen.add(what)
            found = _judged(before, value, changed)
            runs = _runs(model, changed, folder) if len(seen) % RUNS_EVERY == 1 else "not run"
            yield {"what": "wrong", "model": model.stem, "change": what, **found, "runs": runs}


def _judged(before: ir.Model, value: str, changed: onnx.ModelProto) -> Record:
    """What the prover and concrete inputs say of one wrong rewrite: of the value at which it shows, else of any other."""
    try:
        pair = Pair(before, ir.serde.deserialize_model(changed))
    except Exception as error:  # noqa: BLE001 - a change may make no model at all
        return {"verdict": "no model", "example": str(error)[:100]}
    judge, start = Solver("z3").proves, time.process_time()
    ordered = sorted(pair.claims, key=lambda claim: claim.name != value)
    for claim in ordered:
        terms.restart()
        proof = claims.prove(pair, claim, judge)
        if proof.proved and claim.name != value:
            continue
        against = refute(pair, proof, None, 3.0 if proof.proved else 8.0)
        is_number = against is not None and against.error != float("inf")
        if proof.proved and against is not None:
            differs = f"equal under {', '.join(proof.assumed)}" if proof.assumed else "proved and wrong"
            return {"verdict": differs if is_number else "equal or an error", "example": str(against)}
        if not proof.proved:
            verdict = "open" if against is None else "refuted" if is_number else "refused"
            return {"verdict": verdict, "example": str(against or ""), "seconds": time.process_time() - start}
    return {"verdict": "equal", "example": ""}


def _runs(model: pathlib.Path, changed: onnx.ModelProto, folder: str) -> str:
    """What the hostile runs of `attnfuse verify` say."""
    path = pathlib.Path(folder) / "wrong.onnx"
    onnx.save(changed, path)
    try:
        return "equal" if onnx_attnfuse.verify_models(model, path, cases=8).equal else "differ"
    except Exception as error:  # noqa: BLE001 - the wrong model may not run at all
        return f"refused: {str(error)[:60]}"


def _records(measure: Callable[..., Iterator[Record]], model: pathlib.Path, name: str, choices: dict[str, Any]) -> list[Record]:
    return list(measure(model, name, **choices))


@click.command()
@click.argument("what", type=click.Choice(["proofs", "wrong", "write"]))
@click.argument("paths", nargs=-1, required=True, type=pathlib.Path)
@click.option("--sample", default=1, help="Every Nth model of the folder.")
@click.option("--name", default="", help="What the set is called; else as its folder.")
@click.option("--choices", type=json.loads, default="{}", help="Options of optimize, as JSON.")
@click.option("--only", default="*", help="A pattern of names of files.")
@click.option("--jobs", default=1, help="Processes, each on a model.")
def main(
    what: str, paths: tuple[pathlib.Path, ...], sample: int, name: str, choices: dict[str, Any], only: str, jobs: int
) -> None:
    """Measures, or writes the page."""
    if what == "write":
        out, *sources = paths
        records = [json.loads(line) for source in sources for line in source.read_text().splitlines()]
        out.write_text(page(records))
        return
    folder, out = paths
    models = sorted(path for path in folder.glob("*.onnx") if path.match(only))[::sample]
    measure = proofs if what == "proofs" else wrong
    with concurrent.futures.ProcessPoolExecutor(jobs) as pool, out.open("a") as file:
        work = [pool.submit(_records, measure, model, name, choices) for model in models]
        for finished in concurrent.futures.as_completed(work):
            if error := finished.exception():
                click.echo(f"not measured: {error!r}", err=True)
            for record in () if error else finished.result():
                file.write(json.dumps(record) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
