"""The page of what certificates prove and refute, from records."""

# pyright: basic, reportMissingTypeStubs=false
from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.harness import machine, table

Record = dict[str, Any]
ATTENTIONS = ("MultiHeadAttention", "GroupQueryAttention", "Attention")


def page(records: Sequence[Record]) -> str:
    """The whole of `certificates.md`."""
    parts = [
        "# Certificates: what is proved, what is refuted",
        "Written by `python -m benchmarks.certificates`. CPU times of one process. The target is the CPU, but where a set says "
        f"CUDA. {machine()}.",
        *_proved([item for item in records if item["what"] == "proofs"]),
        *_refuted([item for item in records if item["what"] == "wrong"]),
    ]
    return "\n\n".join(parts) + "\n"


def _proved(records: Sequence[Record]) -> Iterator[str]:
    chosen = [item for item in records if "error" not in item]
    rows: list[list[object]] = []
    for name in dict.fromkeys(item["set"] for item in chosen):
        models = [item for item in chosen if item["set"] == name]
        made = [claim for item in models for claim in item["claims"]]
        for operator in (*ATTENTIONS, ""):
            sites = [claim for claim in made if claim[1] == operator]
            if sites:
                first = [next((claim[3] for claim in item["claims"] if claim[1] == operator), None) for item in models]
                alone = statistics.median([seconds for seconds in first if seconds is not None])
                rows.append([name, operator or "sums, rotations, constants", *_times(sites), f"{1000 * alone:.0f}"])
    yield "## Real exports"
    yield (
        "Values that are computed in another way, by the attention operator that was built for them, each proved for all sizes "
        "and masks. Of a decoder, its presents count, too. The first value of a model takes longest: what later layers are "
        "compared with is proved then. Reading both models and starting the solver is not in these times: "
        f"{1000 * statistics.median([item.get('read', 0.0) for item in chosen]):.0f} ms for a model in the middle."
    )
    yield table(["set", "operator", "values", "proved", "median ms", "90 % ms", "worst s", "first of a model, median ms"], rows)
    rows = []
    for name in dict.fromkeys(item["set"] for item in chosen):
        models = [item for item in chosen if item["set"] == name]
        both = [sum(not item[solver][1] for item in models) for solver in ("z3", "cvc5")]
        rows.append([name, len(models), sum(item["sites"] for item in models), *both])
    yield "Models whose certificate a solver confirmed:"
    yield table(["set", "models", "sites fused", "z3 says all", "cvc5 says all"], rows)
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
    "equal under level-rows": "proved where a number that masks leaves nothing of a score, as on a GPU; it differs on a CPU",
    "no model": "",
}


def _refuted(records: Sequence[Record]) -> Iterator[str]:
    counted = Counter(item["verdict"] for item in records)
    same = [item for item in records if item["verdict"].startswith("equal") or item["verdict"] == "open"]
    real = [item for item in records if item not in same and item["verdict"] != "no model"]
    if not real:
        return
    yield "## Rewrites that are wrong on purpose"
    yield (
        f"{len(records)} changes of fused models, each of one thing (`tests/support/wrong_rewrites.py`), {len(real)} of which "
        f"change what is computed, of {len({item['change'] for item in real})} kinds, in {len({item['model'] for item in real})} "
        "models. Refuted are those at a value for which the prover found no proof and concrete numbers found a difference."
    )
    yield table(["verdict", "changes", ""], [[name, counted[name], told] for name, told in _VERDICTS.items() if counted[name]])
    tried = [item for item in real if item["runs"] != "not run"]
    seen = sum(item["runs"] != "equal" for item in tried)
    yield f"The hostile runs of `attnfuse verify` alone, eight cases on whole models, see {seen} of {len(tried)} given to them."
    yield "\n".join(f"- `{item['model']}`, {item['change']}: {item['verdict']}" for item in same)
    kinds: dict[str, list[Record]] = {}
    for item in real:
        kinds.setdefault(item["change"].partition(" at ")[0], []).append(item)
    yield table(
        ["change", "made", "refuted by numbers", "an input"],
        [
            [kind, len(items), sum(item["verdict"] == "refuted" for item in items), items[0]["example"]]
            for kind, items in sorted(kinds.items())
        ],
    )  # fmt: skip
