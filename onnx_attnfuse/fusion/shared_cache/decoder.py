"""A decoder before and after: taken out of two that an `If` merges, and the outcome of sharing its cache, for the report.

    If(use_cache_branch) then with_past else without     becomes     with_past

So Optimum merges decoders with and without a past; the one with a past takes a prompt too. The one without is the other with an
empty past, which is not taken for granted: where the cache becomes one buffer, the result is run against the source as it is
called, a prompt without a past and steps with one (`verify/decoder_loop.py`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from onnx_attnfuse.attention.match.candidates import Candidate
from onnx_attnfuse.graph.constants import all_nodes, is_standard, subgraphs
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import RESHAPES, is_attention
from onnx_attnfuse.graph.sweep import sweep
from onnx_attnfuse.graph.uses import before, is_fed, label
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.report.model import SiteReport
from onnx_attnfuse.serving.decoder import ServedDecoder
from onnx_attnfuse.verify.decoder_feeds import DecoderBranch, Loop, OwnCache
from onnx_attnfuse.verify.input_kinds import kinds
from onnx_attnfuse.verify.verdict import Verified

LENGTH, TOTAL = "max_sequence_length", "total_sequence_length"
"""The names of the buffer's length, and of that of an added mask."""
POSITIONS = 2
"""The axis of positions in a cache, (b, heads, positions, channels)."""
_Check = Callable[[ir.Model, ir.Model, Loop], Verified | None]
_NONE = "no attention takes past keys and values as inputs and returns them as outputs"


def window_length(window: int) -> str:
    """The name of the length of a buffer that keeps no more than a window, and is no shorter."""
    return f"window_{window}_length"


@dataclasses.dataclass(frozen=True)
class Merged:
    """A decoder that another one was made from."""

    source: ir.Model
    """Two decoders in one model, or one with another cache."""
    branch: DecoderBranch | None
    """The input that chooses between two."""
    own: OwnCache | None = None
    """The cache where it is another one."""

    def check(self, check: _Check, before: ir.Model, after: ir.Model, loop: Loop) -> Verified | None:
        """Judges a decoder beside this one as it is called, and beside the one made of it where that has another cache.

        Raises:
            Refused: It differs.
        """
        if self.own is not None:
            check(before, after, loop)
        return check(self.source, after, dataclasses.replace(loop, branch=self.branch, own=self.own))


def with_past(model: ir.Model) -> tuple[ir.Model, Merged] | None:
    """A model with the decoder that has a past alone, and its source; None if the model is not two decoders merged.

    Merged is what consists of one `If` over an input, of which one branch reads all that the other does and more: a past.
    The model given is not changed.
    """
    if _choice(model.graph) is None:
        return None
    alone = model.clone()
    chosen = _choice(alone.graph)
    assert chosen is not None
    node, flag, value = chosen
    dims = () if flag.shape is None else tuple(flag.shape)
    _put_in_place(node, node.attributes["then_branch" if value else "else_branch"].as_graph(), alone.graph)
    alone.graph.inputs.remove(flag)
    _name_lengths_of_masks(alone.graph)
    return alone, Merged(model, DecoderBranch(flag.name or "", value, len(dims)))


def _choice(graph: ir.Graph) -> tuple[ir.Node, ir.Value, bool] | None:
    """The `If`, the input that it asks, and what the input is where there is a past."""
    nodes = [node for node in graph if is_standard(node, "If")]
    if len(nodes) != 1 or any(not is_standard(node, "If", "Identity", "Constant", *RESHAPES) for node in graph):
        return None
    flag = _input_of(nodes[0].inputs[0])
    if flag is None or flag.dtype != ir.DataType.BOOL or len({node for node, _ in flag.uses()}) != 1:
        return None
    read = {name: _inputs(nodes[0].attributes[name].as_graph()) for name in ("then_branch", "else_branch")}
    for name, other in (("then_branch", "else_branch"), ("else_branch", "then_branch")):
        if read[other] < read[name]:
            return nodes[0], flag, name == "then_branch"
    return None


def _input_of(value: ir.Value | None) -> ir.Value | None:
    """The graph input that a condition is, whatever shape it was brought into."""
    value = None if value is None else before(value, "Identity", *RESHAPES)
    return value if is_fed(value) else None


def _inputs(branch: ir.Graph) -> set[ir.Value]:
    """The inputs of the model that a branch reads."""
    read = {value for node in all_nodes(branch) for value in node.inputs}
    read |= set(branch.outputs)
    return set(filter(is_fed, read))


def _put_in_place(node: ir.Node, branch: ir.Graph, graph: ir.Graph) -> None:
    """Puts the nodes of a branch in the place of the `If`, which goes with all that it and the other branch alone needed."""
    results = list(branch.outputs)
    branch.outputs.clear()
    for name, value in list(branch.initializers.items()):
        del branch.initializers[name]
        graph.initializers[name] = value
    inner = list(branch)
    branch.remove(inner)
    graph.insert_before(node, inner)
    for old, result in zip(node.outputs, results, strict=True):
        new = result
        name, is_output = old.name, old.is_graph_output()
        if is_output and (new.producer() is None or new.is_graph_output()):
            copied = ir.node("Identity", [new])
            graph.insert_before(node, copied)
            new = copied.outputs[0]
        new.shape, new.type = old.shape or new.shape, old.type or new.type
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        if is_output:
            old.name, new.name = None, name
    sweep(node.outputs)


def _name_lengths_of_masks(graph: ir.Graph) -> None:
    """Gives masks lengths of their own: inputs may have shapes of the other decoder, whose masks are of new positions."""
    for name, kind in kinds(graph, Facts(graph)).items():
        value = next(item for item in graph.inputs if item.name == name)
        if kind.name == "mask" and value.shape is not None and not isinstance(value.shape[-1], int):
            value.shape = ir.Shape([*value.shape[:-1], f"{name}_length"])


@dataclasses.dataclass(frozen=True)
class SharedCache:
    """The outcome of sharing the cache of one graph."""

    decoder: ServedDecoder | None = None
    """The decoder; None: the cache is as it was."""
    sites: Mapping[ir.Node, SiteReport] = dataclasses.field(default_factory=dict["ir.Node", SiteReport])
    """The attentions that share the buffer, by the node that each was found at."""
    candidates: tuple[Candidate, ...] = ()
    """The attentions that share the buffer as they were found, in order."""
    reasons: Mapping[str, Reason] = dataclasses.field(default_factory=dict[str, Reason])
    """Why the caches of others were left, by the names of the attentions."""
    note: str | None = None
    """A line on the model."""
    source: ir.Model | None = None
    """The graph as it was, where there is a decoder; so is the next."""
    loop: Loop | None = None
    """How both are run."""
    check: Callable[[], Verified | None] | None = None
    """Judges the decoder as it is by then against its source; raises `Refused` where it differs."""
    tables: str | None = None
    """The name of the positions that tables of rotations have rows for; None: there are no tables."""

    def joined(self, others: Sequence[SiteReport]) -> list[SiteReport]:
        """The reports on all attentions: those that share the buffer, then `others`, with why the cache of each was left."""
        reasons = [self.reasons.get(site.name) for site in others]
        others_reported = [
            site if reason is None else dataclasses.replace(site, reasons=(*site.reasons, reason))
            for site, reason in zip(others, reasons, strict=True)
        ]
        return [*(self.sites[item.node] for item in self.candidates), *others_reported]


def why_no_cache(graph: ir.Graph) -> str:
    """Why no cache of a graph can be a buffer, as far as that is known."""
    for node in graph:
        inner = (item for branch in subgraphs(node) for item in branch.all_nodes())
        if is_standard(node, "If") and any(is_attention(item) or is_standard(item, "Softmax") for item in inner):
            where = f"the cache is as it was: attentions are in branches of '{label(node)}'"
            return f"{where}, as where decoders with and without a past are merged; export only the one with a past"
    if any(map(is_attention, graph)):
        return f"{_NONE}; some are operators already, start from the model as it was exported"
    return f"{_NONE}; export the decoder with its past"


def note_on(
    decoder: ServedDecoder, *, adds_mask: bool, rearranged: bool, has_chunks: bool, window_cache: bool, idle: Sequence[str]
) -> str:
    """A line on the cache of a model.

    Args:
        decoder: The model.
        adds_mask: Its mask is an input that was added.
        rearranged: Padding may lie anywhere.
        has_chunks: There may be several entries with several new tokens each.
        window_cache: Buffers that keep no more than a window are asked for.
        idle: Inputs that are gone, as they only became outputs.
    """
    if decoder.pages is not None:
        return (
            f"the cache of {decoder.layers} layers is in pages, past_key_values.N to present.N, for the tokens of many requests"
        )
    lines = [
        f"the cache of {decoder.layers} layers is one buffer, past_key_values.N to present.N, of max_sequence_length positions"
    ]
    if adds_mask:
        lines.append(f"'{decoder.attention_mask}', an input that was added, gives their number")
    elif not rearranged:
        lines.append(f"'{decoder.attention_mask}' gives their number, and padding is assumed to be absent or on the right")
    else:
        lines.append(f"'{decoder.attention_mask}' gives their number, and padding may be anywhere")
    if has_chunks and not decoder.takes_chunks:
        lines.append("a batch of several entries takes one new token of each at a time")
    lines += [f"'{name}', which only became an output, is gone" for name in idle]
    windows = [window for window in decoder.cache_windows if window is not None]
    if windows:
        lengths = " or ".join(map(window_length, sorted(set(windows))))
        lines.append(f"{len(windows)} of them keep no more than their window, in {lengths} positions; no token can be taken back")
    elif window_cache:
        lines.append("none keeps less, as no layer with a buffer of its own has a window, or ONNX Runtime is not known to")
    return "; ".join(lines)


def left(reasons: Mapping[ir.Node, Reason]) -> SharedCache:
    """The outcome where the cache is as it was."""
    first = next(iter(reasons.values()))
    return SharedCache(reasons={label(node): reason for node, reason in reasons.items()}, note=f"the cache is as it was: {first}")


def renamed(source: ServedDecoder, decoder: ServedDecoder, where: str) -> tuple[tuple[str, str], ...]:
    """The names of keys and values before and after, layer by layer: those of the `past` or the `present`."""
    pairs = [zip(getattr(source, name), getattr(decoder, name), strict=True) for name in (f"{where}_keys", f"{where}_values")]
    return tuple(itertools.chain.from_iterable(zip(*pairs, strict=True)))
