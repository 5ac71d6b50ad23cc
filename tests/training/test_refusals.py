"""Gradient graphs that differ from a fused one in the one thing that forbids it, and operators that only training has."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from onnx_attnfuse.attention.match.contractions import read_contraction
from onnx_attnfuse.errors import MissingDependencyError
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.kernels.policy import Policy
from onnx_attnfuse.training.kernels import TrainingDevice
from onnx_attnfuse.training.ortmodule.hook import enable
from onnx_attnfuse.training.ortmodule.pipeline import fuse_graph
from onnx_attnfuse.training.ortmodule.stand_ins import StandIns
from tests.training.evaluating import eager, evaluated, recorded
from tests.training.modules import CASES

CPU = TrainingDevice("cpu")


def node(model: ir.Model, operator: str, *, after: str | None = None) -> ir.Node:
    """The first node of a kind, or the first below one of another kind."""
    start = after is None
    for item in model.graph:
        if start and item.op_type == operator:
            return item
        start = start or item.op_type == after
    raise LookupError(operator)


def _other_scale(model: ir.Model) -> None:
    divided = node(model, "Div", after="SoftmaxGrad_13")
    model.graph.register_initializer(ir.Value(name="other", const_value=ir.tensor(np.float32(3.0), name="other")))
    divided.replace_input_with(1, model.graph.initializers["other"])


def _other_values(model: ir.Model) -> None:
    softmax = node(model, "SoftmaxGrad_13")
    product = softmax.inputs[0].producer()
    scores = node(model, "Softmax").inputs[0].producer().inputs[0].producer()
    product.replace_input_with(1, scores.inputs[0])


def _weights_given_out(model: ir.Model) -> None:
    model.graph.outputs.append(node(model, "Softmax").outputs[0])


def _scores_given_out(model: ir.Model) -> None:
    model.graph.outputs.append(node(model, "Softmax").inputs[0])


def _other_factor(model: ir.Model) -> None:
    softmax = node(model, "SoftmaxGrad_13")
    softmax.inputs[0].producer().attributes["alpha"] = ir.AttrFloat32("alpha", 2.0)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (_other_scale, "other-scale"),
        (_other_values, "no-weights-gradient"),
        (_weights_given_out, "weights-used"),
        (_scores_given_out, "inner-value-used"),
        (_other_factor, "no-weights-gradient"),
    ],
)
def test_near_misses(change: Callable[[ir.Model], None], code: str) -> None:
    untouched = ir.from_proto(recorded("plain"))
    assert fuse_graph(untouched.graph, CPU, Policy()).fused == 1
    model = ir.from_proto(recorded("plain"))
    change(model)
    (site,) = fuse_graph(model.graph, CPU, Policy()).sites
    codes = {reason.code for reason in site.reasons}
    assert not site.fused
    assert codes == {code}


def test_other_dropout_is_refused() -> None:
    model = ir.from_proto(recorded("dropout"))
    gradient = node(model, "DropoutGrad")
    gradient.outputs[0].replace_all_uses_with(gradient.inputs[0])
    (site,) = fuse_graph(model.graph, TrainingDevice("cuda", 90), Policy(flash=False)).sites
    assert [reason.code for reason in site.reasons] == ["other-dropout"]


def _gradient_is_kept(model: ir.Model) -> None:
    zeroed = node(model, "SoftmaxGrad_13").inputs[0].producer()
    zeroed.outputs[0].replace_all_uses_with(zeroed.inputs[1])


def _along_another_axis(model: ir.Model) -> None:
    node(model, "ReduceMax").attributes["axes"] = ir.AttrInt64s("axes", [-2])


def _set_to_another_number(model: ir.Model) -> None:
    zeroed = next(user for user, _ in node(model, "Softmax").outputs[0].uses() if user.op_type == "Where")
    model.graph.register_initializer(ir.Value(name="one", const_value=ir.tensor(np.float32(1.0), name="one")))
    zeroed.replace_input_with(2, model.graph.initializers["one"])


@pytest.mark.parametrize("change", [_gradient_is_kept, _along_another_axis, _set_to_another_number])
def test_rows_that_are_set_to_0_otherwise_are_refused(change: Callable[[ir.Model], None]) -> None:
    untouched = ir.from_proto(recorded("torch_zeroed"))
    assert fuse_graph(untouched.graph, CPU, Policy()).fused == 1
    model = ir.from_proto(recorded("torch_zeroed"))
    change(model)
    before = sorted(map(str, ir.to_proto(model).graph.node))
    report = fuse_graph(model.graph, CPU, Policy())
    assert not report.fused
    assert {reason.code for site in report.sites for reason in site.reasons} <= {"row-rule", "unreadable-weight-step"}
    assert sorted(map(str, ir.to_proto(model).graph.node)) == before


@pytest.mark.parametrize("readable", [False, True])
def test_nothing_is_said_of_a_mask_that_was_not_read(readable: bool) -> None:
    model = ir.from_proto(recorded("plain"))
    if not readable:
        softmax = node(model, "Softmax")
        unread = ir.node("Erf", softmax.inputs[:1], name="between")
        model.graph.insert_before(softmax, unread)
        softmax.replace_input_with(0, unread.outputs[0])
    (site,) = fuse_graph(model.graph, CPU, Policy()).sites
    assert (site.fused, site.mask) == (readable, "no_mask" if readable else None)
    assert ("mask" in site.line()) == readable


def test_bias_softmax_is_read_as_what_it_does_and_put_back() -> None:
    model = ir.from_proto(recorded("bias"))
    softmax = node(model, "Softmax")
    added = softmax.inputs[0].producer()
    fused = ir.node("BiasSoftmax", added.inputs, {"axis": -1}, domain="com.microsoft", name="bias_softmax")
    fused.outputs[0].name, fused.outputs[0].type = "weights", softmax.outputs[0].type
    fused.outputs[0].shape = softmax.outputs[0].shape
    model.graph.insert_after(softmax, fused)
    softmax.outputs[0].replace_all_uses_with(fused.outputs[0])
    model.graph.remove([softmax, added], safe=True)
    standins = StandIns(model.graph)
    assert {"Add", "Softmax"} <= {item.op_type for item in model.graph}
    standins.restore()
    assert "Softmax" not in {item.op_type for item in model.graph}
    (site,) = fuse_graph(model.graph, CPU, Policy()).sites
    assert site.fused
    step, wanted = evaluated(ir.to_proto(model), CASES["bias"]), eager(CASES["bias"])
    np.testing.assert_allclose(step.result, wanted.result, atol=2e-6)
    np.testing.assert_allclose(step.gradients["query.weight"], wanted.gradients["query.weight"], atol=1e-5)


@pytest.mark.parametrize("turned", [0, 1])
def test_products_of_sequence_first_operands(turned: int) -> None:
    """FusedMatMul that takes (s, b, n, h): what it computes is what its labels say."""
    a = np.random.default_rng(0).standard_normal((5, 2, 3, 7)).astype(np.float32)
    b = np.random.default_rng(1).standard_normal((2, 3, 5 if turned else 7, 4)).astype(np.float32)
    info = onnx.helper.make_tensor_value_info
    made = onnx.helper.make_node("FusedMatMul", ["a", "b"], ["y"], domain="com.microsoft", transBatchA=1, transA=turned)
    graph = onnx.helper.make_graph([made], "g", [info("a", 1, a.shape), info("b", 1, b.shape)], [info("y", 1, None)])
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8)
    found = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"a": a, "b": b})[0]
    read = ir.from_proto(model)
    facts = Facts(read.graph)
    contraction = read_contraction(read.graph[0], facts)
    assert contraction is not None
    letters = {label: chr(ord("a") + index) for index, label in enumerate({*contraction.labels[0], *contraction.labels[1]})}
    terms = ["".join(letters[label] for label in labels) for labels in (*contraction.labels, contraction.out)]
    np.testing.assert_allclose(found, np.einsum(f"{terms[0]},{terms[1]}->{terms[2]}", a, b), rtol=1e-5)
    assert facts.dims(read.graph[0].outputs[0]) == found.shape


def test_without_onnxruntime_training_one_clear_error() -> None:
    with pytest.raises(MissingDependencyError, match=r"onnxruntime-training 1\.19\.2.*pip install"):
        enable()
