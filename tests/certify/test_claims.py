"""Proofs of real rewrites, and refusals of rewrites that are wrong by one thing."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnx_attnfuse
from onnx_attnfuse.certify import claims, terms
from onnx_attnfuse.certify.pairing import Pair
from onnx_attnfuse.certify.solvers import Solver, SolverName
from onnx_attnfuse.graph import io
from onnx_attnfuse.verify.witness import counterexample, refute
from tests.support.wrong_rewrites import wrong_rewrites

BUNDLED = pathlib.Path(__file__).parents[2] / "models" / "bundled"
MODELS = sorted(path.stem for path in BUNDLED.glob("*.onnx"))


def fused(name: str, folder: pathlib.Path, **choices: object) -> tuple[str, str]:
    source, result = str(BUNDLED / f"{name}.onnx"), str(folder / f"{name}.onnx")
    onnx_attnfuse.optimize(source, verify="none", **choices).save(result)
    return source, result


def proofs(before: ir.Model, after: ir.Model, solver: SolverName = "z3") -> list[claims.Proof]:
    pair, judge = Pair(before, after), Solver(solver).proves
    found = []
    for claim in pair.claims:
        terms.restart()
        found.append(claims.prove(pair, claim, judge))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_every_change_of_a_real_export_is_proved(name: str, tmp_path: pathlib.Path) -> None:
    source, result = fused(name, tmp_path)
    found = proofs(io.load(source), io.load(result))
    assert any(proof.claim.after.producer().op_type in {"MultiHeadAttention", "Attention", "Where", "Reshape"} for proof in found)
    assert [proof.claim.name for proof in found if not proof.proved] == []


@pytest.mark.parametrize("name", ["bert__dyn18__sdpa", "llama_past__dyn18__sdpa"])
def test_another_solver_proves_the_same(name: str, tmp_path: pathlib.Path) -> None:
    source, result = fused(name, tmp_path)
    assert all(proof.proved for proof in proofs(io.load(source), io.load(result), "cvc5"))


def test_a_model_is_equal_to_itself_without_any_claim() -> None:
    path = str(BUNDLED / "bert__dyn18__sdpa.onnx")
    assert Pair(io.load(path), io.load(path)).claims == []


_EQUAL = {
    "bert__dyn18__sdpa": [
        "mask of the next head at MultiHeadAttention",
        "mask of the next row at MultiHeadAttention",
        "constant + 1 at Where",
        "constant - 1 at Where",
    ],
    "gpt2__ts17__eager": ["mask of the next head at MultiHeadAttention"],
}
"""Changes that change nothing: a mask is one for all heads, one of padding is one for all rows, and a softmax does not see a
number that is added for every key that is kept."""


def _mutants(name: str, folder: pathlib.Path) -> list[tuple[str, str, onnx.ModelProto]]:
    source, result = fused(name, folder)
    found: dict[str, tuple[str, str, onnx.ModelProto]] = {}
    for what, value, model in wrong_rewrites(onnx.load(source), onnx.load(result)):
        found.setdefault(what, (what, value, model))
    return list(found.values())


@pytest.mark.parametrize("name", ["bert__dyn18__sdpa", pytest.param("gpt2__ts17__eager", marks=pytest.mark.exhaustive)])
def test_no_wrong_rewrite_is_proved(name: str, tmp_path: pathlib.Path) -> None:
    source = str(BUNDLED / f"{name}.onnx")
    mutants = _mutants(name, tmp_path)
    assert len(mutants) >= 10
    for what, value, model in mutants:
        found = {proof.claim.name: proof for proof in proofs(io.load(source), ir.serde.deserialize_model(model))}
        assert found[value].proved == (what in _EQUAL[name]), what


@pytest.mark.parametrize("what", ["triangle", "scale lost", "mask dropped", "keys for values", "keys of other heads"])
def test_a_wrong_rewrite_is_refuted_by_numbers(what: str, tmp_path: pathlib.Path) -> None:
    source = io.load(str(BUNDLED / "bert__dyn18__sdpa.onnx"))
    value, model = next((value, model) for name, value, model in _mutants("bert__dyn18__sdpa", tmp_path) if name.startswith(what))
    pair = Pair(source, ir.serde.deserialize_model(model))
    proof = next(proof for proof in proofs(pair.before.model, pair.after.model) if proof.claim.name == value)
    found = refute(pair, same_claim(proof, pair), Solver("z3"))
    assert found is not None
    assert found.error > 1e-2
    assert sum(found.sizes.values()) <= 4


def same_claim(proof: claims.Proof, pair: Pair) -> claims.Proof:
    """The proof of the same claim in another pair of the same models."""
    return dataclasses.replace(proof, claim=next(claim for claim in pair.claims if claim.name == proof.claim.name))


def _edited(path: str, edit: Callable[[onnx.ModelProto], None]) -> ir.Model:
    model = onnx.load(path)
    edit(model)
    return ir.serde.deserialize_model(model)


def test_other_weights_are_a_claim_that_is_not_proved(tmp_path: pathlib.Path) -> None:
    source, result = fused("bert__dyn18__sdpa", tmp_path)

    def edit(model: onnx.ModelProto) -> None:
        tensor = next(item for item in model.graph.initializer if len(item.dims) == 2 and item.data_type == 1)
        array = onnx.numpy_helper.to_array(tensor).copy()
        array[0, 0] += 1
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))

    assert not all(proof.proved for proof in proofs(io.load(source), _edited(result, edit)))


def test_another_attribute_of_an_operator_without_a_meaning_is_not_proved(tmp_path: pathlib.Path) -> None:
    source, result = fused("bert__dyn18__sdpa", tmp_path)

    def edit(model: onnx.ModelProto) -> None:
        node = next(item for item in model.graph.node if item.op_type == "LayerNormalization")
        next(item for item in node.attribute if item.name == "epsilon").f *= 2

    found = proofs(io.load(source), _edited(result, edit))
    assert [proof.claim.after.producer().op_type for proof in found if not proof.proved] == ["LayerNormalization"]


def test_an_output_that_is_missing_is_told(tmp_path: pathlib.Path) -> None:
    source, result = fused("llama_past__dyn18__sdpa", tmp_path)
    after = _edited(result, lambda model: model.graph.output.pop())
    assert len(Pair(io.load(source), after).differences()) == 1


def test_a_counterexample_is_found_by_the_name_of_the_value(tmp_path: pathlib.Path) -> None:
    source = str(BUNDLED / "bert__dyn18__sdpa.onnx")
    value, model = next(
        (value, model) for name, value, model in _mutants("bert__dyn18__sdpa", tmp_path) if name.startswith("scale")
    )
    wrong = ir.serde.deserialize_model(model)
    found = counterexample(io.load(source), wrong, value, Solver("z3"))
    assert found is not None
    assert "the two differ by" in str(found)
    assert counterexample(io.load(source), io.load(source), value, Solver("z3")) is None


def test_a_node_that_no_valid_model_has_is_not_proved_and_stops_nothing(tmp_path: pathlib.Path) -> None:
    source, result = fused("gpt2__ts17__eager", tmp_path)

    def edit(model: onnx.ModelProto) -> None:
        node = next(item for item in model.graph.node if item.op_type == "Slice")
        axes = onnx.numpy_helper.from_array(np.array([9], np.int64), "no such axis")
        model.graph.initializer.append(axes)
        node.input[3] = axes.name

    assert not all(proof.proved for proof in proofs(io.load(source), _edited(result, edit)))


@pytest.mark.parametrize("name", ["llama_past__dyn18__sdpa"])
def test_group_query_attention_behind_a_test_at_run_time_is_proved_and_without_the_test_is_not(
    name: str, tmp_path: pathlib.Path
) -> None:
    source, result = fused(name, tmp_path, target="GroupQueryAttention", padding="guarded")
    found = proofs(io.load(source), io.load(result))
    assert sum(proof.claim.after.producer().op_type == "If" for proof in found) == 6
    assert [proof.claim.name for proof in found if not proof.proved] == []
    unguarded = fused(name, tmp_path, target="GroupQueryAttention", padding="assume-none")[1]
    found = proofs(io.load(source), io.load(unguarded))
    assert {proof.claim.after.producer().op_type for proof in found if not proof.proved} == {"GroupQueryAttention"}


def _chosen(kept: bool, first: str, second: str, text: str) -> ir.Model:
    """Numbers that a test chooses; the two branches stand in the order of their names or the other way round."""
    branches = [("then_branch", first), ("else_branch", second)]
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]>\nagraph {text}')
    node = next(item for item in model.graph.node if item.op_type == "If")
    for name, operator in branches if kept else branches[::-1]:
        inner = onnx.helper.make_node(operator, ["y"], [f"{operator} of it"])
        output = onnx.helper.make_tensor_value_info(f"{operator} of it", 1, ["n"])
        node.attribute.append(onnx.helper.make_attribute(name, onnx.helper.make_graph([inner], name, [], [output])))
    return ir.serde.deserialize_model(model)


def test_branches_are_told_apart_by_their_names_and_not_by_their_order() -> None:
    text = "(bool c, float[n] x) => (float[n] z) {{ y = Softplus(x) z{} = If(c) {} }}"
    plain = text.format("", ""), text.format("2", "z = Identity(z2)")
    before = _chosen(True, "Neg", "Abs", plain[0])
    assert all(proof.proved for proof in proofs(before, _chosen(False, "Neg", "Abs", plain[1])))
    assert not all(proof.proved for proof in proofs(before, _chosen(False, "Abs", "Neg", plain[1])))


LENGTHS = """<ir_version: 10, opset_import: ["" : 18]>
lengths (float[s] x) => (int64[1] n)
<int64[1] zero = {0}, float[8] table = {0.5, 0.25, 0.1, 0.2, 0.3, 0.4, 0.6, 0.7}>
{
    length = Shape(x)
    %s
}"""


@pytest.mark.parametrize(
    ("source", "proved"),
    [("part = Slice(table, zero, length, zero) y = Add(x, part) n = Shape(y)", True), ("y = Add(x, x) n = Shape(y)", False)],
)
def test_lengths_that_broadcasting_brings_together_are_the_same_wherever_the_source_runs(source: str, proved: bool) -> None:
    before, after = (
        ir.from_onnx_text(LENGTHS % body)
        for body in (source, "turned = Neg(table) begun = Slice(turned, zero, length, zero) n = Shape(begun)")
    )
    assert [proof.proved for proof in proofs(before, after)] == [proved]


FLAT = """<ir_version: 8, opset_import: ["" : 18]>
flat (float[b, s, 4] x) => (float[b, s, 4] z)
<float[4, 4] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 8, 7, 6, 5, 4, 3, 2}, float[4] bias = {1, 2, 3, 4}, float[1] two = {2},
 int64[2] rows = {-1, 4}>
{
    near = Neg(x)
    %s
}"""
_BY_GEMM = "flat = Reshape(near, rows) g = Gemm(flat, w, bias) shape = Shape(near) y = Reshape(g, shape) z = Mul(y, two)"


@pytest.mark.parametrize(("result", "differs"), [("z = Add(y, y)", False), ("t = Add(y, y) z = Add(t, y)", True)])
def test_what_one_piece_is_given_the_other_does_not_compute(result: str, differs: bool) -> None:
    before = ir.from_onnx_text(FLAT % _BY_GEMM)
    after = ir.from_onnx_text(FLAT % f"m = MatMul(near, w) y = Add(m, bias) {result}")
    pair = Pair(before, after)
    proof = next(proof for proof in proofs(before, after) if proof.claim.name == "z")
    assert (refute(pair, same_claim(proof, pair)) is not None) == differs
