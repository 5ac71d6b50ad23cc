"""One attention with masks that a rule says, spelled as people do, each beside one that is almost the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

BATCH, LENGTH, HEADS, SIZE, WIDTH = 2, 37, 4, 8, 32
LOWEST = torch.finfo(torch.float32).min
Rule = Callable[[torch.Tensor, torch.Tensor, "Masked", Mapping[str, torch.Tensor]], torch.Tensor]


class Masked(torch.nn.Module):
    """Projections and an attention whose scores a rule replaces, or has numbers added to."""

    def __init__(
        self, rule: Rule | None, fill: float = LOWEST, *, added: bool = False, spell: Any = None, heads: int = HEADS
    ) -> None:
        super().__init__()
        self.rule, self.fill, self.added, self.spell, self.kv_heads = rule, fill, added, spell, heads
        self.query, self.out = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.key, self.value = torch.nn.Linear(WIDTH, heads * SIZE), torch.nn.Linear(WIDTH, heads * SIZE)
        self.register_buffer("triangle", torch.ones(64, 64, dtype=torch.bool).tril())
        self.register_buffer("slopes", torch.tensor([0.5, 0.25, 0.125, 0.0625]), persistent=False)

    def forward(self, x: torch.Tensor, **given: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            layer(x).view(batch, length, -1, SIZE).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        key, value = (item.repeat_interleave(HEADS // self.kv_heads, 1) for item in (key, value))
        place = torch.arange(length)
        scores = query @ key.transpose(2, 3) * 0.3
        if self.spell is not None:
            scores = self.spell(scores, place[:, None], place, self, given)
        if self.rule is not None:
            kept = self.rule(place[:, None], place, self, given)
            none = torch.zeros((), dtype=scores.dtype)
            scores = scores + torch.where(kept, none, self.fill) if self.added else scores.masked_fill(~kept, self.fill)
        return self.out((scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, length, WIDTH))


def triangle(i, j, module, given):
    return j <= i


def buffer(i, j, module, given):
    return module.triangle[: len(j), : len(j)]


def window(i, j, module, given):
    return (j <= i) & (i - j < 8)


def almost_a_window(i, j, module, given):
    """One key more, far from the others."""
    return ((j <= i) & (i - j < 8)) | ((i == 30) & (j == 2))


def two_sided(i, j, module, given):
    return (i - j).abs() < 5


def documents(i, j, module, given):
    marks = given["documents"]
    return (marks[:, None, :, None] == marks[:, None, None, :]) & (j <= i)


def almost_documents(i, j, module, given):
    """Documents that see the one before them, too."""
    marks = given["documents"]
    return (marks[:, None, :, None] - marks[:, None, None, :] <= 1) & (j <= i)


def begun_anew(i, j, module, given):
    """Documents begin where positions do not go on; without positions that are given they go on throughout."""
    places = given["positions"] if "positions" in given else torch.arange(len(j))[None]
    number = (torch.diff(places, prepend=places[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    return (j <= i) & (number[:, None, :, None] == number[:, None, None, :])


def padded_triangle(i, j, module, given):
    return (j <= i) & given["mask"][:, None, None, :].bool()


def padding(i, j, module, given):
    return given["mask"][:, None, None, :].bool()


def prefix(i, j, module, given):
    return (j <= i) | (j < given["numbers"][:, None, None, None])


def alibi(scores, i, j, module, given):
    return scores + module.slopes[:, None, None] * (j - i)


def computed_alibi(scores, i, j, module, given, first=0):
    """Slopes as BLOOM and MPT compute them, times what a caller gives, with distances from `first` on."""
    slopes = torch.pow(torch.full((), 0.25, dtype=scores.dtype), torch.arange(1, HEADS + 1, dtype=torch.int32))
    return scores + (slopes * given.get("factor", 1.0))[:, None, None] * (j - i - first)


def capped(scores, i, j, module, given):
    return torch.tanh(scores / 5) * 5


def shifted(i, j, module, given):
    """A triangle that begins one key later: the first row sees none."""
    return j < i


PADDINGS = ("none", "right", "left", "holes", "all")


def given(*names: str, padding: str = "right", length: int = LENGTH) -> dict[str, torch.Tensor]:
    """Inputs of these names."""
    generator = torch.Generator().manual_seed(1)
    found = {"x": torch.randn(BATCH, length, WIDTH, generator=generator)}
    if "mask" in names:
        mask = torch.ones(BATCH, length, dtype=torch.int64)
        mask[0, slice(*{"none": (0, 0), "right": (20, None), "left": (0, 9), "holes": (3, 6), "all": (0, None)}[padding])] = 0
        found["mask"] = mask
    if "documents" in names:
        found["documents"] = (torch.arange(length) // 10).repeat(BATCH, 1)
    if "positions" in names:
        found["positions"] = torch.arange(length).repeat(BATCH, 1) % 10
    if "numbers" in names:
        found["numbers"] = torch.tensor([5, 11])
    return found
