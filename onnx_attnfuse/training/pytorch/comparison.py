"""A rewritten and compiled graph beside the graph as it was captured, run eagerly: results and gradients of one step.

How far the two may be apart is measured, too: by the module itself on inputs that are rounded differently.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as trees

from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.training.pytorch.emitter import without_modes
from onnx_attnfuse.training.pytorch.trace import is_plain

_TIMES = 8.0
"""How many times as far as another rounding leads."""
_FLOOR = 1e-2
"""The part of the largest gradient below which a gradient is compared by that part, not by itself: those of key biases are 0."""
_TENSOR_CORES = 2.0**-11
"""The rounding of float32 products where they need not be exact."""


@dataclasses.dataclass(frozen=True)
class GradientComparison:
    """How far results and gradients of a graph are apart, in parts of them."""

    apart: float
    rounding: float
    """How far inputs that are rounded differently lead."""

    @property
    def differs(self) -> bool:
        """Whether rounding does not explain it."""
        return not self.apart <= _TIMES * self.rounding

    @property
    def words(self) -> str:
        """Both numbers, for a reader."""
        return (
            f"results and gradients {self.apart:.1e} from those of the module, where another rounding leads {self.rounding:.1e}"
        )


def compare(call: Callable[..., Any], module: fx.GraphModule, inputs: Sequence[Any]) -> GradientComparison:
    """Holds a compiled graph against the captured one, on copies of its inputs.

    Args:
        call: The compiled graph.
        module: The graph as it was captured.
        inputs: The inputs of a step.

    Raises:
        Refused: Something is drawn at random, memory is exhausted, or an input is no plain tensor.
    """
    tensors = [item for item in inputs if isinstance(item, Tensor)]
    if not all(map(is_plain, tensors)):
        raise Refused("unverified", "an input is not a plain tensor and cannot be copied")
    devices = sorted({item.device.index for item in tensors if item.is_cuda})
    try:
        with torch.random.fork_rng(devices):
            before = _drawn(devices)
            expected = _outcome(module, inputs)
            if before != _drawn(devices):
                raise Refused("unverified", "something is drawn at random, as dropout does")
            epsilon = _epsilon(module, inputs)
            rounding = max(apart(_outcome(module, inputs, epsilon), expected), epsilon)
            found = _outcome(call, inputs)
    except torch.OutOfMemoryError as error:
        raise Refused("unverified", "the memory does not suffice for a step without fusing") from error
    return GradientComparison(apart(found, expected), rounding)


def apart(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> float:
    """The largest distance of tensors in parts of their sizes, NaN for NaN; infinite where only one side has NaN."""
    sizes = [0.0 if item is None else _norm(item.nan_to_num(0.0, 0.0, 0.0)) for item in expected]
    floor, most = _FLOOR * max(sizes, default=0.0), 0.0
    for one, other, size in zip(found, expected, sizes, strict=True):
        distance, whole = _distance(one, other), max(size, floor)
        if distance:
            most = max(most, distance / whole if whole else math.inf)
    return most


def _distance(one: Tensor | None, other: Tensor | None) -> float:
    """The distance of two gradients, of which None is one of zeros."""
    if one is None or other is None:
        given = one if other is None else other
        return 0.0 if given is None else _norm(given)
    same = (one == other) | (one.isnan() & other.isnan())
    found = _norm(one.double().sub(other.double()).masked_fill(same, 0.0))
    return math.inf if math.isnan(found) else found


def _norm(tensor: Tensor) -> float:
    return math.sqrt(float(tensor.double().square().sum()))


def _outcome(call: Callable[..., Any], inputs: Sequence[Any], nudge: float = 0.0) -> list[Tensor | None]:
    """Floating results of a call on copies, and the gradients of its inputs."""
    given = [_copy(item, nudge) if isinstance(item, Tensor) else item for item in inputs]
    results = [item for item in trees.tree_leaves(call(*given)) if isinstance(item, Tensor) and item.is_floating_point()]
    ends = [item for item in results if item.requires_grad]
    wanted = [item for item in given if isinstance(item, Tensor) and item.requires_grad]
    gradients: Sequence[Tensor | None] = ()
    if ends and wanted:
        weights = [_waves(item) for item in ends]
        gradients = torch.autograd.grad(ends, wanted, weights, allow_unused=True)
    return [*(item.detach().clone() for item in results), *gradients]


def _copy(tensor: Tensor, nudge: float) -> Tensor:
    """A copy with the same strides, where asked for with its numbers rounded differently, if they are trained."""
    with torch.no_grad(), without_modes():
        extent = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
        flat = tensor.detach().as_strided((extent if tensor.numel() else 0,), (1,)).clone()
        if nudge and tensor.requires_grad:
            flat = (flat.double() * (1 + nudge * _waves(flat).sign())).to(flat.dtype)
        found = flat.as_strided(tensor.shape, tensor.stride())
    return found.requires_grad_(tensor.requires_grad)


def _waves(tensor: Tensor) -> Tensor:
    """Numbers between -1 and 1 in no order, in the shape and type of a tensor."""
    places = torch.arange(tensor.numel(), dtype=torch.float32, device=tensor.device)
    return (places * 12.9898 + 1).sin().to(tensor.dtype).reshape(tensor.shape)


def _epsilon(module: fx.GraphModule, inputs: Sequence[Any]) -> float:
    """The rounding of the narrowest type that a graph computes in."""
    examples = [node.meta.get("example_value") for node in module.graph.nodes]
    known = [item for item in (*examples, *inputs) if isinstance(item, Tensor) and item.is_floating_point()]
    widest = max((torch.finfo(item.dtype).eps for item in known), default=0.0)
    exact = torch.get_float32_matmul_precision() == "highest" or not any(item.is_cuda for item in known)
    return widest if exact else max(widest, _TENSOR_CORES)


def _drawn(devices: Sequence[int]) -> list[bytes]:
    """The state of the random numbers, which drawing changes."""
    states = [torch.random.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]
    return [bytes(state.numpy()) for state in states]
