"""The call for an attention: the form of its mask, its kernel, and why not a faster one."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import onnx_ir as ir
import torch

from onnx_attnfuse.attention.axes.factors import leaves, length
from onnx_attnfuse.attention.masks.classify import Meaning, split_mask
from onnx_attnfuse.attention.masks.index_reader import Reader
from onnx_attnfuse.attention.masks.intervals import Bounds
from onnx_attnfuse.attention.masks.mask_terms import elements_of, factors_of
from onnx_attnfuse.attention.masks.predicates import Other, Padding
from onnx_attnfuse.attention.masks.rounded_sums import lowest_sum
from onnx_attnfuse.attention.masks.seen_keys import on_diagonal, rows_see_themselves
from onnx_attnfuse.attention.spec import Added, AttentionSpec, Mask, Replaced, mask_values
from onnx_attnfuse.certify.terms import Term
from onnx_attnfuse.graph.dtypes import HALVES
from onnx_attnfuse.graph.thresholds import MASKS_APART, ORDINARY
from onnx_attnfuse.kernels.policy import Policy
from onnx_attnfuse.reasons import Reason, Refused
from onnx_attnfuse.training.fully_masked_rows import swallows_from, treatment
from onnx_attnfuse.training.kernels import (
    CPU_FLASH,
    CUDNN,
    EFFICIENT,
    FLASH,
    Demand,
    TrainingDevice,
    TrainingKernel,
    check_differentiable,
)
from onnx_attnfuse.training.pytorch.runtime_calls import PLAIN, wide_enough
from onnx_attnfuse.training.pytorch.sites import CapturedSite

Form = Literal["none", "causal", "kept", "bias", "rule"]
"""How a mask is passed: not at all, by the argument `is_causal`, as truth values, as numbers, as a rule of flex
attention."""
Rows = Literal["none", "zero", "void", "replaced", "shifted", "added", "infinite", "levelled"]
"""Correction of rows without a key: none, as there are none; they are 0, or NaN, where scores are replaced; equal weights, where
scores are replaced by a number; the scores as they were; equal weights, where a number is added; NaN there; a call of their
own."""
_LEAST_FLEX = 16
LEAST_WEIGHT = -745.0
"""Below this an exponential is 0 in any type."""
MATH = "math"
FLEX = "flex"


@dataclasses.dataclass(frozen=True)
class Wishes:
    """The wishes of a caller on the calls that are written."""

    policy: Policy
    flex: bool | None = None
    """Flex attention where a rule says what a mask means: wherever it can be, nowhere, or None: on CUDA."""
    patterns: tuple[Any, ...] = ()
    """Patterns besides the built-in ones, as `Options` has them."""
    compiled: bool = False
    """The graph is compiled as a whole afterwards."""
    kernels: tuple[str, ...] = ()
    """The kernels to choose from, by name, the one to be tried first in front; none: as the policy has it."""
    deterministic: bool = False
    """Gradients are to be the same bit for bit in each run."""


@dataclasses.dataclass(frozen=True)
class CallPlan:
    """The call for one attention."""

    form: Form
    rows: Rows
    kernel: str
    kernels: tuple[str, ...]
    """Names of `SDPBackend` to choose from; none: as PyTorch chooses."""
    others: tuple[tuple[str, Reason], ...]
    """Faster kernels that do not run it, and why."""
    is_new: bool = True
    """Something is replaced; else it is the call that the module makes itself."""
    deterministic: bool = True
    """Gradients are the same bit for bit in each run."""

    @property
    def words(self) -> str:
        """How the mask is passed, for a reader."""
        words = {
            "none": "without a mask",
            "causal": "causal by attribute",
            "kept": "its mask as truth values",
            "bias": "its mask as a bias",
            "rule": "its mask as a rule",
        }[self.form]
        if not self.is_new:
            return "the module's own call"
        return words + ("" if self.rows in {"none", "shifted"} else ", rows without a key apart")


class Planner:
    """Chooses calls for the attentions of one captured graph."""

    def __init__(self, device: TrainingDevice, wishes: Wishes, reader: Reader, bounds: Bounds) -> None:
        self._device, self._wishes, self._reader, self._bounds = device, wishes, reader, bounds

    def plan(self, site: CapturedSite, *, trained: bool, no_rule: Reason | None = None) -> CallPlan:
        """The call for an attention.

        Args:
            site: The attention.
            trained: Something that is added to its scores has a gradient.
            no_rule: Why its mask cannot be passed as a rule, as far as that was tried.

        Raises:
            Refused: No call is exact.
        """
        spec, meaning = site.spec, site.meaning
        _check(spec)
        others: list[tuple[str, Reason]] = []
        reason = no_rule or self._no_flex(site, trained=trained)
        if reason is None:
            return CallPlan("rule", self._flex_rows(site), FLEX, (), ())
        if reason.code != "fastest":
            others.append((FLEX, reason))
        if spec.softcap is not None:
            raise Refused("softcap", "the scores are capped by tanh, which no kernel but flex attention does: " + reason.message)
        form = self._form(spec, meaning)
        rows: Rows = "none" if form in {"none", "causal"} else self._rows(spec, meaning, form) if site.call is None else "zero"
        form = "bias" if rows == "levelled" else form
        if rows == "levelled" and self._device.kind == "cpu" and self._wishes.compiled:
            raise Refused(
                "unfused-faster", "rows without a key may be of any kind, which takes compiled graphs two calls on a CPU"
            )
        is_new = site.call is None or form in {"none", "causal"}
        if is_new and site.call is not None and self._has(site, form):
            is_new = False
        return self._kernel(site, form, rows, tuple(others), trained=trained, is_new=is_new)

    def _has(self, site: CapturedSite, form: Form) -> bool:
        """Whether the module's own call passes its mask in a form already."""
        call = site.call
        assert call is not None
        causal = (len(call.args) > 5 and bool(call.args[5])) or bool(call.kwargs.get("is_causal"))
        masked = (len(call.args) > 3 and call.args[3] is not None) or call.kwargs.get("attn_mask") is not None
        return not masked and causal == (form == "causal")

    def _kernel(
        self, site: CapturedSite, form: Form, rows: Rows, others: tuple[tuple[str, Reason], ...], *, trained: bool, is_new: bool
    ) -> CallPlan:
        """The first kernel of the device that takes a call."""
        axes = site.spec.axes
        sizes: tuple[Any, Any] = length(axes.h), length(axes.v)
        if site.spec.sink is not None and all(isinstance(size, int) for size in sizes):
            sizes = wide_enough(*sizes), wide_enough(*sizes)
        demand = Demand(
            dtype=site.spec.dtype,
            head_size=sizes[0],
            v_head_size=sizes[1],
            bias=form in {"kept", "bias"},
            causal=form == "causal",
            square=length(axes.i) == length(axes.j),
            dropout=site.dropout,
            bias_gradient=trained and form == "bias",
        )
        found, wishes = others, self._wishes
        is_new |= bool(wishes.kernels) or (wishes.deterministic and self._device.kind == "cuda")
        order = self._order()
        allowed = [kernel for kernel in order if self._off(kernel) is None]
        math_too = not wishes.kernels or MATH in wishes.kernels
        names = (*(kernel.backend for kernel in allowed), *["MATH"] * math_too)
        restricted = len(allowed) < len(order) or wishes.policy.wishes or wishes.kernels
        for kernel in order:
            reason = self._off(kernel) or kernel.refuse(demand, self._device)
            if reason is None:
                return CallPlan(form, rows, kernel.name, names if restricted else (), found, is_new, is_deterministic(kernel))
            found = (*found, (kernel.name, reason))
        if not math_too:
            raise Refused("no-such-kernel", "; ".join(f"{name}: {reason}" for name, reason in found))
        is_plain = self._device.kind == "cpu" and site.spec.dtype not in HALVES and site.call is None
        return CallPlan(form, rows, MATH, PLAIN if is_plain else names if restricted else (), found, is_new)

    def _order(self) -> list[TrainingKernel]:
        """The kernels of the device, those that are asked for first."""
        names = self._wishes.kernels
        usual = (FLASH, *([CUDNN] if "cudnn" in names else []), EFFICIENT, CPU_FLASH)
        here = [kernel for kernel in usual if kernel.device == self._device.kind]
        return sorted(here, key=lambda kernel: names.index(kernel.key) if kernel.key in names else not self._switch(kernel))

    def _switch(self, kernel: TrainingKernel) -> bool | None:
        policy = self._wishes.policy
        return {"flash": policy.flash, "efficient": policy.efficient}.get(kernel.switch or "")

    def _off(self, kernel: TrainingKernel) -> Reason | None:
        """Why a kernel is not wanted, whatever it can."""
        names = self._wishes.kernels
        if self._switch(kernel) is False or (names and kernel.key not in names):
            return Reason("switched-off", "it is switched off")
        if self._wishes.deterministic and not is_deterministic(kernel):
            remedy = " unless torch.use_deterministic_algorithms(True) is called" if kernel.determinism == "if asked" else ""
            return Reason("not-deterministic", f"its gradients differ from run to run{remedy}")
        return None

    def _form(self, spec: AttentionSpec, meaning: Meaning) -> Form:
        """How the mask is passed.

        Raises:
            Refused: No way is exact.
        """
        if meaning.is_trivial and not spec.mask:
            return "none"
        triangle = meaning.only_causal
        square = length(spec.axes.i) == length(spec.axes.j)
        if triangle is not None and triangle.offset == 0 and square and self._sees_a_key(spec, meaning):
            return "causal"
        if meaning.is_trivial and not any(isinstance(step, Replaced) for step in spec.mask):
            return "none"
        if _only_forbids(spec, meaning):
            return "kept"
        masks = [
            value
            for value in mask_values(spec.mask)
            if self._reader.facts.dtype(value) in {ir.DataType.FLOAT, ir.DataType.DOUBLE}
        ]
        if spec.dtype in HALVES and masks:
            raise Refused("narrowed-mask", f"the mask '{masks[0].name}' would be rounded to half precision")
        return "bias"

    def _sees_a_key(self, spec: AttentionSpec, meaning: Meaning) -> bool:
        if meaning.is_distrusted:
            return False
        if not any(map(self._bounds.may_mask, meaning.biases)):
            return meaning.rows_see_a_key or rows_see_themselves(meaning.allowed, spec)
        own = [on_diagonal(bias, spec) for bias in meaning.biases]
        return rows_see_themselves(meaning.allowed, spec) and not any(bias is None or self._bounds.may_mask(bias) for bias in own)

    def _rows(self, spec: AttentionSpec, meaning: Meaning, form: Form) -> Rows:
        """The correction that rows without a key need.

        Raises:
            Refused: The module's result for them cannot be reproduced.
        """
        if spec.sink is not None:
            self._check_sink(spec, meaning)
            return "none"
        if self._sees_a_key(spec, meaning) and not spec.row_rules:
            return "none"
        last = spec.mask[-1] if spec.mask else None
        if isinstance(last, Replaced) and not spec.row_rules and self._lies_below(last.fill, spec.mask[:-1], meaning):
            return "void" if last.fill == -math.inf else "replaced"
        kind = treatment(spec, meaning, self._reader, self._bounds)
        if kind == "none":
            return "none"
        fills = meaning.fills
        if kind == "replaced":
            if len(fills) > 1:
                raise Refused("mixed-mask", "scores are replaced by several numbers; fully masked rows are of several kinds")
            infinite = -math.inf in fills
            if spec.row_rules:
                return _guarded(infinite=infinite)
            return "void" if infinite else "replaced"
        if spec.row_rules:
            raise Refused("row-rule", "NaN becomes 0 after the softmax, and comes back in gradients where a mask is added")
        steps = [step for step in spec.mask if isinstance(step, Added)]
        if form != "kept" or len(steps) != len(spec.mask) or len(fills) != 1:
            return "levelled"
        (fill,) = fills
        alike = fill == -math.inf or (len(steps) == 1 and lowest_sum(steps[0], self._reader, self._bounds) == fill)
        if not alike:
            return "levelled"
        limit = swallows_from(self._reader.facts.dtype(steps[0].indexed.value))
        return "infinite" if fill == -math.inf else "added" if fill <= limit else "shifted"

    def _lies_below(self, fill: float, earlier: Mask, meaning: Meaning) -> bool:
        """Whether scores that are replaced last lie below all others, however low a bias is, so that no row mixes both."""
        masked = any(isinstance(step, Replaced) for step in earlier) or split_mask(earlier, self._reader).fills
        lowest = sum(self._bounds.of_term(bias)[0] for bias in meaning.biases)
        return not masked and not meaning.is_distrusted and lowest > fill + MASKS_APART

    def _check_sink(self, spec: AttentionSpec, meaning: Meaning) -> None:
        """Refuses a sink beside which masked keys may count; one that is an ordinary score leaves them no weight.

        Raises:
            Refused: They may, in rows that see no key.
        """
        if self._sees_a_key(spec, meaning):
            return
        assert spec.sink is not None
        low, fill = self._bounds.of(spec.sink.value)[0], max(meaning.fills, default=-math.inf)
        if low < -ORDINARY:
            raise Refused("sink", "the sink may be as low as masked scores, which then have weight in fully masked rows")
        if fill > low - ORDINARY + LEAST_WEIGHT:
            raise Refused("sink", f"scores masked by {fill:g} may have weight apart from the sink in fully masked rows")

    def _no_flex(self, site: CapturedSite, *, trained: bool) -> Reason | None:
        """Why flex attention is not taken; `fastest` where there is nothing to gain."""
        spec, meaning = site.spec, site.meaning
        dense = [item for item in meaning.predicates if isinstance(item, Other) and _is_dense(item.predicate, spec)]
        rules = [item for item in meaning.predicates if not isinstance(item, Padding) and item not in dense]
        plain = meaning.only_causal is not None and spec.softcap is None and self._form(spec, meaning) == "causal"
        pays = (rules and not plain) or spec.softcap is not None
        if not pays or dense:
            return Reason("fastest", "it is no faster for this mask")
        asked = FLEX in self._wishes.kernels if self._wishes.kernels else self._wishes.flex
        wanted = asked if asked is not None else self._device.kind == "cuda"
        if not wanted:
            off = asked is False
            return Reason("switched-off", "it is switched off") if off else Reason("other-device", "it runs on cuda")
        if spec.sink is not None:
            return Reason("sink", "it has no score without a value")
        if site.dropout:
            return Reason("dropout", f"it has no dropout, and {site.dropout:g} of the weights are dropped")
        if trained:
            return Reason("bias-gradient", "the term added to the scores is trained")
        size, own = length(spec.axes.h), length(spec.axes.v)
        if not isinstance(size, int) or size != own or (size < _LEAST_FLEX and self._device.kind == "cuda"):
            return Reason("head-size", f"it takes heads of equal sizes from {_LEAST_FLEX} on, and here they are {size} and {own}")
        if spec.row_rules or meaning.is_distrusted:
            return Reason("row-rule", "rows are zeroed after the softmax")
        try:
            self._flex_rows(site)
        except Refused as refused:
            return refused.reason
        return None

    def _flex_rows(self, site: CapturedSite) -> Rows:
        """The correction that rows without a key need with flex attention.

        Raises:
            Refused: It cannot be had.
        """
        spec, meaning = site.spec, site.meaning
        if self._sees_a_key(spec, meaning) or not spec.mask:
            return "none"
        if site.call is not None:
            if meaning.fills == frozenset([-math.inf]):
                return "zero"
            raise Refused("mixed-mask", "fully masked rows depend on the kernel where numbers are added")
        rows = self._rows(spec, meaning, "kept")
        if rows not in {"replaced", "added"}:
            raise Refused("mixed-mask", "fully masked rows do not get equal weights")
        return rows


def is_deterministic(kernel: TrainingKernel) -> bool:
    """Whether a kernel gives the same gradients in each run, as PyTorch is switched now."""
    asked = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    return kernel.determinism == "always" or (kernel.determinism == "if asked" and asked)


def _guarded(*, infinite: bool) -> Rows:
    if not infinite:
        raise Refused("row-rule", "rows are zeroed after the softmax, which no kernel differentiates")
    return "zero"


def _is_dense(condition: Term, spec: AttentionSpec) -> bool:
    """Whether a condition reads a tensor that has an element for each pair of row and key."""
    rows, keys = (set(leaves(axis)) for axis in (spec.query_axis, spec.key_axis))
    return any(rows & found and keys & found for found in map(factors_of, elements_of(condition)))


def _only_forbids(spec: AttentionSpec, meaning: Meaning) -> bool:
    """Whether a mask certainly leaves a score as it is or forbids it."""
    if meaning.biases or meaning.is_distrusted:
        return False
    return bool(spec.mask) and all(isinstance(step, (Added, Replaced)) and getattr(step, "fill", -1.0) != 0 for step in spec.mask)


def _check(spec: AttentionSpec) -> None:
    """Refuses attention that neither call computes.

    Raises:
        Refused: A sink, a computed scale, weights that are multiplied, or rows that are set to 0 where data says so.
    """
    if any(rule.condition is not None for rule in spec.row_rules):
        raise Refused("row-rule", "rows are zeroed after the softmax, which no kernel differentiates")
    check_differentiable(spec)
