"""One attention in each of the spellings that training meets, as PyTorch modules with inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

BATCH, ROWS, KEYS, HEADS, SIZE, WIDTH = 3, 7, 5, 4, 8, 32
LOWEST = torch.finfo(torch.float32).min
INFINITE = float("-inf")
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "Attention", "torch.Tensor | None"], torch.Tensor]
"""Queries, keys and values of shape (b, n, s, h), the module and its mask, to a result of shape (b, n, s, h)."""


class Attention(torch.nn.Module):
    """Projections, and an attention spelled by a function."""

    def __init__(self, attend: Attend, kv_heads: int = HEADS, value_size: int = SIZE) -> None:
        super().__init__()
        self.attend, self.kv_heads, self.value_size = attend, kv_heads, value_size
        self.query = torch.nn.Linear(WIDTH, HEADS * SIZE)
        self.key = torch.nn.Linear(WIDTH, kv_heads * SIZE)
        self.value = torch.nn.Linear(WIDTH, kv_heads * value_size)
        self.out = torch.nn.Linear(HEADS * value_size, WIDTH)
        self.bias = torch.nn.Parameter(torch.randn(HEADS, ROWS, ROWS))
        self.register_buffer("earlier", torch.ones(ROWS + 2, ROWS + 2, dtype=torch.bool).tril()[None, None])

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, other: torch.Tensor | None = None) -> torch.Tensor:
        source = x if other is None else other
        query = self.query(x).view(x.shape[0], x.shape[1], HEADS, SIZE).transpose(1, 2)
        key = self.key(source).view(x.shape[0], source.shape[1], self.kv_heads, SIZE).transpose(1, 2)
        value = self.value(source).view(x.shape[0], source.shape[1], self.kv_heads, self.value_size).transpose(1, 2)
        result = self.attend(query, key, value, self, mask)
        return self.out(result.transpose(1, 2).reshape(x.shape[0], x.shape[1], HEADS * self.value_size))


class Packed(torch.nn.Module):
    """Keys and values by one projection, whose channels are counted at run time; or values by another one."""

    def __init__(self, *, apart: bool) -> None:
        super().__init__()
        self.query, self.out = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.key = torch.nn.Linear(WIDTH, WIDTH if apart else 2 * WIDTH)
        self.value = torch.nn.Linear(WIDTH, WIDTH) if apart else None

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, other: torch.Tensor | None = None) -> torch.Tensor:
        assert other is not None
        batch, rows, keys = x.shape[0], x.shape[1], other.shape[1]
        query = self.query(x).view(batch, rows, HEADS, SIZE).transpose(1, 2)
        if self.value is None:
            key, value = self.key(other).view(batch, keys, 2, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            key = self.key(other).view(batch, keys, HEADS, SIZE).transpose(1, 2)
            value = self.value(other).view(batch, keys, HEADS, -1).transpose(1, 2)
        return self.out(plain(query, key, value, self, mask).transpose(1, 2).reshape(batch, rows, WIDTH))


@dataclasses.dataclass(frozen=True)
class Case:
    """A module, what it is fed, and what is to become of it."""

    attend: Attend
    mask: Callable[[], torch.Tensor] | None = None
    cross: bool = False
    kv_heads: int = HEADS
    value_size: int = SIZE
    refused: str | None = None
    """The code of the reason why it is left alone on the CPU."""
    refused_by_kernel: bool = False
    """It is the kernel that refuses; others can."""
    frozen: tuple[str, ...] = ()
    autocast: bool = False
    """In float16, which ONNX Runtime has no kernels for on the CPU."""
    zeroed: bool = False
    """Recorded with a PyTorch that gives zeros for rows without a key."""
    double: bool = False
    """PyTorch's own float32 result is rounded too much to be the truth."""

    make: Callable[[], torch.nn.Module] | None = None
    """Makes the module where it is another one than `Attention`."""

    def module(self) -> torch.nn.Module:
        """The module, its parameters always the same."""
        torch.manual_seed(0)
        module = Attention(self.attend, self.kv_heads, self.value_size) if self.make is None else self.make()
        for name in self.frozen:
            getattr(module, name).requires_grad_(False)
        return module

    def inputs(self) -> dict[str, torch.Tensor]:
        """What it is fed."""
        generator = torch.Generator().manual_seed(1)
        found = {"x": torch.randn(BATCH, ROWS, WIDTH, generator=generator)}
        if self.mask is not None:
            found["mask"] = self.mask()
        if self.cross:
            found["other"] = torch.randn(BATCH, KEYS, WIDTH, generator=generator)
        return found


def weighted(scores: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return scores.softmax(-1) @ value


def plain(query, key, value, module, mask):
    return weighted(query @ key.transpose(2, 3) / SIZE**0.5, value)


def scaled_query(query, key, value, module, mask):
    return weighted((query * 0.3) @ key.transpose(2, 3), value)


def negated(query, key, value, module, mask):
    return weighted(-(query @ key.transpose(2, 3)) * 0.3, value)


def batched(query, key, value, module, mask):
    """Heads folded into the batch, as bmm wants them."""
    query, key, value = (item.reshape(-1, *item.shape[2:]) for item in (query, key, value))
    scores = torch.bmm(query * SIZE**-0.5, key.transpose(1, 2))
    return torch.bmm(scores.softmax(-1), value).view(-1, HEADS, *query.shape[1:])


def einsum(query, key, value, module, mask):
    query, key, value = (item.transpose(1, 2) for item in (query, key, value))
    weights = (torch.einsum("bsnh,btnh->bnst", query, key) / SIZE**0.5).softmax(-1)
    return torch.einsum("bnst,btnh->bsnh", weights, value).transpose(1, 2)


def repeated(query, key, value, module, mask):
    """Grouped heads, repeated as transformers does."""
    groups = HEADS // module.kv_heads
    batch, heads, keys, _ = key.shape
    key, value = (
        item[:, :, None].expand(batch, heads, groups, keys, item.shape[-1]).reshape(batch, HEADS, keys, item.shape[-1])
        for item in (key, value)
    )
    return plain(query, key, value, module, mask)


def added(query, key, value, module, mask):
    return weighted(query @ key.transpose(2, 3) * 0.3 + mask, value)


def padded(query, key, value, module, mask):
    """Padding as integers, as transformers takes it."""
    return weighted(query @ key.transpose(2, 3) * 0.3 + (1.0 - mask[:, None, None, :].float()) * LOWEST, value)


def filled(query, key, value, module, mask):
    return weighted((query @ key.transpose(2, 3) * 0.3).masked_fill(mask.logical_not(), -1e9), value)


def selected(query, key, value, module, mask):
    scores = query @ key.transpose(2, 3) * 0.3
    return weighted(torch.where(mask, scores, torch.tensor(float("-inf"))), value)


def triangle(query, key, value, module, mask):
    later = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril().logical_not()
    scores = query @ key.transpose(2, 3) * 0.3
    return weighted(scores.masked_fill(later, torch.finfo(scores.dtype).min), value)


def buffered(query, key, value, module, mask):
    """The triangle is cut out of a buffer, as GPT-2 has it."""
    earlier = module.earlier[:, :, : query.shape[2], : key.shape[2]]
    return weighted((query @ key.transpose(2, 3) * 0.3).masked_fill(earlier.logical_not(), LOWEST), value)


def triangle_and_padding(query, key, value, module, mask):
    later = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril().logical_not()
    return weighted((query @ key.transpose(2, 3) * 0.3).masked_fill(later, LOWEST) + mask, value)


def trained(query, key, value, module, mask):
    return weighted(query @ key.transpose(2, 3) * 0.3 + module.bias, value)


def dropped(query, key, value, module, mask):
    return functional.dropout((query @ key.transpose(2, 3) * 0.3).softmax(-1), 0.25, training=True) @ value


def dropped_and_added(query, key, value, module, mask):
    return functional.dropout((query @ key.transpose(2, 3) * 0.3 + mask).softmax(-1), 0.25, training=True) @ value


def not_dropped(query, key, value, module, mask):
    return functional.dropout((query @ key.transpose(2, 3) * 0.3).softmax(-1), 0.0, training=True) @ value


def capped(query, key, value, module, mask):
    return weighted(torch.tanh(query @ key.transpose(2, 3) / 5) * 5, value)


def gated(query, key, value, module, mask):
    return (query @ key.transpose(2, 3) * 0.3).softmax(-1) * 0.5 @ value


def torch_causal(query, key, value, module, mask):
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def torch_unmasked(query, key, value, module, mask):
    return functional.scaled_dot_product_attention(query, key, value)


def torch_scaled(query, key, value, module, mask):
    return functional.scaled_dot_product_attention(query, key, value, scale=0.2)


def torch_masked(query, key, value, module, mask):
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def guarded(query, key, value, module, mask):
    """Weights that are NaN are set to 0, which leaves their gradients NaN."""
    weights = (query @ key.transpose(2, 3) * 0.3).masked_fill(mask.logical_not(), float("-inf")).softmax(-1)
    return torch.where(weights.isnan(), 0.0, weights) @ value


def torch_dropped(query, key, value, module, mask):
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=0.25)


def torch_causal_and_masked(query, key, value, module, mask):
    earlier = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=earlier & mask)


def torch_trained(query, key, value, module, mask):
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=module.bias + mask)


def padding(fill: float, *, dead: bool = False) -> Callable[[], torch.Tensor]:
    """A mask to be added: the first entry has padding on the right; the second nothing but padding, if that is asked for."""

    def make() -> torch.Tensor:
        mask = torch.zeros(BATCH, 1, 1, ROWS)
        mask[0, :, :, 4:] = fill
        if dead:
            mask[1] = fill
        return mask

    return make


def attention_mask() -> torch.Tensor:
    """Padding on the right of the first entry, and nothing but padding in the second, as integers."""
    return (padding(1.0, dead=True)()[:, 0, 0] == 0).long()


def rows(fill: float) -> Callable[[], torch.Tensor]:
    """A mask to be added that differs by row; one row sees nothing, another has numbers twice as low."""

    def make() -> torch.Tensor:
        mask = torch.zeros(BATCH, 1, ROWS, ROWS)
        mask[:, :, torch.arange(ROWS)[:, None] < torch.arange(ROWS)] = fill
        mask[0, :, 2, :] = fill
        mask[1, :, 3, :] = fill
        mask[1, :, 3, 4:] *= 2
        return mask

    return make


def rows_of_either_kind() -> torch.Tensor:
    """A mask to be added in which one row is -inf throughout, and another the lowest number."""
    mask = rows(INFINITE)().expand(BATCH, 1, ROWS, ROWS).clone()
    mask[2, :, 4, :] = LOWEST
    return mask


def kept(*, dead: bool = False) -> Callable[[], torch.Tensor]:
    """Which keys are seen; a row of the second entry sees none, if that is asked for."""

    def make() -> torch.Tensor:
        mask = torch.ones(BATCH, 1, ROWS, ROWS, dtype=torch.bool)
        mask[0, :, :, 4:] = False
        if dead:
            mask[1, 0, 3] = False
        return mask

    return make


def numbers() -> torch.Tensor:
    """Ordinary numbers to be added to the scores."""
    return torch.randn(BATCH, HEADS, ROWS, ROWS, generator=torch.Generator().manual_seed(2))


CASES: Mapping[str, Case] = {
    "plain": Case(plain),
    "scaled_query": Case(scaled_query),
    "negated": Case(negated, refused="scale-not-positive"),
    "batched": Case(batched),
    "einsum": Case(einsum),
    "cross": Case(plain, cross=True),
    "grouped": Case(repeated, kv_heads=2),
    "multi_query": Case(repeated, kv_heads=1),
    "padding": Case(added, padding(LOWEST)),
    "padding_throughout": Case(added, padding(LOWEST, dead=True)),
    "padding_minus_ten_thousand": Case(added, padding(-1e4, dead=True), double=True),
    "padding_infinite": Case(added, padding(INFINITE)),
    "padding_infinite_throughout": Case(added, padding(INFINITE, dead=True)),
    "rows": Case(added, rows(LOWEST)),
    "rows_minus_billion": Case(added, rows(-1e9)),
    "bias": Case(added, numbers),
    "filled": Case(filled, kept()),
    "filled_throughout": Case(filled, kept(dead=True)),
    "selected": Case(selected, kept()),
    "selected_throughout": Case(selected, kept(dead=True)),
    "triangle": Case(triangle),
    "buffered": Case(buffered),
    "not_dropped": Case(not_dropped),
    "torch_causal": Case(torch_causal),
    "torch_masked": Case(torch_masked, kept()),
    "torch_causal_and_masked": Case(torch_causal_and_masked, kept()),
    "torch_zeroed": Case(torch_masked, kept(dead=True), zeroed=True),
    "torch_zeroed_causal": Case(torch_causal_and_masked, kept(dead=True), zeroed=True),
    "torch_zeroed_rows": Case(torch_masked, rows_of_either_kind, zeroed=True),
    "torch_zeroed_dropout": Case(torch_dropped, kept(dead=True), refused="dropout", refused_by_kernel=True, zeroed=True),
    "frozen_keys": Case(plain, frozen=("key",)),
    "frozen_queries_and_keys": Case(plain, frozen=("query", "key")),
    "frozen_values": Case(plain, frozen=("value",)),
    "trained_bias": Case(trained, refused="bias-gradient", refused_by_kernel=True),
    "torch_trained": Case(torch_trained, numbers, refused="bias-gradient", refused_by_kernel=True),
    "dropout": Case(dropped, refused="dropout", refused_by_kernel=True),
    "dropout_padding": Case(dropped_and_added, padding(LOWEST, dead=True), refused="dropout", refused_by_kernel=True),
    "torch_dropout": Case(torch_dropped, refused="dropout", refused_by_kernel=True),
    "torch_dropout_masked": Case(torch_dropped, kept(), refused="dropout", refused_by_kernel=True),
    "packed": Case(plain, cross=True, make=lambda: Packed(apart=False)),
    "packed_apart": Case(plain, cross=True, make=lambda: Packed(apart=True)),
    "value_size": Case(plain, value_size=16, refused="head-sizes", refused_by_kernel=True),
    "autocast": Case(plain, autocast=True),
    "autocast_triangle": Case(triangle, autocast=True),
    "autocast_padding": Case(padded, attention_mask, autocast=True),
    "autocast_bias": Case(added, numbers, autocast=True, refused="narrowed-mask"),
    "autocast_zeroed": Case(torch_masked, kept(dead=True), autocast=True, zeroed=True),
    "capped": Case(capped, refused="softcap"),
    "guarded": Case(guarded, kept(), refused="row-rule"),
    "gated": Case(gated, refused="scaled-weights"),
    "triangle_and_padding": Case(triangle_and_padding, padding(LOWEST), refused="mixed-mask"),
}
"""By name. Each that is refused differs in one thing from one that is fused."""
KEPT: Mapping[str, Case] = {
    "torch_causal": Case(torch_causal),
    "torch_unmasked": Case(torch_unmasked),
    "torch_scaled": Case(torch_scaled),
}
"""What may be kept as one call at export."""
