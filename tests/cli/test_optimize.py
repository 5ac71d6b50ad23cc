"""The command: what it writes, what it prints, and how it ends."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest

import onnx_attnfuse
from onnx_attnfuse.graph import io
from onnx_attnfuse.kernels.policy import Policy
from onnx_attnfuse.options import Options
from onnx_attnfuse_cli.main import main
from tests.support import small_models
from tests.support.decoders import decoder


@pytest.fixture
def model(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A model with one attention in a folder of its own, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    return small_models.written(small_models.ATTENTION, tmp_path / "model.onnx")


def names(model: pathlib.Path) -> set[str]:
    """What lies in the model's folder."""
    return {path.name for path in model.parent.iterdir()}


def op_types(path: pathlib.Path) -> set[str]:
    """The operators of a saved model."""
    return {node.op_type for node in io.load(path).graph}


def test_optimize_writes_beside_the_model(model: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = model.read_bytes()
    assert main(["optimize", str(model)]) == 0
    assert model.read_bytes() == before
    assert names(model) == {"model.onnx", "model.attnfuse.onnx"}
    assert "MultiHeadAttention" in op_types(model.with_name("model.attnfuse.onnx"))
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "fused 1 of 1 attention site"
    assert err == f"wrote {model.with_name('model.attnfuse.onnx')}\n"


def test_optimize_writes_where_it_is_told(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "there").mkdir()
    assert main(["optimize", "model.onnx", "-o", "there/out.onnx", "-q"]) == 0
    assert names(tmp_path / "there" / "out.onnx") == {"out.onnx"}
    assert names(model) == {"model.onnx", "there"}


def test_a_cache_that_is_shared_is_told(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = small_models.written(decoder(), tmp_path / "model.onnx")
    assert main(["optimize", str(path), "--ep", "cpu", "--cache", "shared"]) == 0
    out = capsys.readouterr().out
    assert "mask: GroupQueryAttention causal, shared buffer" in out
    assert "the cache of 2 layers is one buffer, past_key_values.N to present.N, of max_sequence_length positions; " in out
    assert "GroupQueryAttention" in op_types(path.with_name("model.attnfuse.onnx"))
    assert main(["explain", str(path), "--ep", "cpu", "--cache", "shared"]) == 0
    assert "mask: GroupQueryAttention causal, shared buffer" in capsys.readouterr().out


def test_a_model_without_a_cache_is_fused_as_usual(model: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["optimize", str(model), "--cache", "shared", "-q", "--report", str(model.with_suffix(".json"))]) == 1
    why = "no attention takes past keys and values as inputs and returns them as outputs; export the decoder with its past"
    assert capsys.readouterr().err == f"Error: --cache shared was not applied: {why}\n"
    assert json.loads(model.with_suffix(".json").read_text())["unshared"] == why
    assert "MultiHeadAttention" in op_types(model.with_name("model.attnfuse.onnx"))


def test_a_quiet_run_that_verified_nothing_says_so(
    model: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["optimize", str(model), "-q"]) == 0
    assert capsys.readouterr().err.startswith("Warning: nothing was verified: onnxruntime is not installed; run pip install")
    assert main(["optimize", str(model), "-q", "--verify", "none"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["optimize", str(model), "-q", "--verify", "sites"]) == 2


def test_a_model_without_attention_has_not_all_that_is_required(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = '<ir_version: 8, opset_import: ["" : 18]> g (float[n] x) => (float[n] y) { y = Relu(x) }'
    path = small_models.written(small_models.parsed(text), tmp_path / "model.onnx")
    assert main(["optimize", str(path), "-q"]) == 0
    assert main(["optimize", str(path), "-q", "--require-all"]) == 1
    assert capsys.readouterr().err.startswith("Error: no attention was found, and --require-all needs one; ")


def test_quiet_says_nothing(model: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["optimize", str(model), "-q"]) == 0
    assert capsys.readouterr() == ("", "")


def test_dry_run_writes_nothing(model: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["optimize", str(model), "--dry-run"]) == 0
    assert names(model) == {"model.onnx"}
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "fused 1 of 1 attention site"
    assert err == "nothing written (--dry-run)\n"


def test_report_is_the_documented_json(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert main(["optimize", str(model), "--report", "report.json", "-q"]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["schema"], report["candidates"], report["fused"]) == (1, 1, 1)
    described = (pathlib.Path(__file__).parents[2] / "docs" / "report.md").read_text()
    keys = {*report, *report["sites"][0], *report["sites"][0]["layout"], *report["sites"][0]["verified"]}
    assert {key for key in keys if f"`{key}`" not in described} == set()


@pytest.mark.parametrize("spelling", ["--min-fused", "--min_fused"])
@pytest.mark.parametrize(("wanted", "status"), [("1", 0), ("2", 1)])
def test_fewer_sites_than_min_fused_asks_for_end_in_one(
    spelling: str, wanted: str, status: int, model: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["optimize", str(model), spelling, wanted, "-q"]) == status
    assert model.with_name("model.attnfuse.onnx").exists()
    assert capsys.readouterr().err == ("Error: 1 of 1 attentions are fused, and --min-fused needs 2\n" if status else "")


def test_sites_fused_before_count(model: pathlib.Path) -> None:
    assert main(["optimize", str(model), "-q"]) == 0
    assert main(["optimize", "model.attnfuse.onnx", "-q", "--min-fused", "1", "--require-all"]) == 0


def with_weights_as_output(path: pathlib.Path) -> pathlib.Path:
    """An attention that stays, because its weights are an output of the model."""
    return small_models.written(
        small_models.ATTENTION.replace("(float[b, 2, s, 4] out)", "(float[b, 2, s, 4] out, float[b, 2, s, t] weights)"), path
    )


def test_a_site_that_is_left_ends_in_one_where_all_are_required(model: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_weights_as_output(model)
    assert main(["optimize", str(model), "-q"]) == 0
    assert main(["optimize", str(model), "-q", "--require-all"]) == 1
    assert model.with_name("model.attnfuse.onnx").exists()
    assert capsys.readouterr().err == "Error: 1 of 1 attentions are not fused, and --require-all needs all\n"


BESIDE = """<ir_version: 8, opset_import: ["" : 18]>
attention (float[b, 2, s, 4] q, float[b, 2, t, 4] k, float[b, 2, t, 4] v) => (float[b, 2, s, 4] out, float[b, 2, s, 4] more{}) {{
  scores = MatMul(q, turned) weights = Softmax<axis = -1>(scores) out = MatMul(weights, v)
  others = MatMul(k, turned) same = Softmax<axis = -1>(others) more = MatMul(same, v) turned = Transpose<perm = [0, 1, 3, 2]>(k)
}}"""


@pytest.mark.parametrize(
    ("outputs", "target", "status", "err"),
    [
        ("", "MultiHeadAttention", 0, ""),
        (", float[b, 2, s, t] weights", "auto", 0, ""),
        (", float[b, 2, s, t] weights", "MultiHeadAttention", 0, "Warning: 1 of 2 attentions are not the --target; "),
        ("", "GroupQueryAttention", 1, "Error: 2 of 2 attentions are not the --target; `attnfuse explain -v`"),
        ("", "packed", 1, "Error: 2 of 2 attentions are not the --target; `attnfuse explain -v` gives"),
    ],
)
def test_attention_that_is_not_the_target_is_a_problem_that_quiet_prints(
    outputs: str, target: str, status: int, err: str, model: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small_models.written(BESIDE.format(outputs), model)
    assert main(["optimize", str(model), "-q", "--ep", "cpu", "--target", target]) == status
    out, told = capsys.readouterr()
    assert (out, told[: len(err)], told.count("\n")) == ("", err, bool(err))
    assert model.with_name("model.attnfuse.onnx").exists()
    required = main(["optimize", str(model), "-q", "--ep", "cpu", "--target", target, "--require-all"])
    assert required == bool(err or outputs)


STANDARD = """<ir_version: 9, opset_import: ["" : 23]>
attention (float[b, 2, s, 4] q, float[b, 2, t, 4] k, float[b, 2, t, 4] v, float[b, 1, s, t] mask) => (float[b, 2, s, 4] out)
{ [standard] out = Attention<softcap = 2.0>(q, k, v, mask) }"""


@pytest.mark.parametrize(
    ("target", "status", "codes"),
    [("auto", 0, []), ("onnx.Attention", 0, []), ("MultiHeadAttention", 1, ["no-softcap", "not-as-asked"])],
)
def test_an_operator_that_stays_is_not_the_one_asked_for(
    target: str, status: int, codes: list[str], model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    small_models.written(STANDARD, model)
    arguments = ["optimize", str(model), "-q", "--target", target, "--require-all", "--report", "report.json"]
    assert main(arguments) == status
    (site,) = json.loads((tmp_path / "report.json").read_text())["sites"]
    assert site["status"] == ("skipped" if status else "already-fused")
    assert (site["op"], site["domain"]) == ("Attention", "")
    assert [reason["code"] for reason in site["reasons"] if status] == codes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["optimize"], "Missing argument 'MODEL...'; attnfuse optimize --help says what goes where"),
        (
            ["optimize", "model.onnx", "--ep", "tpu"],
            "Invalid value for '--ep': 'tpu' is not one of 'auto', 'coreml', 'cpu', 'cuda', 'dml', ",
        ),
        (
            ["optimize", "model.onnx", "--padding", "left"],
            "'left' is not one of 'auto', 'exact', 'guarded', 'assume-right', 'assume-none'.",
        ),
        (
            ["optimize", "model.onnx", "--cache", "share"],
            "'share' is not one of 'as-is', 'shared', 'paged'; did you mean 'shared'?",
        ),
        (["optimize", "model.onnx", "--target", "SDPA"], "Invalid value for '--target': 'SDPA' is not one of 'auto', "),
        (["optimize", "model.onnx", "--dim", "b=none"], "Invalid value for '--dim': 'b=none' is not NAME=N with N from 1 on"),
        (["explain", "model.onnx", "--dim", "4"], "Invalid value for '--dim': '4' is not NAME=N with N from 1 on"),
        (["optimize", "model.onnx", "--zzz"], "No such option '--zzz'; attnfuse optimize --help lists them"),
        (["optimize", "model.onnx", "--require_al"], "No such option '--require-al'; did you mean '--require-all'?"),
        (["optimize", "model.onnx", "--target", "multihead"], "'packed'; did you mean 'MultiHeadAttention'?"),
        (["optimize", "model.onnx", "--verify", "site"], "'site' is not one of 'none', 'sites', 'model'; did you mean 'sites'?"),
        (["bench", "model.onnx", "--ep", "cud"], "did you mean 'cuda'?"),
        (["optimize", "model.onnx", "-v", "-q"], "-v and -q contradict each other; choose one"),
        (["optimize", "model.onnx", "-o", "./model.onnx"], "-o is the model itself, model.onnx; choose another file"),
        (["optimize", "model.onnx", "-o", "."], ". is a folder; give the name of a file in it"),
        (["optimize", "model.onnx", "-o", "no/out.onnx"], "the folder no does not exist; make it first"),
        (
            ["convert", "model.onnx", "-o", "model.onnx/out.onnx"],
            "model.onnx is a file, and model.onnx/out.onnx cannot be in it;",
        ),
        (["optimize", "model.onnx", "--evidence", "model.onnx"], "evidence is model.onnx, a file; choose a folder"),
        (["optimize", "model.onnx", "--patterns", "model.onnx"], "model.onnx is no Python file by its name; --patterns takes"),
        (["optimize", "model.onnx", "--report", "model.onnx"], "--report is a model, model.onnx; choose another file"),
        (
            ["optimize", "model.onnx", "--report", "model.attnfuse.onnx"],
            "--report is a model, model.attnfuse.onnx; choose another file",
        ),
        (["optimise", "model.onnx"], "No such command 'optimise'; did you mean 'optimize'?"),
        (["quantize", "model.onnx"], "No such command 'quantize'; attnfuse --help lists them"),
        (["model.onnx", "-q"], "No such command 'model.onnx'; did you mean 'attnfuse optimize model.onnx'?"),
        (["patterns", "lst"], "No such command 'lst'; did you mean 'list'?"),
        (["explain", "other.onnx"], "other.onnx does not exist; check the path"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_writes_nothing(
    arguments: list[str], message: str, model: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Error: ")
    assert message in err
    assert err.count("\n") == 1
    assert names(model) == {"model.onnx"}


def test_rewrites_that_differ_end_in_three_and_are_no_sites(
    model: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rewrite that differs is our defect, so a run that had one is made here from a good one."""
    optimize = onnx_attnfuse.optimize

    def with_one_undone(*args: Any, **kwargs: Any) -> Any:
        result = optimize(*args, **kwargs)
        return dataclasses.replace(result, report=dataclasses.replace(result.report, differing=2))

    monkeypatch.setattr(onnx_attnfuse, "optimize", with_one_undone)
    assert main(["optimize", str(model), "-q", "--require-all"]) == 3
    assert model.with_name("model.attnfuse.onnx").exists()
    assert capsys.readouterr().err == (
        "Error: 2 rewrites differed in verification and were undone; that leaves 0 of 1 attentions unfused\n"
    )


@pytest.mark.parametrize("option", ["-o", "--report", "--evidence", "--patterns", "--certify", "--hf-config", "--conformance"])
def test_a_path_that_the_file_system_refuses_is_no_defect(
    option: str, model: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = ["--cache", "shared"] if option == "--hf-config" else []
    assert main(["optimize", str(model), option, "n" * 300, *shared]) == 2
    err = capsys.readouterr().err
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
    assert names(model) == {"model.onnx"}


def test_a_file_of_the_package_that_cannot_be_read_is_a_defect(
    model: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        raise PermissionError(13, "Permission denied", str(pathlib.Path(onnx_attnfuse.__file__).with_name("table.txt")))

    monkeypatch.setattr(onnx_attnfuse, "optimize", broken)
    assert main(["optimize", str(model)]) == 4
    assert "a defect; " in capsys.readouterr().err


def test_a_defect_leaves_a_report(
    model: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        raise KeyError("first line\nsecond line")

    monkeypatch.setattr(onnx_attnfuse, "optimize", broken)
    assert main(["optimize", str(model), "--ep", "cpu"]) == 4
    (path,) = model.parent.glob("attnfuse-error-*.txt")
    assert names(model) == {"model.onnx", path.name}
    assert (
        capsys.readouterr().err == f"Error: KeyError inside attnfuse, a defect; {path.name} has the details, please report it\n"
    )
    text = path.read_text()
    assert text.startswith(f"command: attnfuse optimize {model} --ep cpu\npython: ")
    assert "\nonnx-ir: " in text
    assert "in broken" in text
    assert text.endswith("KeyError: 'first line\\nsecond line'\n")


def test_explain_writes_nothing(model: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(model)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "would fuse 1 of 1 attention site"
    assert names(model) == {"model.onnx"}


def test_what_is_forecast_at_sizes(model: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpu = ["explain", str(model), "--json", "--ep", "cuda", "--arch", "sm80"]
    assert main(gpu) == 0
    (site,) = json.loads(capsys.readouterr().out)["sites"]
    assert site["kernel"]["device"] == "cuda:sm80"
    assert site["kernel"]["forecast"] == "MATH"
    assert [item["code"] for item in site["kernel"]["refused"]] == ["old-architecture", "not-float16", "head-size"]
    assert main([*gpu, "--dim", "s=8192", "--dim", "b=8", "--dim", "t=8192"]) == 0
    (site,) = json.loads(capsys.readouterr().out)["sites"]
    assert (site["status"], site["reasons"][0]["code"]) == ("skipped", "unfused-faster")


def test_explain_as_json(model: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(model), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["candidates"] == 1


def test_every_option_of_the_library_is_an_option_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["optimize", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for field in dataclasses.fields(Options):
        assert (f"--{field.name.replace('_', '-')}" in text) == (
            field.name not in {"pictures", "policy", "progress", "provable", "unproved"}
        )
    for field in dataclasses.fields(Policy):
        assert f"--{field.name.replace('_', '-')} / --no-{field.name.replace('_', '-')}" in text
    assert "Execution provider that the model will run on" in text


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


def test_it_is_a_module() -> None:
    result = run("-m", "onnx_attnfuse_cli", "--version")
    assert result.returncode == 0
    assert result.stdout.startswith("attnfuse ")


def test_it_starts_without_what_it_does_not_need() -> None:
    heavy = {"numpy", "onnx", "onnxruntime", "rich", "torch"}
    code = f"import sys; from onnx_attnfuse_cli.main import main; main(sys.argv[1:]); print({{*sys.modules}} & {heavy})"
    for arguments in (["--version"], ["--help"], ["optimize", "--help"]):
        assert run("-c", code, *arguments).stdout.splitlines()[-1] == "set()"


def test_without_arguments_it_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "Commands:" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "verb"), [("optimize", "fused"), ("explain", "would fuse")])
def test_a_report_in_html_is_a_page(command: str, verb: str, model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert main([command, str(model), "--report", "report.html"]) == 0
    page = (tmp_path / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert f"{verb} 1 of 1 attention site" in page
    assert "<title>model.onnx " in page
    assert page.count('<figure class="drawing">') == 2


def test_a_page_that_cannot_be_made_is_refused_first(
    model: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "jinja2" else find_spec(name))
    assert main(["optimize", str(model), "--report", "report.html"]) == 2
    message = "the report as a page needs Jinja2; run pip install 'onnx-attnfuse[report]'"
    assert capsys.readouterr() == ("", f"Error: {message}\n")
    assert names(model) == {"model.onnx"}
