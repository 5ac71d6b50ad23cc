"""Whole models against each other: what inputs are taken for, what counts as different, and where a difference begins."""

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
from onnx_attnfuse import OptionError, verify_models
from onnx_attnfuse.errors import ModelError
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.verify.compare_models import check_models
from onnx_attnfuse.verify.input_kinds import InputKind, as_its_kind, kinds
from onnx_attnfuse.verify.inputs import InputCase
from onnx_attnfuse_cli.main import main
from tests.support import small_models
from tests.support.bundled import BUNDLED, name_of
from tests.support.pairs import GUARDED, MASKED, PADDED, PLAIN, graph

KINDS = {
    "bert": {"input_ids": "ids", "attention_mask": "mask"},
    "gpt2": {"input_ids": "ids", "attention_mask": "mask"},
    "llama_past": {"input_ids": "ids", "attention_mask": "mask", "position_ids": "positions", "past_key_0": "numbers"},
    "swin": {"pixel_values": "image"},
    "t5": {"input_ids": "ids", "attention_mask": "mask", "decoder_input_ids": "ids", "decoder_attention_mask": "mask"},
    "vit": {"pixel_values": "image"},
    "whisper_decoder": {"input_ids": "ids", "attention_mask": "mask", "encoder_hidden_states": "numbers"},
}


@pytest.mark.parametrize("path", BUNDLED, ids=name_of)
def test_inputs_are_told_by_what_they_feed(path: pathlib.Path) -> None:
    model = ir.from_proto(onnx.load(path))
    for count, value in enumerate(model.graph.inputs):
        value.metadata_props["name"] = value.name or ""
        value.name = "position_ids" if value.name == "position_ids" else f"input {count}"
    found = kinds(model.graph, Facts(model.graph))
    named = {value.metadata_props["name"]: found[value.name or ""] for value in model.graph.inputs}
    expected = KINDS[path.stem.split("__")[0]]
    assert {name: named[name].name for name in expected} == expected


FEEDS = """<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]>
g ({kind} x, float[b, s, 64] q, float[b, 2, p, 16] past) => (float[y] out)
<float[3, 8] few = {{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}}, int64[1] one = {{1}},
 float[16, 8] cos, float[16, 8] sin>
{{ {nodes} }}"""


@pytest.mark.parametrize(
    ("kind", "nodes", "expected"),
    [
        ("int64[b, s]", "out = Gather(few, x)", "types"),
        ("int64[b, s]", "y = Cast<to = 1>(x) z = Unsqueeze(y, one) w = Mul(z, z) out = Sin(w)", "positions"),
        ("int64[b, s]", "y = Cast<to = 1>(x) out = Mul(y, y)", "mask"),
        ("bool[b, s]", "out = Where(x, q, q)", "mask"),
        ("float[b, 1, s, t]", "y = Add(q, x) out = Softmax(y)", "bias"),
        ("float[b, 1, s, t]", "y = MatMul(q, x) out = Softmax(y)", "numbers"),
        ("float[b, 3, s, t]", "out = Relu(x)", "image"),
        ("int32[b]", "out = com.microsoft.MultiHeadAttention<num_heads = 4>(q, q, q, , x)", "lengths"),
        ("int32[b, s]", "out = com.microsoft.MultiHeadAttention<num_heads = 4>(q, q, q, , x)", "mask"),
        ("int32[b]", "out = com.microsoft.GroupQueryAttention<num_heads = 4>(q, q, q, past, past, x)", "last"),
        ("int32", "out = com.microsoft.GroupQueryAttention<num_heads = 4>(q, q, q, past, past, , x)", "total"),
    ],
)
def test_operators_tell_what_an_input_is(kind: str, nodes: str, expected: str) -> None:
    text = FEEDS.format(kind=kind, nodes=nodes).replace(",\n float[16, 8] cos, float[16, 8] sin>", ">")
    model = ir.from_onnx_text(text)
    assert kinds(model.graph, Facts(model.graph))["x"].name == expected


@pytest.mark.parametrize(
    ("node", "keys", "rows"),
    [
        ("MultiHeadAttention<num_heads = 4>(q, q, q, , x)", "s", "s"),
        ("MultiHeadAttention<num_heads = 4>(q, q, q, , x, , past, past)", "(s + p)", "s"),
        ("GroupQueryAttention<num_heads = 4, kv_num_heads = 4>(q, q, q, past, past, x)", "(s + p)", "s"),
        ("Attention<num_heads = 4>(q, w, , x)", "s", "s"),
    ],
)
def test_lengths_count_the_keys_of_their_operator(node: str, keys: str, rows: str) -> None:
    text = FEEDS.format(kind="int32[b]", nodes=f"out = com.microsoft.{node}").replace(
        ",\n float[16, 8] cos, float[16, 8] sin>", ">"
    )
    text = text.replace("float[b, s, 64] q,", "float[b, s, 64] q, float[64, 192] w,")
    model = ir.from_onnx_text(text)
    found = kinds(model.graph, Facts(model.graph))["x"]
    assert (str(found.keys), str(found.rows)) == (keys, rows)


@pytest.mark.parametrize(
    ("kind", "pattern", "expected"),
    [
        (InputKind("lengths", keys=5, rows=5), "full", [5, 5, 5]),
        (InputKind("lengths", keys=5, rows=5), "right", [5, 4, 3]),
        (InputKind("lengths", keys=5, rows=5), "empty", [5, 4, 0]),
        (InputKind("last", keys=7, rows=5), "right", [6, 5, 4]),
        (InputKind("last", keys=5, rows=5), "right", [4, 4, 4]),
        (InputKind("total", keys=7, rows=5), "right", [7, 7, 7]),
        (InputKind("positions"), "right", [0, 1, 2]),
        (InputKind("types", 2), "index", [0, 1, 1]),
    ],
    ids=str,
)
def test_lengths_fit_the_sizes(kind: InputKind, pattern: Any, expected: list[int]) -> None:
    assert as_its_kind(kind, np.arange(3), InputCase(pattern, "plain", 1.0), {}).tolist() == expected


def test_ids_reach_every_row_of_their_table() -> None:
    found = as_its_kind(InputKind("ids", 4), np.zeros((40, 9), np.int64), InputCase("full", "plain", 1.0), {})
    assert set(found.ravel().tolist()) == {0, 1, 2, 3}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("path", BUNDLED, ids=name_of)
def test_a_fused_model_is_equal(path: pathlib.Path) -> None:
    fused = onnx_attnfuse.optimize(onnx.load(path), verify="none", always=True)
    assert fused.report.fused
    found = verify_models(path, fused.model)
    assert found.equal, found.detail
    assert found.divergence is None
    assert all(output.relative_error is not None and output.relative_error < 1e-3 for output in found.outputs)


def test_what_holds_for_some_batches_only_differs_at_the_first_attention() -> None:
    path = next(path for path in BUNDLED if path.stem == "bert__dyn18__sdpa")
    fused = onnx_attnfuse.optimize(path, verify="none", ep="cpu", padding="assume-none")
    found = verify_models(path, fused.model)
    assert not found.equal
    assert found.divergence is not None
    assert found.divergence.site == fused.report.sites[0].name
    assert "MultiHeadAttention" in found.divergence.node_in_second
    assert found.outputs[0].differing
    assert fused.report.sites[0].name == "node_Softmax_136"


def result_of(nodes: str, **rest: Any) -> onnx.ModelProto:
    """A model that gives `old`."""
    model = graph(nodes + "\n    new = Identity(old)", inputs=MASKED, **rest)
    model.graph.outputs.pop()
    return ir.to_proto(model)


def test_a_difference_outside_of_attention_belongs_to_none() -> None:
    changed = result_of(PLAIN.replace("vs = Reshape(v, split)", "w = Neg(v)\n    vs = Reshape(w, split)"))
    found = verify_models(result_of(PLAIN), changed)
    assert found.divergence is not None
    assert (found.divergence.value, found.divergence.site) == ("vs", None)


def test_a_difference_that_begins_at_an_output_is_found() -> None:
    changed = result_of(PLAIN.replace("old = Reshape(back, flat)", "far = Add(back, back)\n    old = Reshape(far, flat)"))
    found = verify_models(result_of(PLAIN), changed)
    assert found.divergence is not None
    assert found.divergence.value == "old"


def test_nan_is_counted_apart() -> None:
    guarded, bare = result_of(GUARDED, closed="inf"), result_of(PADDED, closed="inf")
    found = verify_models(guarded, bare).outputs[0]
    assert found.nan_only_in_second > 0
    assert found.nan_only_in_first == 0
    assert found.max_abs_error is not None
    assert found.max_abs_error < 1e-5
    assert verify_models(bare, guarded).outputs[0].nan_only_in_first == found.nan_only_in_second


def test_models_may_be_of_different_float_types() -> None:
    single, half = result_of(PADDED, closed="-10000"), result_of(PADDED, dtype="float16", closed="-10000")
    found = verify_models(single, half)
    assert found.equal, found.detail
    assert found.outputs[0].max_abs_error
    assert not verify_models(single, half, tolerance=1e-6).equal
    assert not verify_models(single, half, atol=1e-6).equal
    assert verify_models(single, half, atol=0.1, rtol=0.1).equal


WRONG = PADDED.replace("Add(scaled, bias)", "Sub(scaled, bias)")


def test_what_one_type_cannot_say_is_no_difference_by_itself() -> None:
    single, half = result_of(PADDED), result_of(WRONG, dtype="float16", closed="-65504")
    found = verify_models(single, half)
    assert found.divergence is not None
    assert found.divergence.value == "masked"


def test_as_many_cases_are_run_as_are_asked_for() -> None:
    model = result_of(PADDED)
    assert [verify_models(model, model, cases=count).cases for count in (1, 40)] == [1, 40]


def test_lengths_can_be_given() -> None:
    changed = result_of(PLAIN.replace("old = Reshape(back, flat)", "far = Add(back, back)\n    old = Reshape(far, flat)"))
    detail = verify_models(result_of(PLAIN), changed, dim={"s": 11, "b": 2}).detail
    assert "q 2x11x32" in detail


GIVEN_LENGTHS = """<ir_version: 10, opset_import: ["" : 18, "com.microsoft" : 1]>
step (float[b, s, 64] q, float[b, s, 32] k, float[b, s, 32] v, float[b, 2, p, 16] past_key, float[b, 2, p, 16] past_value,
      int32[b] last, int32 total) => (float[b, s, 64] out, float[b, 2, t, 16] key)
{
    out, key, value = com.microsoft.GroupQueryAttention<num_heads = 4, kv_num_heads = 2>
        (q, k, v, past_key, past_value, last, total)
}"""


def test_lengths_that_are_inputs_fit_each_other() -> None:
    model = onnx.parser.parse_model(GIVEN_LENGTHS)
    spelled = onnx_attnfuse.unfuse(model)
    assert spelled.report.unfused == 1
    found = verify_models(model, spelled.model)
    assert found.equal, found.detail
    assert found.cases > 2


@pytest.mark.parametrize(
    ("choices", "error", "message"),
    [
        ({"dim": {"x": 2}}, OptionError, "no input has a dimension called x; there are b, s, t"),
        ({"cases": 0}, OptionError, "0 cases show nothing"),
        ({"tolerance": -1.0}, OptionError, "tolerance is -1.0"),
        ({"atol": float("nan")}, OptionError, "atol is nan"),
    ],
    ids=str,
)
def test_choices_out_of_bounds(choices: dict[str, Any], error: type[Exception], message: str) -> None:
    model = result_of(PADDED)
    with pytest.raises(error, match=message):
        verify_models(model, model, **choices)


PROJECTED = """<ir_version: 10, opset_import: ["" : 18]>
g (float[b, s, 8] x, bool[b, s] mask) => (float[b, 1, s, 8] out)
<float fill = {%s}, int64[2] axes = {1, 2}, int64[1] one = {1}, float zero = {0}, float w = {0}>
{ q = MatMul(x, w) q4 = Unsqueeze(q, one) k4 = Unsqueeze(x, one) kt = Transpose<perm = [0, 1, 3, 2]>(k4) scores = MatMul(q4, kt)
  kept = Unsqueeze(mask, axes) low = Where(kept, zero, fill) masked = Add(scores, low) found = Softmax(masked)
  any = Cast<to = 1>(kept) most = ReduceMax(any) some = Cast<to = 9>(most)
  weights = Where(some, found, zero) out = MatMul(weights, k4) }"""


@pytest.mark.parametrize(("fill", "equal"), [("-1e30", True), ("-50", False)])
def test_scores_of_projections_are_large_and_low_enough_to_tell_a_fill_from_a_mask(fill: str, equal: bool) -> None:
    weight = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32) / 3
    models = [onnx.parser.parse_model(PROJECTED % number) for number in ("-1e38", fill)]
    for model in models:
        del model.graph.initializer[-1]
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    found = verify_models(models[0], models[1])
    assert found.equal is equal, found.detail


RANDOM = """<ir_version: 10, opset_import: ["" : 18]>
g (float[b, 8] x) => (float[b, 8] out) { drawn = RandomNormalLike%s(x) out = Add(x, drawn) }"""


def test_a_model_that_draws_random_numbers_differs_from_none() -> None:
    """The random numbers of a model with a seed are the same in each new session; without one they never are."""
    unseeded, seeded = (onnx.parser.parse_model(RANDOM % seed) for seed in ("", "<seed = 1.0>"))
    verdict = check_models(unseeded, unseeded)
    assert verdict.undecided == "the original model gives other results each time that it runs on the same inputs"
    with pytest.raises(ModelError, match="the first model gives other results each time"):
        verify_models(unseeded, seeded)


@pytest.fixture
def files(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Models as files in the working directory."""
    monkeypatch.chdir(tmp_path)
    small_models.written(result_of(PLAIN), tmp_path / "a.onnx")
    small_models.written(result_of(PLAIN.replace("scaled = Mul(qk, scale)", "scaled = Add(qk, scale)")), tmp_path / "b.onnx")
    small_models.written(small_models.LINEAR, tmp_path / "other.onnx")
    small_models.written(result_of(PLAIN.replace("Softmax", "own.Softmax")), tmp_path / "broken.onnx")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["a.onnx", "a.onnx"], 0, "equal in 13 cases"),
        (["a.onnx", "b.onnx"], 3, "the models differ: output 'old'"),
        (["a.onnx", "other.onnx"], 2, "do not have the same inputs: only one has"),
        (["a.onnx", "none.onnx"], 2, "does not exist"),
        (["a.onnx", "broken.onnx"], 2, "the second model does not load"),
        (["broken.onnx", "a.onnx"], 2, "the first model does not load"),
        (["a.onnx", "a.onnx", "--dim", "x=3"], 2, "no input has a dimension called x"),
        (["a.onnx", "a.onnx", "--cases", "0"], 2, "0 cases show nothing"),
    ],
    ids=str,
)
def test_how_the_command_ends(
    arguments: list[str], status: int, said: str, files: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *arguments]) == status
    out, err = capsys.readouterr()
    assert said in (err if status else out)
    assert len(err.splitlines()) == bool(status)


def test_the_json_is_the_documented_one(files: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "a.onnx", "b.onnx", "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["equal"], found["divergence"]["value"]) == (1, False, "scaled")
    described = (pathlib.Path(__file__).parents[2] / "docs" / "verify.md").read_text()
    assert {key for key in {*found, *found["outputs"][0], *found["divergence"]} if f"`{key}`" not in described} == set()
