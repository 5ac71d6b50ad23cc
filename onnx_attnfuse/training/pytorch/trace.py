"""A captured graph written down as ONNX operators, so that attention in it is read by the same engine as in an exported model.

The graph is run on the fake tensors that Dynamo captured it with. Each node runs as it is, and the operators of PyTorch below
it are seen one by one (views, products, sums): each becomes an ONNX node, or an opaque one where ONNX has none. So every form
ends as the same few operators, and every node of the captured graph has the values that it computes.

    traced = trace(gm, fake inputs, constants)
    traced.graph                the ONNX graph
    traced.values[node]         the value of a node of the captured graph
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from onnx_attnfuse.training.pytorch import operators
from onnx_attnfuse.training.pytorch.emitter import APART, DTYPES, Emitter, without_modes
from onnx_attnfuse.training.pytorch.gradients import Gradients

Constants = Mapping[int, Callable[[], npt.NDArray[Any] | None]]
"""The contents of tensors by the id of their fake, for buffers of the module."""
_DROPOUTS = frozenset([torch.nn.functional.dropout, torch.dropout, torch.ops.aten.dropout.default])
_HOLDS_GRAPHS: Any = importlib.import_module("torch._ops").HigherOrderOperator
_TRANSFORMS: Any = importlib.import_module("torch._C._functorch")
_SWITCH: Any = importlib.import_module("torch._C")._set_grad_enabled
_SDPA = frozenset([torch.nn.functional.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default])


@dataclasses.dataclass
class Nested:
    """A graph inside of a captured graph."""

    module: fx.GraphModule
    inputs: list[Any]
    """The fakes that it runs on."""
    gradients: Gradients


class Traced:
    """A captured graph, and its ONNX form."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.graph = ir.Graph([], [], nodes=[])
        self.nodes: dict[ir.Value, fx.Node] = {}
        """The node of the captured graph that has a value, if one has."""
        self.drops: dict[ir.Node, tuple[float, bool]] = {}
        """Nodes of a dropout: the share that is dropped, and whether it is."""
        self.calls: dict[ir.Node, fx.Node] = {}
        """Softmaxes inside of a `scaled_dot_product_attention`, and that."""
        self.fakes: dict[fx.Node, torch.Tensor] = {}
        """The fake tensor of each node that computes one."""
        self.nested: list[Nested] = []
        self.constants: dict[ir.Value, int] = {}
        """Values of buffers, with the ids of their fake tensors."""
        self.reached: set[ir.Value] = set()
        """Values that are not computed here and may have a gradient."""
        self.ended: set[ir.Value] = set()
        """Values without a gradient that are computed from some with one."""
        self.modes: dict[fx.Node, Hashable] = {}
        """The mode in which each node runs: whether gradients are recorded, autocast, and how many transforms of torch.func."""
        self.transformed: set[fx.Node] = set()
        """Nodes that run inside of torch.vmap or another transform of torch.func."""


def trace(
    module: fx.GraphModule, inputs: Sequence[Any], mode: FakeTensorMode, constants: Constants, gradients: Gradients | None = None
) -> Traced:
    """Writes a captured graph down.

    Args:
        module: The graph.
        inputs: Fake tensors, and numbers, for its placeholders.
        mode: The mode that the fake tensors belong to.
        constants: The contents of buffers among the inputs.
        gradients: Which of the inputs gradients reach; None: those that ask for one.
    """
    traced = Traced(module)
    recorder = Recorder(traced, constants, gradients or Gradients.of(inputs))
    interpreter = _Interpreter(module, recorder)
    with mode, torch.no_grad(), _ambient(), recorder, enable_python_dispatcher():
        interpreter.run(*inputs)
    ends = [value for node in interpreter.results for value in [recorder.known(traced.fakes.get(node))] if value is not None]
    traced.graph = recorder.emitter.graph(ends)
    return traced


@contextlib.contextmanager
def _ambient() -> Generator[None]:
    """Puts autocast and the transforms of torch.func back as they were, wherever a graph ends."""
    before, depth = _autocast(), _depth()
    try:
        yield
    finally:
        _TRANSFORMS.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        for kind, enabled, dtype in before:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)


def _autocast() -> tuple[tuple[str, bool, torch.dtype], ...]:
    """For each kind of device whether autocast is on, and its type."""
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))


def _depth() -> int:
    """How many transforms of torch.func are around the current call."""
    return _TRANSFORMS.get_dynamic_layer_stack_depth()


class Recorder(TorchDispatchMode):
    """Writes down every operator that runs on fake tensors."""

    def __init__(self, traced: Traced, constants: Constants, gradients: Gradients) -> None:
        super().__init__()
        self.gradients = gradients
        self.emitter = Emitter()
        self.traced = traced
        self._given = constants
        self._values: dict[int, ir.Value] = {}
        self._alive: list[torch.Tensor] = []
        self._sharing: dict[int, set[int]] = {}
        """The tensors that share a storage."""
        self._is_quiet = False

    @contextlib.contextmanager
    def quiet(self) -> Generator[None]:
        """Writes nothing down inside of the block."""
        self._is_quiet = True
        try:
            yield
        finally:
            self._is_quiet = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given: dict[str, Any] = kwargs or {}
        found = func(*args, **given)
        if func.namespace != "prim" and not self._is_quiet and any(isinstance(item, torch.Tensor) for item in _flat(found)):
            self.record(func, args, given, found)
        return found

    def record(self, func: Any, args: Any, kwargs: Any, found: Any) -> None:
        """Writes one call down."""
        named = operators.named_arguments(func, args, kwargs)
        changed = [named[item.name] for item in func._schema.arguments if item.alias_info and item.alias_info.is_write]
        results = [item for item in _flat(found) if isinstance(item, torch.Tensor)]
        read = [item for item in _flat([args, *kwargs.values()]) if isinstance(item, torch.Tensor)]
        values = operators.translate(func, named, results, self) or [
            self.emitter.op("opaque", [self.value(item) for item in read], None, item, domain="aten") for item in results
        ]
        written = [item for item in changed if isinstance(item, torch.Tensor)]
        name = func._schema.name
        alien = [item for item in written if not self.gradients.written(name, read, item)]
        for tensor in written:
            self._forget(tensor)
        self.gradients.follow(name, read, [item for item in results if not _among(item, written)])
        self.traced.ended.update(value for item, value in zip(results, values, strict=True) if self.gradients.has_ended(item))
        for tensor, value in zip(results, values, strict=True):
            self.bind(tensor, self._apart(tensor, value) if _among(tensor, alien) else value)

    def bind(self, tensor: torch.Tensor, value: ir.Value) -> None:
        """Makes a value that of a tensor from now on."""
        self._alive.append(tensor)
        self._values[id(tensor)] = value
        self._sharing.setdefault(storage_of(tensor), set()).add(id(tensor))

    def value(self, tensor: torch.Tensor) -> ir.Value:
        """The value of a tensor; an input of the graph if nothing computed it here."""
        found = self._values.get(id(tensor))
        if found is None:
            found = self._constant(tensor) or self._leaf(tensor)
            self.bind(tensor, found)
            if self.gradients.reach(tensor):
                self.traced.reached.add(found)
        if not self.gradients.end_in(tensor):
            return found
        self.gradients.is_apart(tensor)
        apart = self._apart(tensor, found)
        self.bind(tensor, apart)
        if found in self.traced.nodes:
            self.traced.nodes[apart] = self.traced.nodes[found]
        return apart

    def _apart(self, tensor: torch.Tensor, value: ir.Value) -> ir.Value:
        """A tensor that is read no further, as its gradient is not that of what computed it."""
        return self.emitter.op(APART, [value], None, tensor, domain="aten")

    def known(self, tensor: torch.Tensor | None) -> ir.Value | None:
        """The value of a tensor, if it has one."""
        return None if tensor is None else self._values.get(id(tensor))

    def _leaf(self, tensor: torch.Tensor) -> ir.Value:
        """A tensor that is given: one with a gradient holds ordinary numbers, one without may be a mask."""
        if tensor.requires_grad:
            return self.emitter.op("trained", [], None, tensor, domain="aten")
        return self.emitter.leaf(tensor, "given")

    def _constant(self, tensor: torch.Tensor) -> ir.Value | None:
        read = self._given.get(id(tensor))
        array = None if read is None or tensor.dtype not in DTYPES else read()
        if array is None:
            return None
        value = self.emitter.constant(array, "buffer", DTYPES[tensor.dtype])
        self.traced.constants[value] = id(tensor)
        return value

    def _forget(self, tensor: torch.Tensor) -> None:
        """Forgets the contents of tensors whose storage is written to."""
        for other in self._sharing.pop(storage_of(tensor), set()):
            if other != id(tensor) and self.gradients.reach(tensor):
                self.gradients.forget(other)
            self.traced.nodes.pop(self._values.pop(other), None)  # type: ignore[arg-type]
            self._given = {key: read for key, read in self._given.items() if key != other}


class _Interpreter(fx.Interpreter):
    """Runs the nodes of a captured graph, and notes which values each has."""

    def __init__(self, module: fx.GraphModule, recorder: Recorder) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._recorder = recorder
        self._traced = recorder.traced
        self._depth = _depth()
        self.results: list[fx.Node] = []
        """Nodes with more users than those recorded."""
        self._node: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        """Runs a node; one that holds a graph, or that fakes cannot run, has what Dynamo noted for it."""
        self._node = n
        self._traced.modes[n] = self._recorder.gradients.are_recorded, *_autocast(), _depth()
        if _depth() > self._depth:
            self._traced.transformed.add(n)
        if n.op == "output":
            self.results += n.all_input_nodes
        if n.op == "call_function" and isinstance(n.target, _HOLDS_GRAPHS):
            self.results += n.all_input_nodes
            found = self._held(n)
        else:
            try:
                found = super().run_node(n)
            except Exception:  # noqa: BLE001 - operators that fakes cannot run are opaque
                self.results += n.all_input_nodes
                found = n.meta.get("example_value")
        if isinstance(found, torch.Tensor) and not _TRANSFORMS.is_functorch_wrapped_tensor(found):
            self._traced.fakes[n] = found
            if n.op != "output":
                self._traced.nodes.setdefault(self._recorder.value(found), n)
        return found

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A tensor that the graph holds, which has no gradient."""
        found = super().get_attr(target, args, kwargs)
        if isinstance(found, torch.Tensor) and not found.requires_grad:
            self._recorder.gradients.is_apart(found)
        return found

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Calls a function; dropouts and whole attentions are known as such, and no gradients are recorded here."""
        if target is _SWITCH:
            (self._recorder.gradients.recorded,) = args
            return None
        if target in _DROPOUTS:
            return operators.dropout(self._recorder, *args, **kwargs)
        if target in _SDPA:
            found = operators.attention(self._recorder, *args, **kwargs)
            if found is not None:
                output, softmax = found
                assert self._node is not None
                self._traced.calls[softmax] = self._node
                return output
        return super().call_function(target, args, kwargs)

    def _held(self, node: fx.Node) -> Any:
        """The result of an operator that holds graphs; those of checkpoints are read in their turn."""
        args, _ = self.fetch_args_kwargs_from_env(node)
        graphs = [item for item in args if isinstance(item, fx.GraphModule)]
        if len(graphs) == 1 and args[0] is graphs[0]:
            inputs = list(args[1:])
            self._traced.nested.append(Nested(graphs[0], inputs, self._recorder.gradients.inside(inputs)))
        return node.meta.get("example_value")


def _flat(found: Any) -> list[Any]:
    if isinstance(found, (list, tuple)):
        return [inner for item in cast("Sequence[Any]", found) for inner in _flat(item)]
    return [found]


def _among(tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    return any(tensor is other for other in others)


def storage_of(tensor: Any) -> int:
    """A mark of the memory that a tensor is a view of."""
    return tensor.untyped_storage()._cdata


def is_plain(tensor: Any) -> bool:
    """Whether a tensor is itself what it holds: no fake, and no share of a distributed one."""
    return type(tensor) in {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}


def as_array(tensor: torch.Tensor) -> npt.NDArray[Any] | None:
    """The numbers of a tensor, on the host; None for a subclass, which may hold a share of them, or nothing."""
    if tensor.dtype not in DTYPES or not is_plain(tensor):
        return None
    with without_modes():
        held = tensor.detach().cpu()
        wide = held.float().numpy() if tensor.dtype == torch.bfloat16 else held.numpy()
        return np.array(wide, dtype=DTYPES[tensor.dtype].numpy())
