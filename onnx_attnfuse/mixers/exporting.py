"""Recurrences of PyTorch modules, exported as one operator each.

    with onnx_attnfuse.mixers_as_operators(model):
        torch.onnx.export(model, inputs, "model.onnx", dynamo=True, dynamic_shapes=shapes)

As they are written in PyTorch, delta rules in chunks hold after an export for the number of chunks of the example alone, and
selective scans for its length alone. LinearAttention of ONNX Runtime holds for every length.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import math
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from onnx_attnfuse.errors import MissingDependencyError, OptionError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_Call: TypeAlias = "tuple[tuple[Any, ...], dict[str, Any]]"
_LOG = logging.getLogger(__name__)
_LENGTHS, _CHUNK = (1, 4, 11), 4
_SEQUENCES = frozenset(["cu_seqlens", "seq_idx"])
"""Arguments for several sequences in one row, which transformers' functions take and refuse."""
_OPERANDS = 5
"""Operands that all libraries have first and in one order; they differ in the order of what follows."""
_TOLERANCE = 1e-3


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor | None = None,
    *,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """A state of keys by values that each token reads after it has faded it and written to it; exported as LinearAttention.

    For each token: `state = exp(decay) * state`, `row = value`, with `beta` instead `row = beta * (value - key @ state)`, then
    `state = state + outer(key, row)` and `output = scale * query @ state`.

    Args:
        query: Floats of shape (batch, tokens, query heads, key size).
        key: Floats of shape (batch, tokens, query heads, key size), or with as many heads as `value`.
        value: Floats of shape (batch, tokens, heads, value size); a head of queries serves several that follow each other.
        state: Floats of shape (batch, heads, key size, value size) before the first token; zeros if it is left out.
        decay: Logarithms of shape (batch, tokens, heads), or (batch, tokens, heads, key size).
        beta: Rates of a delta rule, of shape (batch, tokens, heads).
        scale: Factor of the queries, which is not 0; 1 / sqrt(key size) if it is left out.

    Returns:
        The output, shaped as `value`, and the state after the last token.
    """
    import torch

    batch, length, heads, size = value.shape
    width = key.shape[-1]
    factor = 1 / math.sqrt(width) if scale is None else scale
    if state is None:
        state = value.new_zeros((batch, heads, width, size))
    if not _is_exporting():
        return _in_steps(query, key, value, state, decay, beta, factor)
    rule = {(True, True): "gated_delta", (True, False): "gated", (False, True): "delta", (False, False): "linear"}
    flat = [None if item is None else item.reshape(batch, length, -1) for item in (query, key, value, decay, beta)]
    output, present = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::LinearAttention",
        [*flat[:3], state, *flat[3:]],
        {
            "q_num_heads": query.shape[2],
            "kv_num_heads": heads,
            "update_rule": rule[decay is not None, beta is not None],
            "scale": float(factor),
        },
        dtypes=(value.dtype, value.dtype),
        shapes=((batch, length, heads * size), state.shape),
        version=1,
    )
    return output.reshape(batch, length, heads, size), present


def _is_exporting() -> bool:
    import torch

    return torch.compiler.is_exporting() or torch.onnx.is_in_onnx_export()


def _in_steps(
    query: Tensor, key: Tensor, value: Tensor, state: Tensor, decay: Tensor | None, beta: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    import torch

    query, key = (item.repeat_interleave(value.shape[2] // item.shape[2], dim=2) for item in (query, key))
    outputs: list[Tensor] = []
    for now in range(value.shape[1]):
        row = value[:, now]
        if decay is not None:
            fading = decay[:, now].exp()[..., None]
            state = state * (fading if decay.dim() == 4 else fading[..., None])
        if beta is not None:
            row = beta[:, now, :, None] * (row - torch.einsum("bhk,bhkv->bhv", key[:, now], state))
        state = state + key[:, now, :, :, None] * row[:, :, None]
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", query[:, now], state))
    return torch.stack(outputs, dim=1), state


@dataclasses.dataclass(frozen=True)
class _Recurrence:
    """A function that libraries have under one name, and the same by `linear_attention`."""

    compute: Callable[..., Any]
    draw: Callable[[Any, int], _Call]
    """Arguments for a number of tokens."""


@contextlib.contextmanager
def mixers_as_operators(model: torch.nn.Module) -> Generator[tuple[str, ...]]:
    """While it is open, exports of `model` have each recurrence as LinearAttention, for every number of tokens.

    Functions of flash-linear-attention and mamba_ssm, and those of transformers in their place, are replaced where the modules
    of the model look them up: gated delta rules (by head or by channel), Mamba-2's scan in chunks and Mamba's selective scan.
    Each is first run beside the operator's formula on drawn inputs; one that differs stays as it is, with a warning. Calls that
    are not exported are those of the library.

    Args:
        model: The module that is exported.

    Yields:
        The names of the replaced functions.

    Raises:
        MissingDependencyError: torch is older than 2.8, which has no operators of other domains.
        OptionError: None of the modules calls such a function.
    """
    import torch

    if not hasattr(torch.onnx, "ops"):
        raise MissingDependencyError("exporting recurrences as operators needs torch 2.8; run pip install 'torch>=2.8'")
    with contextlib.ExitStack() as stack:
        names: dict[str, None] = {}
        device = next((item.device for item in model.parameters()), torch.device("cpu"))
        for owner, name, function in list(_recurrences(model)):
            if fault := _fault(function, device):
                _LOG.warning("%s.%s is exported as it is: %s", function.__module__, name, fault)
                continue
            stack.callback(setattr, owner, name, function)
            setattr(owner, name, _exported(function))
            names[f"{function.__module__}.{name}"] = None
        if not names:
            raise OptionError(
                "no module of the model calls a recurrence that is known; call onnx_attnfuse.linear_attention in your own module"
            )
        yield tuple(names)


def _recurrences(model: torch.nn.Module) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Where the modules of a model find recurrences: their own attributes, and the globals of the files they are written in."""
    modules = list(model.modules())
    files = dict.fromkeys(sys.modules[type(module).__module__] for module in modules)
    for owner in (*files, *modules):
        for name, value in list(vars(owner).items()):
            if inspect.isfunction(value) and _name_of(value) in _RECURRENCES:
                yield owner, name, value


def _name_of(function: Callable[..., Any]) -> str:
    """The name by which a library of kernels has a function: transformers keeps it beside its own."""
    kept = inspect.getclosurevars(function).nonlocals.get("func_name", function.__name__)
    return str(kept).removeprefix("torch_")


def _exported(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which is an operator where it is exported; arguments that it names and the operator lacks are its own."""
    known = _RECURRENCES[_name_of(function)]
    accepted, own = inspect.signature(known.compute).parameters, list(inspect.signature(function).parameters)
    foreign = _SEQUENCES.union(own) - accepted.keys()

    def call(*args: Any, **kwargs: Any) -> Any:
        choices = {**dict(zip(own[_OPERANDS:], args[_OPERANDS:], strict=False)), **kwargs}
        if not _is_exporting() or any(choices.get(name) is not None for name in foreign):
            return function(*args, **kwargs)
        return known.compute(*args[:_OPERANDS], **{name: value for name, value in choices.items() if name in accepted})

    return call


def _fault(function: Callable[..., Any], device: torch.device) -> str:
    """In what way a function is not the recurrence that it is called; nothing if it is."""
    import torch

    known = _RECURRENCES[_name_of(function)]
    for length in _LENGTHS:
        args, kwargs = known.draw(_randn(device, length), length)
        try:
            with torch.no_grad():
                found, wanted = (_tensors(run(*args, **kwargs)) for run in (function, known.compute))
        except Exception as error:  # noqa: BLE001 - whatever a library's function raises
            return f"it ends in {type(error).__name__} on drawn inputs: {error}"
        if len(found) != len(wanted) or not all(map(_is_near, found, wanted)):
            return f"it differs from LinearAttention on drawn inputs of {length} tokens"
    return ""


def _is_near(found: Tensor, wanted: Tensor) -> bool:
    return found.shape == wanted.shape and bool((found - wanted).abs().max() <= _TOLERANCE * wanted.abs().max())


def _randn(device: torch.device, seed: int) -> Callable[..., Tensor]:
    import torch

    random = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(device)

    return randn


def _tensors(result: Any) -> Sequence[Tensor]:
    items = cast("tuple[Tensor, ...]", result if isinstance(result, tuple) else (result,))
    return [item.float() for item in items]


def _gated_delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`chunk_gated_delta_rule` and `chunk_kda` of flash-linear-attention, and the same token by token."""
    del chunk_size  # the result is the same for each
    dtype = query.dtype
    query, key, value, g, beta = (item.float() for item in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        query, key = (item * ((item * item).sum(-1, keepdim=True) + 1e-6).rsqrt() for item in (query, key))
    first = None if initial_state is None else initial_state.float()
    output, state = linear_attention(query, key, value, first, decay=g, beta=beta, scale=scale)
    return output.to(dtype), state if output_final_state else None


def _draw_gated_delta(randn: Callable[..., Tensor], length: int, *channels: int) -> _Call:
    query, key, value = randn(2, length, 2, 8), randn(2, length, 2, 8), randn(2, length, 2, 8)
    g, beta = -randn(2, length, 2, *channels).abs(), randn(2, length, 2).sigmoid()
    chunks = {"initial_state": randn(2, 2, 8, 8), "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    return (query, key, value), {"g": g, "beta": beta, **chunks}


def _state_space(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int = 64,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
) -> Any:
    """`mamba_chunk_scan_combined` of mamba_ssm: heads of values, keys and queries (B, C) for groups of heads."""
    import torch

    del chunk_size  # the result is the same for each
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = (torch.nn.functional.softplus(dt) if dt_softplus else dt).clamp(*dt_limit).float()
    first = None if initial_states is None else initial_states.float().transpose(2, 3)
    values, decay = x.float() * dt[..., None], A.float() * dt
    output, state = linear_attention(C.float(), B.float(), values, first, decay=decay, scale=1.0)
    if D is not None:
        output = output + x.float() * (D[:, None] if D.dim() == 1 else D)
    if z is not None:
        output = output * torch.nn.functional.silu(z.float())
    return (output, state.transpose(2, 3)) if return_final_states else output


def _draw_state_space(randn: Callable[..., Tensor], length: int) -> _Call:
    x, dt, B, C = randn(2, length, 4, 8), randn(2, length, 4), randn(2, length, 2, 6), randn(2, length, 2, 6)
    state = {"initial_states": randn(2, 4, 8, 6), "return_final_states": True}
    bias = {"D": randn(4), "dt_bias": randn(4), "dt_softplus": True, "dt_limit": (0.0, 2.0)}
    return (x, dt, -randn(4).abs(), B, C), {"chunk_size": _CHUNK, **bias, **state}


def _selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    use_mambapy: bool = False,
    use_associative_scan: bool = False,
) -> Any:
    """`selective_scan_fn` of mamba_ssm: each channel is a head of one value, with decays of its own for each key channel."""
    import torch

    del use_mambapy, use_associative_scan  # ways to the same result
    dtype = u.dtype
    delta = delta if delta_bias is None else delta + delta_bias.to(delta.dtype)[..., None]
    delta = (torch.nn.functional.softplus(delta) if delta_softplus else delta).float().transpose(1, 2)
    query, key = (item.float().transpose(1, 2)[:, :, None] for item in (C, B))
    values, decay = (u.float().transpose(1, 2) * delta)[..., None], delta[..., None] * A.float()
    output, state = linear_attention(query, key, values, decay=decay, scale=1.0)
    output = output[..., 0].transpose(1, 2)
    output = output if D is None else output + u.float() * D.float()[:, None]
    output = output if z is None else output * torch.nn.functional.silu(z.float())
    return (output.to(dtype), state[..., 0]) if return_last_state else output.to(dtype)


def _draw_selective_scan(randn: Callable[..., Tensor], length: int) -> _Call:
    u, delta, z = randn(2, 5, length), randn(2, 5, length), randn(2, 5, length)
    B, C = randn(2, 6, length), randn(2, 6, length)
    choices = {"D": randn(5), "z": z, "delta_bias": randn(5), "delta_softplus": True, "return_last_state": True}
    return (u, delta, -randn(5, 6).abs(), B, C), choices


_DELTA = _Recurrence(_gated_delta, _draw_gated_delta)
_DELTA_BY_CHANNEL = _Recurrence(_gated_delta, lambda randn, length: _draw_gated_delta(randn, length, 8))
_RECURRENCES = {
    "chunk_gated_delta_rule": _DELTA,
    "chunk_kda": _DELTA_BY_CHANNEL,
    "fused_recurrent_gated_delta_rule": _DELTA,
    "fused_recurrent_kda": _DELTA_BY_CHANNEL,
    "mamba_chunk_scan_combined": _Recurrence(_state_space, _draw_state_space),
    "selective_scan_fn": _Recurrence(_selective_scan, _draw_selective_scan),
}
"""By the names of flash-linear-attention and mamba_ssm."""
