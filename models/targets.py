"""Which target takes which attention: ``python -m models.targets FOLDER [--only bert]``.

For every family of exports in the folder: the operators that can take its sites, which of them the planner chooses on a CPU in
float32 and on two GPUs in half precision, and why the others cannot, in the planner's own words. Nothing is built or run here;
``models.coverage`` does that.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir

from onnx_attnfuse.attention.masks.classify import Meaning, understand
from onnx_attnfuse.attention.masks.index_reader import Reader
from onnx_attnfuse.attention.masks.intervals import Bounds
from onnx_attnfuse.attention.match.candidates import anchor_of, find_candidates
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.fusion.plan import Plan, PlanContext, make_plans
from onnx_attnfuse.graph import io
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.opset import Opset
from onnx_attnfuse.graph.scopes import all_names, scopes
from onnx_attnfuse.kernels.device import Device
from onnx_attnfuse.language.registry.discovery import load
from onnx_attnfuse.options import Options
from onnx_attnfuse.targets import TARGETS, attention, name_of
from onnx_attnfuse.targets.base import BuildContext

DEVICES = {"cpu": Device("cpu"), "sm80": Device("cuda", 80), "sm90": Device("cuda", 90)}
SHORT = {
    "MultiHeadAttention": "MHA",
    "GroupQueryAttention": "GQA",
    "Attention": "Attention",
    "onnx.Attention": "onnx.Attention",
    "PackedMultiHeadAttention": "packed",
}


@dataclasses.dataclass
class Family:
    """Counts for one family of exports: sites, targets that take them, plans by device, and reasons."""

    sites: int = 0
    takes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter[str])
    chosen: dict[str, collections.Counter[str]] = dataclasses.field(default_factory=dict[str, collections.Counter[str]])
    reasons: dict[str, collections.Counter[str]] = dataclasses.field(default_factory=dict[str, collections.Counter[str]])


def read(path: Path) -> Iterator[tuple[AttentionSpec, Meaning, dict[str, BuildContext]]]:
    """Every attention of an export, understood, with a workbench for each device."""
    model, _ = io.from_any(path)
    names = all_names(model)
    for scope in scopes(model):
        builder = Builder(scope.graph, scope.facts, scope.opset, names)
        reader, bounds = Reader(scope.facts), Bounds(scope.facts)
        benches = {
            name: BuildContext(builder, bounds, reader, device, Opset(model, asked=True)) for name, device in DEVICES.items()
        }
        for candidate in find_candidates(scope, load(Options()).readers, keep_outputs=False):
            if candidate.spec is not None:
                builder.at(anchor_of(candidate.spec))
                yield candidate.spec, understand(candidate.spec, reader), benches


def look(path: Path, family: Family) -> None:
    """Adds the sites of one export."""
    for spec, meaning, benches in read(path):
        family.sites += 1
        half = dataclasses.replace(spec, dtype=ir.DataType.FLOAT16)
        for name, device in DEVICES.items():
            one = spec if device.ep == "cpu" else half
            plans, _ = make_plans(one, meaning, PlanContext(device), benches[name])
            family.chosen.setdefault(name, collections.Counter())[said(plans[0]) if plans else "none"] += 1
        for target in TARGETS:
            one = spec if target is attention else half  # whose weights keep their type
            refusal = target.refuse(one, meaning, benches["sm90"])
            if refusal is None:
                exact = any(item.is_exact for item in target.encodings(half, meaning))
                family.takes[short(name_of(target)) + ("" if exact else " (some batches)")] += 1
            else:
                family.reasons.setdefault(refusal.code, collections.Counter())[short(name_of(target))] += 1


def short(name: str) -> str:
    """A target's name for a table."""
    return SHORT.get(name, name)


def said(plan: Plan) -> str:
    """A plan in a few words."""
    forms = dict.fromkeys(
        f"{short(name_of(item.target))} {item.encoding.mask if item.encoding.mask != 'none' else ''}".strip()
        for item in (*plan.faster, plan.main)
    )
    return ", else ".join(forms)


def row(name: str, family: Family) -> str:
    """One line of the table."""

    def words(counted: collections.Counter[str]) -> str:
        whole = len(counted) == 1 and sum(counted.values()) == family.sites
        return "; ".join(item if whole else f"{item} ×{count}" for item, count in counted.most_common())

    takes = "; ".join(item if count == family.sites else f"{item} ×{count}" for item, count in family.takes.items())
    why = "; ".join(f"{', '.join(counted)}: {code}" for code, counted in family.reasons.items())
    cells = [
        name,
        str(family.sites),
        takes,
        *(words(family.chosen.get(device, collections.Counter())) for device in DEVICES),
        why,
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m models.targets", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="families, with commas")
    options = parser.parse_args()
    only = set(filter(None, options.only.split(",")))
    families: dict[str, Family] = {}
    for path in sorted(options.folder.glob("*.onnx")):
        name = path.stem.split("__")[0]
        if not only or name in only:
            look(path, families.setdefault(name, Family()))
    print("| family | sites | can be taken by | cpu | sm80 | sm90 | the others |\n|---|---|---|---|---|---|---|")
    for name, family in families.items():
        print(row(name, family))


if __name__ == "__main__":
    main()
