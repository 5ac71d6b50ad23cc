"""Models for several execution providers at once: only what is right on all, best by the worst."""

from __future__ import annotations

import dataclasses
import pathlib

import onnx
import onnx_ir as ir
import pytest

import onnx_attnfuse
from onnx_attnfuse import OptionError
from onnx_attnfuse.kernels import providers
from onnx_attnfuse.kernels.conditions import AttentionParams
from onnx_attnfuse.kernels.device import resolve
from onnx_attnfuse.kernels.execution_provider import ExecutionProvider, OpSupport
from onnx_attnfuse.kernels.forecast import forecast
from onnx_attnfuse_cli.main import main
from tests.support.bundled import BUNDLED

FLOAT = ir.DataType.FLOAT
BERT = next(path for path in BUNDLED if path.stem == "bert__dyn18__sdpa")


def sites(ep: str, path: pathlib.Path = BERT, **choices: object) -> list[onnx_attnfuse.SiteReport]:
    """The report on the attentions of a model."""
    return list(onnx_attnfuse.explain(onnx.load(path), ep=ep, **{"verify": "none", **choices}).sites)


def test_a_form_is_taken_that_is_right_on_all() -> None:
    found = sites("cpu,cuda", arch="sm90")
    assert len(found) == 2
    for site in found:
        assert (site.op, site.mask_form) == ("MultiHeadAttention", "attention_bias b 1 1 t")
        assert site.kernel is not None
        assert (site.kernel.device, site.kernel.forecast) == ("cpu,cuda:sm90", "MATH, EFFICIENT_ATTENTION")


@pytest.mark.parametrize(
    ("ep", "status"),
    [
        ("webgpu,dml", "skipped"),
        ("cpu,dml", "fused"),
        ("migraphx,cpu", "skipped"),
        ("wasm,cpu", "fused"),
        ("qnn,cpu", "decomposed"),
    ],
)
def test_what_one_refuses_is_not_written_and_what_one_wants_spelled_out_is(ep: str, status: str) -> None:
    assert {site.status for site in sites(ep)} == {status}


def test_what_one_is_right_under_is_named() -> None:
    found = sites("webgpu,dml", assume=("default", "wide-subgroups"))
    assert {site.status for site in found} == {"fused"}
    assert all("wide-subgroups" in site.assumptions for site in found)


def made_up(name: str, ready: float, other: float) -> ExecutionProvider:
    """A provider with times for MultiHeadAttention and GroupQueryAttention."""
    floats = frozenset([FLOAT])

    def support(time: float) -> OpSupport:
        return OpSupport("made up", floats, floats, masks=frozenset(["none"]), causal=True, time=lambda params, kernel: time)

    operators = {"MultiHeadAttention": support(ready), "GroupQueryAttention": support(other)}
    return ExecutionProvider(name, "X", "onnxruntime", "made up", operators)


@pytest.mark.parametrize(("times", "faster"), [((1.2, 1.5), "MultiHeadAttention"), ((0.2, 0.9), "GroupQueryAttention")])
def test_of_two_forms_the_one_is_better_whose_worst_time_is(
    times: tuple[float, float], faster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, unit, time in (("one", 1.0, times[0]), ("two", 10.0, times[1])):
        monkeypatch.setitem(providers._records, name, made_up(name, unit, unit * time))
    params = AttentionParams(FLOAT, 2, 4, 64, 64, 64, 64, "none", causal=True)
    device = resolve("one,two")
    by_time = {
        op: forecast(dataclasses.replace(params, op=op), device).time for op in ("MultiHeadAttention", "GroupQueryAttention")
    }
    assert by_time == pytest.approx({"MultiHeadAttention": 1.0, "GroupQueryAttention": max(times)})
    assert min(by_time, key=lambda op: by_time[op]) == faster


def test_a_form_that_fails_on_one_fails() -> None:
    params = AttentionParams(FLOAT, 1 << 10, 16, 1 << 9, 1 << 9, 3, 3, "bias")
    assert forecast(params, resolve("cpu")).fails is None
    assert forecast(params, resolve("cuda", "sm90")).fails is not None
    assert forecast(params, resolve("cpu,cuda", "sm90")).fails is not None
    small = dataclasses.replace(params, batch=2)
    assert forecast(small, resolve("cpu,cuda", "sm90")).fails is None


def test_facts_that_differ_count_as_not_known() -> None:
    both = providers.provider("cpu,cuda")
    assert (both.rounds_float16, both.keeps_nan_rows, both.takes_if, both.rotates) == (None, None, True, True)
    assert providers.provider("cpu,wasm").rounds_float16 is False
    assert both.pays == providers.provider("cpu").pays & providers.provider("cuda").pays
    assert resolve("cpu,cuda", "sm90").name == "cpu,cuda:sm90"


@pytest.mark.parametrize(
    ("ep", "message"),
    [
        ("cpu,cpu", "ep is 'cpu,cpu'; name each execution provider once"),
        ("auto,cpu", "ep is 'auto,cpu'; auto selects one execution provider, so name all of them"),
        ("cpu,tpu", "ep is 'tpu'; choose auto, coreml, cpu, .* or webgpu"),
    ],
)
def test_names_that_make_no_sense_are_refused(ep: str, message: str) -> None:
    with pytest.raises(OptionError, match=f"^{message}$"):
        resolve(ep)


def test_the_table_of_kernels_tells_what_is_spelled_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", str(BERT), "--arch", "qnn,cpu"]) == 0
    shown = capsys.readouterr().out
    assert "decomposed: MatMul, Mul," in shown
    assert "None" not in shown


def test_the_command_takes_several_and_names_the_word_that_is_none(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.onnx"
    assert main(["optimize", str(BERT), "--ep", "cpu, cuda", "--verify", "none", "-o", str(out)]) == 0
    assert out.exists()
    assert main(["optimize", str(BERT), "--ep", "cpu,cud", "-o", str(tmp_path / "none.onnx")]) == 2
    assert "did you mean 'cuda'?" in capsys.readouterr().err
    assert not (tmp_path / "none.onnx").exists()
    assert main(["explain", str(BERT), "--ep", "nv_tensorrt_rtx,cuda"]) == 0
    assert "decomposed for nv_tensorrt_rtx,cuda" in capsys.readouterr().out
