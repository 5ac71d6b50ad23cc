"""Whether ONNX Runtime can capture a model on an execution provider, and if not, which nodes prevent it.

    capture_blockers(model, provider.capture)       # a reason for each node, none if the model can be captured

A captured model has fixed sizes. So values computed from constants and from sizes alone are constants; any other value read
by a kernel on the host is a blocker, and so are control flow, nodes without a kernel, and nodes for which the host waits.

`CAPTURE` has the conditions of a CUDA graph. A session that is to capture refuses a model with control flow, and one in which
values are copied between GPU and host: for nodes without a CUDA kernel, and for inputs that kernels read on the host. What waits
for the GPU fails while it is captured.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

import onnx.defs
import onnx_ir as ir

from onnx_attnfuse.graph.constants import attribute, given, is_constant, subgraphs
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import ASKS_SHAPE, CONTRIB, RANDOM, REDUCTIONS, STANDARD, is_standard, plain_domain
from onnx_attnfuse.graph.scopes import scopes
from onnx_attnfuse.graph.tensors import bodies
from onnx_attnfuse.graph.uses import label
from onnx_attnfuse.kernels.execution_provider import Capture
from onnx_attnfuse.kernels.kernel_table import Typed, read_table
from onnx_attnfuse.reasons import Reason

_FIRST, _SECOND, _SECOND_THIRD, _FIFTH = (0,), (1,), (1, 2), (4,)
_STANDARD: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(REDUCTIONS, _SECOND),
    **dict.fromkeys(
        "CumSum Expand Reshape SequenceAt SequenceErase Split Squeeze Tile TopK Trilu Unsqueeze Upsample".split(), _SECOND
    ),
    **dict.fromkeys(["Dropout", "OneHot"], _SECOND_THIRD),
    **dict.fromkeys(["GRU", "LSTM", "RNN"], _FIFTH),
    "ConstantOfShape": _FIRST,
    "DynamicSlice": (1, 2, 3),
    "MatMulInteger": (2, 3),
    "Pad": (1, 2, 3),
    "Range": (0, 1, 2),
    "Resize": (1, 2, 3),
    "SequenceInsert": (2,),
    "Slice": (1, 2, 3, 4),
}
_CONTRIB: Mapping[str, tuple[int, ...]] = {
    "Attention": (6,),
    "BiasDropout": (3, 4),
    "BitmaskDropout": _SECOND_THIRD,
    "ConvTransposeWithDynamicPads": (2,),
    "DecoderMaskedMultiHeadAttention": (7, 8),
    "DecoderMaskedSelfAttention": (6, 7),
    "GroupQueryAttention": (6,),
    "MultiHeadAttention": (8,),
    "QAttention": (3, 4, 6, 7),
    "RelativePositionBias": _SECOND_THIRD,
    "SparseAttention": (7,),
    "Trilu": _SECOND,
}
_ITS_LENGTH = "the number of elements that it gives"
_WAITS: Mapping[tuple[str, str], str] = {
    **dict.fromkeys([("", "Compress"), ("", "NonMaxSuppression"), ("", "NonZero")], _ITS_LENGTH),
    (CONTRIB, "DynamicTimeWarping"): _ITS_LENGTH,
    (CONTRIB, "RemovePadding"): "the number of tokens",
    **dict.fromkeys([(CONTRIB, "DecoderAttention"), (CONTRIB, "LongformerAttention"), (CONTRIB, "SparseAttention")], "its masks"),
    ("", "SequenceLength"): "a length that it gives there",
}


def capture_blockers(
    model: ir.Model, capture: Capture, *, folded: bool = False, known: Mapping[ir.Graph, Facts] | None = None
) -> tuple[Reason, ...]:
    """Nodes that prevent the capture of a model, each with its reason.

    Args:
        model: The model, nodes in topological order.
        capture: The models that the execution provider captures.
        folded: Whether sizes are fixed and nodes that depend on them are folded, so that no node may ask for a size any more.
        known: The facts of the main graph and of each function, where there are some already.

    Returns:
        A reason for each node that prevents it, in the order of the graph.
    """
    parts = set(bodies(model))
    if known is None or not parts <= set(known):
        known = {scope.graph: scope.facts for scope in scopes(model) if scope.graph in parts}
    search = _Search(model, capture, known, folded=folded)
    search.read(model.graph, _Part(known[model.graph], _opset(model)))
    return tuple(search.found)


@dataclasses.dataclass(frozen=True)
class _Part:
    """The main graph or a function, with the graphs nested in it: facts about its values, and its opset."""

    facts: Facts
    opset: int


def _opset(part: ir.Model | ir.Function, default: int = 1) -> int:
    return part.opset_imports.get("", part.opset_imports.get("ai.onnx", default))


class _Search:
    """The search through one model: values that are constants once sizes are fixed, and blockers."""

    def __init__(self, model: ir.Model, capture: Capture, known: Mapping[ir.Graph, Facts], *, folded: bool) -> None:
        self.model, self.capture, self.known, self.folded = model, capture, known, folded
        self.kernels = capture.kernels()
        self.fixed: set[ir.Value] = set()
        """The values that depend on constants and sizes alone."""
        self.found: dict[Reason, None] = {}

    def read(self, graph: ir.Graph, part: _Part) -> None:
        """Reads the nodes of a graph in their order, and the graphs that they run."""
        for node in graph:
            if self._is_fixed_by(node, part):
                self.fixed.update(node.outputs)

    def _is_fixed_by(self, node: ir.Node, part: _Part) -> bool:
        """Whether a node gives constants once sizes are fixed; nodes that prevent a capture are noted."""
        self.fixed.difference_update(node.outputs)
        function = self.model.functions.get(node.op_identifier())
        if function is not None:
            self._call(node, function)
            return False
        if subgraphs(node):
            return self._is_constant_flow(node, part)
        if is_standard(node, *ASKS_SHAPE):
            self._note_size(node)
            return True
        if is_standard(node, "Identity"):  # ONNX Runtime takes it out before it looks for kernels
            return all(value is not None and self._is_fixed(value) for value in node.inputs)
        if node.op_type not in RANDOM and all(value is None or self._is_fixed(value) for value in node.inputs):
            return True
        self.found.update(dict.fromkeys(self._blockers(node, part)))
        return False

    def _is_fixed(self, value: ir.Value) -> bool:
        return value in self.fixed or is_constant(value)

    def _call(self, node: ir.Node, function: ir.Function) -> None:
        """Reads a function with the arguments of one of its calls."""
        for place, formal in enumerate(function.inputs):
            actual = given(node, place)
            (self.fixed.add if actual is None or self._is_fixed(actual) else self.fixed.discard)(formal)
        self.read(function.graph, _Part(self.known[function.graph], _opset(function, _opset(self.model))))
        self.fixed.update(
            output for output, formal in zip(node.outputs, function.outputs, strict=False) if self._is_fixed(formal)
        )

    def _is_constant_flow(self, node: ir.Node, part: _Part) -> bool:
        """Whether fixed sizes decide which branch is run, so that it takes the node's place, and give constants there."""
        condition = node.inputs[0] if node.inputs else None
        if self.folded or not is_standard(node, "If") or condition is None or not self._is_fixed(condition):
            self.found[Reason("branches-on-host", f"{node.op_type} is control flow", label(node))] = None
            return False
        branches = subgraphs(node)
        for branch in branches:
            self.read(branch, part)
        return all(self._is_fixed(value) for branch in branches for value in branch.outputs)

    def _note_size(self, node: ir.Node) -> None:
        if self.folded and node.inputs[0] is not None:
            message = f"{node.op_type} asks for the size of '{node.inputs[0].name}', which is not known before the model runs"
            self.found[Reason("open-size", message, label(node))] = None

    def _blockers(self, node: ir.Node, part: _Part) -> Iterator[Reason]:
        """Reasons that prevent the capture of a node whose inputs are not all constants."""
        op, domain, name = node.op_type, plain_domain(node.domain), label(node)
        waits = self.capture.waits.get((domain, op))
        if waits is not None:
            yield Reason("waits-for-device", f"{op} waits for the device, as the host asks for {waits}", name)
            return
        version = _changed_in(domain, op, part.opset)
        inputs, outputs = (_typed(values, part.facts) for values in (node.inputs, node.outputs))
        refusal = self.kernels.refusal(domain, op, version, inputs, outputs)
        if refusal is not None:
            yield Reason("runs-on-host", f"{refusal}, so it runs on the host", name)
            return
        unable = self.capture.not_run(node)
        if unable is not None:
            yield Reason("runs-on-host", f"{op} with {unable} runs on the host", name)
            return
        for place in self.capture.host_inputs.get((domain, op), ()):
            value = given(node, place)
            if value is not None and not self._is_fixed(value):
                source = "an input, and would be the same in every replay" if value.is_graph_input() else "computed on the device"
                yield Reason("read-on-host", f"{op} reads '{value.name}' on the host, which is {source}", name)


def _typed(values: Sequence[ir.Value | None], facts: Facts) -> list[Typed]:
    """Places and element types of those values whose type is known."""
    types = ((place, facts.dtype(value)) for place, value in enumerate(values))
    return [(place, dtype) for place, dtype in types if dtype is not None]


@functools.cache
def _changed_in(domain: str, op: str, opset: int) -> int:
    """The version of its domain in which an operator was last changed; 1 in other domains, and without a schema."""
    if domain not in STANDARD:
        return 1
    try:
        return onnx.defs.get_schema(op, opset).since_version
    except onnx.defs.SchemaError:
        return 1


def _not_run(node: ir.Node) -> str | None:
    """The attribute that cuDNN cannot do, for which the provider leaves a node to the CPU although there is a kernel."""
    match node.op_type:
        case "ArgMax" | "ArgMin":
            return "select_last_index" if attribute(node, "select_last_index", 0) else None
        case "ConvTranspose":
            pads = list(attribute(node, "pads", ()))
            half = len(pads) // 2
            automatic = str(attribute(node, "auto_pad", "NOTSET")).startswith("SAME")
            return "padding that is not the same on both sides" if automatic or pads[:half] != pads[half:] else None
        case "GRU":
            return None if attribute(node, "linear_before_reset", 0) == 1 else "linear_before_reset=0"
        case _:
            return None


CAPTURE = Capture(
    name="CUDA graph",
    known_from="memory types, waits and checks read in ONNX Runtime 1.25; cuda_kernels.txt has the sources of kernels",
    kernels=functools.partial(read_table, "cuda_kernels.txt"),
    host_inputs={
        **{("", op): places for op, places in _STANDARD.items()},
        **{(CONTRIB, op): places for op, places in _CONTRIB.items()},
    },
    waits=_WAITS,
    not_run=_not_run,
    options={"enable_cuda_graph": "1"},
)
