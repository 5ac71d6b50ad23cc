"""What com.microsoft.Attention leaves to other operators: operands that are no projections of one value, or not only that."""

from __future__ import annotations

from typing import Any

import pytest

import onnx_attnfuse
from tests.targets.test_attention import HEADS, WIDTH, Shifted, Three, exported, fused

torch = pytest.importorskip("torch")
nn = torch.nn
SIZE = WIDTH // HEADS


class Crossing(Three):
    def forward(self, x: torch.Tensor, other: torch.Tensor) -> Any:
        q, _, _ = self.operands(x)
        return self.attended(x, None, q, *self.operands(other)[1:])


class Placed(Three):
    """As DETR does it: places are added for queries and keys, not for values."""

    def forward(self, x: torch.Tensor, place: torch.Tensor) -> Any:
        q, k, _ = self.operands(x + place)
        return self.attended(x, None, q, k, self.operands(x)[2])


class Telling(Three):
    def forward(self, x: torch.Tensor) -> Any:
        q, k, v = self.operands(x)
        return self.attended(x, None, q, k, v), k


class Turned(Three):
    def operands(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = super().operands(x)
        turned = torch.cat([-q[..., 4:], q[..., :4]], -1)
        return turned, k, v


class Grouped(Three):
    def __init__(self) -> None:
        super().__init__()
        self.k = self.v = nn.Linear(WIDTH, WIDTH // 2)

    def operands(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k = self.k(x).unflatten(-1, (HEADS // 2, -1)).transpose(1, 2).repeat_interleave(2, 1)
        return q, k, k * 2.0


class Given(Three):
    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> Any:
        q, k, _ = self.operands(x)
        v = (x @ weight).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return self.attended(x, None, q, k, v)


class Capped(Three):
    def attended(self, x: torch.Tensor, mask: torch.Tensor | None, q: Any, k: Any, v: Any) -> torch.Tensor:
        return (((q @ k.transpose(2, 3)).tanh() * 5.0).softmax(-1) @ v).transpose(1, 2).flatten(2)


class Warmed(Three):
    def __init__(self) -> None:
        super().__init__()
        self.heat = nn.Parameter(torch.rand(HEADS, 1, 1))

    def operands(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = super().operands(x)
        return q * self.heat, k, v


X = torch.randn(2, 5, WIDTH)


@pytest.mark.parametrize(
    ("module", "more", "code"),
    [
        (Crossing(), (torch.randn(2, 6, WIDTH),), "not-self-attention"),
        (Placed(), (X,), "not-self-attention"),
        (Telling(), (), "projection-used"),
        (Turned(), (), "not-projected"),
        (Grouped(), (), "grouped-heads"),
        (Given(), (torch.randn(WIDTH, WIDTH),), "weight-not-constant"),
        (Capped(), (), "no-softcap"),
        (Shifted("kv"), (), "not-projected"),
        (Warmed(), (), "not-projected"),
    ],
    ids=lambda item: type(item).__name__ if isinstance(item, nn.Module) else "",
)
def test_what_it_does_not_take(module: Any, more: tuple[Any, ...], code: str) -> None:
    _, site = fused(exported(module, *more))
    assert (site.status, [reason.code for reason in site.reasons]) == ("skipped", [code])


class Rotated(Three):
    """Rotary embeddings of queries, of keys, or of both."""

    def __init__(self, turned: str) -> None:
        super().__init__()
        self.turned = turned
        self.register_buffer("rates", torch.outer(torch.arange(64.0), 10.0 ** -torch.arange(SIZE / 2)))

    def turn(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        angles = torch.cat([self.rates[:rows], self.rates[:rows]], -1)
        return x * angles.cos() + torch.cat([-x[..., SIZE // 2 :], x[..., : SIZE // 2]], -1) * angles.sin()

    def operands(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        named = zip("qkv", super().operands(x), strict=True)
        return tuple(self.turn(item, x.shape[1]) if name in self.turned else item for name, item in named)


class Sunk(Three):
    """One more score in each row, which takes weight and has no value."""

    def __init__(self) -> None:
        super().__init__()
        self.sink = nn.Parameter(torch.randn(HEADS))

    def attended(self, x: torch.Tensor, mask: torch.Tensor | None, q: Any, k: Any, v: Any) -> torch.Tensor:
        sinks = self.sink.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
        weights = torch.cat([q @ k.transpose(2, 3) * SIZE**-0.5, sinks], -1).softmax(-1)
        return (weights[..., :-1] @ v).transpose(1, 2).flatten(2)


class Cached(Three):
    """Keys and values of earlier positions come in, all go out."""

    def forward(self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Any:
        q, k, v = self.operands(x)
        k, v = torch.cat([keys.transpose(1, 2), k], 2), torch.cat([values.transpose(1, 2), v], 2)
        return self.attended(x, None, q, k, v), k, v


PAST = torch.randn(2, 3, HEADS, SIZE)


@pytest.mark.parametrize(
    ("module", "more", "code"),
    [
        (Rotated("q"), (), "rotated"),
        (Rotated("k"), (), "rotated"),
        (Rotated("qk"), (), "rotated"),
        (Sunk(), (), "sink"),
        (Cached(), (PAST, PAST), "cached"),
    ],
    ids=["queries rotated", "keys rotated", "both rotated", "sink", "cache"],
)
def test_what_others_do(module: Any, more: tuple[Any, ...], code: str) -> None:
    model = exported(module, *more)
    _, site = fused(model)
    assert (site.status, [reason.code for reason in site.reasons]) == ("skipped", [code])
    _, site = fused(model, target="auto")
    assert site.status == "fused"


def test_without_them_it_is_taken() -> None:
    assert fused(exported(Rotated("")))[1].op == "Attention"


class Widened(Three):
    """Its input is widened before it is projected in float32."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x.half().float())


def test_an_input_is_taken_in_the_type_of_the_weights() -> None:
    result = onnx_attnfuse.optimize(exported(Widened()), ep="cpu", target="Attention", verify="sites")
    assert [(site.op, site.status) for site in result.report.sites] == [("Attention", "fused")]
