"""com.microsoft.Attention: the projections of self-attention inside the operator, their weights merged once."""

from __future__ import annotations

import functools
import io
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

import onnx_attnfuse
from onnx_attnfuse.targets import attention
from tests.support.bundled import BUNDLED, cases, run

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
FEEDS = [(1, 2), (3, 7), (2, 1)]
_SLOW = pytest.mark.exhaustive


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


@functools.cache
def model_of(name: str, *, dynamo: bool = False) -> onnx.ModelProto:
    """One of the models that are taken."""
    return exported(MAKERS[name](), dynamo=dynamo)


def inputs(model: onnx.ModelProto, batch: int, rows: int) -> dict[str, Any]:
    """Numbers for all inputs, padding on the left of the last entry."""
    rng = np.random.default_rng(rows)
    found: dict[str, Any] = {}
    for item in model.graph.input:
        found[item.name] = rng.standard_normal((batch, rows, WIDTH), np.float32)
        if item.name == "mask":
            found["mask"] = np.ones((batch, rows), np.int64)
            found["mask"][-1, : rows // 2] = 0
    return found


def same(old: onnx.ModelProto, new: onnx.ModelProto, feeds: dict[str, Any]) -> None:
    """Both give the same."""
    for one, other in zip(run(old, feeds).values(), run(new, feeds).values(), strict=True):
        np.testing.assert_allclose(other, one, atol=2e-5, rtol=1e-5)


def weights(model: onnx.ModelProto) -> dict[str, list[int]]:
    """The matrices."""
    return {item.name: list(item.dims) for item in model.graph.initializer if len(item.dims) == 2}


def ops(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def fused(model: onnx.ModelProto, **choices: Any) -> tuple[onnx.ModelProto, Any]:
    """The model with its only site fused, and the site."""
    choices = {"ep": "cpu", "verify": "sites", "target": "Attention", **choices}
    result = onnx_attnfuse.optimize(model, **choices)
    (site,) = result.report.sites
    return result.model, site


@pytest.mark.parametrize(
    ("name", "dynamo"),
    [
        *((name, False) for name in MAKERS),
        *(pytest.param(name, True, marks=_SLOW) for name in ("padding", "h 3 d", "one product", "sliced weights")),
    ],
)
def test_what_it_takes(name: str, dynamo: bool) -> None:
    model = model_of(name, dynamo=dynamo)
    new, site = fused(model)
    assert (site.status, site.op, [str(reason) for reason in site.reasons]) == ("fused", "Attention", [])
    assert site.verified is not None
    assert ops(new).count("Attention") == 1
    assert not {"MatMul", "Gemm", "Softmax"} & set(ops(new))
    (merged,) = weights(new).values()
    assert np.prod(merged) == sum(np.prod(dims) for dims in weights(model).values())
    for batch, rows in FEEDS:
        if rows > 1 or "mask" not in {item.name for item in model.graph.input}:
            same(model, new, inputs(model, batch, rows))


def test_a_packing_that_fits_is_used_as_it_is() -> None:
    new, _ = fused(model_of("one product"))
    assert weights(new) == weights(model_of("one product"))
    (node,) = [node for node in new.graph.node if node.op_type == "Attention"]
    assert set(node.input[1:]) <= {item.name for item in model_of("one product").graph.initializer}


@pytest.mark.parametrize(("mask", "form"), [("causal", "unidirectional"), ("distance", "attention_bias 1 n s t")])
def test_how_a_mask_is_handed_over(mask: str, form: str) -> None:
    assert fused(model_of(mask))[1].mask_form == form


def test_the_report_shows_the_columns() -> None:
    assert fused(model_of("h 3 d"))[1].layout.value == "(n 3[2] v) -> (n v)"


class Shifted(Three):
    """What is added to the queries differs by row."""

    def operands(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        place = torch.arange(x.shape[1])[:, None] / torch.arange(1, WIDTH + 1)
        return (self.q(x) + place.sin()).unflatten(-1, (HEADS, -1)).transpose(1, 2), *super().operands(x)[1:]


class Layers(nn.Module):
    """Two layers with the same weights, of which one is used elsewhere too."""

    def __init__(self, *, used: bool = False) -> None:
        super().__init__()
        self.layer, self.used = Three(), used

    def forward(self, x: torch.Tensor) -> Any:
        y = self.layer(self.layer(x) + x)
        return (y, y @ self.layer.v.weight.T) if self.used else y


def test_weights_that_layers_share_are_merged_once() -> None:
    model = exported(Layers())
    result = onnx_attnfuse.optimize(model, ep="cpu", target="Attention")
    assert ops(result.model).count("Attention") == 2
    assert list(weights(result.model).values()) == [[WIDTH, 3 * WIDTH]]
    same(model, result.model, inputs(model, 2, 5))


def test_a_weight_that_is_needed_elsewhere_stays() -> None:
    model = exported(Layers(used=True))
    result = onnx_attnfuse.optimize(model, ep="cpu", target="Attention")
    assert ops(result.model).count("Attention") == 2
    assert sorted(weights(result.model).values()) == [[WIDTH, WIDTH], [WIDTH, 3 * WIDTH]]
    same(model, result.model, inputs(model, 2, 5))


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("path", BUNDLED, ids=lambda path: path.stem)
def test_models_that_come_along(path: pathlib.Path) -> None:
    model = onnx.load_model(path)
    result = onnx_attnfuse.optimize(model, ep="cpu", target="Attention", verify="sites")
    codes = {reason.code for site in result.report.sites for reason in site.reasons}
    known = {"llama_past": {"cached"}, "t5": {"not-self-attention"}, "whisper_decoder": {"not-self-attention"}}
    assert codes - {"not-as-asked"} == known.get(path.stem.split("__")[0], set())
    assert result.report.fused or path.stem.startswith("llama")
    for feeds in cases(path).values():
        for one, other in zip(run(model, feeds).values(), run(result.model, feeds).values(), strict=True):
            np.testing.assert_allclose(other, one, atol=2e-4)


@pytest.mark.parametrize(("ep", "arch"), [("cpu", None), ("cuda", "sm90"), ("cuda", "sm80")])
def test_unasked_it_leaves_the_site_to_others(ep: str, arch: str | None) -> None:
    assert fused(model_of("padding"), ep=ep, arch=arch, target="auto")[1].op == "MultiHeadAttention"


def test_padding_as_lengths_behind_a_test() -> None:
    model = model_of("padding")
    new, site = fused(model, ep="cuda", arch="sm90", padding="guarded")
    assert site.mask_form.startswith("mask_index ")
    inner = [node.op_type for node in new.graph.node for item in node.attribute for node in item.g.node]
    assert inner.count("Attention") == site.mask_form.count(", else ") + 1
    assert "MultiHeadAttention" not in inner
    assert list(weights(new).values()) == [[WIDTH, 3 * WIDTH]]
    for pattern in ("full", "right", "left", "holes", "empty"):
        feeds = inputs(model, 3, 8)
        mask = np.ones((3, 8), np.int64)
        mask[1] = {"full": 1, "right": [1] * 5 + [0] * 3, "left": [0] * 3 + [1] * 5, "holes": [1, 0] * 4, "empty": 0}[pattern]
        same(model, new, {**feeds, "mask": mask})


@pytest.mark.parametrize("half", ["float16", pytest.param("bfloat16", marks=_SLOW)])
def test_half_precision_is_fused_where_there_is_a_kernel_for_it(half: str) -> None:
    """Judged as it is and as float32; rows without a key cannot be levelled, so padding is refused where they must be."""
    model = exported(Three(mask="causal").to(getattr(torch, half)), dynamo=True)
    assert model.graph.input[0].type.tensor_type.elem_type == getattr(onnx.TensorProto, half.upper())
    assert fused(model, ep="cuda", arch="sm90")[1].op == "Attention"
    code = "no-kernel-for-type" if half == "bfloat16" else None
    assert next((reason.code for reason in fused(model, ep="cpu")[1].reasons), None) == code


def test_the_judge_sees_how_weights_are_merged(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    merged = attention._merged

    def exchanged(builder: Any, projections: Any, spec: Any) -> Any:
        query, key, value = projections.operands
        return merged(builder, type(projections)(projections.input, (key, query, value)), spec)

    monkeypatch.setattr(attention, "_merged", exchanged)
    _, site = fused(model_of("distance"), evidence=str(tmp_path))
    assert (site.status, [reason.code for reason in site.reasons]) == ("skipped", ["differs"])


def test_it_gives_no_answer_twice() -> None:
    """Layers that differ in their weights only are one piece to the judge."""
    torch.manual_seed(0)
    model = exported(nn.Sequential(Three(), Three("qkv"), Three("qkv")))
    result = onnx_attnfuse.optimize(model, ep="cpu", target="Attention", verify="sites")
    assert len({site.verified for site in result.report.sites}) == 1
    assert result.report.fused == 3
