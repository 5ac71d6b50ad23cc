"""Products gated by their own Gelu as one operator: where they are, what is left, and that what differs is found."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import pytest
import torch
from onnx import numpy_helper

import onnx_attnfuse
from onnx_attnfuse.fusion.enabling import activations
from onnx_attnfuse.verify.runtime import Reference
from tests.support.bundled import run

Array = npt.NDArray[Any]
C, N = 8, 2560
_ATTENTION = """kt = Transpose<perm = [0, 2, 1]>(x) qk = MatMul(x, kt) small = Mul(qk, scale)
   weights = Softmax<axis = -1>(small) seen = MatMul(weights, x)"""
_TEXT = """<ir_version: 9, opset_import: ["" : 20, "com.microsoft" : 1]>
model ({t}[b, s, {c}] x) => ({outputs}) {{ {attention} {nodes} }}"""
_BIASED = "p = MatMul(seen, w) whole = Add(p, bias)"
_SPLIT = "left, right = Split<axis = -1, num_outputs = 2>(whole)"
_SLICES = "left = Slice(whole, zero, mid, last) right = Slice(whole, mid, end, last)"
_ERF = "sr = Div(right, root) e = Erf(sr) e1 = Add(e, unit) re = Mul(right, e1) g = Mul(re, half)"
_GATED = "y = Mul(left, g)"


def model_of(nodes: str, *, width: int = N, dtype: str = "float16", outputs: str = "", **more: Array) -> onnx.ModelProto:
    """A model with an attention, whose result `seen` (b, s, c) goes into `nodes`."""
    outputs = outputs or f"{dtype}[b, s, {width // 2}] y"
    model = onnx.parser.parse_model(_TEXT.format(t=dtype, c=C, nodes=nodes, attention=_ATTENTION, outputs=outputs))
    kind: Any = {"float16": np.float16, "float": np.float32}[dtype]
    rng = np.random.default_rng(0)
    arrays: dict[str, Array] = {
        "scale": np.asarray(0.3, kind),
        "w": rng.standard_normal((C, width)).astype(kind),
        "bias": rng.standard_normal(width).astype(kind),
        **{name: np.asarray(number, kind) for name, number in {"root": 2**0.5, "unit": 1, "half": 0.5, "third": 0.3}.items()},
        **{name: np.asarray([place]) for name, place in {"zero": 0, "mid": width // 2, "end": width, "last": -1}.items()},
        **more,
    }
    read = {name for node in model.graph.node for name in node.input}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items() if name in read)
    return model


def optimized(model: onnx.ModelProto, ep: str = "cuda") -> tuple[onnx.ModelProto, int]:
    """The model as we fuse it, judged, and how many products were gated by the operator."""
    result = onnx_attnfuse.optimize(model, ep=ep, verify="sites")
    assert result.report.fused == 1
    assert not result.report.failures
    notes = [note for note in result.report.notes if "gated by their own Gelu" in note]
    return result.model, int(notes[0].split()[0]) if notes else 0


def fused(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == "BiasSplitGelu"]


_GELU = "g = Gelu(right)"
_OWN_GELU = "g = com.microsoft.Gelu(right)"


@pytest.mark.parametrize("dtype", ["float16", "float"])
@pytest.mark.parametrize(
    ("nodes", "is_biased"),
    [
        (f"{_BIASED} {_SPLIT} {_GELU} {_GATED}", True),
        (f"{_BIASED} {_SPLIT} {_GELU} y = Mul(g, left)", True),
        (f"{_BIASED} {_SPLIT} {_ERF} {_GATED}", True),
        (f"{_BIASED} {_SLICES} {_ERF} {_GATED}", True),
        (f"whole = MatMul(seen, w) {_SPLIT} {_GELU} {_GATED}", False),
    ],
    ids=["Gelu", "other order", "spelled", "slices", "no bias"],
)
def test_a_gated_product_becomes_one_operator(nodes: str, is_biased: bool, dtype: str) -> None:
    before = model_of(nodes, dtype=dtype)
    after, count = optimized(before)
    assert count == 1
    (node,) = fused(after)
    assert not {"Split", "Slice", "Gelu", "BiasGelu", "Erf"} & {item.op_type for item in after.graph.node}
    bias = next(numpy_helper.to_array(item) for item in after.graph.initializer if item.name == node.input[1])
    assert bias.any() == is_biased
    x = np.random.default_rng(1).standard_normal((2, 3, C)).astype(np.float32 if dtype == "float" else np.float16)
    (found,) = Reference(after).run(["y"], {"x": x})
    wanted = run(before, {"x": x})["y"]
    bound = 2e-5 if dtype == "float" else 2e-2
    np.testing.assert_allclose(found.astype(np.float32), wanted.astype(np.float32), rtol=bound, atol=bound)


def test_the_gelu_of_onnxruntime_is_one_too() -> None:
    after, count = optimized(model_of(f"{_BIASED} {_SPLIT} {_OWN_GELU} {_GATED}", dtype="float"))
    assert count == len(fused(after)) == 1


@pytest.mark.parametrize("width", [5120, 10240])
def test_the_other_widths_that_there_is_a_kernel_for(width: int) -> None:
    after, count = optimized(model_of(f"{_BIASED} {_SPLIT} {_GELU} {_GATED}", width=width))
    assert count == len(fused(after)) == 1


_NEGATED = "other = Neg(whole) left, more = Split<axis = -1, num_outputs = 2>(other)"
_BOTH = f"float16[b, s, {N // 2}] y, float16[b, s, {N // 2}] left"


@pytest.mark.parametrize(
    ("nodes", "choices"),
    [
        (f"{_BIASED} {_SPLIT} {_GELU} {_GATED}", {"width": 2048}),
        (f"{_BIASED} {_SPLIT} {_GELU} {_GATED}", {"width": 7680}),
        (f"{_BIASED} right, left = Split<axis = -1, num_outputs = 2>(whole) {_GELU} {_GATED}", {}),
        (f"{_BIASED} {_SPLIT} g = Gelu<approximate = 'tanh'>(right) {_GATED}".replace("'", '"'), {}),
        (f"{_BIASED} {_SPLIT} g = Sigmoid(right) {_GATED}", {}),
        (f"{_BIASED} {_SPLIT} {_GELU} y = Add(left, g)", {}),
        (f"{_BIASED} {_SPLIT} {_GELU} y = Mul(right, g)", {}),
        (f"{_BIASED} {_SPLIT} {_GELU} {_GATED}", {"outputs": _BOTH}),
        (f"{_BIASED} {_SPLIT} {_ERF.replace('half', 'third')} {_GATED}", {}),
        (f"{_BIASED} {_SPLIT} {_ERF.replace('root', 'unit')} {_GATED}", {}),
        (f"{_BIASED} {_SLICES.replace('mid, end', 'zero, mid')} {_GELU} {_GATED}", {}),
        (f"{_BIASED} {_SPLIT.replace('left', 'rest')} {_NEGATED} {_GELU} {_GATED}", {}),
    ],
    ids=[
        "a width without a kernel",
        "another width",
        "the left half gates",
        "by tanh",
        "another activation",
        "a sum",
        "gated by itself",
        "a half is an output",
        "a third in the place of the half",
        "another curve",
        "one half twice",
        "halves of two values",
    ],
)
def test_what_is_left_as_it_is(nodes: str, choices: dict[str, Any]) -> None:
    after, count = optimized(model_of(nodes, **choices))
    assert (count, fused(after)) == (0, [])


def test_no_other_provider_gets_what_it_has_no_kernel_for() -> None:
    model = model_of(f"{_BIASED} {_SPLIT} {_GELU} {_GATED}", dtype="float")
    assert optimized(model, ep="cpu")[1] == 0


def test_a_batch_that_may_be_empty_is_left() -> None:
    """The kernel starts a block for each row, and none cannot be started."""
    model = model_of(f"{_BIASED} {_SPLIT} {_GELU} {_GATED}")
    result = onnx_attnfuse.optimize(model, ep="cuda", assume=("named-sizes", "masks-fit"), verify="none")
    assert fused(result.model) == []


def test_a_bias_of_the_wrong_half_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    made = activations.halves

    def swapped(left: Any, right: Any, facts: Any) -> Any:
        return made(left, right, facts) or made(right, left, facts)

    monkeypatch.setattr(activations, "halves", swapped)
    after, count = optimized(model_of(f"{_BIASED} right, left = Split<axis = -1, num_outputs = 2>(whole) {_GELU} {_GATED}"))
    assert (count, fused(after)) == (0, [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_reference_is_what_torch_computes(dtype: torch.dtype) -> None:
    from onnx_attnfuse.verify.references import operator

    x, bias = (torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype) * 3 for shape in ((2, 3, 64), (64,)))
    left, right = (x + bias).float().chunk(2, dim=-1)
    wanted = (left * torch.nn.functional.gelu(right)).to(dtype)
    (found,) = operator("BiasSplitGelu").called(x.numpy(), bias.numpy())
    np.testing.assert_allclose(
        found.astype(np.float32), wanted.float().numpy(), rtol=2e-3 if dtype == torch.float16 else 1e-5, atol=1e-5
    )


def test_it_is_spelled_out_again() -> None:
    after, _ = optimized(model_of(f"{_BIASED} {_SPLIT} {_GELU} {_GATED}", dtype="float"))
    result = onnx_attnfuse.unfuse(after)
    assert fused(result.model) == []
    x = np.random.default_rng(1).standard_normal((2, 3, C)).astype(np.float32)
    np.testing.assert_allclose(run(result.model, {"x": x})["y"], Reference(after).run(["y"], {"x": x})[0], rtol=1e-4, atol=1e-5)
