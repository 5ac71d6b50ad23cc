"""What certificates prove and refute: ``python benchmarks/certificates.py {proofs,wrong,layers,write} ...``.

    proofs FOLDER OUT.jsonl [--only NAMES] fuses each model of a folder, proves it with z3, and has both solvers check
    wrong FOLDER OUT.jsonl [--only NAMES]   rewrites that are wrong on purpose: proved, refuted, seen by hostile runs
    findings FOLDER REWRITTEN OUT.jsonl    rewrites of models by an older version, which were wrong
    layers OUT.jsonl FILE...               the time by the number of layers
    write OUT.md RECORDS.jsonl...          the table

Times are CPU times of one process, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import onnx
import onnx_ir as ir

import onnx_attnfuse
from onnx_attnfuse.certify import claims, terms
from onnx_attnfuse.certify.certificate import certify, check
from onnx_attnfuse.certify.pairing import Pair
from onnx_attnfuse.certify.smt import Obligation
from onnx_attnfuse.certify.solvers import Solver
from onnx_attnfuse.certify.witness import refute
from onnx_attnfuse.errors import AttnFuseError
from onnx_attnfuse.graph import io

Record = dict[str, Any]
_ATTENTIONS = ("MultiHeadAttention", "GroupQueryAttention", "Attention")
RUNS_EVERY = 8
"""Of how many wrong rewrites one is given to the hostile runs, which take seconds each."""


def _fused(model: pathlib.Path, folder: str, **choices: Any) -> tuple[pathlib.Path, onnx_attnfuse.Report]:
    result = onnx_attnfuse.optimize(model, verify="none", **choices)
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
                if item.op_type in _ATTENTIONS and found.get(value) != "GroupQueryAttention":
                    found[value] = item.op_type
            above = {name for item in inner for name in item.input if name not in known | seen}
            seen |= above
            pending += above
    return found


def proofs(models: Sequence[pathlib.Path], name: str = "", **choices: Any) -> Iterator[Record]:
    """One record for each model: its sites, its claims, and the times of proving and checking."""
    for model in models:
        record: Record = {"what": "proofs", "set": name or model.parent.name, "model": model.stem}
        try:
            with tempfile.TemporaryDirectory() as folder:
                out, report = _fused(model, folder, **choices)
                record["sites"] = report.fused
                built = _operators(onnx.load(model, load_external_data=False), onnx.load(out, load_external_data=False))
                start = time.process_time()
                taken: list[float] = []
                certificate = certify(model, out, told=lambda _: taken.append(time.process_time()))  # noqa: B023
                ends = [start, *taken]
                record["claims"] = [
                    [claim.name, built.get(claim.name, ""), claim.proved, ends[place + 1] - ends[place], claim.open]
                    for place, claim in enumerate(certificate.claims)
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


class _Asking:
    def __init__(self) -> None:
        self._solver = Solver("z3")

    def holds(self, asked: Obligation) -> bool:
        return self._solver.decide(asked.text) == "unsat"


def wrong(models: Sequence[pathlib.Path], **choices: Any) -> Iterator[Record]:
    """One record for each wrong rewrite of a kind and a model."""
    from tests.support.wrong_rewrites import wrong_rewrites

    for model in models:
        with tempfile.TemporaryDirectory() as folder:
            out, _ = _fused(model, folder, **choices)
            before, seen = io.load(str(model)), set[str]()
            for what, value, changed in wrong_rewrites(onnx.load(model), onnx.load(out)):
                if what not in seen:
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
    judge, start = _Asking(), time.process_time()
    ordered = sorted(pair.claims, key=lambda claim: claim.name != value)
    for claim in ordered:
        terms.restart()
        proof = claims.prove(pair, claim, judge)
        if proof.proved and claim.name != value:
            continue
        against = refute(pair, proof, None, 3.0 if proof.proved else 8.0)
        is_number = against is not None and against.error != float("inf")
        if proof.proved and against is not None:
            return {"verdict": "proved and wrong" if is_number else "equal or an error", "example": str(against)}
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


def _findings(models: Sequence[pathlib.Path], folder: pathlib.Path) -> Iterator[Record]:
    """One record for each model of which another folder holds a wrong rewrite."""
    for model in models:
        rewritten = folder / model.name
        if rewritten.exists():
            pair, judge, found = Pair(io.load(str(model)), io.load(str(rewritten))), _Asking(), "equal"
            for claim in pair.claims:
                terms.restart()
                proof = claims.prove(pair, claim, judge)
                if not proof.proved:
                    found = str(refute(pair, proof, Solver("z3"), 15.0) or "open")
                    break
            yield {"what": "findings", "model": model.stem, "found": found}


def layers(models: Sequence[pathlib.Path]) -> Iterator[Record]:
    """The time and the size of certificates by the number of layers."""
    for model in models:
        with tempfile.TemporaryDirectory() as folder:
            out, report = _fused(model, folder)
            start = time.process_time()
            found = certify(model, out)
            spent = time.process_time() - start
            proved = sum(claim.proved for claim in found.claims)
            yield {
                "what": "layers", "model": model.stem, "sites": report.fused, "claims": len(found.claims), "proved": proved,
                "obligations": len(found.obligations), "bytes": len(found.text), "seconds": spent,
            }  # fmt: skip


def page(records: Sequence[Record]) -> str:
    """The whole of `certificates.md`."""
    parts = [
        "# Certificates: what is proved, what is refuted",
        "Written by `python benchmarks/certificates.py`. CPU times of one process on a shared machine of two cores; z3 5.4.1, "
        "cvc5 1.4.2, ONNX Runtime 1.31.1. The target is the CPU.",
        *_proved([item for item in records if item["what"] == "proofs"]),
        *_refuted([item for item in records if item["what"] == "wrong"]),
        *_found([item for item in records if item["what"] == "findings"]),
        *_layered([item for item in records if item["what"] == "layers"]),
    ]
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _proved(records: Sequence[Record]) -> Iterator[str]:
    chosen = [item for item in records if "error" not in item]
    rows: list[list[object]] = []
    for name in dict.fromkeys(item["set"] for item in chosen):
        models = [item for item in chosen if item["set"] == name]
        made = [claim for item in models for claim in item["claims"]]
        for operator in (*_ATTENTIONS, ""):
            sites = [claim for claim in made if claim[1] == operator]
            if sites:
                rows.append([name, operator or "sums, rotations, constants", *_times(sites)])
    yield "## Real exports"
    yield (
        "Values that are computed in another way, by the attention operator that was built for them, each proved for all sizes "
        "and masks. Of a decoder, its presents count, too."
    )
    yield _table(["set", "operator", "values", "proved", "median ms", "90 % ms", "worst s"], rows)
    rows = []
    for name in dict.fromkeys(item["set"] for item in chosen):
        models = [item for item in chosen if item["set"] == name]
        both = [sum(not item[solver][1] for item in models) for solver in ("z3", "cvc5")]
        rows.append([name, len(models), sum(item["sites"] for item in models), *both])
    yield "Models whose certificate a solver confirmed:"
    yield _table(["set", "models", "sites fused", "z3 says all", "cvc5 says all"], rows)
    for item in records:
        lost = [claim for claim in item.get("claims", ()) if not claim[2]]
        if "error" in item or lost:
            told = "; ".join(f"`{claim[0]}` ({claim[1]}), open is {claim[4]}" for claim in lost[:4])
            yield f"- `{item['model']}`: {item.get('error', told)}"


def _times(sites: Sequence[Any]) -> list[object]:
    times = sorted(claim[3] for claim in sites)
    return [
        len(sites), sum(claim[2] for claim in sites), f"{1000 * statistics.median(times):.0f}",
        f"{1000 * times[int(0.9 * len(times))]:.0f}", f"{times[-1]:.1f}",
    ]  # fmt: skip


_VERDICTS = {
    "refuted": "not proved, and the two differ by numbers on an input that was found",
    "refused": "not proved, and ONNX Runtime ends with an error on an input that was found, or takes the model for none",
    "open": "not proved, and no input was found",
    "proved and wrong": "a defect of the prover",
    "equal": "proved, and no input was found",
    "equal or an error": "proved, and ONNX Runtime ends with an error for some sizes",
    "no model": "",
}


_SAME = """Changes that are equal, or open, read one by one:

- A mask that is one for all heads, or for all rows, is none of another head or row.
- A test at run time that is stricter (`constant` or `another operator` at Slice, Equal, LessOrEqual and Or in front of
  an If) chooses the branch that is right for all. Where it holds no key is
  masked, so none lies outside of a window either, and a larger window is no other one.
- A mask of 0 and the lowest number has nothing between -10 and the lowest, and is never minus infinity: `Greater` may
  be `GreaterOrEqual` there, and what is chosen where all is minus infinity is never chosen.
- The largest and the smallest of a row are read where all of it is the lowest number.
- The largest of a row that sees a key is 0, so that it may be subtracted always: equal, and not proved.
- `Mul` of batch and length left out: the same for a batch of one, and else a Reshape ends with an error. That all nodes
  of the model after fit together is not proved."""


def _refuted(records: Sequence[Record]) -> Iterator[str]:
    counted = Counter(item["verdict"] for item in records)
    same = [item for item in records if item["verdict"] in {"equal", "equal or an error", "open"}]
    real = [item for item in records if item not in same and item["verdict"] != "no model"]
    if not real:
        return
    yield "## Rewrites that are wrong on purpose"
    yield (
        f"{len(records)} changes of fused models, each of one thing (`tests/support/wrong_rewrites.py`), {len(real)} of which "
        f"change what is computed, of {len({item['change'] for item in real})} kinds, in {len({item['model'] for item in real})} "
        "models. Refuted are those at a value for which the prover found no proof and concrete numbers found a difference."
    )
    yield _table(["verdict", "changes", ""], [[name, counted[name], told] for name, told in _VERDICTS.items() if counted[name]])
    tried = [item for item in real if item["runs"] != "not run"]
    seen = sum(item["runs"] != "equal" for item in tried)
    yield f"The hostile runs of `attnfuse verify` alone, eight cases on whole models, see {seen} of {len(tried)} given to them."
    yield _SAME
    yield "\n".join(f"- `{item['model']}`, {item['change']}: {item['verdict']}" for item in same)
    kinds: dict[str, list[Record]] = {}
    for item in real:
        kinds.setdefault(item["change"].partition(" at ")[0], []).append(item)
    yield _table(
        ["change", "made", "refuted by numbers", "an input"],
        [
            [kind, len(items), sum(item["verdict"] == "refuted" for item in items), items[0]["example"]]
            for kind, items in sorted(kinds.items())
        ],
    )  # fmt: skip


def _found(records: Sequence[Record]) -> Iterator[str]:
    if records:
        counted = sum(item["found"] not in {"equal", "open"} for item in records)
        yield "## Findings, as they were before they were mended"
        yield f"Models of which an older version made something wrong: {counted} of {len(records)} are refuted."
        yield _table(["finding", "found"], [[item["model"], item["found"]] for item in records])


def _layered(records: Sequence[Record]) -> Iterator[str]:
    if records:
        yield "## Layers"
        rows = [
            [
                item["model"],
                item["sites"],
                f"{item['proved']} of {item['claims']}",
                item["obligations"],
                item["bytes"],
                f"{item['seconds']:.1f}",
            ]
            for item in records
        ]
        yield _table(["decoder", "sites", "values proved", "obligations", "bytes", "seconds"], rows)


def main() -> None:
    """Measures, or writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["proofs", "wrong", "findings", "layers", "write"])
    parser.add_argument("paths", nargs="+", type=pathlib.Path)
    parser.add_argument("--sample", type=int, default=1, help="every Nth model of the folder")
    parser.add_argument("--name", default="", help="what the set is called; else as its folder")
    parser.add_argument("--choices", type=json.loads, default={}, help="options of optimize, as JSON")
    parser.add_argument("--only", default="", help="patterns of names of files, with commas")
    options = parser.parse_args()
    if options.what == "write":
        out, *sources = options.paths
        records = [json.loads(line) for source in sources for line in source.read_text().splitlines()]
        out.write_text(page(records))
        return
    if options.what == "layers":
        out, *models = options.paths
    else:
        folder, *others, out = options.paths
        rewritten = others[0] if others else folder
        wanted = tuple(filter(None, options.only.split(",")))
        models = [path for path in sorted(folder.glob("*.onnx")) if not wanted or any(map(path.match, wanted))][:: options.sample]
    if options.what == "layers":
        records = layers(models)
    elif options.what == "findings":
        records = _findings(models, rewritten)
    else:
        records = wrong(models, **options.choices) if options.what == "wrong" else proofs(models, options.name, **options.choices)
    with out.open("a") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
