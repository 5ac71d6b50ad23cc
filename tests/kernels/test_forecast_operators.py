"""Forecasts for operators that stand in a model, what ONNX Runtime prints of kernels, and the two held together."""

from __future__ import annotations

import itertools
import json
import pathlib
from typing import get_args

import onnx
import onnx_ir as ir
import pytest

import onnx_attnfuse
from onnx_attnfuse import OptionError, RunError
from onnx_attnfuse.bench.confirm_kernels import Confirmation, Ran, confirm, confirm_kernels, node_forecasts, read_kernel_log
from onnx_attnfuse.bench.process import sample
from onnx_attnfuse.fusion.pipeline import forecast, sequence_symbols
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.kernels.conditions import AttentionParams, MaskForm
from onnx_attnfuse.kernels.device import Device
from onnx_attnfuse.kernels.forecast import forecast_existing
from onnx_attnfuse.kernels.op_node import params_of_node
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse_cli.main import main
from tests.support import small_models
from tests.support.bundled import BUNDLED, name_of
from tests.support.graph_builder import GraphBuilder, Operand

HALF, FLOAT, INT = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT, onnx.TensorProto.INT32

PRINTED = (
    "\x1b[36mAttentionKernelOptions: FLASH_ATTENTION=1 EFFICIENT_ATTENTION=1 CUDNN_FLASH_ATTENTION=1 MATH=1\x1b[0m\n"
    "\x1b[36mOperator=MultiHeadAttention Node=/h.0/attn/Softmax/MultiHeadAttention DataType=fp16"
    " SdpaKernel=CUDNN_FLASH_ATTENTION\x1b[0m\n"
    "something else\n"
    "\x1b[36mOperator=MultiHeadAttention Node=a node with spaces DataType=fp32 SdpaKernel=MATH\x1b[0m\n"
    "Operator=GroupQueryAttention DataType=bf16 SdpaKernel=XQA\n"
)
"""As ONNX Runtime prints it, colours included; the first line comes when a session is made."""


def test_what_onnx_runtime_prints_is_read() -> None:
    assert read_kernel_log(PRINTED) == [
        Ran("MultiHeadAttention", "/h.0/attn/Softmax/MultiHeadAttention", "fp16", "CUDNN_FLASH_ATTENTION"),
        Ran("MultiHeadAttention", "a node with spaces", "fp32", "MATH"),
        Ran("GroupQueryAttention", "", "bf16", "XQA"),
    ]
    assert read_kernel_log("") == []


def test_each_operator_is_held_against_its_forecast() -> None:
    forecasts = {"right": ("MHA", "MATH"), "wrong": ("MHA", "MATH"), "twice": ("MHA", "MATH"), "idle": ("MHA", "MATH")}
    runs = [
        Ran("MHA", node, "fp16", kernel)
        for node, kernel in (("right", "MATH"), ("right", "MATH"), ("wrong", "XQA"), ("twice", "MATH"), ("twice", "XQA"))
    ]
    found = confirm(
        {**forecasts, "open": ("GQA", None)}, [*runs, Ran("GQA", "open", "fp16", "XQA"), Ran("PMHA", "new", "fp16", "MATH")]
    )
    assert {item.node: item.outcome for item in found} == {
        "right": "as forecast",
        "wrong": "another kernel",
        "twice": "another kernel",
        "idle": "did not run",
        "open": "not forecast",
        "new": "not forecast",
    }
    assert found[-1] == Confirmation("new", "PMHA", None, ("MATH",))


def _operator(op: str, inputs: dict[str, tuple[list[str | int], int]], order: list[str | None], **attributes: Operand) -> ir.Node:
    graph = GraphBuilder(23)
    for name, (dims, dtype) in inputs.items():
        graph.given(name, dims, dtype)
    domain = "" if attributes.pop("standard", 0) else "com.microsoft"
    graph.gives(graph.op(op, *order, domain=domain, **attributes), "out", ["x"], HALF)
    return next(iter(ir.from_proto(graph.model()).graph))


def _problem(node: ir.Node) -> AttentionParams | Reason:
    assert node.graph is not None
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    return params_of_node(node, Facts(graph))


WIDE: tuple[list[str | int], int] = (["b", "s", 256], HALF)
OTHER: tuple[list[str | int], int] = (["b", "t", 256], HALF)


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (
            _operator("MultiHeadAttention", {"q": WIDE, "k": OTHER, "v": (["b", "t", 512], HALF)}, ["q", "k", "v"], num_heads=4),
            {"rows": "s", "columns": "t", "head_size": 64, "v_head_size": 128, "mask": "none", "causal": False},
        ),
        (
            _operator("MultiHeadAttention", {"q": (["b", "s", 4, 3, 64], HALF)}, ["q"], num_heads=4, unidirectional=1),
            {"rows": "s", "columns": "s", "head_size": 64, "causal": True},
        ),
        (
            _operator("MultiHeadAttention", {"q": WIDE, "k": (["b", 4, "t", 64], HALF)}, ["q", "k", "k"], num_heads=4),
            {"columns": "t", "head_size": 64, "v_head_size": 64},
        ),
        (
            _operator(
                "MultiHeadAttention",
                {"q": WIDE, "p": (["b", 4, "past", 64], HALF)},
                ["q", "q", "q", None, None, None, "p", "p"],
                num_heads=4,
            ),
            {"columns": sizes.symbol("past") + sizes.symbol("s"), "cached": True},
        ),
        (
            _operator("MultiHeadAttention", {"q": WIDE, "m": (["b"], INT)}, ["q", "q", "q", None, "m"], num_heads=4),
            {"mask": "lengths"},
        ),
        (
            _operator("MultiHeadAttention", {"q": WIDE, "m": (["b", "s"], INT)}, ["q", "q", "q", None, "m"], num_heads=4),
            {"mask": "raw"},
        ),
        (
            _operator(
                "MultiHeadAttention", {"q": WIDE, "m": (["b", 1, "s", "s"], HALF)}, ["q", "q", "q", None, None, "m"], num_heads=4
            ),
            {"mask": "bias"},
        ),
        (
            _operator(
                "Attention",
                {"x": (["b", "s", 96], HALF), "w": ([96, 768], HALF), "c": ([768], HALF), "m": ([2], INT)},
                ["x", "w", "c"],
                num_heads=4,
            ),
            {"op": "Attention", "head_size": 64, "rows": "s", "columns": "s"},
        ),
        (
            _operator(
                "GroupQueryAttention",
                {"q": WIDE, "p": (["b", 2, "past", 32], HALF), "n": (["b"], INT), "t": ([], INT)},
                ["q", None, None, "p", "p", "n", "t"],
                num_heads=4,
                kv_num_heads=2,
                local_window_size=16,
            ),
            {"op": "GroupQueryAttention", "head_size": 32, "windowed": True, "cached": True, "grouped": True},
        ),
        (
            _operator(
                "Attention",
                {"q": WIDE, "k": (["b", "t", 128], HALF)},
                ["q", "k", "k"],
                standard=1,
                q_num_heads=4,
                kv_num_heads=2,
                is_causal=1,
            ),
            {"op": "onnx.Attention", "head_size": 64, "v_head_size": 64, "grouped": True, "causal": True},
        ),
    ],
)
def test_an_operator_is_read_off_its_inputs(node: ir.Node, expected: dict[str, object]) -> None:
    params = _problem(node)
    assert isinstance(params, AttentionParams)
    found = {name: getattr(params, name) for name in expected}
    assert {name: str(value) if isinstance(expected[name], str) else value for name, value in found.items()} == expected


@pytest.mark.parametrize(
    ("node", "code"),
    [
        (
            _operator("MultiHeadAttention", {"q": WIDE, "m": ([7], INT)}, ["q", "q", "q", None, "m"], num_heads=4),
            "unknown-form",
        ),
        (_operator("MultiHeadAttention", {"q": WIDE}, ["q", "q", "q"], num_heads=3), "unknown-head-size"),
        (_operator("PagedAttention", {"q": WIDE}, ["q"], num_heads=4), "unknown-operator"),
    ],
)
def test_what_cannot_be_told_has_a_reason(node: ir.Node, code: str) -> None:
    params = _problem(node)
    assert isinstance(params, Reason)
    assert params.code == code


@pytest.mark.sampled
@pytest.mark.parametrize("path", BUNDLED, ids=name_of)
@pytest.mark.parametrize("arch", ["sm80", "sm90"])
def test_operators_that_were_built_are_forecast_as_they_were_planned(path: pathlib.Path, arch: str) -> None:
    """Two readings that know nothing of each other: of the attention that was found, and of the operator in its place."""
    result = onnx_attnfuse.optimize(path, ep="cuda", arch=arch, verify="none")
    planned = {
        site.name: {site.kernel.forecast, *(item.kernel for item in site.kernel.otherwise)}
        for site in result.report.sites
        if site.kernel is not None
    }
    device = Device("cuda", int(arch[2:]))
    lengths = sample(result.model, dict.fromkeys(sequence_symbols(result.model), 512)).lengths
    found = node_forecasts(result.model, lengths, device)
    assert len(found) >= len(planned) > 0
    for node, (_, kernel) in found.items():
        (chain,) = (kernels for name, kernels in planned.items() if node.startswith(f"{name}/"))
        assert kernel in chain, node


@pytest.mark.parametrize(
    "op", ["MultiHeadAttention", "Attention", "GroupQueryAttention", "PackedMultiHeadAttention", "onnx.Attention"]
)
@pytest.mark.parametrize("device", [Device("cpu"), Device("cuda", 75), Device("cuda", 80), Device("cuda", 90)], ids=str)
def test_whatever_stands_in_a_model_has_a_forecast_or_none(op: str, device: Device) -> None:
    """Nobody has asked whether such an operator can run at all."""
    count = 0
    for dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE):
        for mask in get_args(MaskForm):
            for rows, causal, cached, capped in itertools.product((1, 64, 2048, sizes.symbol("s")), *[(False, True)] * 3):
                params = AttentionParams(
                    dtype, 2, 4, rows, 2048, 64, 64, mask, causal=causal, cached=cached, capped=capped, grouped=cached, op=op
                )
                found = forecast_existing(params, device)
                assert found is None or found.chain
                count += found is not None
    assert (count == 0) == (op == "PackedMultiHeadAttention" and device.ep == "cpu")


def test_a_fused_model_is_forecast_too() -> None:
    fused = onnx_attnfuse.optimize(small_models.parsed(small_models.ATTENTION), ep="cpu").model
    (site,) = onnx_attnfuse.explain(fused, ep="cpu").sites
    assert site.status == "already-fused"
    assert site.kernel is not None
    assert site.kernel.forecast == "FLASH_ATTENTION"


def test_lengths_and_types_that_the_model_does_not_have() -> None:
    model = small_models.parsed(small_models.ATTENTION)
    assert sequence_symbols(ir.from_proto(model)) == {"s", "t"}

    def kernel(**choices: object) -> tuple[str, str | None]:
        found = forecast(model, ep="cuda", arch="sm90", **choices).sites[0].kernel  # type: ignore[arg-type]
        assert found is not None
        return found.forecast, found.when

    assert kernel()[0] == "MATH"
    wide = small_models.parsed(small_models.ATTENTION.replace(", 4]", ", 64]"))
    model = wide
    assert kernel() == ("EFFICIENT_ATTENTION", "there are 256 queries or keys")
    assert kernel(length=512) == ("EFFICIENT_ATTENTION", None)
    assert kernel(length=64) == ("MATH", None)
    assert kernel(length=64, dim={"t": 512}) == ("EFFICIENT_ATTENTION", None)
    assert kernel(dtype="float16") == ("CUDNN_FLASH_ATTENTION", None)
    assert wide.SerializeToString() == small_models.parsed(small_models.ATTENTION.replace(", 4]", ", 64]")).SerializeToString()
    for wrong in ({"dtype": "int8"}, {"length": 0}):
        with pytest.raises(OptionError, match="choose"):
            kernel(**wrong)


def test_the_command_forecasts_for_each_device_that_is_named(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(small_models.written(small_models.ATTENTION.replace(", 4]", ", 64]"), tmp_path / "model.onnx"))
    assert main(["kernels", path, "--arch", "cpu,sm80", "--dtype", "float16", "--seq", "512"]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.endswith(": MultiHeadAttention")] == [
        "    cpu: MultiHeadAttention",
        "    sm80: MultiHeadAttention",
    ]
    assert "        not CUDNN_FLASH_ATTENTION: is chosen from sm90 on, this is sm80\n" in out
    assert main(["kernels", path, "--arch", "sm80,sm90", "--dtype", "float16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {name: report["sites"][0]["kernel"]["forecast"] for name, report in found.items()} == {
        "sm80": "FLASH_ATTENTION",
        "sm90": "CUDNN_FLASH_ATTENTION",
    }
    assert {item.name for item in tmp_path.iterdir()} == {"model.onnx"}


def test_layers_share_a_line_unless_each_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    path = next(str(path) for path in BUNDLED if path.stem.startswith("vit"))
    names = {
        "": ["model.layers.{0..1}.attention", "×2"],
        "-v": ["model.layers.0.attention", "(node_Softmax_75)", "model.layers.1.attention", "(node_Softmax_148)"],
    }
    for option, expected in names.items():
        assert main(["kernels", path, "--arch", "sm80", *filter(None, [option])]) == 0
        words = capsys.readouterr().out.split()
        assert [word for word in words if "Softmax" in word or "×2" in word or "layers" in word] == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "sm42"], "arch is 'sm42'; choose one of sm70"),
        (["--arch", ","], "--arch names no device; choose some"),
        (["--confirm", "--dtype", "float16"], "leave --arch and --dtype out"),
        (["--confirm"], "there is none here; run attnfuse doctor for details"),
    ],
)
def test_what_cannot_be_forecast_or_confirmed_is_one_line(
    arguments: list[str],
    message: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    path = str(small_models.written(small_models.ATTENTION, tmp_path / "model.onnx"))
    assert main(["kernels", path, *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


def test_what_does_not_run_on_the_gpu_says_why() -> None:
    result = onnx_attnfuse.optimize(small_models.parsed(small_models.ATTENTION), ep="cuda", arch="sm90", verify="none")
    with pytest.raises(RunError, match=r"the fused model did not run on the GPU: .*CUDAExecutionProvider"):
        confirm_kernels(result, 90, {})
