"""Certificates as files: SMT-LIB 2 that a solver runs as it is, with a manifest in its comments.

    certificate = certify("model.onnx", "model.attnfuse.onnx")
    pathlib.Path("out.cert").write_text(certificate.text)
    verdict = check("model.onnx", "model.attnfuse.onnx", "out.cert", "cvc5")

A certificate is believed for nothing: checking makes all obligations anew from the two models, takes the file's word only on
which of them are worth asking for, and has the solver decide every one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any, cast

import onnx_ir as ir

from onnx_attnfuse.certify import terms
from onnx_attnfuse.certify.claims import Proof, prove
from onnx_attnfuse.certify.pairing import Pair
from onnx_attnfuse.certify.solvers import Obligation, Solver, SolverName
from onnx_attnfuse.errors import ModelError, OptionError
from onnx_attnfuse.graph import io
from onnx_attnfuse.graph.assumptions import ASSUMPTIONS, AssumptionName, named_in_order

VERSION = 1
_FIRST = "; attnfuse certificate "
_MANIFEST = "; manifest "
_BEGIN = "; obligation "
_SEPARATOR = "(check-sat) ; expected: unsat\n"
_TAKEN: tuple[AssumptionName, ...] = (
    "large-fills", "bounded-scores", "named-sizes", "nonempty-axes", "masks-fit", "indices-in-range",
)  # fmt: skip
REAL_ARITHMETIC = "real-arithmetic: floats are real numbers, and constants that are roundings of one number are that number"
WEIGHED = "weights: numbers made of weights alone are computed, and equal but for rounding"
FINITE = "finite-inputs: no input and no activation is infinite or NaN, and no integer overflows"
DIVIDED = "divided-sizes: a size that a node divides, to make another size of it, is at least 0, and not divided by 0"
ModelFile = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True)
class Judged:
    """One claim with its result."""

    name: str
    before: str
    """The operator that gave the value."""
    after: str
    """The operator that gives it now."""
    proved: bool
    obligations: tuple[int, ...]
    """Numbers of its obligations in the certificate."""
    boundary: tuple[str, ...]
    """The values from which on both pieces were executed."""
    open: str = ""
    """The obligation that no solver decided, or why there is none."""
    assumes: tuple[AssumptionName, ...] = ()
    """Assumptions of it, besides those of all."""
    seconds: float = 0.0
    """CPU time of the proof."""
    sites: tuple[str, ...] = ()
    """The names, in the model or a function of it, of the values that it may be about."""


@dataclasses.dataclass(frozen=True)
class Certificate:
    """The claims on two models, each as it was judged, with the obligations that prove them."""

    before: str
    """A digest of all that the model before computes, weights included."""
    after: str
    claims: tuple[Judged, ...]
    obligations: tuple[str, ...]
    sizes: Mapping[str, str]
    """Sizes that are the same because operators of the model before take equal ones."""
    problems: tuple[str, ...] = ()
    """The differences of the models' interfaces."""
    files: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    """SHA-256 of the files, if they are files."""

    @property
    def is_complete(self) -> bool:
        """Whether the models compute the same, under the assumptions."""
        return not self.problems and all(claim.proved for claim in self.claims)

    @property
    def open(self) -> tuple[Judged, ...]:
        """The claims that are not proved."""
        return tuple(claim for claim in self.claims if not claim.proved)

    @property
    def text(self) -> str:
        """The file."""
        own: set[AssumptionName] = {name for claim in self.claims for name in claim.assumes}
        taken: list[AssumptionName] = [name for name in ASSUMPTIONS if name in {*_TAKEN, *own}]
        manifest: dict[str, Any] = {
            "before": self.before,
            "after": self.after,
            "files": dict(self.files),
            "assumptions": [*(f"{name}: {ASSUMPTIONS[name]}" for name in taken), REAL_ARITHMETIC, WEIGHED, FINITE, DIVIDED],
            "sizes": dict(self.sizes),
            "problems": list(self.problems),
            "claims": [_record(claim) for claim in self.claims],
        }
        lines = [f"{_FIRST}{VERSION}", "; each check-sat must be unsat; docs/certificates.md explains what that proves"]
        lines += [_MANIFEST + line for line in json.dumps(manifest, indent=1, sort_keys=True).splitlines()]
        parts = ["\n".join(lines) + "\n"]
        for number, text in enumerate(self.obligations):
            parts.append(f"(reset)\n(set-logic ALL)\n{_BEGIN}{number}\n{text}{_SEPARATOR}")
        return "".join(parts)


def _record(claim: Judged) -> dict[str, Any]:
    """A claim as it is written: without times, so that the same models give the same file."""
    found = dataclasses.asdict(claim)
    del found["seconds"], found["sites"]
    return found


def parse(text: str, where: str) -> Certificate:
    """A certificate from its text.

    Raises:
        OptionError: It is none.
    """
    lines = text.splitlines()
    if not lines or not lines[0].startswith(_FIRST):
        raise OptionError(f"{where} is no certificate; attnfuse optimize --certify writes one")
    if lines[0] != f"{_FIRST}{VERSION}":
        raise OptionError(f"{where} is a certificate of another version, {lines[0][len(_FIRST) :]}; make it again")
    try:
        content = json.loads("\n".join(line[len(_MANIFEST) :] for line in lines if line.startswith(_MANIFEST)))
        return _parsed(content, text)
    except (KeyError, TypeError, ValueError) as error:
        raise OptionError(f"{where} is a damaged certificate; make it again") from error


def _parsed(content: Mapping[str, Any], text: str) -> Certificate:
    parts = [part.partition("\n")[2].partition(_SEPARATOR)[0] for part in text.split(_BEGIN)[1:]]
    claims = tuple(
        Judged(
            str(claim["name"]),
            str(claim["before"]),
            str(claim["after"]),
            bool(claim["proved"]),
            tuple(map(int, claim["obligations"])),
            tuple(map(str, claim["boundary"])),
            str(claim["open"]),
            named_in_order(*cast("list[AssumptionName]", claim["assumes"])),
        )
        for claim in cast("list[dict[str, Any]]", content["claims"])
    )
    return Certificate(
        str(content["before"]), str(content["after"]), claims, tuple(parts), dict(content["sizes"]), tuple(content["problems"]),
        dict(content["files"]),
    )  # fmt: skip


def _hashes(models: Mapping[str, ModelFile | ir.Model]) -> dict[str, str]:
    return {
        name: hashlib.sha256(pathlib.Path(model).read_bytes()).hexdigest()
        for name, model in models.items()
        if not isinstance(model, ir.Model)
    }


def _loaded(model: ModelFile | ir.Model) -> ir.Model:
    return model if isinstance(model, ir.Model) else io.load(os.fspath(model))


def _pair(before: ModelFile | ir.Model, after: ModelFile | ir.Model) -> Pair:
    return Pair(_loaded(before), _loaded(after))


def certify(before: ModelFile | ir.Model, after: ModelFile | ir.Model, solver: SolverName = "z3") -> Certificate:
    """Proves the equality of two models as far as possible.

    Args:
        before: The reference.
        after: The rewritten model.
        solver: The solver that decides obligations.

    Raises:
        MissingDependencyError: The solver is not installed.
        ModelError: A model cannot be read.
        OptionError: There is no such solver.
    """
    judge = Solver(solver).proves
    pair = _pair(before, after)
    places: dict[str, int] = {}
    claims: list[Judged] = []
    for claim in pair.claims:
        terms.restart()
        start = time.process_time()
        proof = prove(pair, claim, judge)
        taken = time.process_time() - start
        numbers = [places.setdefault(item.text, len(places)) for item in proof.obligations] if proof.proved else []
        claims.append(_judged(proof, tuple(dict.fromkeys(numbers)), taken, pair.sites(claim)))
    sizes = {name: str(dim) for name, dim in sorted(pair.aliases.items())}
    hashes = _hashes({"before": before, "after": after})
    return Certificate(
        pair.before.content, pair.after.content, tuple(claims), tuple(places), sizes, tuple(pair.differences()), hashes
    )


def _judged(proof: Proof, numbers: tuple[int, ...], seconds: float, sites: tuple[str, ...]) -> Judged:
    nodes = [value.producer() for value in (proof.claim.before, proof.claim.after)]
    first, second = ("constant" if node is None else node.op_type for node in nodes)
    what = "" if proof.proved else proof.problem or ", ".join(dict.fromkeys(name for name, _ in proof.open))
    boundary = tuple(f"{name} = {value}" for name, value in proof.boundary.items())
    assumed = proof.assumed if proof.proved else ()
    return Judged(proof.claim.name, first, second, proof.proved, numbers, boundary, what, assumed, seconds, sites)


@dataclasses.dataclass(frozen=True)
class ProofVerdict:
    """The outcome of checking a certificate."""

    solver: str
    proved: int
    obligations: int
    problems: tuple[str, ...]
    """The errors in it, or open claims; empty if all is proved."""


def check(
    before: ModelFile | ir.Model, after: ModelFile | ir.Model, certificate: ModelFile, solver: SolverName = "z3"
) -> ProofVerdict:
    """Makes the obligations of two models anew, compares them with a certificate, and has each decided.

    Raises:
        MissingDependencyError: The solver is not installed.
        ModelError: A model or the certificate cannot be read.
        OptionError: The file is no certificate, or one of other models, or there is no such solver.
    """
    asked = Solver(solver)
    path = pathlib.Path(certificate)
    try:
        given = parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read; give the file that --certify wrote") from error
    pair = _pair(before, after)
    for what, side, expected in (("first", pair.before, given.before), ("second", pair.after, given.after)):
        if side.content != expected:
            raise OptionError(f"{path} is not about the {what} model; give the models that it was made of, or make it again")
    problems = pair.differences()
    recorded, known, used = set(given.obligations), {claim.name: claim for claim in given.claims}, dict[str, None]()

    def judge(asked: Obligation) -> bool:
        return asked.text in recorded  # believed, as all that are used are decided afterwards

    for claim in pair.claims:
        terms.restart()
        proof = prove(pair, claim, judge)
        noted = known.pop(claim.name, None)
        if not proof.proved:
            why = noted.open if noted is not None and noted.open else "the file lacks an obligation that it needs"
            problems.append(f"'{claim.name}' is not proved: {why}")
        used.update((item.text, None) for item in proof.obligations if proof.proved)
    problems += [f"'{name}' is claimed, and not to be proved of these models" for name in known]
    for text in used:
        answer = asked.decide(text)
        if answer != "unsat":
            problems.append(f"obligation {given.obligations.index(text)} is {answer} to {solver}")
    return ProofVerdict(solver, len(pair.claims) - sum("is not proved" in item for item in problems), len(used), tuple(problems))
