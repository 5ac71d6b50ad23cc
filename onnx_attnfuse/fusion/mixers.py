"""Sequence mixers that are no softmax attention, in one graph: each becomes one operator where that is proved equal.

An operator is written where a record says that the execution provider runs it, and that it is faster there. The new nodes are
executed symbolically beside the mixer before it is run, and in the end both are run on inputs of other sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx_ir as ir

from onnx_attnfuse.containment import Subject
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.folding import fold
from onnx_attnfuse.graph.scopes import Scope
from onnx_attnfuse.graph.uses import label
from onnx_attnfuse.kernels.execution_provider import ExecutionProvider
from onnx_attnfuse.kernels.operators import by_key
from onnx_attnfuse.kernels.support import supported
from onnx_attnfuse.mixers.candidates import Mixer, MixerKind, find_mixers
from onnx_attnfuse.mixers.convolutions import fused_convolution
from onnx_attnfuse.mixers.loops import fused_loop
from onnx_attnfuse.mixers.recurrences import fused_step
from onnx_attnfuse.mixers.rewrite import Replacement
from onnx_attnfuse.reasons import Reason, Refused
from onnx_attnfuse.report.model import MixerReport
from onnx_attnfuse.transforms.rewriting import GraphContext

_LEFT: Mapping[MixerKind, Reason] = {
    "recurrence": Reason("mixer-step", "a step of a recurrence is not fused"),
    "unrolled recurrence": Reason("mixer-unrolled", "the export unrolled its tokens, so it is for one length"),
    "recurrence in a loop": Reason("mixer-loop", "a recurrence in the body of a Scan or Loop is not fused"),
    "chunked recurrence": Reason("mixer-chunked", "a recurrence in chunks, with running sums of decays, is not fused"),
    "causal convolution": Reason("mixer-convolution", "a causal convolution without a state is not fused"),
}
_FUSED_BY: Mapping[MixerKind, Callable[[Mixer, Builder], Replacement]] = {
    "causal convolution": fused_convolution,
    "recurrence": fused_step,
    "recurrence in a loop": fused_loop,
}
_FUSING = Subject("fusing a sequence mixer")


def fuse_mixers(graph: GraphContext, provider: ExecutionProvider, runtime: tuple[int, int] | None) -> list[MixerReport]:
    """Fuses the mixers of a graph that can be, and reports each."""
    found: list[MixerReport] = []
    for item in _own(graph.scope, graph.model.graph):
        name = label(item.node)
        with graph.rewrite(item.node, _FUSING) as edit:
            done, ends = _proved(item, graph, provider, runtime)
            edit.replace(done.pairs, ends)
            fold(done.folds, graph.builder, "attnfuse/weight")
            found.append(MixerReport(name, graph.scope.path, item.kind, (), done.operator))
        if edit.reason is not None:
            found.append(_left(item, graph.scope, edit.reason))
    return found


def _own(scope: Scope, main: ir.Graph) -> list[Mixer]:
    """The mixers of a graph that is no body of a loop."""
    if not scope.is_function and scope.graph is not main and scope.graph.inputs:
        return []
    return find_mixers(scope.graph, scope.facts)


def _left(item: Mixer, scope: Scope, reason: Reason) -> MixerReport:
    return MixerReport(label(item.node), scope.path, item.kind, (reason,))


def _proved(
    item: Mixer, graph: GraphContext, provider: ExecutionProvider, runtime: tuple[int, int] | None
) -> tuple[Replacement, tuple[ir.Value, ...]]:
    """The replacement of a mixer, proved to equal it, and the values that both are computed from.

    Raises:
        Refused: There is none, or no kernel for it, or it could not be shown equal.
    """
    build = _FUSED_BY.get(item.kind)
    if build is None:
        raise Refused(_LEFT[item.kind].code, _LEFT[item.kind].message)
    done = build(item, graph.builder)
    info, known = by_key()[done.operator], supported(done.operator, provider)
    if runtime is not None and runtime < info.runtime:
        raise Refused("no-kernel-for-device", f"{done.operator} needs ONNX Runtime {'.'.join(map(str, info.runtime))}")
    dtype = graph.scope.facts.dtype(done.pairs[0][0])
    if dtype not in known.written:
        raise Refused("no-kernel-for-type", f"{done.operator} is not written on {provider.name} for this type")
    ends = done.proof(graph.scope.facts)
    if ends is None:
        raise Refused("mixer-unequal", f"{done.operator} could not be proved to compute the same")
    return done, ends
