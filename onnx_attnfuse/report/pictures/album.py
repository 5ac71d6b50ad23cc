"""Pictures of sites, taken while they are worked on, where somebody wants to see them.

A mask is evaluated at small sizes as it was read: which keys each row sees, and where something is added.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnx_attnfuse.attention.masks.classify import Meaning
from onnx_attnfuse.attention.match.candidates import Candidate
from onnx_attnfuse.attention.spec import AttentionSpec, mask_values
from onnx_attnfuse.containment import Subject, contained
from onnx_attnfuse.graph.scopes import Scope
from onnx_attnfuse.graph.uses import label
from onnx_attnfuse.report.pictures.model import Cells, Drawing, MaskPanel, MaskPicture, SitePicture
from onnx_attnfuse.report.pictures.site_graph import UNNAMED, PicturedSite, surroundings, trace
from onnx_attnfuse.targets.base import Emitted
from onnx_attnfuse.verify.verifier import StepTimer

if TYPE_CHECKING:
    from onnx_attnfuse.verify.mask_check import MaskSample

_MAX_CELLS_PER_SIDE = 40
"""Rows or keys that are still drawn apart."""
_TITLES = {"full": "no padding", "right": "padded on the right", "left": "padded on the left"}
_ABOVE, _BELOW = "1234", "abcd"
_PARTS = {"before": "a site", "mask": "a mask", "after": "what took the place of a site"}


class Album:
    """The pictures of one run; it changes nothing in the model, and takes none unless `wanted`."""

    def __init__(self, model: ir.Model, wanted: bool, timer: StepTimer) -> None:
        self._wanted = wanted
        self._clock = timer
        self._model = model
        self._pictures: dict[ir.Node, SitePicture] = {}
        self._painted: dict[tuple[object, ...], MaskPicture | None] = {}
        """Each mask is painted once."""

    def before(self, candidates: Sequence[Candidate], scope: Scope) -> None:
        """Draws sites as they are."""
        for candidate in candidates:
            self._take(candidate.node, "before", lambda candidate=candidate: _drawn(candidate, scope))

    def mask(self, node: ir.Node, spec: AttentionSpec, meaning: Meaning, scope: Scope) -> None:
        """Paints what a mask was read as."""
        self._take(node, "mask", lambda: self._paint(spec, meaning, scope))

    def _paint(self, spec: AttentionSpec, meaning: Meaning, scope: Scope) -> MaskPicture | None:
        """The picture of a mask; None where there is none, or it cannot be evaluated."""
        from onnx_attnfuse.verify.mask_check import samples

        if (meaning.is_trivial and not spec.causal) or meaning.is_distrusted:
            return None
        key = (meaning.text, spec.axes.num_heads, *mask_values(spec.mask))
        if key not in self._painted:
            opsets = scope.graph.opset_imports or self._model.opset_imports
            self._painted[key] = _panels(samples(spec, meaning, scope.facts, opsets, self._model.functions))
        return self._painted[key]

    def after(self, node: ir.Node, spec: AttentionSpec, emitted: Emitted, scope: Scope) -> None:
        """Draws what has taken the place of a site."""
        self._take(node, "after", lambda: _fused(spec, emitted, scope))

    def packed(self, node: ir.Node, operator: ir.Node, result: ir.Value, scope: Scope) -> None:
        """Draws a packed attention, from its own operands on: the nodes before them are packed too."""
        names = ("query", "key", "value")
        operands = {value: role for value, role in zip(operator.inputs, names, strict=False) if value is not None}
        site = PicturedSite((result,), operands, {}, operator.op_identifier())
        self._take(node, "after", lambda: trace(site, scope.facts))

    def pictures(self, candidates: Sequence[Candidate], count: int) -> tuple[SitePicture | None, ...]:
        """One for each candidate in order, then None up to `count` for sites that were no candidates; none if none are wanted."""
        if not self._wanted:
            return ()
        found = [self._pictures.get(candidate.node) for candidate in candidates]
        return (*found, *[None] * (count - len(found)))

    def _take(self, node: ir.Node, part: str, make: Callable[[], Drawing | MaskPicture | None]) -> None:
        """Takes one picture; where our own code fails there is none, and the site is treated the same."""
        if not self._wanted:
            return
        picture = None
        with self._clock.step("draw"), contained(Subject(f"drawing {_PARTS[part]}"), label(node)):
            picture = make()
        self._pictures[node] = dataclasses.replace(self._pictures.get(node, SitePicture()), **{part: picture})


def _fused(spec: AttentionSpec, emitted: Emitted, scope: Scope) -> Drawing | None:
    operands = {**dict.fromkeys(emitted.operands, UNNAMED), **_roles(_operands(spec))}
    results = tuple(new for _, new in emitted.results)
    return trace(PicturedSite(results, operands, _roles(_others(spec)), emitted.node.op_identifier()), scope.facts)


def _drawn(candidate: Candidate, scope: Scope) -> Drawing | None:
    if candidate.read is None:
        is_attention = candidate.refusal is None or candidate.refusal.code != "not-attention"
        return surroundings(candidate.node, scope.facts, fused=candidate.softmax is None) if is_attention else None
    spec = candidate.read
    results = [spec.output[-1].value]
    if spec.cache is not None:
        results += [indexed.value for indexed in spec.cache.present]
    fused = candidate.node.op_identifier() if candidate.softmax is None else None
    operands, others = _roles(_operands(spec)), _roles(_others(spec))
    site = PicturedSite(tuple(dict.fromkeys(results)), operands, others, fused, anchor=candidate.node)
    return trace(site, scope.facts)


def _roles(named: Iterable[tuple[ir.Value, str]]) -> dict[ir.Value, str]:
    """Values with all that each is to the attention."""
    found: dict[ir.Value, str] = {}
    for value, role in named:
        known = found.get(value)
        found[value] = role if known is None or known == role else f"{known}, {role}"
    return found


def _operands(spec: AttentionSpec) -> Iterator[tuple[ir.Value, str]]:
    cache = spec.cache
    key, value = cache.new if cache is not None else (spec.key, spec.value)
    yield from ((operand[-1].indexed.value, role) for operand, role in ((spec.query, "query"), (key, "key"), (value, "value")))
    if cache is not None:
        yield from ((indexed.value, f"past {role}") for indexed, role in zip(cache.past, ("key", "value"), strict=True))


def _others(spec: AttentionSpec) -> Iterator[tuple[ir.Value, str]]:
    new = spec.cache.new if spec.cache is not None else ()
    for rotary in (source.rotary for operand in (*spec.operands(), *new) for source in operand):
        if rotary is not None:
            yield rotary.cos.indexed.value, "cosines"
            yield rotary.sin.indexed.value, "sines"
            if rotary.positions is not None:
                yield rotary.positions.value, "positions"
    yield from ((value, "mask") for value in mask_values(spec.mask))
    yield from ((scale.indexed.value, "scale") for scale in (*spec.scale_values, *spec.result_scales))
    yield from ((rule.condition.value, "rows kept") for rule in spec.row_rules if rule.condition is not None)
    if spec.sink is not None:
        yield spec.sink.value, "sink"


def _panels(found: dict[str, MaskSample]) -> MaskPicture | None:
    """Panels of those that differ; the last batch entry is the one with most padding."""
    if not found:
        return None
    entry = -1
    largest = max(float(np.abs(sample.added[np.isfinite(sample.added)]).max(initial=0.0)) for sample in found.values())
    rows, keys = next(iter(found.values())).allowed.shape[-2:]
    step = -(-max(rows, keys) // _MAX_CELLS_PER_SIDE)
    panels: dict[Cells, MaskPanel] = {}
    for pattern, sample in found.items():
        cells = _cells(sample.allowed[entry, 0, ::step, ::step], sample.added[entry, 0, ::step, ::step], largest)
        panels.setdefault(cells, MaskPanel(_TITLES[pattern], cells))
    alone = len(panels) == 1
    shown = tuple(dataclasses.replace(panel, title="every batch entry") if alone else panel for panel in panels.values())
    return MaskPicture(shown, step, by_head=any(_differ_by_head(sample) for sample in found.values()))


def _cells(allowed: npt.NDArray[np.bool_], added: npt.NDArray[np.float64], largest: float) -> Cells:
    share = np.clip(np.nan_to_num(np.abs(added) / (largest or 1.0), posinf=1.0), 0.0, 1.0)
    levels = np.ceil(share * len(_ABOVE)).astype(int)

    def letter(row: int, key: int) -> str:
        if not allowed[row, key]:
            return "."
        level = int(levels[row, key])
        return "o" if level == 0 else (_ABOVE if added[row, key] > 0 else _BELOW)[level - 1]

    return tuple("".join(letter(row, key) for key in range(allowed.shape[1])) for row in range(allowed.shape[0]))


def _differ_by_head(sample: MaskSample) -> bool:
    return bool((sample.allowed != sample.allowed[:, :1]).any() or (sample.added != sample.added[:, :1]).any())
