"""The benchmark: inputs that fit, attention that is cut out, contenders in processes of their own, what their times come to."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import onnx_attnfuse
from onnx_attnfuse.bench import compare, op_sweep
from onnx_attnfuse.bench import run as bench_run
from onnx_attnfuse.bench.compare import Contender, Figures, contenders, figures, run
from onnx_attnfuse.bench.process import Child, ChildError, Sample, fitting, sample
from onnx_attnfuse.bench.run import Alone, Bench, Contest, cut_attention, picture
from onnx_attnfuse.errors import ModelError
from onnx_attnfuse.graph import io
from onnx_attnfuse.kernels.gpus import DeviceLimits
from onnx_attnfuse.options import Options
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse_cli.main import main
from tests.support import small_models
from tests.support.bundled import BUNDLED, name_of, run_in, session, with_outputs

WIDE = small_models.ATTENTION.replace(", 4]", ", 64]")


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("path", BUNDLED, ids=name_of)
def test_every_model_runs_on_its_sample(path: pathlib.Path) -> None:
    inputs = fitting(path, io.load(path), {}, "cpu", 300)
    outputs = run_in(session(onnx.load(path)), inputs.feeds)
    assert all(np.isfinite(array).all() for array in outputs.values())


def test_sizes_that_are_given_are_kept_and_others_fit() -> None:
    model = ir.from_proto(small_models.parsed(small_models.ATTENTION))
    inputs = sample(model, {"b": 3, "s": 5, "nowhere": 7})
    assert {name: array.shape for name, array in inputs.feeds.items()} == {
        "q": (3, 2, 5, 4),
        "k": (3, 2, 128, 4),
        "v": (3, 2, 128, 4),
    }
    assert (inputs.batch, inputs.tokens) == (3, None)
    assert dict(inputs.lengths) == {"b": 3, "s": 5, "t": 128}


def test_tokens_are_counted_in_integers_of_two_axes() -> None:
    inputs = sample(io.load(next(path for path in BUNDLED if path.stem.startswith("gpt2"))))
    assert inputs.tokens == 128
    assert inputs.batch == 1


def test_there_is_a_mask_over_a_cache_and_new_tokens() -> None:
    inputs = sample(io.load(next(path for path in BUNDLED if path.stem.startswith("llama_past"))))
    assert sorted(set(inputs.lengths.values())) == [1, 128, 256]


def test_an_input_of_unknown_shape_is_refused() -> None:
    model = ir.from_proto(small_models.parsed(small_models.LINEAR))
    model.graph.inputs[0].shape = None
    with pytest.raises(ModelError, match="of input 'x' is unknown; export the model with it"):
        sample(model)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("path", BUNDLED, ids=name_of)
def test_attention_that_is_cut_out_computes_what_it_did(path: pathlib.Path) -> None:
    """The whole model says what flows into its attention and what comes out; the piece is fed the one and must give the other."""
    proto = onnx.load(path)
    alone = cut_attention(ir.from_proto(proto))
    assert isinstance(alone, Alone)
    names = [entry.name for entry in alone.proto.graph.input]
    (result,) = (entry.name for entry in alone.proto.graph.output)
    feeds = fitting(path, ir.from_proto(proto), {}, "cpu", 300).feeds
    seen = {**feeds, **run_in(session(with_outputs(proto, {*names, result} - feeds.keys())), feeds)}
    found = run_in(session(alone.proto), {name: seen[name] for name in names})
    np.testing.assert_allclose(found[result], seen[result], rtol=1e-5, atol=1e-6)


def test_a_model_without_attention_has_none_to_cut_out() -> None:
    found = cut_attention(ir.from_proto(small_models.parsed(small_models.LINEAR)))
    assert isinstance(found, Reason)
    assert found.code == "no-attention"


TWO_TOKENS = Sample({}, {"ids": np.ones((2, 10), np.int64)})


def test_what_times_come_to() -> None:
    times = {"attnfuse": [[1.0, 2.0, 3.0], [4.0, 4.0, 5.0]], "original": [[6.0, 8.0, 9.0], [4.0, 6.0, 9.0]]}
    ours, theirs, broken = figures(["attnfuse", "original", "other"], times, {"attnfuse": 7.0}, {"other": "no"}, TWO_TOKENS)
    assert (ours.ms, ours.fastest, ours.slowest, ours.megabytes) == (3.5, 1.0, 5.0, 7.0)
    assert ours.ratios == (6 / 4, 8 / 2)
    assert ours.ratio == (6 / 4 + 8 / 2) / 2
    assert ours.quartiles == (2.25, 4.0)
    assert ours.samples_per_second == pytest.approx(2 / 3.5e-3)
    assert ours.tokens_per_second == pytest.approx(20 / 3.5e-3)
    assert (theirs.ratio, theirs.ms) == (1.0, 7.0)
    assert (broken.failed, broken.ms, broken.ratio) == ("no", None, None)


def test_without_the_original_ratios_are_to_the_last_that_ran() -> None:
    times = {"attnfuse": [[1.0]], "onnxscript": [[3.0]]}
    ours, _, _ = figures(["attnfuse", "onnxscript", "original"], times, {}, {"original": "no"}, TWO_TOKENS)
    assert ours.ratio == 3.0


def test_contenders_run_and_those_that_fail_say_why(tmp_path: pathlib.Path) -> None:
    path = small_models.written(WIDE, tmp_path / "model.onnx")
    options = Options(ep="cpu", verify="none")
    found, report = contenders(path, ["onnxscript", "onnxruntime:none", "original"], options, tmp_path, 300)
    assert report.fused == 1
    broken = Contender("broken", small_models.written(small_models.LINEAR.replace("Add", "Sum"), tmp_path / "linear.onnx"))
    missing = Contender("missing", tmp_path / "nowhere.onnx")
    inputs = sample(io.load(path), {"b": 2, "s": 16, "t": 16})
    results = {item.name: item for item in run([broken, missing, *found], inputs, tmp_path, ep="cpu", runs=10, seconds=300)}
    assert results["onnxruntime:none"].failed is not None
    assert "invalid choice: 'none'" in results["onnxruntime:none"].failed
    assert "nowhere.onnx" in (results["missing"].failed or "")
    assert results["broken"].failed
    for name in ("attnfuse", "onnxscript", "original"):
        item = results[name]
        assert item.failed is None
        assert item.ms is not None
        assert item.fastest is not None
        assert item.slowest is not None
        assert 0 < item.fastest <= item.ms <= item.slowest
    assert results["original"].ratios == (1.0, 1.0)


def test_the_share_of_the_limit_stands_beside_every_time(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = DeviceLimits("a device", 1e6, {"float32": 1e15}, "a test")
    monkeypatch.setattr(bench_run, "device_limits", lambda ep: device)
    path = small_models.written(WIDE, tmp_path / "model.onnx")
    options = Options(ep="cpu", verify="none", dim={"b": 1, "s": 16, "t": 16})
    whole, _ = bench_run.Bench(options, ["original", "onnxruntime:none"], runs=5).model(path)
    assert whole.limit is not None
    assert whole.limit.ms == pytest.approx(1e3 * 4 * (4 * 2 * 16 * 64 + 1) / 1e6, rel=1e-3)
    ours, theirs, broken = whole.figures
    assert ours.ms is not None
    assert theirs.ms is not None
    assert (ours.share, theirs.share, broken.share) == (whole.limit.ms / ours.ms, whole.limit.ms / theirs.ms, None)


def test_a_child_has_a_time_limit(tmp_path: pathlib.Path) -> None:
    path = small_models.written(small_models.ATTENTION, tmp_path / "model.onnx")
    arrays = sample(io.load(path)).save(tmp_path / "inputs.npz")
    with Child({"model": str(path), "ep": "cpu", **arrays}) as child, pytest.raises(ChildError, match=r"did not end within 0 s$"):
        child.ask(None, 0)


def test_a_child_that_ends_says_with_what(tmp_path: pathlib.Path) -> None:
    with Child({}) as child, pytest.raises(ChildError, match=r"KeyError: 'ep'"):
        child.ask(None, 60)


def test_what_onnx_runtime_prints_is_kept_apart(tmp_path: pathlib.Path) -> None:
    path = small_models.written(small_models.ATTENTION, tmp_path / "model.onnx")
    arrays = sample(io.load(path)).save(tmp_path / "inputs.npz")
    with Child({"model": str(path), "ep": "cpu", **arrays}) as child:
        assert child.ask(None, 300)["loaded"] is True
        assert len(child.ask(4, 300)["ms"]) == 4
    assert child.printed == ""


@pytest.mark.parametrize("form", op_sweep.FORMATS)
def test_the_inputs_of_the_operator_table(form: op_sweep.Format) -> None:
    proto, shapes = op_sweep.model((2, 3, 4, 8), form, onnx.TensorProto.FLOAT16)
    onnx.checker.check_model(proto)
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == 3 * 2 * 3 * 4 * 8
    assert [len(shape) for shape in shapes.values()] == {"Q,K,V": [3, 3, 3], "Q,KV": [3, 5], "QKV": [5]}[form]


def test_the_operator_of_the_table_is_attention() -> None:
    proto, shapes = op_sweep.model((1, 5, 2, 4), "Q,K,V", onnx.TensorProto.FLOAT)
    rng = np.random.default_rng(1)
    feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    (found,) = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)
    q, k, v = (feeds[name].reshape(5, 2, 4).transpose(1, 0, 2) for name in ("query", "key", "value"))
    scores = np.exp(q @ k.transpose(0, 2, 1) / 2)
    expected = (scores / scores.sum(-1, keepdims=True) @ v).transpose(1, 0, 2).reshape(1, 5, 8)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert op_sweep.operations((1, 5, 2, 4)) == 2 * (2 * 2 * 5 * 5 * 4)


def test_the_rows_and_columns_of_the_table() -> None:
    full = op_sweep.table(small=False, ep="cuda")
    assert len(full) == 19 * 3 + 2
    assert full[-1] == ((8, 4096, 32, 128), "QKV")
    assert {form for _, form in op_sweep.table(small=True, ep="cpu")} == {"Q,K,V"}
    assert list(op_sweep.kernels("cuda", 90)) == ["as chosen", "flash", "efficient"]
    assert list(op_sweep.kernels("cuda", 80)) == ["as chosen", "flash", "tensorrt", "efficient"]


def test_a_cell_is_measured_or_says_why() -> None:
    rows: list[tuple[op_sweep.Size, op_sweep.Format]] = [((1, 32, 2, 16), "Q,K,V"), ((1, 32, 2, 16), "QKV")]
    measured, refused = op_sweep.measure(
        rows, {"as chosen": op_sweep.kernels("cpu", 0)["as chosen"]}, ep="cpu", runs=3, seconds=300
    )
    assert measured.tflops is not None
    assert measured.tflops > 0
    assert refused.tflops is None
    assert refused.failed is not None
    assert "not implemented for CPU" in refused.failed


@pytest.mark.exhaustive
def test_the_command_measures_the_model_and_its_attention(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(small_models.written(WIDE, tmp_path / "model.onnx"))
    assert main(["bench", path, "--runs", "5", "--dim", "s=16", "--dim", "t=16", "--json"]) == 0
    whole, alone = json.loads(capsys.readouterr().out)
    assert whole["lengths"] == alone["lengths"] == {"b": 1, "s": 16, "t": 16}
    assert [item["name"] for item in whole["figures"]] == ["attnfuse", "original"]
    assert all(item["failed"] is None and item["ms"] > 0 for item in (*whole["figures"], *alone["figures"]))
    assert whole["work"]["operations"] == {"float32": 2 * 2 * 2 * 16 * 16 * 64}
    assert whole["work"]["left_out"] == []
    assert whole["limit"] is None
    assert main(["bench", path, "--runs", "5", "--against", "onnxruntime:none"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("whole model (b=1, s=128, t=128)\n    attnfuse fused 1 of 1\n")
    assert "onnxruntime:none failed: it failed on the model: " in out
    assert "\nattnfuse, limit of this device unknown; reached " in out
    assert {item.name for item in tmp_path.iterdir()} == {"model.onnx"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a MODEL, or --seeds without one"),
        (["model.onnx", "--seeds"], "give a MODEL, or --seeds without one"),
        (["model.onnx", "--small"], "--small is for --seeds"),
        (["--seeds"], "--seeds at full size is for CUDA; give --small, or --ep cuda"),
        (["model.onnx", "--against", "torch"], "there is no contender 'torch'; choose original, onnxscript"),
        (["model.onnx", "--cuda-graph"], "cuda_graph is asked for, and cpu captures no model; choose --ep cuda with it"),
        (["model.onnx", "model.onnx", "--cuda-graph"], "cuda_graph is asked for, and cpu captures no model"),
        (["model.onnx", "--ep", "cuda"], "running on CUDA needs an NVIDIA GPU, and there is none here"),
        (["other.onnx"], "other.onnx does not exist; check the path"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    arguments: list[str],
    message: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    small_models.written(small_models.ATTENTION, tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


def test_two_models_are_measured_in_turns_and_compared(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = small_models.written(WIDE, tmp_path / "first.onnx")
    assert main(["optimize", str(first), "-o", str(tmp_path / "second.onnx"), "-q"]) == 0
    capsys.readouterr()
    arguments = ["bench", str(first), str(tmp_path / "second.onnx"), "--runs", "5", "--dim", "s=16", "--dim", "t=16"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [item["name"] for item in found["figures"]] == ["second.onnx", "first.onnx"]
    assert found["figures"][1]["ratio"] == 1.0
    assert found["figures"][0]["ratio"] > 0
    assert found["clock"] == "CPU time on one thread"
    assert found["lengths"] == {"b": 1, "s": 16, "t": 16}
    assert found["outputs"]["equal"]
    assert main(arguments) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("outputs: equal in ")


def test_two_models_that_differ_are_reported(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = small_models.written(WIDE, tmp_path / "first.onnx")
    second = small_models.written(WIDE.replace("{0.5}", "{0.25}"), tmp_path / "second.onnx")
    assert main(["bench", str(first), str(second), "--runs", "5", "--dim", "s=4", "--dim", "t=4"]) == 3
    assert "outputs: output 'out' " in capsys.readouterr().out


def test_two_models_of_other_inputs_are_no_pair(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = small_models.written(WIDE, tmp_path / "first.onnx")
    second = small_models.written(small_models.LINEAR, tmp_path / "second.onnx")
    assert main(["bench", str(first), str(second), "--runs", "5"]) == 2
    out = capsys.readouterr().out
    assert "second.onnx failed: " in out
    assert "outputs not compared: " in out


def test_options_of_one_model_are_refused_for_two(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = str(small_models.written(WIDE, tmp_path / "first.onnx"))
    assert main(["bench", first, first, "--target", "auto"]) == 2
    assert capsys.readouterr().err == "Error: --target is for one model; two are run as they are, so leave it out\n"


DECODER = next(path for path in BUNDLED if path.stem.startswith("llama_past"))


@pytest.mark.parametrize("kv_cache", ["same", "int8"])
def test_a_decode_step_with_a_shared_cache_has_a_buffer_for_all_positions(
    kv_cache: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--dim", "seq=1", "--dim", "past=15", "--runs", "5", "--price", "2"]
    assert main(["bench", str(DECODER), "--cache", "shared", "--kv-cache", kv_cache, *sizes]) == 0
    out = capsys.readouterr().out
    assert "whole model (batch=1, past=15, past_plus_seq=16, seq=1)" in out
    assert "failed" not in out
    assert "price of 1M tokens" in out


def test_present_and_past_are_one_buffer(tmp_path: pathlib.Path) -> None:
    """The key of the new token is written where the past is."""
    options = Options(cache="shared", verify="none", ep="cpu", dim={"seq": 1, "past": 15})
    whole = fitting(DECODER, io.load(DECODER), options.dim, "cpu", 300)
    (ours,), report = contenders(DECODER, [], options, tmp_path, 300)
    found = bench_run._in_one_buffer(ours, report, whole)
    assert found.inputs is not None
    assert found.inputs.feeds["past_key_values.0.key"].shape[2] == 16
    assert found.buffers["present.1.value"] == "past_key_values.1.value"
    (measured,) = run([found], whole, tmp_path, ep="cpu", runs=5, seconds=300)
    assert measured.failed is None
    broken = dataclasses.replace(found, buffers={"present.0.key": "input_ids"})
    (failed,) = run([broken], whole, tmp_path, ep="cpu", runs=5, seconds=300)
    assert failed.failed is not None


def test_a_model_that_cannot_be_captured_runs_without(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = small_models.written(WIDE, tmp_path / "model.onnx")
    inputs, started = sample(io.load(path)), compare._started
    settings: list[dict[str, str]] = []

    def refusing(task: dict[str, Any], contender: Contender, *others: Any) -> Any:
        settings.append(task["provider_options"])
        if contender.name == "no" and settings[-1]:
            raise ChildError("a node runs on the host")
        return started({**task, "ep": "cpu", "provider_options": {}}, contender, *others)

    monkeypatch.setattr(compare, "_started", refusing)
    both = [Contender("yes", path), Contender("no", path)]
    yes, no = run(both, inputs, tmp_path, ep="cuda", runs=5, seconds=300, captured=True)
    assert (yes.failed, yes.uncaptured, no.failed, no.uncaptured) == (None, None, None, "a node runs on the host")
    assert settings == [{"enable_cuda_graph": "1"}] * 2 + [{}]
    settings.clear()
    assert run(both[:1], inputs, tmp_path, ep="cuda", runs=5, seconds=300)[0].uncaptured is None
    assert settings == [{}]


def test_a_step_that_is_captured_has_a_buffer_as_long_as_its_mask() -> None:
    half = onnx_attnfuse.convert(DECODER).model
    inputs = sample(io.load(DECODER), {"seq": 1, "past": 15})
    options = Bench(Options(ep="cuda", arch="sm90", cache="shared", cuda_graph=True, verify="none"))._fixed(inputs)
    assert options.dim == {"batch": 1, "seq": 1, "past": 15, "past_plus_seq": 16, "max_sequence_length": 16}
    result = onnx_attnfuse.optimize(half, options)
    assert result.report.capture is not None
    assert result.report.capture.possible
    assert Bench(Options(ep="cuda"))._fixed(inputs).dim == {}


def test_a_cache_that_is_not_shared_is_an_error(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = small_models.written(small_models.ATTENTION, tmp_path / "model.onnx")
    assert main(["bench", str(path), "--cache", "shared"]) == 2
    assert capsys.readouterr().err.startswith("Error: --cache shared was not applied: ")


def test_without_onnxruntime_nothing_is_measured(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = small_models.written(small_models.ATTENTION, tmp_path / "model.onnx")
    monkeypatch.setattr(bench_run, "available", lambda: False)
    assert main(["bench", str(path)]) == 2
    assert capsys.readouterr().err == "Error: measuring needs onnxruntime; run pip install 'onnx-attnfuse[cpu]'\n"


def test_optimize_says_in_a_line_what_it_gained(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = small_models.written(WIDE, tmp_path / "model.onnx")
    assert main(["optimize", str(path), "--bench", "-q", "--ep", "cpu"]) == 0
    assert re.fullmatch(
        r"\d+\.\d\d times as fast \(.+ to .+\), .+ ms instead of .+; b=1, s=128, t=128\n", capsys.readouterr().out
    )
    assert main(["optimize", str(path), "--bench", "--dry-run"]) == 2
    assert "--bench is for one model that is written to a file" in capsys.readouterr().err


def test_a_picture_has_a_bar_for_each_contender(tmp_path: pathlib.Path) -> None:
    ours = Figures("attnfuse", ms=1.0, ratio=4.0)
    others = Figures("original", ms=4.0, ratio=1.0), Figures("a<b", "it failed")
    drawn = picture(
        [Contest("whole model", {"batch": 2}, (ours, *others), 1, 1), Contest("attention alone", {}, (), 0, 0, "why")]
    )
    root = ET.fromstring(drawn)
    texts = [item.text for item in root.findall(".//{*}text")]
    assert "whole model (batch=2)" in texts
    assert texts[1:3] == ["attnfuse", "1 ms, 4.00 times as fast"]
    assert texts[5:7] == ["a<b", "failed"]
    widths = [float(item.get("width", 0)) for item in root.findall(".//{*}rect")][1:]
    assert widths == [85.0, 340.0, 0.0]


def test_the_command_draws_what_it_measured(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = small_models.written(WIDE, tmp_path / "model.onnx"), tmp_path / "times.svg"
    assert main(["bench", str(path), "--runs", "5", "--picture", str(out)]) == 0
    assert len(ET.parse(out).findall(".//{*}rect")) == 5
    assert main(["bench", str(path), str(path), "--picture", str(out)]) == 2
    assert "--picture is for one model" in capsys.readouterr().err
