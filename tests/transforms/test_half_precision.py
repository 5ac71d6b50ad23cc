"""Conversion to half types: what stays float32, what masks become, and that the result computes the same and still fuses."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

import onnx_attnfuse
from onnx_attnfuse import ModelError, OptionError, VerificationError, convert, verify_models
from onnx_attnfuse.graph import io
from onnx_attnfuse.transforms.half_precision.keep_float32 import rounded
from onnx_attnfuse.verify.runtime import Reference
from onnx_attnfuse_cli.main import main
from tests.support import small_models
from tests.support.bundled import BUNDLED, Array, name_of, run

HALF = onnx.TensorProto.FLOAT16
FLOAT = onnx.TensorProto.FLOAT


def parsed(nodes: str, inputs: str, outputs: str, constants: str = "", opset: int = 18, functions: str = "") -> onnx.ModelProto:
    head = f'<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1, "own" : 1]>'
    given = f"<{constants}>" if constants else ""
    return onnx.parser.parse_model(f"{head}\ng ({inputs}) => ({outputs}) {given} {{ {nodes} }} {functions}")


def converted(model: onnx.ModelProto, **choices: Any) -> onnx.ModelProto:
    """The model in a half type, valid."""
    result = convert(model, **{"verify": "none", **choices}).model
    onnx.checker.check_model(result, full_check=True)
    return result


def types_of(model: onnx.ModelProto) -> dict[str, int]:
    """The element type of every value that a node gives, as ONNX infers it."""
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    entries = [*inferred.graph.value_info, *inferred.graph.output, *inferred.graph.input]
    return {entry.name: entry.type.tensor_type.elem_type for entry in entries}


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("keep_io_types", [False, True], ids=["half io", "float io"])
@pytest.mark.parametrize("path", BUNDLED, ids=name_of)
def test_real_models_are_equal_and_half_as_large(path: pathlib.Path, keep_io_types: bool) -> None:
    result = convert(path, keep_io_types=keep_io_types, verify="model")
    report = result.report
    assert report.verification is not None
    assert report.verification.equal
    assert report.verification.cases >= 3
    assert report.bytes_after < 0.62 * report.bytes_before
    proto = ir.to_proto(result._ir)
    onnx.checker.check_model(proto, full_check=True)
    expected = FLOAT if keep_io_types else HALF
    entries = [*proto.graph.input, *proto.graph.output]
    assert {entry.type.tensor_type.elem_type for entry in entries} <= {expected, onnx.TensorProto.INT64}


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize("choices", [{}, {"ep": "cuda", "arch": "sm90"}], ids=["cpu", "cuda"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("path", BUNDLED, ids=name_of)
def test_what_is_converted_still_fuses(path: pathlib.Path, dtype: str, choices: dict[str, Any]) -> None:
    before = onnx_attnfuse.optimize(path, verify="none", always=True, **choices).report
    after = onnx_attnfuse.optimize(convert(path, dtype=dtype, verify="none")._ir, always=True, **choices).report
    assert after.fused + after.already_fused == before.fused + before.already_fused
    assert after.candidates == before.candidates


@pytest.mark.newest  # before onnx 1.23 its reference multiplies no matrices of bfloat16
def test_bfloat16_is_compared_where_there_is_no_kernel() -> None:
    path = next(path for path in BUNDLED if path.stem.startswith("gpt2"))
    report = convert(path, dtype="bfloat16", verify="model").report
    assert report.verification is not None
    assert report.verification.equal


SCORES = "float[b, s, t] q, float[b, t, t] k, bool[b, 1, t] first, bool[b, 1, t] second"
TWICE = """
    product = MatMul(q, k)
    one = Where(first, zero, fill)
    other = Where(second, zero, fill)
    some = Add(product, one)
    masked = Add(some, other)
    weights = Softmax<axis = -1>(masked)
    out = MatMul(weights, k)
"""


def test_masks_that_are_added_twice_stay_finite() -> None:
    model = parsed(TWICE, SCORES, "float[b, s, t] out", "float zero = {0}, float fill = {-1e9}")
    half = converted(model)
    assert verify_models(model, half).equal
    fills = "zero = Cast<to = 10>(nothing)\n fill = Cast<to = 10>(lowest)\n"
    inputs = SCORES.replace("float[", "float16[")
    naive = parsed(fills + TWICE, inputs, "float16[b, s, t] out", "float nothing = {0}, float lowest = {-65504}")
    nothing = np.zeros((1, 1, 4), bool)
    feeds: dict[str, Array] = {"q": np.full((1, 2, 4), -3, np.float16), "k": np.ones((1, 4, 4), np.float16)}
    feeds |= {"first": nothing, "second": nothing}
    assert np.isfinite(Reference(half).run(None, feeds)[0]).all()
    assert np.isnan(Reference(naive).run(None, feeds)[0]).all()


SUMMED = """
    added = Where(seen, zero, fill)
    bias = Add(added, table)
    p = MatMul(q, k)
    scores = Add(p, bias)
    weights = Softmax(scores)
    out = MatMul(weights, q)
"""


@pytest.mark.parametrize(("fill", "rounds"), [("-10000", False), ("-inf", True), ("-100", True)])
def test_a_bias_beside_a_finite_mask_number_is_not_rounded(fill: str, rounds: bool) -> None:
    numbers = ", ".join(f"{0.1 * place}" for place in range(25))
    constants = f"float zero = {{0}}, float fill = {{{fill}}}, float[5, 5] table = {{{numbers}}}"
    model = parsed(SUMMED, "float[5, 5] q, float[5, 5] k, bool[5, 5] seen", "float[5, 5] out", constants)
    half = converted(model)
    casts = [node.input[0] for node in half.graph.node if node.op_type == "Cast"]
    assert ("bias" in casts) is rounds
    seen = np.zeros((5, 5), bool)
    feeds: dict[str, Array] = {"q": np.eye(5, dtype=np.float16), "k": np.zeros((5, 5), np.float16), "seen": seen}
    wide = run(model, {name: array.astype(np.float32) if name != "seen" else array for name, array in feeds.items()})["out"]
    if fill != "-inf":
        np.testing.assert_allclose(run(half, feeds)["out"], wide, atol=0.02 if fill == "-100" else 2e-3)


@pytest.mark.parametrize(("fill", "rounds"), [("-10000", False), ("-100", True)])
def test_nor_is_it_where_infinities_are_added_too(fill: str, rounds: bool) -> None:
    numbers = ", ".join(f"{0.1 * place}" for place in range(25))
    constants = f"float zero = {{0}}, float no = {{-inf}}, float fill = {{{fill}}}, float[5, 5] table = {{{numbers}}}"
    nodes = SUMMED.replace(
        "bias = Add(added, table)", "never = Where(there, zero, no)\n both = Add(never, added)\n bias = Add(both, table)"
    )
    model = parsed(nodes, "float[5, 5] q, float[5, 5] k, bool[5, 5] seen, bool[5, 5] there", "float[5, 5] out", constants)
    casts = [node.input[0] for node in converted(model).graph.node if node.op_type == "Cast"]
    assert ("bias" in casts) is rounds


FUSED = """
    bias = Where(seen, zero, fill)
    out = com.microsoft.MultiHeadAttention<num_heads = 2>(q, q, q, , , bias)
"""


@pytest.mark.parametrize(("fill", "expected"), [("-3.4028234663852886e38", -65504.0), ("-100", -100.0)])
def test_fills_become_the_lowest_number_where_an_operator_takes_them(fill: str, expected: float) -> None:
    inputs = "float[b, s, 32] q, bool[b, 2, s, s] seen"
    half = converted(parsed(FUSED, inputs, "float[b, s, 32] out", f"float zero = {{0}}, float fill = {{{fill}}}"))
    bias = next(node.input[5] for node in half.graph.node if node.op_type == "MultiHeadAttention")
    half.graph.output.append(onnx.ValueInfoProto(name=bias))
    feeds = {"q": np.ones((1, 2, 32), np.float16), "seen": np.zeros((1, 2, 2, 2), bool)}
    assert set(run(half, feeds)[bias].ravel().tolist()) == {expected}


def test_infinities_stay_infinite() -> None:
    nodes = "some = Add(mask, far)\n out = com.microsoft.MultiHeadAttention<num_heads = 2>(q, q, q, , , some)"
    inputs = "float[b, s, 32] q, float[b, 2, s, s] mask"
    half = converted(parsed(nodes, inputs, "float[b, s, 32] out", "float far = {-1e30}"))
    bias = next(node.input[5] for node in half.graph.node if node.op_type == "MultiHeadAttention")
    half.graph.output.append(onnx.ValueInfoProto(name=bias))
    mask = np.asarray([[[[0, -np.inf]]]], np.float16) + np.zeros((1, 2, 2, 2), np.float16)
    found = run(half, {"q": np.ones((1, 2, 32), np.float16), "mask": mask})[bias]
    assert found[0, 0, 0].tolist() == [-65504.0, -np.inf]


NORM = """
    square = Pow(x, two)
    mean = ReduceMean<axes = [-1]>(square)
    some = Add(mean, least)
    root = Sqrt(some)
    inverse = Reciprocal(root)
    normal = Mul(x, inverse)
    scaled = Mul(normal, gain)
    out = MatMul(scaled, weight)
"""
NORM_CONSTANTS = "float two = {2}, float least = {1e-12}, float[4] gain = {1, 1, 1, 1}, float[4, 1] weight = {1, 1, 1, 1}"


def test_norms_divide_by_statistics_in_float32() -> None:
    model = parsed(NORM, "float[b, 4] x", "float[b, 1] out", NORM_CONSTANTS, opset=13)
    half = converted(model)
    types = types_of(half)
    assert {types[name] for name in ("square", "mean", "some", "root", "inverse", "normal")} == {FLOAT}
    assert types["out"] == HALF
    feeds = {"x": np.asarray([[0, 0, 0, 0], [300, 300, 300, 300]], np.float16)}
    assert run(half, feeds)["out"].ravel().tolist() == [0, 4]


ISLANDS = [
    ("a cube of an activation", "y = Pow(x, three)\n out = Tanh(y)", "float three = {3}", {"y": HALF, "out": HALF}),
    ("a square that is summed", "y = Pow(x, two)\n out = ReduceSum(y)", "float two = {2}", {"y": FLOAT}),
    ("a table of angles", "p = Cast<to = 1>(n)\n y = Mul(p, w)\n c = Cos(y)\n out = Mul(x, c)", "float w = {0.1}", {"c": FLOAT}),
    ("angles of an activation", "y = Mul(x, x)\n c = Sin(y)\n out = Mul(x, c)", "", {"y": FLOAT, "c": FLOAT, "out": HALF}),
    ("a residual", "y = Add(x, x)\n out = Relu(y)", "", {"y": HALF, "out": HALF}),
    (
        "the scores of a softmax",
        "p = MatMul(x, x)\n y = Mul(p, w)\n t = Transpose(y)\n s = Softmax(t)\n out = MatMul(s, x)",
        "float w = {0.1}",
        {"p": HALF, "y": FLOAT, "t": FLOAT, "s": FLOAT, "out": HALF},
    ),
    (
        "scores that are written to",
        "p = MatMul(x, x)\n y = Mul(p, w)\n r = Slice(y, a, d)\n z = Add(r, w)\n t = ScatterND(y, i, z)\n s = Softmax(t)\n"
        " out = MatMul(s, x)",
        "float w = {0.1}, int64[1] a = {1}, int64[1] d = {4}, int64[3, 1] i = {1, 2, 3}",
        {"y": FLOAT, "r": FLOAT, "z": FLOAT, "t": FLOAT, "s": FLOAT, "out": HALF},
    ),
    ("a view of a product", "p = MatMul(x, x)\n t = Transpose(p)\n out = Softmax(t)", "", {"p": HALF, "t": HALF}),
    ("a range", "l = Range(a, b, d)\n out = Mul(x, l)", "float a = {0}, float b = {4}, float d = {1}", {"l": FLOAT, "out": HALF}),
    ("an embedding", "y = Gather(e, n)\n out = MatMul(x, y)", "float[4, 4] e", {"y": HALF}),
    ("a comparison", "y = Greater(x, w)\n z = Cast<to = 1>(y)\n out = Mul(z, x)", "float w = {0.1}", {"z": FLOAT, "out": HALF}),
]


@pytest.mark.parametrize(("nodes", "constants", "expected"), [row[1:] for row in ISLANDS], ids=[row[0] for row in ISLANDS])
def test_what_stays_float32(nodes: str, constants: str, expected: dict[str, int]) -> None:
    constants = (
        constants.replace("e", "e = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}") if "[4, 4] e" in constants else constants
    )
    model = parsed(nodes, "float[4, 4] x, int64[4] n", "float[f, h] out", constants)
    types = types_of(converted(model))
    assert {name: types[name] for name in expected} == expected


def test_factors_do_not_become_0_and_weights_do() -> None:
    few, many = (ir.tensor(np.full(count, 1e-12, np.float32)) for count in (1, 1000))
    assert float(rounded(few, ir.DataType.FLOAT16, "x").numpy()[0]) > 0
    assert not rounded(many, ir.DataType.FLOAT16, "x").numpy().any()
    large = rounded(ir.tensor(np.asarray([1e38, -1e38, np.inf], np.float32)), ir.DataType.FLOAT16, "x").numpy()
    assert large.tolist() == [65504, -65504, np.inf]


RESIZED = 'out = Resize<mode = "linear">(x, , scales)'


def test_scales_of_a_resize_stay_float32() -> None:
    model = parsed(RESIZED, "float[1, 1, s, t] x", "float[1, 1, u, v] out", "float[4] scales = {1, 1, 2, 2}")
    assert verify_models(model, converted(model)).equal


BRANCHES = """
    y = Mul(x, x)
    out = If(flag) <
        then_branch = first () => (float[n] a) { a = Softmax(y) },
        else_branch = second () => (float[n] b) { b = Add(y, some) }
    >
"""
STEPS = """
    out = Loop(count, , x) <body = step (int64 i, bool go, float[n] state) => (bool stay, float[n] next) {
        stay = Identity(go)
        next = Mul(state, some)
    }>
"""


@pytest.mark.parametrize(("nodes", "inputs"), [(BRANCHES, "bool flag, float[n] x"), (STEPS, "int64 count, float[n] x")])
def test_nested_graphs_are_converted_and_compute_the_same(nodes: str, inputs: str) -> None:
    model = parsed(nodes, inputs, "float[n] out", "float some = {0.5}")
    half = converted(model)
    feeds = {"flag": np.asarray(True), "count": np.asarray(2), "x": np.arange(3, dtype=np.float32)}
    for flag in (True, False):
        feeds["flag"] = np.asarray(flag)
        expected = run(model, feeds)["out"]
        assert np.allclose(run(half, feeds | {"x": feeds["x"].astype(np.float16)})["out"], expected, atol=5e-3)


def test_functions_are_opened() -> None:
    function = '<domain: "own", opset_import: ["" : 18]> twice (a) => (b) { b = Add(a, a) }'
    model = parsed("y = own.twice(x)\n out = own.twice(y)", "float[n] x", "float[n] out", functions=function)
    half = converted(model)
    assert not half.functions
    assert run(half, {"x": np.ones(2, np.float16)})["out"].tolist() == [4, 4]


def test_constants_of_both_kinds_are_there_in_both_types() -> None:
    nodes = "c = Constant<value = float[1] {0.25}>()\n y = Mul(x, c)\n z = ReduceSum<keepdims = 0>(x)\n"
    nodes += "w = Mul(z, c)\n v = Exp(w)\n out = Add(y, v)"
    model = parsed(nodes, "float[n] x", "float[n] out", opset=13)
    assert verify_models(model, converted(model)).equal


@pytest.mark.parametrize("keep_io_types", [False, True])
def test_inputs_that_are_outputs_and_have_defaults(keep_io_types: bool) -> None:
    model = parsed("out = Mul(x, gain)\n same = Identity(x)", "float[n] x, float gain", "float[n] out, float[n] same")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(3, np.float32), "gain"))
    half = converted(model, keep_io_types=keep_io_types)
    x = np.ones(2, np.float32 if keep_io_types else np.float16)
    result = run(half, {"x": x})
    assert result["out"].tolist() == [3, 3]
    assert result["same"].dtype == x.dtype


def test_weights_in_files_are_read_when_written(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from onnx_attnfuse.transforms.half_precision import keep_float32

    model = parsed("out = MatMul(x, weight)", "float[n, 64] x", "float[n, 64] out")
    weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "weight"))
    path = tmp_path / "model.onnx"
    onnx.save_model(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    (tmp_path / "there").mkdir()
    with monkeypatch.context() as context:
        context.setattr(keep_float32, "read_tensor", lambda tensor: pytest.fail("a weight was read"))
        result = convert(path, verify="none")
    result.save(tmp_path / "there" / "half.onnx")
    tensor = io.load(tmp_path / "there" / "half.onnx").graph.initializers["weight"].const_value
    assert isinstance(tensor, ir.ExternalTensor)
    assert np.array_equal(tensor.numpy(), weight.astype(np.float16))
    assert {file.name for file in (tmp_path / "there").iterdir()} == {"half.onnx", "half.onnx.data"}
    assert verify_models(path, tmp_path / "there" / "half.onnx").equal


def test_what_overflows_is_not_handed_over() -> None:
    model = parsed(
        "y = Mul(x, large)\n z = Relu(y)\n out = Mul(z, small)",
        "float[n, 4] x",
        "float[n, 4] out",
        "float large = {1e6}, float small = {1e-6}",
    )
    with pytest.raises(VerificationError, match="the converted model differs"):
        convert(model, verify="model")
    assert convert(model, verify="model", dtype="bfloat16").report.verification


def test_what_is_fused_is_spelled_out_first() -> None:
    path = next(path for path in BUNDLED if path.stem == "bert__dyn18__sdpa")
    fused = onnx_attnfuse.optimize(path, verify="none", always=True)._ir
    with pytest.raises(VerificationError, match="attnfuse unfuse, convert the result"):
        convert(fused, verify="model")
    spelled = convert(onnx_attnfuse.unfuse(fused)._ir, verify="model")
    assert onnx_attnfuse.optimize(spelled._ir, always=True).report.fused == 2


@pytest.mark.parametrize(
    ("model", "choices", "error", "message"),
    [
        (parsed("out = Relu(x)", "float[n] x", "float[n] out"), {"dtype": "float8"}, OptionError, "choose float16 or bfloat16"),
        (parsed("out = Relu(x)", "float[n] x", "float[n] out"), {"verify": "sites"}, OptionError, "choose none or model"),
        (parsed("out = Relu(x)", "float[n] x", "float[n] out", opset=12), {"dtype": "bfloat16"}, OptionError, "needs opset 13"),
        (parsed("out = Add(x, x)", "int64[n] x", "int64[n] out"), {}, ModelError, "there is nothing to convert"),
        (parsed("y = own.Op(x)\n out = Relu(y)", "float[n] x", "float[n] out"), {}, ModelError, "element type of 'y' is unknown"),
    ],
    ids=["dtype", "verify", "opset", "integers", "unknown type"],
)
def test_what_cannot_be_converted(model: onnx.ModelProto, choices: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        convert(model, **{"verify": "none", **choices})


@pytest.fixture
def model(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A model with one attention in the working directory."""
    monkeypatch.chdir(tmp_path)
    return small_models.written(small_models.ATTENTION, tmp_path / "model.onnx")


def test_the_command_writes_beside_the_model(model: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = model.read_bytes()
    assert main(["convert", "model.onnx"]) == 0
    assert model.read_bytes() == before
    out, err = capsys.readouterr()
    assert out.splitlines()[0].startswith("3 operators in float16")
    assert "compared on" in out
    assert err == "wrote model.float16.onnx\n"
    assert main(["convert", "model.onnx", "--dtype", "bfloat16", "-q"]) == 0
    assert {path.name for path in model.parent.iterdir()} == {"model.onnx", "model.float16.onnx", "model.bfloat16.onnx"}


def test_the_json_is_the_documented_one(model: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "model.onnx", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["schema"], report["dtype"], report["verification"]["equal"]) == (1, "float16", True)
    described = (pathlib.Path(__file__).parents[2] / "docs" / "convert.md").read_text()
    assert {key for key in report if f"`{key}`" not in described} == set()


def test_what_differs_is_not_written(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    nodes, constants = "y = Mul(x, large)\n z = Relu(y)\n out = Mul(z, small)", "float large = {1e6}, float small = {1e-6}"
    small_models.written(parsed(nodes, "float[n, 4] x", "float[n, 4] out", constants), tmp_path / "model.onnx")
    assert main(["convert", "model.onnx"]) == 3
    assert "the converted model differs" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    assert main(["convert", "model.onnx", "--verify", "none", "-q"]) == 0
