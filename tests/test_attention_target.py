"""com.microsoft.Attention: the projections of self-attention inside the operator, their weights merged once."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import numpy as np
import onnx
import pytest

import onnx_attnfuse
from onnx_attnfuse.targets import attention
from tests.projected import (
    MAKERS,
    WIDTH,
    Capped,
    Crossing,
    Given,
    Grouped,
    Layers,
    Placed,
    Shifted,
    Telling,
    Three,
    Turned,
    Warmed,
    exported,
    nn,
    torch,
)
from tests.recorded import BUNDLED, cases, run

FEEDS = [(1, 2), (3, 7), (2, 1)]


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
    [*((name, False) for name in MAKERS), *((name, True) for name in ("padding", "h 3 d", "one product", "sliced weights"))],
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


@pytest.mark.parametrize("path", BUNDLED, ids=lambda path: path.stem)
def test_models_that_come_along(path: pathlib.Path) -> None:
    model = onnx.load_model(path)
    result = onnx_attnfuse.optimize(model, ep="cpu", target="Attention", verify="sites")
    codes = {reason.code for site in result.report.sites for reason in site.reasons}
    known = {"llama_past": {"not-projected"}, "t5": {"not-self-attention"}, "whisper_decoder": {"not-self-attention"}}
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


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_half_precision(half: str) -> None:
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
    _, site = fused(model_of("distance"), evidence=tmp_path)
    assert (site.status, [reason.code for reason in site.reasons]) == ("skipped", ["differs"])


def test_it_gives_no_answer_twice() -> None:
    """Layers that differ in their weights only are one piece to the judge."""
    torch.manual_seed(0)
    model = exported(nn.Sequential(Three(), Three("qkv"), Three("qkv")))
    result = onnx_attnfuse.optimize(model, ep="cpu", target="Attention", verify="sites")
    assert len({site.verified for site in result.report.sites}) == 1
    assert result.report.fused == 3
