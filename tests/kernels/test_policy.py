"""What a policy is read from, what it leaves of each attention on each device, and what ONNX Runtime is told."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import sys
from collections.abc import Mapping

import numpy as np
import onnxruntime
import pytest

import onnx_attnfuse
from onnx_attnfuse import OptionError, Policy
from onnx_attnfuse.kernels.device import Device
from onnx_attnfuse.kernels.ort_settings import session_for, switches_for
from onnx_attnfuse.kernels.policy import read_environment
from onnx_attnfuse_cli.main import main
from tests.support import small_models
from tests.support.environment_table import DEVICES, SETTINGS, SITES, reported, resolved
from tests.support.graph_builder import GraphBuilder

FLASH, EFFICIENT, FALLBACK = "ATTNFUSE_USE_FLASH_ATTENTION", "ATTNFUSE_USE_EFFICIENT_ATTENTION", "ATTNFUSE_SDPA_FALLBACK"
THEIR_FLASH = {"ORTMODULE_USE_TRITON": "1", "ORTMODULE_USE_FLASH_ATTENTION": "1"}


@pytest.mark.parametrize(
    ("environ", "policy"),
    [
        ({}, Policy()),
        ({FLASH: ""}, Policy()),
        ({FLASH: "1"}, Policy(flash=True)),
        ({FLASH: " 0 "}, Policy(flash=False)),
        ({EFFICIENT: "1", FALLBACK: "1"}, Policy(efficient=True, sdpa_fallback=True)),
        (THEIR_FLASH, Policy(flash=True)),
        ({"ORTMODULE_USE_FLASH_ATTENTION": "1"}, Policy()),
        ({"ORTMODULE_USE_TRITON": "1"}, Policy()),
        ({"ORTMODULE_USE_EFFICIENT_ATTENTION": "0"}, Policy()),
        ({"ORTMODULE_USE_EFFICIENT_ATTENTION": "1", "ORTMODULE_ATEN_SDPA_FALLBACK": "1"}, Policy(None, True, True)),
        ({**THEIR_FLASH, FLASH: "0"}, Policy(flash=False)),
        ({"ORTMODULE_USE_EFFICIENT_ATTENTION": "0", EFFICIENT: "1"}, Policy(efficient=True)),
        ({"ORTMODULE_ATEN_SDPA_FALLBACK": "1", FALLBACK: "0"}, Policy(sdpa_fallback=False)),
        ({"USE_FLASH_ATTENTION": "1", "EFFICIENT_ATTENTION": "0", "SDPA_FALLBACK": "1"}, Policy(True, False, True)),
        ({"USE_FLASH_ATTENTION": "1", FLASH: "0"}, Policy(flash=False)),
        ({"USE_FLASH_ATTENTION": "0", **THEIR_FLASH}, Policy(flash=True)),
        ({"USE_FLASH_ATTENTION": "0", "ORTMODULE_USE_FLASH_ATTENTION": "1"}, Policy(flash=False)),
        ({"SDPA_FALLBACK": "yes", "EFFICIENT_ATTENTION": ""}, Policy()),
    ],
)
def test_what_the_environment_says(environ: Mapping[str, str], policy: Policy) -> None:
    assert Policy.from_environment(environ) == policy


@pytest.mark.parametrize("name", [FLASH, EFFICIENT, FALLBACK, *THEIR_FLASH, "ORTMODULE_ATEN_SDPA_FALLBACK"])
@pytest.mark.parametrize("value", ["yes", "2", "-1", "1.0"])
def test_a_malformed_value_is_an_error_that_names_the_variable(name: str, value: str) -> None:
    with pytest.raises(OptionError, match=f"^{name} is '{value}'; set it to 0 or 1, or unset it$"):
        Policy.from_environment({name: value})


def test_what_has_no_effect_is_said() -> None:
    environment = read_environment({**THEIR_FLASH, FLASH: "0", "ORTMODULE_USE_EFFICIENT_ATTENTION": "0"})
    assert set(environment.idle) == {"ORTMODULE_USE_FLASH_ATTENTION", "ORTMODULE_USE_EFFICIENT_ATTENTION"}
    assert environment.line(environment.policy).endswith(" -> no flash")
    assert f"{FLASH}=0, " in environment.line(environment.policy)
    plain = read_environment({FLASH: "1", "USE_FLASH_ATTENTION": "0", "SDPA_FALLBACK": "yes"})
    line = f"{FLASH}=1, USE_FLASH_ATTENTION=0 (no effect), SDPA_FALLBACK=yes (no effect) -> flash"
    assert plain.line(plain.policy) == line


def test_the_environment_is_read_when_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_models.parsed(small_models.ATTENTION)
    assert onnx_attnfuse.explain(model, verify="none").fused == 1
    monkeypatch.setenv(EFFICIENT, "1")
    assert onnx_attnfuse.explain(model, verify="none", ep="cpu").fused == 0
    assert onnx_attnfuse.explain(model, verify="none", ep="cpu", policy=Policy()).fused == 1
    monkeypatch.setenv(EFFICIENT, "please")
    with pytest.raises(OptionError, match=EFFICIENT):
        onnx_attnfuse.explain(model, verify="none")


RESOLUTIONS: tuple[tuple[Mapping[str, str], str, dict[str, str]], ...] = (
    ({}, "no mask", {"cpu": "math", "sm75": "efficient", "sm80": "flash", "sm90": "cudnn_flash"}),
    ({}, "bias", {"cpu": "math", "sm75": "efficient / math", "sm80": "efficient / math", "sm90": "cudnn_flash"}),
    ({FLASH: "1"}, "no mask", {"cpu": "left: not-float32", "sm75": "left: old-architecture", "sm80": "flash"}),
    ({FLASH: "1"}, "no mask, float32", {"cpu": "flash", "sm90": "left: not-half, not-float16"}),
    ({FLASH: "1"}, "no mask, head size 60", {"sm80": "left: old-architecture, head-size", "sm90": "left: head-size"}),
    ({FLASH: "1"}, "no mask, values of 128", {"sm80": "left: old-architecture, v-head-size", "sm90": "cudnn_flash"}),
    ({FLASH: "1"}, "causal", {"sm80": "flash", "sm90": "cudnn_flash"}),
    ({FLASH: "1"}, "padding", {"sm80": "left: old-architecture, mask-form", "sm90": "cudnn_flash"}),
    ({FLASH: "1"}, "bias, 8×512", {"sm80": "left: old-architecture, mask-form", "sm90": "cudnn_flash"}),
    ({EFFICIENT: "1"}, "no mask", {"cpu": "left: no-such-kernel", "sm75": "efficient", "sm80": "efficient", "sm90": "efficient"}),
    ({EFFICIENT: "1"}, "no mask, float32", {"sm75": "efficient", "sm90": "efficient"}),
    ({EFFICIENT: "1"}, "no mask, head size 60", {"sm80": "left: head-size", "sm90": "left: head-size"}),
    ({EFFICIENT: "1"}, "bias", {"sm80": "efficient / math", "sm90": "left: unsafe-switch"}),
    ({EFFICIENT: "1"}, "bias, 8×512", {"sm80": "efficient", "sm90": "efficient"}),
    ({FALLBACK: "1"}, "no mask", {"cpu": "math", "sm75": "efficient", "sm80": "flash", "sm90": "cudnn_flash"}),
    ({FALLBACK: "1"}, "causal", dict.fromkeys(DEVICES, "left: masked")),
    ({FALLBACK: "1"}, "padding", dict.fromkeys(DEVICES, "left: masked")),
    ({FLASH: "1", EFFICIENT: "1"}, "no mask", {"sm75": "efficient", "sm80": "flash", "sm90": "cudnn_flash"}),
    ({FLASH: "1", EFFICIENT: "1"}, "no mask, float32", {"cpu": "flash", "sm75": "efficient", "sm90": "efficient"}),
    ({FLASH: "1", EFFICIENT: "1"}, "padding", {"sm80": "efficient / math", "sm90": "cudnn_flash"}),
    ({FLASH: "1", FALLBACK: "1"}, "no mask, head size 60", dict.fromkeys(DEVICES, "math")),
    ({FLASH: "1", FALLBACK: "1"}, "bias", {"sm80": "left: old-architecture, mask-form, masked", "sm90": "cudnn_flash"}),
    ({FLASH: "0"}, "no mask", {"cpu": "math", "sm75": "efficient", "sm80": "efficient", "sm90": "efficient"}),
    ({FLASH: "0"}, "no mask, float32", {"cpu": "math", "sm80": "efficient"}),
    ({EFFICIENT: "0"}, "no mask", {"sm80": "flash", "sm90": "cudnn_flash"}),
    ({EFFICIENT: "0"}, "bias, 8×512", {"sm80": "math", "sm90": "cudnn_flash"}),
    ({"ORTMODULE_USE_FLASH_ATTENTION": "1"}, "no mask, head size 60", dict.fromkeys(DEVICES, "math")),
    (THEIR_FLASH, "no mask, head size 60", {"sm80": "left: old-architecture, head-size", "sm90": "left: head-size"}),
    ({**THEIR_FLASH, FLASH: "0"}, "no mask", {"sm80": "efficient", "sm90": "efficient"}),
)


@pytest.mark.parametrize(("settings", "name", "expected"), RESOLUTIONS)
def test_the_resolution_on_every_device(settings: Mapping[str, str], name: str, expected: Mapping[str, str]) -> None:
    site = next(site for site in SITES if site.name == name)
    assert {device: reported(resolved(settings, site, device)) for device in expected} == dict(expected)


def test_every_refused_site_says_what_each_kernel_has_against_it() -> None:
    (site,) = resolved({FLASH: "1"}, SITES[6], "sm80").sites
    assert [str(reason) for reason in site.reasons] == [
        "no flash attention: CUDNN_FLASH_ATTENTION is chosen from sm90 on, this is sm80",
        "no flash attention: FLASH_ATTENTION takes no mask, and the mask is a bias",
    ]


def test_what_no_operator_can_compute_has_each_reason_once() -> None:
    double = small_models.parsed(small_models.ATTENTION.replace("float[", "double[").replace("<float scale", "<double scale"))
    plain = onnx_attnfuse.explain(double, policy=Policy(), ep="cuda", arch="sm90", verify="none").sites[0].reasons
    both = onnx_attnfuse.explain(double, policy=Policy(True, True), ep="cuda", arch="sm90", verify="none").sites[0].reasons
    assert len(plain) > 1
    assert both == plain


@pytest.mark.sampled
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("device", ["sm75", "sm80", "sm90"])
def test_no_setting_leads_a_site_to_the_math_kernel_that_did_not_go_there(settings: Mapping[str, str], device: str) -> None:
    """The math kernel ends the process from 2^31 scores on, so nothing may be switched off for sites of unknown size."""
    for site in SITES:
        before, after = (reported(resolved(chosen, site, device)) for chosen in ({}, settings))
        if site.rows == "s" and after.startswith("math"):
            assert before.startswith("math"), site.name


@pytest.mark.parametrize(
    ("policy", "arch", "options", "environment"),
    [
        (Policy(), 80, {}, {}),
        (Policy(sdpa_fallback=True), 90, {}, {}),
        (Policy(efficient=True), 90, {"sdpa_kernel": str(2 + 16 + 512)}, {}),
        (Policy(efficient=True), 80, {"sdpa_kernel": str(2 + 16 + 512)}, {}),
        (Policy(flash=True), 80, {"sdpa_kernel": str(1 + 2 + 4 + 16 + 32 + 64 + 512)}, {}),
        (Policy(flash=False), 90, {"sdpa_kernel": str(2 + 4 + 16 + 32 + 64 + 512)}, {}),
        (Policy(flash=False, efficient=False), 80, {"sdpa_kernel": str(4 + 16 + 32 + 64 + 512)}, {}),
        (
            Policy(flash=True),
            90,
            {},
            {"ORT_MIN_SEQ_LEN_FLASH_ATTENTION_PACKED_QKV": "0", "ORT_MIN_SEQ_LEN_EFFICIENT_ATTENTION_FP32": "0"},
        ),
        (
            Policy(efficient=False),
            90,
            {},
            {
                "ORT_DISABLE_MEMORY_EFFICIENT_ATTENTION": "1",
                "ORT_MIN_SEQ_LEN_FLASH_ATTENTION_PACKED_QKV": "0",
                "ORT_MIN_SEQ_LEN_EFFICIENT_ATTENTION_FP32": "0",
            },
        ),
        (Policy(flash=True), 0, {}, {}),
        (Policy(flash=False), 0, {}, {"ORT_DISABLE_FLASH_ATTENTION": "1", "ORT_GQA_DISABLE_FLASH_ATTENTION": "1"}),
        (Policy(efficient=True), 0, {}, {}),
    ],
)
def test_what_onnx_runtime_is_told(policy: Policy, arch: int, options: dict[str, str], environment: dict[str, str]) -> None:
    device = Device("cuda", arch) if arch else Device("cpu")
    session = session_for(dataclasses.replace(device, switches=switches_for(policy, device)))
    assert (dict(session.provider_options), dict(session.environment)) == (options, environment)


def _with_an_operator_of_unknown_needs() -> GraphBuilder:
    graph = GraphBuilder()
    q, k, v = (graph.given(name, ["b", 4, "s", 64], 10) for name in "qkv")
    scores = graph.op("MatMul", q, graph.op("Transpose", k, perm=[0, 1, 3, 2]))
    graph.gives(graph.op("MatMul", graph.op("Softmax", scores, axis=-1), v), "out", ["b", 4, "s", 64], 10)
    x, lengths = graph.given("x", ["b", "s", 256], 10), graph.given("lengths", ["b"], 6)
    fused = graph.op("MultiHeadAttention", x, x, x, None, lengths, domain="com.microsoft", num_heads=4, unidirectional=1)
    graph.gives(fused, "other", ["b", "s", 256], 10)
    return graph


def test_where_an_operator_may_need_a_kernel_nothing_is_switched_off() -> None:
    """Causal lengths end in an error beyond 1024 keys where cuDNN's kernel is switched off."""
    model = _with_an_operator_of_unknown_needs().model()
    report = onnx_attnfuse.explain(model, policy=Policy(flash=False), ep="cuda", arch="sm90", verify="none")
    assert report.session is not None
    assert not report.session.provider_options
    assert any(
        note.startswith("no kernel is switched off") and note.endswith("'MultiHeadAttention_5_0'") for note in report.notes
    )
    assert report.sites[0].kernel is not None
    assert report.sites[0].kernel.forecast == "CUDNN_FLASH_ATTENTION"


def test_the_settings_start_a_session(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    model = small_models.parsed(small_models.ATTENTION)
    result = onnx_attnfuse.optimize(model, policy=Policy(flash=False), ep="cpu")
    assert onnx_attnfuse.providers(result) == onnx_attnfuse.providers(result.report) == ["CPUExecutionProvider"]
    onnx_attnfuse.session_options(result)
    assert "ORT_DISABLE_FLASH_ATTENTION=1 is not set" in caplog.text
    caplog.clear()
    for name, value in onnx_attnfuse.session_environment(result).items():
        monkeypatch.setenv(name, value)
    options = onnx_attnfuse.session_options(result)
    assert not caplog.text
    session = onnxruntime.InferenceSession(result.model.SerializeToString(), options, providers=onnx_attnfuse.providers(result))
    feeds = {name: np.ones((1, 2, 3, 4), np.float32) for name in "qkv"}
    np.testing.assert_allclose(session.run(None, feeds)[0], 1.0)


def test_providers_name_the_gpu_with_its_options() -> None:
    report = resolved({EFFICIENT: "1"}, SITES[0], "sm90")
    assert onnx_attnfuse.providers(report) == [("CUDAExecutionProvider", {"sdpa_kernel": "530"}), "CPUExecutionProvider"]
    nothing_fused = resolved({EFFICIENT: "1"}, SITES[2], "sm90")
    assert onnx_attnfuse.providers(nothing_fused) == [("CUDAExecutionProvider", {}), "CPUExecutionProvider"]


def command(folder: pathlib.Path, *arguments: str, **environ: str) -> tuple[int, str, str]:
    """The command in a process of its own: status, stdout, stderr."""
    path = small_models.written(small_models.ATTENTION, folder / "model.onnx")
    root = pathlib.Path(__file__).parents[2]
    paths = ":".join(str(root / part) for part in (".", "patterns", "cli"))
    line = [sys.executable, "-m", "onnx_attnfuse_cli", "explain", str(path), "--ep", "cpu", *arguments]
    done = subprocess.run(
        line, capture_output=True, text=True, check=False, env={"PYTHONPATH": paths, "PATH": "/usr/bin", **environ}
    )
    return done.returncode, done.stdout, done.stderr


def test_one_line_says_what_was_seen(tmp_path: pathlib.Path) -> None:
    assert command(tmp_path)[2] == ""
    assert command(tmp_path, **{FLASH: "1"})[2] == f"attnfuse: {FLASH}=1 -> flash\n"
    assert command(tmp_path, "--no-flash", **{FLASH: "1"})[2] == f"attnfuse: {FLASH}=1 -> no flash\n"
    assert command(tmp_path, **{FALLBACK: "off"})[::2] == (2, f"Error: {FALLBACK} is 'off'; set it to 0 or 1, or unset it\n")


def test_debugging_says_what_was_selected_and_then_every_refusal(tmp_path: pathlib.Path) -> None:
    (line,) = command(tmp_path, ATTNFUSE_DEBUG="1")[2].splitlines()
    assert line == "INFO onnx_attnfuse.selection: softmax: selected MultiHeadAttention with FLASH_ATTENTION on cpu"
    selected, *refused = command(tmp_path, "--efficient", ATTNFUSE_DEBUG="2")[2].splitlines()
    assert selected.endswith("softmax: selected nothing, left unfused")
    assert refused == [
        "DEBUG onnx_attnfuse.selection: softmax: no-such-kernel: MultiHeadAttention has no memory-efficient kernel on cpu"
    ]
    assert command(tmp_path, ATTNFUSE_DEBUG="3")[::2] == (
        2,
        "Error: ATTNFUSE_DEBUG is '3'; set it to 0, 1 or 2, or unset it\n",
    )


def test_options_of_the_command_win(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small_models.written(small_models.ATTENTION, tmp_path / "model.onnx")
    monkeypatch.setenv(EFFICIENT, "1")
    for option, policy in (("--no-efficient", [None, False, None]), ("--flash", [True, True, None])):
        assert main(["explain", str(path), "--json", "--ep", "cpu", option]) == 0
        assert list(json.loads(capsys.readouterr().out)["policy"].values()) == policy
