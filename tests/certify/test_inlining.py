"""What is changed in model-local functions is proved in place of their calls, or not at all."""

from __future__ import annotations

import pathlib

import onnx
import onnx_ir as ir
import pytest

import onnx_attnfuse
from onnx_attnfuse.certify.certificate import Certificate, certify, check
from onnx_attnfuse.certify.pairing import inlined, origin
from onnx_attnfuse.errors import OptionError
from onnx_attnfuse_cli.main import main

_CALLED = """<ir_version: 10, opset_import: ["": {main}, "local": 1]> g (float[B,S,8] x) => (float[B,S,8] y) {{ {calls} }}
<domain: "local", opset_import: ["": 18]> Attend (a) => (result) {{
    heads = Constant<value = int64[4] {{0, 0, 2, 4}}>()
    split = Reshape(a, heads)
    q = Transpose<perm = [0, 2, 1, 3]>(split)
    k = Transpose<perm = [0, 2, 3, 1]>(split)
    s = MatMul(q, k)
    w = Softmax<axis = -1>(s)
    o = MatMul(w, q)
    back = Transpose<perm = [0, 2, 1, 3]>(o)
    flat = Constant<value = int64[3] {{0, 0, 8}}>()
    result = Reshape(back, flat)
}}"""
_OUTER = '<domain: "local", opset_import: ["": 18, "local": 1]> Outer (a) => (b) { b = local.Attend(a) }'
_CALLS = {
    "a function": "y = local.Attend(x)",
    "a function in a function": "y = local.Outer(x)",
    "two calls": "q = local.Attend(x) r = local.Attend(x) y = Add(q, r)",
}


def _model(calls: str, main: int = 18) -> onnx.ModelProto:
    return onnx.parser.parse_model(_CALLED.format(calls=calls, main=main) + (_OUTER if "Outer" in calls else ""))


def _fused(model: onnx.ModelProto) -> onnx.ModelProto:
    after = onnx_attnfuse.optimize(model, verify="none").model
    assert any(node.op_type == "MultiHeadAttention" for function in after.functions for node in function.node)
    return after


def _certificate(before: onnx.ModelProto, after: onnx.ModelProto) -> Certificate:
    return certify(ir.from_proto(before), ir.from_proto(after))


def _rescaled(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    node = next(item for function in copy.functions for item in function.node if item.op_type == "MultiHeadAttention")
    next(item for item in node.attribute if item.name == "scale").f *= 2
    return copy


@pytest.mark.parametrize("calls", _CALLS.values(), ids=_CALLS)
def test_a_fusion_in_a_function_is_proved_and_a_wrong_one_is_not(calls: str) -> None:
    before = _model(calls)
    after = _fused(before)
    right, wrong = _certificate(before, after), _certificate(before, _rescaled(after))
    assert right.is_complete
    assert right.claims
    assert not wrong.is_complete
    assert "result" in wrong.open[0].sites


def test_a_certificate_is_of_the_functions_as_they_are_written(tmp_path: pathlib.Path) -> None:
    before = _model(_CALLS["a function"])
    after, found = _fused(before), tmp_path / "out.cert"
    found.write_text(_certificate(before, after).text)
    models = ir.from_proto(before), ir.from_proto(after)
    assert check(*models, found).problems == ()
    with pytest.raises(OptionError, match="not about the second model"):
        check(models[0], ir.from_proto(_rescaled(after)), found)


def test_a_fusion_in_a_function_of_another_opset_is_not_looked_into() -> None:
    before = _model(_CALLS["a function in a function"], main=17)
    found = _certificate(before, _fused(before))
    assert [claim.name for claim in found.open] == ["y"]
    assert {"y", "result"} <= set(found.open[0].sites)


@pytest.mark.parametrize(("opset", "said"), [(17, "fused 0 of 1 attention site"), (18, "fused 1 of 1 attention site")])
def test_a_function_is_left_where_a_proof_is_required_and_there_is_none(
    opset: int, said: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in.onnx"
    onnx.save(_model(_CALLS["a function in a function"], opset), path)
    assert main(["optimize", str(path), "-o", str(tmp_path / "out.onnx"), "--require-proof"]) == 0
    assert said in capsys.readouterr().out


def test_values_keep_the_names_that_they_have_in_their_functions() -> None:
    found = inlined(ir.from_proto(_model(_CALLS["two calls"])))
    assert not found.functions
    nodes = [node for node in found.graph if node.op_type == "Softmax"]
    assert len({node.outputs[0].name for node in nodes}) == 2
    assert [origin(node.outputs[0]) for node in nodes] == ["w", "w"]


@pytest.mark.parametrize(("body", "is_inlined"), [("b, a", False), ("b, b", False), ("b, c", True)])
def test_a_function_that_hands_on_a_value_twice_stays(body: str, is_inlined: bool) -> None:
    """Its values would be called by other names."""
    text = f"""<ir_version: 10, opset_import: ["": 18, "local": 1]>
    g (float[A] x) => (float[A] y, float[A] z) {{ y, z = local.F(x) }}
    <domain: "local", opset_import: ["": 18]> F (a) => ({body}) {{ b = Neg(a) c = Abs(a) }}"""
    found = inlined(ir.from_proto(onnx.parser.parse_model(text)))
    assert (not found.functions) == is_inlined
