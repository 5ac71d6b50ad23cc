"""RMS normalizations in float32 of half precision as one operator: where they are, what is left, and what it computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
import torch
from onnx import numpy_helper

import onnx_attnfuse
from onnx_attnfuse.fusion.enabling import norms
from onnx_attnfuse.kernels import device
from onnx_attnfuse.verify.references import operator
from onnx_attnfuse.verify.runtime import Reference
from tests.support.bundled import run

Array = npt.NDArray[Any]
C = 8
_ATTENTION = """kt = Transpose<perm = [0, 2, 1]>(x) qk = MatMul(x, kt) small = Mul(qk, scale)
   weights = Softmax<axis = -1>(small) seen = MatMul(weights, x)"""
_TEXT = """<ir_version: 10, opset_import: ["" : 23]>
model ({t}[b, {s}, 8] x) => ({outputs}) {{ {attention} {nodes} }}"""
_WIDEN, _ROUND = "f = Cast<to = 1>({x})", "y = Cast<to = {to}>(scaled)"
_ROOT = "p = Pow(f, two) m = ReduceMean<keepdims = 1>(p, last) e = Add(m, eps) r = Sqrt(e)"
_INVERSE = "i = Reciprocal(r) n = Mul(f, i)"
_BY_HAND = f"{_WIDEN} {_ROOT} {_INVERSE} scaled = Mul(n, w) {_ROUND}"
_DIVIDED = _BY_HAND.replace(_INVERSE, "n = Div(f, r)").replace("Pow(f, two)", "Mul(f, f)")
_FACTORS_FIRST = _BY_HAND.replace("Mul(n, w)", "Mul(w, n)")
_OPERATOR = f"{_WIDEN} scaled = RMSNormalization<epsilon = 1e-6>(f, w) {_ROUND}"
_NO_FACTORS = f"{_WIDEN} {_ROOT} {_INVERSE} {_ROUND}".replace("(scaled)", "(n)")
_HEADS = "heads = Reshape(seen, split) turned = Transpose<perm = [0, 2, 1, 3]>(heads)"
_TURNED = f"{_HEADS} {_BY_HAND}".replace("{x}", "turned")
_BACK = "back = Transpose<perm = [0, 2, 1, 3]>(y) z = Reshape(back, whole)"
_KINDS = {"float16": 10, "bfloat16": 16}


def model_of(
    nodes: str, *, dtype: str = "float16", x: str = "seen", length: str = "s", outputs: str = "", **more: Array
) -> onnx.ModelProto:
    """A model with an attention, whose result `seen` (b, s, 8) goes into `nodes`."""
    nodes = nodes.replace("{x}", x).replace("{to}", str(_KINDS[dtype]))
    outputs = outputs or f"{dtype}[b, s, {C}] y"
    model = onnx.parser.parse_model(_TEXT.format(t=dtype, s=length, nodes=nodes, attention=_ATTENTION, outputs=outputs))
    arrays: dict[str, Array] = {
        "w": np.random.default_rng(0).standard_normal(C).astype(np.float32),
        "two": np.float32(2),
        "eps": np.float32([1e-6]),
        "last": np.asarray([-1]),
        "split": np.asarray([0, 0, 2, 4]),
        "whole": np.asarray([0, 0, 8]),
        **more,
    }
    read = {name for node in model.graph.node for name in node.input}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items() if name in read)
    kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype("float16")) if dtype == "float16" else onnx.TensorProto.BFLOAT16
    model.graph.initializer.append(onnx.helper.make_tensor("scale", kind, [], [0.3]))
    return model


def optimized(
    model: onnx.ModelProto, ep: str = "cuda", onnxruntime: str | None = "1.31"
) -> tuple[onnx.ModelProto, list[onnx.NodeProto]]:
    """The model as we fuse it, judged, and the operators that normalize."""
    result = onnx_attnfuse.optimize(model, ep=ep, onnxruntime=onnxruntime, verify="sites")
    assert result.report.fused == 1
    assert not result.report.failures
    made = [node for node in result.model.graph.node if node.op_type == "BranchwiseRMSNorm"]
    notes = [note for note in result.report.notes if "float32 RMSNorms" in note]
    assert [int(note.split()[0]) for note in notes] == ([len(made)] if made else [])
    return result.model, made


def names(model: onnx.ModelProto) -> set[str]:
    return {node.op_type for node in model.graph.node}


@pytest.mark.parametrize("dtype", _KINDS)
@pytest.mark.parametrize(
    ("nodes", "is_scaled"),
    [(_BY_HAND, True), (_DIVIDED, True), (_FACTORS_FIRST, True), (_OPERATOR, True), (_NO_FACTORS, False)],
    ids=["by hand", "divided", "factors first", "operator", "no factors"],
)
def test_a_normalization_in_float32_becomes_one_operator(nodes: str, is_scaled: bool, dtype: str) -> None:
    after, (node,) = optimized(model_of(nodes, dtype=dtype))
    assert len(node.input) == 1 + is_scaled
    settings = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
    assert settings == {"num_branches": 1, "epsilon": pytest.approx(1e-6)}
    assert not {"Cast", "Sqrt", "Reciprocal", "ReduceMean", "RMSNormalization"} & names(after)


@pytest.mark.parametrize("nodes", [_BY_HAND, _OPERATOR, _NO_FACTORS], ids=["by hand", "operator", "no factors"])
def test_it_gives_what_onnx_runtime_computes_of_what_is_spelled_out(nodes: str) -> None:
    before = model_of(nodes)
    after, _ = optimized(before)
    x = np.random.default_rng(1).standard_normal((2, 3, C)).astype(np.float16)
    (found,) = Reference(after).run(["y"], {"x": x})
    np.testing.assert_allclose(found.astype(np.float32), run(before, {"x": x})["y"].astype(np.float32), rtol=4e-3, atol=4e-3)


def test_heads_are_normalized_before_they_are_turned_and_a_turn_back_falls_away() -> None:
    before = model_of(f"{_TURNED} {_BACK}", outputs=f"float16[b, s, {C}] z", w=np.float32([1, 2, -0.5, 3]))
    after, (node,) = optimized(before)
    assert len([item for item in after.graph.node if item.op_type == "Transpose"]) == 0
    x = np.random.default_rng(1).standard_normal((2, 3, C)).astype(np.float16)
    (found,) = Reference(after).run(["z"], {"x": x})
    np.testing.assert_allclose(found.astype(np.float32), run(before, {"x": x})["z"].astype(np.float32), rtol=4e-3, atol=4e-3)
    assert node.output[0] != "z"


@pytest.mark.parametrize(("shape", "moved"), [("b, 2, s, 4", "Transpose"), ("b, 2, 1, 4", "Reshape")])
def test_heads_that_others_read_turned_are_turned_behind(shape: str, moved: str) -> None:
    nodes = _TURNED if moved == "Transpose" else f"one = Gather<axis = 1>(seen, zero) {_TURNED.replace('seen', 'one')}"
    before = model_of(nodes, outputs=f"float16[{shape}] y", w=np.ones(4, np.float32), zero=np.asarray([0]))
    after, (node,) = optimized(before)
    (behind,) = (item for item in after.graph.node if node.output[0] in item.input)
    assert behind.op_type == moved
    x = np.random.default_rng(1).standard_normal((2, 3, C)).astype(np.float16)
    (found,) = Reference(after).run(["y"], {"x": x})
    np.testing.assert_allclose(found.astype(np.float32), run(before, {"x": x})["y"].astype(np.float32), rtol=4e-3, atol=4e-3)


_INNER = f"float16[b, s, {C}] y, float[b, s, {C}] n"
_HALF = "h = Cast<to = 10>(n) scaled = Mul(h, w) y = Identity(scaled)"


@pytest.mark.parametrize(
    ("nodes", "choices"),
    [
        (_BY_HAND.replace("scaled = Mul(n, w) y = Cast<to = {to}>(scaled)", _HALF), {"w": np.ones(C, np.float16)}),
        (_BY_HAND.replace("<to = 1>", "<to = 11>"), {"w": np.ones(C), "two": np.float64(2), "eps": np.float64(1e-6)}),
        (_BY_HAND, {"last": np.asarray([1])}),
        (_BY_HAND.replace("keepdims = 1>(p", "keepdims = 1>(f"), {}),
        (_BY_HAND.replace("f = Cast<to = 1>({x})", "g = Cast<to = 1>({x}) a = ReduceMean(g, last) f = Sub(g, a)"), {}),
        (_BY_HAND, {"two": np.float32(3)}),
        (_BY_HAND, {"eps": np.float32([0])}),
        (_BY_HAND, {"eps": np.float32([np.inf])}),
        (_BY_HAND, {"w": np.ones(1, np.float32)}),
        (_BY_HAND, {"w": np.ones((3, C), np.float32)}),
        (_BY_HAND, {"outputs": _INNER}),
        (f"{_NO_FACTORS.replace('y = ', 'h = ')} y = Mul(h, w)", {"w": np.ones(C, np.float16)}),
        (_OPERATOR.replace("epsilon", "axis = 1, epsilon"), {"w": np.ones((1, C), np.float32)}),
        (_OPERATOR.replace("epsilon", "stash_type = 11, epsilon"), {}),
    ],
    ids=[
        "factors in half precision",
        "in float64",
        "along another axis",
        "no squares",
        "centred",
        "cubes",
        "nothing added",
        "infinity added",
        "one factor",
        "factors by row",
        "looked into",
        "factors still to come",
        "an operator along two axes",
        "an operator in float64",
    ],
)
def test_what_is_left_as_it_is(nodes: str, choices: dict[str, Any]) -> None:
    _, made = optimized(model_of(nodes, **choices))
    assert made == []


def test_factors_may_be_an_input() -> None:
    model = model_of(_BY_HAND)
    (factors,) = (item for item in model.graph.initializer if item.name == "w")
    model.graph.initializer.remove(factors)
    model.graph.input.append(onnx.helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, [C]))
    _, (node,) = optimized(model)
    assert node.input[1] == "w"


def test_factors_behind_a_rounding_stay_behind_it() -> None:
    rounded = "h = Cast<to = 10>(n) wide = Cast<to = 1>(h) scaled = Mul(wide, w)"
    after, (node,) = optimized(model_of(_BY_HAND.replace("scaled = Mul(n, w)", rounded)))
    assert len(node.input) == 1
    assert "Mul" in names(after)


def test_a_turn_that_moves_the_last_axis_stays_in_front() -> None:
    nodes = f"turned = Transpose<perm = [0, 2, 1]>(seen) {_BY_HAND}"
    after, (node,) = optimized(model_of(nodes, x="turned", length="3", outputs="float16[b, 8, 3] y", w=np.ones(3, np.float32)))
    (in_front,) = (item for item in after.graph.node if node.input[0] in item.output)
    assert in_front.op_type == "Transpose"


def test_no_other_provider_gets_what_it_has_no_kernel_for() -> None:
    assert optimized(model_of(_BY_HAND), ep="cpu")[1] == []


@pytest.mark.parametrize(("version", "count"), [("1.28", 0), ("1.30.2", 0), ("1.31.0", 1), ("2.0", 1)])
def test_an_onnx_runtime_without_the_operator_gets_none(version: str, count: int) -> None:
    assert len(optimized(model_of(_BY_HAND), onnxruntime=version)[1]) == count


@pytest.mark.parametrize(("version", "count"), [("1.30.0", 0), ("1.32.0.dev20261101", 1), ("unknown", 1)])
def test_the_installed_version_counts_where_none_is_told(version: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.importlib.metadata, "distribution", lambda name: name)
    monkeypatch.setattr(device.importlib.metadata, "version", lambda name: version)
    assert len(optimized(model_of(_BY_HAND), onnxruntime=None)[1]) == count


@pytest.mark.parametrize("version", ["", "newest", "1", "1.x", "1.30rc"])
def test_what_is_no_version_is_refused(version: str) -> None:
    with pytest.raises(onnx_attnfuse.OptionError, match="give the version of ONNX Runtime as"):
        onnx_attnfuse.optimize(model_of(_BY_HAND), ep="cuda", onnxruntime=version)


def test_another_epsilon_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    made = norms.read_rms_norm

    def wrong(value: ir.Value, facts: Any) -> Any:
        norm = made(value, facts)
        return norm and type(norm)(norm.x, norm.weight, 0.5, norm.inside)

    monkeypatch.setattr(norms, "read_rms_norm", wrong)
    assert optimized(model_of(_BY_HAND))[1] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("branches", [0, 1, 3])
@pytest.mark.parametrize("by_branch", [False, True])
def test_the_reference_is_what_torch_computes(branches: int, by_branch: bool, dtype: torch.dtype) -> None:
    generator, count, size = torch.Generator().manual_seed(0), branches or 2, 12
    x = (torch.randn(2, 5, count, size, generator=generator) * 3).to(dtype)
    scale = torch.randn(*([count] if by_branch else []), size, generator=generator)
    wanted = (torch.nn.functional.rms_norm(x.float(), (size,), eps=0.1) * scale).to(dtype)
    flat = x.reshape(2, 5, -1) if branches else x
    (found,) = operator("BranchwiseRMSNorm").called(flat.numpy(), scale.numpy(), num_branches=branches, epsilon=0.1)
    assert found.shape == tuple(flat.shape)
    bound = 2e-3 if dtype == torch.float16 else 2e-6
    np.testing.assert_allclose(found.astype(np.float32).reshape(wanted.shape), wanted.float().numpy(), rtol=bound, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "scale", "why"), [({"num_branches": 3}, 4, "length of a branch"), ({"num_branches": 2}, 3, "factors of shape")]
)
def test_the_reference_refuses_what_does_not_divide(settings: dict[str, int], scale: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        operator("BranchwiseRMSNorm").called(np.ones((2, 8), np.float32), np.ones(scale, np.float32), **settings)


@pytest.mark.parametrize("nodes", [_BY_HAND, _NO_FACTORS], ids=["factors", "no factors"])
def test_it_is_spelled_out_again(nodes: str) -> None:
    after, _ = optimized(model_of(nodes))
    result = onnx_attnfuse.unfuse(after)
    assert "BranchwiseRMSNorm" not in names(result.model)
    x = np.random.default_rng(1).standard_normal((2, 3, C)).astype(np.float16)
    (found,) = Reference(after).run(["y"], {"x": x})
    np.testing.assert_allclose(
        run(result.model, {"x": x})["y"].astype(np.float32), found.astype(np.float32), rtol=4e-3, atol=4e-3
    )
