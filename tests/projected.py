"""Small modules of self-attention with its projections, as exporters write them: what Attention takes, and near misses."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import onnx
import pytest

torch = pytest.importorskip("torch")
nn = torch.nn
WIDTH, HEADS = 32, 4


class Three(nn.Module):
    """Three projections, as BERT and its like have; what a subclass or an argument changes is the point of a test."""

    def __init__(self, biases: str = "qkv", values: int = WIDTH, mask: str = "none", scale: float | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q = nn.Linear(WIDTH, WIDTH, bias="q" in biases)
        self.k = nn.Linear(WIDTH, WIDTH, bias="k" in biases)
        self.v = nn.Linear(WIDTH, values, bias="v" in biases)
        self.mask, self.scale = mask, scale

    def operands(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))

    def bias(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
        rows = x.shape[1]
        if self.mask == "causal":
            return torch.full((rows, rows), float("-inf")).triu(1).to(x.dtype)
        if self.mask == "padding" and mask is not None:
            return (1.0 - mask[:, None, None, :].float()) * torch.finfo(torch.float32).min
        if self.mask == "distance":
            place = torch.arange(rows)
            return -(place[:, None] - place[None, :]).abs().float() * torch.arange(1, HEADS + 1)[None, :, None, None]
        return None

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        return self.attended(x, mask, *self.operands(x))

    def attended(self, x: torch.Tensor, mask: torch.Tensor | None, q: Any, k: Any, v: Any) -> torch.Tensor:
        scores = q @ k.transpose(2, 3) * (self.scale or q.shape[-1] ** -0.5)
        bias = self.bias(x, mask)
        weights = (scores if bias is None else scores + bias).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)


class Packed(Three):
    """One projection whose columns are queries, keys and values in some order."""

    def __init__(self, order: str, *, bias: bool = True) -> None:
        super().__init__()
        self.qkv, self.order = nn.Linear(WIDTH, 3 * WIDTH, bias=bias), order

    def operands(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sizes = {"3": 3, "h": HEADS, "d": WIDTH // HEADS}
        packed = self.qkv(x).unflatten(-1, [sizes[letter] for letter in self.order])
        place = [0, 1, *(2 + self.order.index(letter) for letter in "hd"), 2 + self.order.index("3")]
        return packed.permute(place).transpose(1, 2).unbind(-1)


class Flat(Three):
    """As GPT-2 does it: rows and batch in one axis, one product with an untransposed weight, split afterwards."""

    def __init__(self, parts: tuple[int, int, int] = (WIDTH, WIDTH, WIDTH)) -> None:
        super().__init__()
        self.parts = parts
        self.weight = nn.Parameter(torch.randn(WIDTH, sum(parts)) / WIDTH**0.5)
        self.shift = nn.Parameter(torch.randn(sum(parts)))

    def operands(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        packed = torch.addmm(self.shift, x.reshape(-1, WIDTH), self.weight).view(*x.shape[:2], -1)
        return tuple(item.unflatten(-1, (HEADS, -1)).transpose(1, 2) for item in packed.split(self.parts, -1))


class Within(Flat):
    """Split inside each head, values wider than queries and keys."""

    def __init__(self) -> None:
        super().__init__((WIDTH, WIDTH, 4 * WIDTH))

    def operands(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        packed = torch.addmm(self.shift, x.reshape(-1, WIDTH), self.weight).view(*x.shape[:2], HEADS, -1)
        return tuple(item.transpose(1, 2) for item in packed.split([part // HEADS for part in self.parts], -1))


class Sliced(Three):
    """As nn.MultiheadAttention does it where it is not fused: slices of one weight and one bias, each with a product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) / WIDTH**0.5), nn.Parameter(torch.randn(3 * WIDTH))

    def operands(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = zip(self.weight.chunk(3), self.shift.chunk(3), strict=True)
        return tuple((x @ weight.T + bias).unflatten(-1, (HEADS, -1)).transpose(1, 2) for weight, bias in parts)


class Scaled(Three):
    """Queries and values are scaled on their way."""

    def operands(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = super().operands(x)
        return q * 0.5, k, v / 4.0


class Shifted(Three):
    """What is added to the queries differs by row."""

    def operands(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        place = torch.arange(x.shape[1])[:, None] / torch.arange(1, WIDTH + 1)
        return (self.q(x) + place.sin()).unflatten(-1, (HEADS, -1)).transpose(1, 2), *super().operands(x)[1:]


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


class Layers(nn.Module):
    """Two layers with the same weights, of which one is used elsewhere too."""

    def __init__(self, *, used: bool = False) -> None:
        super().__init__()
        self.layer, self.used = Three(), used

    def forward(self, x: torch.Tensor) -> Any:
        y = self.layer(self.layer(x) + x)
        return (y, y @ self.layer.v.weight.T) if self.used else y


MAKERS: dict[str, Callable[[], Any]] = {
    "plain": Three,
    "no bias": lambda: Three(""),
    "one bias": lambda: Three("k"),
    "wide values": lambda: Three(values=2 * WIDTH),
    "narrow values": lambda: Three("qv", values=WIDTH // 2),
    "causal": lambda: Three(mask="causal"),
    "padding": lambda: Three(mask="padding"),
    "distance": lambda: Three(mask="distance"),
    "scale": lambda: Three(scale=0.77),
    "scaled on the way": Scaled,
    "sliced weights": Sliced,
    "3 h d": lambda: Packed("3hd"),
    "h 3 d": lambda: Packed("h3d"),
    "h d 3": lambda: Packed("hd3"),
    "packed, no bias": lambda: Packed("h3d", bias=False),
    "one product": Flat,
    "one product, other values": lambda: Flat((WIDTH, WIDTH, WIDTH // 4 * 5)),
    "split inside heads": Within,
}


def exported(module: Any, *more: Any, dynamo: bool = False) -> onnx.ModelProto:
    """The module as one of the exporters writes it, batch and rows dynamic; TorchScript's takes a hundredth of the time."""
    numbers = next((item.dtype for item in module.parameters()), torch.float32)
    masked = getattr(module, "mask", "none") == "padding"
    given = (torch.randn(2, 5, WIDTH, dtype=numbers), *((torch.ones(2, 5, dtype=torch.int64),) if masked else ()), *more)
    names = ["x", *(["mask"] if masked else []), *(f"more{place}" for place in range(len(more)))]
    dynamic = [{} if item.ndim == 2 and item.shape[0] == WIDTH else {0: "b", 1: "s"} for item in given]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dynamo:
            program = torch.onnx.export(
                module.eval(), given, dynamo=True, verbose=False, input_names=names, dynamic_shapes=tuple(dynamic)
            )
            assert program is not None
            return program.model_proto
        file, axes = io.BytesIO(), dict(zip(names, dynamic, strict=True))
        torch.onnx.export(module.eval(), given, file, dynamo=False, opset_version=17, input_names=names, dynamic_axes=axes)
    return onnx.ModelProto.FromString(file.getvalue())
