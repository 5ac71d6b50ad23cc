"""Calls put into a captured graph, in the place of the nodes that computed an attention before."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from onnx_attnfuse.attention.axes.factors import Axes, length
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.spec import Added, AttentionSpec, Floored, Mask, Replaced, Scaled
from onnx_attnfuse.certify.terms import TRUE
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.training.fully_masked_rows import smallest_gain
from onnx_attnfuse.training.pytorch import flex, layout, rows, runtime_calls
from onnx_attnfuse.training.pytorch.emitter import DTYPES
from onnx_attnfuse.training.pytorch.plan import CallPlan
from onnx_attnfuse.training.pytorch.programs import Compiler, Program
from onnx_attnfuse.training.pytorch.sites import CapturedSite
from onnx_attnfuse.training.pytorch.trace import Traced, storage_of

_TYPES = {onnx: dtype for dtype, onnx in DTYPES.items()}


class Rewriter:
    """Rewrites one captured graph, attention by attention; masks that several share are put together once."""

    def __init__(self, traced: Traced, facts: Facts, *, compiled: bool) -> None:
        """Begins.

        Args:
            traced: The graph as it was read.
            facts: Facts about its values.
            compiled: The graph is compiled as a whole afterwards.
        """
        self._traced, self._facts, self._compiled = traced, facts, compiled
        self._graph: fx.Graph = traced.module.graph
        self._made: dict[Any, tuple[fx.Node, int]] = {}
        """Calls that were added, with the place that they come before."""
        self._known = traced.nodes
        self._places = {node: place for place, node in enumerate(self._graph.nodes)}
        self._place, self._mode = 0, traced.modes.get(next(iter(self._graph.nodes)))
        self._lengths: tuple[fx.Node, fx.Node] | None = None
        """Queries and keys of the attention that is replaced."""

    def replace(self, site: CapturedSite, plan: CallPlan) -> None:
        """Puts a call into the place of an attention.

        Raises:
            Refused: Operands or masks are not tensors of the captured graph; nothing has changed then.
        """
        axes = site.spec.axes
        made = (axes.b, axes.n, axes.i, axes.v)
        old, target = layout.end(site.spec.output, self._known, made)
        if old in self._traced.transformed:
            raise Refused("inner-value", "it is computed inside of torch.vmap or another transform of torch.func")
        before = set(self._graph.nodes)
        self._place, self._mode = self._places[old], self._traced.modes.get(old)
        try:
            with self._graph.inserting_before(old):
                new = layout.arrange(self._emit, self._call(site, plan), made, target)
        except Refused:
            self._undo(before)
            raise
        old.replace_all_uses_with(new, propagate_meta=False)
        if "example_value" in old.meta:
            new.meta.setdefault("example_value", old.meta["example_value"])  # PyTorch's cache asks whether it is a tensor
        self._known[next(value for value, node in self._known.items() if node is old)] = new
        self._places[new], self._traced.modes[new] = self._place, self._mode
        self._sweep(old)

    def _emit(self, function: Any, *arguments: Any) -> fx.Node:
        """Adds a call, or gives the one that was added with the same arguments before."""
        return self._shared((function, arguments), function, arguments)

    def _drawn(self, function: Any, *arguments: Any) -> fx.Node:
        """Adds a call that draws numbers of its own, whatever was added before."""
        return self._graph.call_function(function, arguments)

    def _shared(self, key: Any, function: Any, arguments: tuple[Any, ...]) -> fx.Node:
        """Adds a call, or gives the one with the same key that comes before this place and runs in the same mode."""
        key = key, self._mode
        try:
            node, place = self._made.get(key, (None, 0))
        except TypeError:
            return self._graph.call_function(function, arguments)
        if node is None or place > self._place:
            node = self._graph.call_function(function, arguments)
            self._made[key] = node, self._place
        return node

    def _undo(self, before: set[fx.Node]) -> None:
        for node in reversed([node for node in self._graph.nodes if node not in before]):
            self._graph.erase_node(node)
        self._made = {key: made for key, made in self._made.items() if made[0] in before}

    def _call(self, site: CapturedSite, plan: CallPlan) -> fx.Node:
        spec = site.spec
        query, key, value = self._operands(spec)
        self._lengths = query, key
        for factor in spec.scale_values:
            query = self._emit(runtime_calls.multiplied, query, self._laid(factor.indexed, spec), factor.divide)
        if plan.form == "rule":
            return self._flex(site, plan, (query, key, value))
        mask, empty = self._mask(spec, plan)
        scale, share, kernels = spec.scale, site.dropout, plan.kernels
        emit = self._drawn if share else self._emit
        if spec.sink is not None:
            sink, causal = self._laid(spec.sink, spec), plan.form == "causal"
            return emit(runtime_calls.attend_with_sink, query, key, value, mask, sink, scale, causal, share, kernels)
        if plan.rows == "levelled":
            return emit(rows.attend_levelled, query, key, value, mask, scale, smallest_gain(spec.mask), share, kernels)
        if plan.rows in {"added", "infinite"}:
            (fill,) = site.meaning.fills
            return emit(rows.attend_added, query, key, value, mask, empty, scale, share, kernels, fill)
        if plan.rows in {"replaced", "void", "zero"} and site.call is None:
            ends = {"replaced": None, "void": float("nan"), "zero": 0.0}[plan.rows]
            return emit(rows.attend_replaced, query, key, value, mask, empty, scale, share, kernels, ends)
        return emit(runtime_calls.attend, query, key, value, mask, scale, plan.form == "causal", share, kernels)

    def _operands(self, spec: AttentionSpec) -> tuple[fx.Node, fx.Node, fx.Node]:
        """Queries, keys and values as (b, n, s, h); keys and values of fewer heads where heads share them."""
        axes = spec.axes
        (query, own), *_ = self._usable(spec.query)
        first = self._typed(layout.arrange(self._emit, query, own, (axes.b, axes.n, axes.i, axes.h)), spec)
        keys, values = self._usable(spec.key), self._usable(spec.value)
        for key, key_axes in reversed(keys):
            shared = layout.shared_heads(key_axes, (axes.n,))
            for value, value_axes in reversed(values):
                if shared is None or layout.shared_heads(value_axes, (axes.n,)) != shared:
                    continue
                try:
                    heads = shared[0]
                    laid = (
                        layout.arrange(self._emit, key, key_axes, (axes.b, heads, axes.j, axes.h)),
                        layout.arrange(self._emit, value, value_axes, (axes.b, heads, axes.j, axes.v)),
                    )
                except Refused:
                    continue
                return first, self._typed(laid[0], spec), self._typed(laid[1], spec)
        raise Refused("inner-value", "keys and values are not tensors of the captured graph with the same heads")

    def _usable(self, operand: Any) -> list[tuple[fx.Node, Axes]]:
        found = layout.usable(operand, self._known)
        if not found:
            raise Refused("inner-value", "an operand is not a tensor of the captured graph, or is scaled there")
        return found

    def _typed(self, node: fx.Node, spec: AttentionSpec) -> fx.Node:
        """A tensor in the type that the products were computed in."""
        assert spec.dtype is not None
        dtype, fake = _TYPES[spec.dtype], self._traced.fakes.get(node.args[0] if node.target is runtime_calls.arranged else node)  # type: ignore[arg-type]
        return node if fake is None or fake.dtype == dtype else self._emit(torch.Tensor.to, node, dtype)

    def _mask(self, spec: AttentionSpec, plan: CallPlan) -> tuple[fx.Node | None, fx.Node | None]:
        """The mask of a call, and rows without a key where they are apart."""
        if plan.form in {"none", "causal"}:
            return None, None
        assert spec.dtype is not None
        dtype = _TYPES[spec.dtype]
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        if plan.rows == "levelled":
            return self._bias(spec.mask, spec, wide), None
        last = next((place for place, step in enumerate(spec.mask) if isinstance(step, Replaced)), len(spec.mask))
        if plan.form == "kept":
            kept = self._kept(spec.mask, spec)
            if plan.rows in {"none", "zero"} and not spec.row_rules:
                return kept, None
            empty = self._emit(rows.without_key, kept)
            return self._emit(rows.opened, kept, empty), empty
        if plan.rows in {"replaced", "void", "zero"} and last < len(spec.mask):
            kept = self._kept(spec.mask[last:], spec)
            empty = self._emit(rows.without_key, kept)
            inner = self._bias(spec.mask[:last], spec, dtype) if last else None
            return self._emit(rows.bounded, inner, kept, empty, dtype), empty
        return self._bias(spec.mask, spec, dtype), None

    def _kept(self, mask: Mask, spec: AttentionSpec) -> fx.Node:
        """Where all steps of a mask let a key be seen."""
        total: fx.Node | None = None
        for step in mask:
            assert isinstance(step, (Added, Replaced))
            total = self._seen(step, spec) if total is None else self._emit(runtime_calls.both, total, self._seen(step, spec))
        assert total is not None
        return total

    def _seen(self, step: Added | Replaced, spec: AttentionSpec) -> fx.Node:
        if isinstance(step, Added):
            return self._emit(runtime_calls.above, self._laid(step.indexed, spec), self._facts.assumed.masked_from, step.negative)
        return self._emit(runtime_calls.holds, self._laid(step.condition, spec), step.keep_where)

    def _bias(self, mask: Mask, spec: AttentionSpec, dtype: torch.dtype) -> fx.Node:
        """The numbers that the steps of a mask leave of scores of 0.

        Raises:
            Refused: A step is no sum, no replacement and no factor that makes numbers smaller, which may not become infinite.
        """
        total: fx.Node | None = None
        for step in mask:
            if isinstance(step, Added):
                total = self._emit(runtime_calls.added, total, self._laid(step.indexed, spec), step.negative, dtype)
            elif isinstance(step, Replaced):
                total = self._emit(runtime_calls.replaced, total, self._seen(step, spec), step.fill, dtype)
            elif isinstance(step, Scaled) and not isinstance(step.factor, IndexedValue) and _shrinks(step.factor, step.divide):
                total = None if total is None else self._emit(runtime_calls.scaled, total, step.factor, step.divide)
            else:
                assert isinstance(step, (Scaled, Floored))
                raise Refused("scaled-mask", "masked scores are multiplied or held above a number")
        if total is None:
            raise Refused("scaled-mask", "the mask has no step")
        return total

    def _laid(self, indexed: Any, spec: AttentionSpec) -> fx.Node:
        """A value of a mask as (b or 1, n or 1, s or 1, t or 1)."""
        node, number = self._known.get(indexed.value), self._facts.number(indexed.value)
        if node is None and number is not None and self._lengths is not None:
            return self._emit(torch.Tensor.new_full, self._lengths[0], (1, 1, 1, 1), number)
        if node is None:
            raise Refused("inner-value", f"the mask '{indexed.value.name}' is not a tensor of the captured graph")
        return layout.arrange(self._emit, node, indexed.axes, spec.axes.scores, self._lengths)

    def _flex(self, site: CapturedSite, plan: CallPlan, operands: tuple[fx.Node, fx.Node, fx.Node]) -> fx.Node:
        """Flex attention with the rule and the bias of a mask."""
        query, key, value = operands
        rule, bias = Compiler(site.spec), Compiler(site.spec)
        program = rule.program(site.meaning.allowed)
        read = self._read(rule)
        added: Program | None = None
        for part in site.meaning.biases:
            found = bias.program(part)
            added = found if added is None else ("Add", added, found)
        everything = site.meaning.allowed is TRUE
        blocks = self._blocks(site.spec, ("number", True) if everything else program, () if everything else read, query, key)
        arguments = (program, read, added, self._read(bias), site.spec.scale, site.spec.softcap, plan.rows, self._compiled)
        return self._emit(flex.attend, query, key, value, blocks, *arguments)

    def _blocks(self, spec: AttentionSpec, program: Program, read: tuple[fx.Node, ...], query: fx.Node, key: fx.Node) -> fx.Node:
        """The blocks of a rule, made once for all attentions of the same lengths on a device."""
        fakes = (self._traced.fakes.get(node) for node, _ in self._usable(spec.query))
        device = next((fake.device for fake in fakes if fake is not None), query)
        mark = flex.block_mask, program, read, tuple(map(length, spec.axes.scores)), device
        return self._shared(mark, flex.block_mask, (program, read, query, key, self._compiled))

    def _read(self, compiler: Compiler) -> tuple[fx.Node, ...]:
        """The tensors that a program reads.

        Raises:
            Refused: One is not a tensor of the captured graph.
        """
        nodes = [self._known.get(value) for value in compiler.values]
        if None in nodes:
            raise Refused("inner-value", "the mask is read from a value that is not a tensor of the captured graph")
        return tuple(node for node in nodes if node is not None)

    def _sweep(self, node: fx.Node) -> None:
        """Erases unused nodes, upwards; those written to in place, only where nobody else sees it."""
        pending = [node]
        while pending:
            item = pending.pop()
            if (
                item.users
                or item.op in {"placeholder", "output"}
                or item.graph is not self._graph
                or getattr(item, "_erased", False)
            ):
                continue
            if _writes(item) and not self._is_own(item):
                continue
            inputs = item.all_input_nodes
            self._graph.erase_node(item)
            pending += inputs

    def _is_own(self, item: fx.Node) -> bool:
        """Whether an operator writes to a tensor that was made for it alone."""
        target = item.args[0] if item.args else None
        if not isinstance(target, fx.Node) or target.op == "placeholder" or set(target.users) != {item}:
            return False
        fake = self._traced.fakes.get(target)
        others = [node for node, other in self._traced.fakes.items() if node not in {item, target} and _shares(other, fake)]
        return fake is not None and not any(node.users or node.op == "placeholder" for node in others)


def _shrinks(factor: float, divide: bool) -> bool:
    return factor >= 1 if divide else 0 < factor <= 1


def _shares(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and storage_of(one) == storage_of(other)


def _writes(node: fx.Node) -> bool:
    """Whether a node writes to its first operand."""
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.endswith("__")
    if node.op != "call_function":
        return False
    name = getattr(node.target, "__name__", "")
    return node.target in _WRITING or (name.endswith("_") and not name.endswith("__")) or bool(node.kwargs.get("inplace"))


_WRITING: frozenset[Any] = frozenset([
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.iand, operator.ior, operator.ixor,
])  # fmt: skip
