"""What is planned for execution providers that were not measured: never more than their records vouch for."""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnx_attnfuse
from docs import provider_pages
from onnx_attnfuse import OptionError
from onnx_attnfuse.fusion.plan import PlanContext, why_wrong
from onnx_attnfuse.graph.sizes import symbol
from onnx_attnfuse.kernels import providers
from onnx_attnfuse.kernels.conditions import AttentionParams
from onnx_attnfuse.kernels.device import resolve
from onnx_attnfuse.kernels.execution_provider import ExecutionProvider, OpSupport
from onnx_attnfuse.kernels.support import support
from onnx_attnfuse.reasons import Reason
from tests.support import small_models
from tests.support.bundled import BUNDLED, cases, run
from tests.support.environment_table import SITES

CONTRIB = "com.microsoft"
FLOAT = ir.DataType.FLOAT
BERT = next(path for path in BUNDLED if path.stem == "bert__dyn18__sdpa")
WHISPER = next(path for path in BUNDLED if path.stem == "whisper_decoder__dyn18__sdpa")
LLAMA = next(path for path in BUNDLED if path.stem == "llama_past__dyn18__sdpa")
UNMEASURED = [record for record in providers.every() if record.name not in {"cpu", "cuda", "wasm"}]


def nodes(model: onnx.ModelProto, op: str) -> list[onnx.NodeProto]:
    """The nodes of an operator in the main graph."""
    return [node for node in model.graph.node if node.op_type == op]


def optimized(source: onnx.ModelProto | pathlib.Path, ep: str, **choices: object) -> onnx.ModelProto:
    """The model that is written for an execution provider."""
    given = source if isinstance(source, onnx.ModelProto) else onnx.load(source)
    return onnx_attnfuse.optimize(given, **{"ep": ep, "verify": "none", **choices}).model


@pytest.mark.parametrize("record", UNMEASURED, ids=lambda record: record.name)
@pytest.mark.parametrize("path", [BERT, LLAMA], ids=lambda path: path.stem)
def test_no_contrib_operator_is_written_that_the_record_does_not_vouch_for(record: ExecutionProvider, path: pathlib.Path) -> None:
    written = [node for node in optimized(path, record.name).graph.node if node.domain == CONTRIB]
    for node in written:
        found = support(node.op_type, record)
        assert isinstance(found, OpSupport), node.op_type
        assert found.by_default
    vouched = any(isinstance(found, OpSupport) and found.by_default and not found.is_wrong for found in record.operators.values())
    assert vouched or not written


@pytest.mark.parametrize("record", providers.every(), ids=lambda record: record.name)
@pytest.mark.parametrize("path", [BERT, LLAMA, WHISPER], ids=lambda path: path.stem)
def test_what_is_written_gives_on_the_cpu_what_the_export_gives(record: ExecutionProvider, path: pathlib.Path) -> None:
    model = optimized(path, record.name)
    for feeds in cases(path).values():
        expected, found = run(onnx.load(path), feeds), run(model, feeds)
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, atol=2e-4, rtol=2e-4, err_msg=name)


@pytest.mark.parametrize("record", UNMEASURED, ids=lambda record: record.name)
def test_no_form_stands_behind_a_test_where_if_is_not_known_to_be_taken(record: ExecutionProvider) -> None:
    assert not nodes(optimized(BERT, record.name, padding="guarded"), "If")
    assert not record.takes_if


def of_heads(size: int) -> onnx.ModelProto:
    """An attention without a mask in float32, with heads of a size."""
    site = next(site for site in SITES if site.name == "no mask")
    return dataclasses.replace(site, dtype="float", head=size).model()


@pytest.mark.parametrize(
    ("size", "assume", "codes", "assumed"),
    [(64, (), ["wrong-on-device"], False), (64, ("default", "wide-subgroups"), [], True), (62, ("default",), [], False)],
)
def test_what_a_kernel_is_right_under_is_named_and_has_to_be_asked_for(
    size: int, assume: tuple[str, ...], codes: list[str], assumed: bool
) -> None:
    choices = {"ep": "webgpu", "target": "MultiHeadAttention", "verify": "none", "assume": assume}
    (site,) = onnx_attnfuse.explain(of_heads(size), **choices).sites
    assert [reason.code for reason in site.reasons] == codes
    assert site.status == ("skipped" if codes else "fused")
    assert ("wide-subgroups" in site.assumptions) == assumed


@pytest.mark.parametrize(("window", "codes"), [(True, {"wrong-on-device"}), (False, set())])
def test_what_was_measured_to_be_wrong_is_refused_and_its_near_miss_is_taken(window: bool, codes: set[str]) -> None:
    params = AttentionParams(FLOAT, 1, 4, 1, 8, 64, 64, "none", causal=True, windowed=window, op="GroupQueryAttention")
    reason = why_wrong(params, PlanContext(resolve("webgpu")))
    assert ({reason.code} if reason is not None else set()) == codes


@pytest.mark.parametrize(("v_head_size", "codes"), [(8, {"wrong-on-device"}), (None, {"wrong-on-device"}), (12, set())])
def test_a_size_of_values_that_is_not_known_may_be_one_that_the_flash_kernel_takes(
    v_head_size: int | None, codes: set[str]
) -> None:
    size = symbol("v") if v_head_size is None else v_head_size
    params = AttentionParams(FLOAT, 1, 4, 16, 16, 8, size, "none", op="MultiHeadAttention")
    reason = why_wrong(params, PlanContext(resolve("webgpu")))
    assert ({reason.code} if reason is not None else set()) == codes


def test_a_bias_is_of_full_shape_where_it_is_not_known_to_broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    padded = dataclasses.replace(next(site for site in SITES if site.name == "padding"), dtype="float").model()
    shapes: list[list[int]] = []
    for broadcasts in (False, True):
        record = providers.provider("dml")
        known = record.operators["MultiHeadAttention"]
        assert isinstance(known, OpSupport)
        operators = {"MultiHeadAttention": dataclasses.replace(known, broadcasts_bias=broadcasts)}
        monkeypatch.setitem(providers._records, "dml", dataclasses.replace(record, operators=operators))
        model = onnx.shape_inference.infer_shapes(optimized(padded, "dml"))
        (fused,) = nodes(model, "MultiHeadAttention")
        shapes += [
            [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            for value in model.graph.value_info
            if value.name == fused.input[5]
        ]
    full, shared = shapes
    assert full[2:] == shared[2:]
    assert (full[1] > 1, shared[1]) == (True, 1)


def test_keys_lie_flat_where_they_are_not_known_to_be_taken_by_head() -> None:
    text = small_models.ATTENTION
    ranks = {}
    for ep in ("cpu", "dml"):
        model = onnx.shape_inference.infer_shapes(optimized(small_models.parsed(text), ep))
        (fused,) = nodes(model, "MultiHeadAttention")
        values = {value.name: value for value in (*model.graph.value_info, *model.graph.input)}
        ranks[ep] = len(values[fused.input[1]].type.tensor_type.shape.dim)
    assert ranks == {"cpu": 4, "dml": 3}


def test_a_rotation_stays_spelled_out_where_no_kernel_is_known() -> None:
    assert nodes(optimized(LLAMA, "cpu"), "RotaryEmbedding")
    for record in UNMEASURED:
        assert not nodes(optimized(LLAMA, record.name), "RotaryEmbedding")


def test_a_cache_is_shared_only_where_each_entry_is_known_to_have_a_length_of_its_own() -> None:
    message = (
        r"^cache is 'shared', and GroupQueryAttention is not known to read a length for each entry on webgpu; choose --ep cpu"
    )
    with pytest.raises(OptionError, match=message):
        optimized(LLAMA, "webgpu", cache="shared")
    assert nodes(optimized(LLAMA, "wasm", cache="shared"), "GroupQueryAttention")


def test_the_reason_of_a_record_is_the_reason_of_the_site() -> None:
    (site,) = onnx_attnfuse.explain(of_heads(64), ep="qnn", target="GroupQueryAttention", verify="none").sites
    (reason,) = site.reasons
    assert reason == providers.provider("qnn").operators["GroupQueryAttention"]
    assert isinstance(reason, Reason)


@pytest.mark.parametrize("ep", ["vitisai", "migraphx"])
def test_one_reason_says_that_nothing_is_known(ep: str) -> None:
    (site,) = onnx_attnfuse.explain(of_heads(64), ep=ep, verify="none").sites
    assert [reason.code for reason in site.reasons] == ["no-kernel-for-device"]


RECORD = """
import onnx_ir as ir

from onnx_attnfuse.kernels.execution_provider import ExecutionProvider, UnfusedForm

_FLOAT = frozenset([ir.DataType.FLOAT])
PROVIDER = ExecutionProvider(
    "tpu", "TPUExecutionProvider", "onnxruntime-tpu", "made up", {},
    unfused_form=UnfusedForm("made up", _FLOAT), keeps_nan_rows=True,
)
"""


def test_a_new_provider_is_one_file_and_its_page_is_made_of_that(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = provider_pages.pages()
    (tmp_path / "tpu.py").write_text(RECORD)
    monkeypatch.setattr(providers, "__path__", [*providers.__path__, str(tmp_path)])
    monkeypatch.setattr(providers, "_FILES", (*providers._FILES, "tpu"))
    monkeypatch.setattr(providers, "_records", {})
    out = tmp_path / "out.onnx"
    for ep, status in (("tpu", "decomposed"), ("tpu,cpu", "decomposed")):
        result = onnx_attnfuse.optimize(onnx.load(BERT), ep=ep, verify="none")
        assert {site.status for site in result.report.sites} == {status}
    result.save(out)
    assert not [node for node in onnx.load(out).graph.node if node.domain]
    assert onnx_attnfuse.providers(result)[0] == ("TPUExecutionProvider", {})
    added = provider_pages.pages().items() - before.items()
    ((path, text),) = added
    assert path.name == "tpu.md"
    assert "Source: made up." in text
    assert "attnfuse writes plain attention here, in float32, scaled after the product." in text
    assert "- Not written: it is not known whether MultiHeadAttention has a kernel on tpu." in text


@pytest.mark.parametrize(("ep", "told"), [("qnn", True), ("cuda", False)])
def test_an_if_that_stays_is_told_where_it_is_not_taken(ep: str, told: bool) -> None:
    guarded = optimized(
        dataclasses.replace(next(site for site in SITES if site.name == "padding"), dtype="float").model(),
        "cuda",
        padding="guarded",
    )
    assert nodes(guarded, "If")
    report = onnx_attnfuse.explain(guarded, ep=ep, verify="none")
    assert any("If node" in note for note in report.notes) == told


def test_onnx_runtime_has_one_name_for_each_record() -> None:
    records = providers.every()
    assert len({record.ort_name for record in records}) == len(records)
