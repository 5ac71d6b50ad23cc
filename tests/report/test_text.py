"""The report for a reader: nothing lost, whatever the width."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from onnx_attnfuse.kernels.ort_settings import Session
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.report.model import CaptureReport, Layouts, MixerReport, Report, SiteReport
from onnx_attnfuse.report.text import ForecastText, ReportText
from onnx_attnfuse.verify.verdict import Verified


def fused(number: int, **changes: object) -> SiteReport:
    """One layer's attention."""
    fields = {
        "name": f"/encoder/layer.{number}/Softmax",
        "graph": "main",
        "status": "fused",
        "op": "MultiHeadAttention",
        "domain": "com.microsoft",
        "num_heads": 12,
        "kv_num_heads": 12,
        "head_size": 64,
        "v_head_size": 64,
        "scale": 0.125,
        "mask": "padding",
        "layout": Layouts(query="b s (n h) -> b n s h"),
        "verified": Verified(max_abs_error=number * 1e-7, cases=14),
    }
    return SiteReport(**{**fields, **changes})  # type: ignore[arg-type]


def skipped(number: int) -> SiteReport:
    """An attention that stays."""
    message = (
        "the attention weights are an output too, so they are computed anyway, and nothing would be gained by fusing the rest"
    )
    reasons = (Reason("weights-used", message, f"/decoder/layer.{number}/Identity"),)
    return SiteReport(
        f"/decoder/layer.{number}/Softmax", "main", "skipped", num_heads=32, kv_num_heads=8, head_size=128, reasons=reasons
    )


def shown(report: Report, *, width: int = 80, terminal: bool = False, fold: bool = True) -> str:
    """The report as the command prints it."""
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None, highlight=False)
    console.print(ReportText(report, fold=fold), soft_wrap=not terminal)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def report_of(*sites: SiteReport, **changes: object) -> Report:
    """A report with these sites."""
    return Report(sites=sites, seconds=1.0, **changes)  # type: ignore[arg-type]


def test_layers_that_are_alike_share_a_line() -> None:
    text = shown(report_of(*map(fused, range(12))))
    assert text.splitlines() == [
        "/encoder/layer.{0..11}/Softmax ×12",
        "    fused → MultiHeadAttention, padding, 12×64, error 1.1e-06",
        "    query: b s (n h) -> b n s h",
        "fused 12 of 12 attention sites",
    ]


def test_what_onnx_runtime_is_told_stands_before_the_last_line() -> None:
    options = Session("CUDAExecutionProvider", {"sdpa_kernel": "18"})
    variables = Session("CPUExecutionProvider", environment={"ORT_DISABLE_FLASH_ATTENTION": "1"})
    for session, line in (
        (options, "session: CUDAExecutionProvider sdpa_kernel=18 (EFFICIENT_ATTENTION, MATH)"),
        (variables, "session: export ORT_DISABLE_FLASH_ATTENTION=1"),
    ):
        assert shown(report_of(fused(0), session=session)).splitlines()[-2] == line
    assert "session" not in shown(report_of(fused(0), session=Session("CPUExecutionProvider")))


def test_whether_it_can_be_captured_is_told_in_a_line() -> None:
    blockers = tuple(Reason("branches-on-host", f"{op} is control flow", f"{op}_1") for op in ("If", "Loop", "Scan"))
    for capture, line in (
        (CaptureReport("CUDA graph", True), "CUDA graph: can be captured"),
        (
            CaptureReport("CUDA graph", True, ("batch", "seq")),
            "CUDA graph: can be captured once its sizes are fixed (batch, seq); --cuda-graph does that",
        ),
        (CaptureReport("CUDA graph", False, ("batch",), blockers[:1]), "CUDA graph: no, If is control flow [If_1]"),
        (CaptureReport("CUDA graph", False, (), blockers[:2]), "CUDA graph: no, If is control flow [If_1]; 1 more prevents it"),
        (CaptureReport("CUDA graph", False, (), blockers), "CUDA graph: no, If is control flow [If_1]; 2 more prevent it"),
    ):
        assert shown(report_of(fused(0), capture=capture)).splitlines()[-2] == line


@pytest.mark.parametrize("width", [40, 80])
def test_lines_of_a_terminal_that_are_wrapped_hang(width: int) -> None:
    """Words and their order stay; a line begins further in than the one that it continues."""
    report = report_of(skipped(0), notes=("word " * 30,))
    plain, wrapped = shown(report, width=width), shown(report, width=width, terminal=True)
    assert wrapped.split() == plain.split()
    lines = [line.rstrip() for line in wrapped.splitlines()]
    assert max(map(len, lines)) <= width
    starts = {line.rstrip() for line in plain.splitlines() if len(line) <= width - 10}
    rest = [line for line in lines if line not in starts]
    assert [line for line in rest if line.startswith(("      ", "  word"))]
    assert {len(line) - len(line.lstrip()) for line in lines} == {0, 2, 4, 6}


def test_paragraphs_of_kernels_name_modules() -> None:
    sites = [fused(number, module=f"{part}.layer.{number}.attention") for part in ("encoder", "decoder") for number in (0, 1)]
    console = Console(file=io.StringIO(), width=100, highlight=False)
    console.print(ForecastText({"cpu": report_of(*sites)}))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "encoder.layer.{0..1}.attention ×2" in text
    assert "decoder.layer.{0..1}.attention ×2" in text


def test_a_gap_in_the_numbers_shows() -> None:
    assert "/encoder/layer.*/Softmax ×3" in shown(report_of(fused(0), fused(1), fused(5)))


@pytest.mark.parametrize(
    "changes",
    [{"mask": "causal"}, {"num_heads": 8}, {"op": "Attention"}, {"verified": None}, {"scale": 1.0}, {"graph": "If/then"}],
)
def test_what_differs_has_its_own_line(changes: dict[str, object]) -> None:
    assert "×2" not in shown(report_of(fused(0), fused(1, **changes)))


def test_verbose_folds_nothing() -> None:
    assert "/encoder/layer.1/Softmax\n" in shown(report_of(fused(0), fused(1)), fold=False)


@pytest.mark.parametrize(
    ("changes", "meaning"),
    [
        ({"mask": "no_mask"}, "MultiHeadAttention, no_mask, 12×64,"),
        ({"mask": None}, "MultiHeadAttention, 12×64,"),
        ({"kv_num_heads": 4}, "padding, 12/4×64,"),
        ({"v_head_size": 32}, "padding, 12×64/32,"),
        ({"head_size": None}, "padding, 12 heads,"),
        ({"num_heads": None}, "padding, error"),
        ({"scale": 1.0}, "padding, 12×64, scale 1,"),
    ],
)
def test_an_attention_is_told_in_terms_of_the_field(changes: dict[str, object], meaning: str) -> None:
    assert meaning in shown(report_of(fused(1, **changes)))


@pytest.mark.parametrize("width", [20, 40, 80, 110, 200])
@pytest.mark.parametrize("terminal", [True, False])
def test_no_word_is_cut_off(width: int, terminal: bool) -> None:
    text = shown(report_of(fused(1), skipped(1), skipped(2)), width=width, terminal=terminal)
    reason = skipped(1).reasons[0].message.split()
    words = text.split()
    if terminal and width >= 110:
        assert "site" in words
        assert set(reason) <= set(words)
        return
    start = words.index(reason[0], words.index("weights-used:"))
    assert "".join(words[start:]).startswith("".join(reason))


def test_outside_of_a_terminal_a_site_is_not_wrapped() -> None:
    reason = skipped(1).reasons[0]
    assert f"    weights-used: {reason}\n" in shown(report_of(skipped(1)))


def test_operators_that_changed() -> None:
    before = {"Softmax": 12, "MatMul": 96, "Gelu": 12}
    after = {"MatMul": 72, "com.microsoft::MultiHeadAttention": 12, "Gelu": 12}
    report = report_of(fused(1), ops_before=before, ops_after=after)
    each = "MatMul 96 → 72, Softmax 12 → 0, com.microsoft::MultiHeadAttention 0 → 12"
    assert "operators: 120 → 96\n" in shown(report)
    assert f"operators: 120 → 96 ({each})\n" in shown(report, fold=False)


def test_last_line_accounts_for_every_site() -> None:
    sites = (fused(1), fused(2, status="already-fused"), skipped(1), SiteReport("/head/Softmax", "main", "not-attention"))
    assert shown(report_of(*sites)).splitlines()[-1] == (
        "fused 1 of 3 attention sites (1 already fused, 1 skipped, 1 Softmax that are not attention)"
    )


def test_last_line_counts_sites_that_differed_apart_from_rewrites_around_them() -> None:
    left = dataclasses.replace(skipped(2), reasons=(Reason("differs", "wrong by 3"),))
    assert shown(report_of(fused(1), skipped(1), left, differing=5)).splitlines()[-1] == (
        "fused 1 of 3 attention sites (2 skipped, 1 of these different when verified); 5 rewrites taken back"
    )
    assert shown(report_of(fused(1), differing=1)).splitlines()[-1] == "fused 1 of 1 attention site; 1 rewrite taken back"


def test_other_mixers_that_are_alike_share_a_line_and_are_counted() -> None:
    reasons = (Reason("mixer-chunked", "it is in chunks"),)
    mixers = tuple(MixerReport(name, "main", "chunked recurrence", reasons) for name in ("sum_1", "sum_2"))
    assert shown(report_of(fused(1), mixers=mixers)).splitlines()[-2:] == [
        "sum_1 and 1 more: chunked recurrence left, it is in chunks",
        "fused 1 of 1 attention site; 2 other sequence mixers left",
    ]


def test_a_report_without_sites_is_one_line() -> None:
    assert shown(report_of()) == "found no attention\n"


def test_notes_come_before_the_last_line() -> None:
    assert shown(report_of(fused(1), notes=("device: cpu",))).splitlines()[-2:] == ["device: cpu", "fused 1 of 1 attention site"]
