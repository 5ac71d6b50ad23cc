"""Records of execution providers: complete, honest about where they are known from, and enough to plan for a new one."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Mapping

import onnx
import onnx_ir as ir
import pytest

import onnx_attnfuse
from onnx_attnfuse import OptionError, Policy
from onnx_attnfuse.fusion.enabling import AFTER, BEFORE
from onnx_attnfuse.kernels import providers
from onnx_attnfuse.kernels.conditions import AttentionParams, MaskForm, masks
from onnx_attnfuse.kernels.device import Device, resolve
from onnx_attnfuse.kernels.execution_provider import ExecutionProvider, OpSupport, Paying
from onnx_attnfuse.kernels.forecast import forecast, forecast_existing, has_kernel
from onnx_attnfuse.kernels.operators import by_key
from onnx_attnfuse.kernels.ort_settings import session_for, switches_for
from onnx_attnfuse.kernels.support import support
from onnx_attnfuse.reasons import Reason, Refused
from onnx_attnfuse.targets import TARGETS, name_of, packed
from tests.support import small_models
from tests.support.bundled import BUNDLED
from tests.support.environment_table import SITES

OPERATORS = (*map(name_of, TARGETS), packed.INFO.name)
MEASURED = ("cpu", "cuda")
FLOAT, HALF = ir.DataType.FLOAT, ir.DataType.FLOAT16
NPU = ExecutionProvider(
    name="npu",
    ort_name="NPUExecutionProvider",
    distribution="onnxruntime-npu",
    known_from="made up",
    operators={
        "MultiHeadAttention": OpSupport(
            "made up", frozenset([FLOAT, HALF]), frozenset([FLOAT, HALF]), masks=frozenset(["none", "bias"])
        ),
        "onnx.Attention": None,
    },
)
"""A provider of which little is known: MultiHeadAttention without a mask or with a bias."""


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> ExecutionProvider:
    """The made-up provider, registered for one test."""
    monkeypatch.setitem(providers._records, NPU.name, NPU)
    return NPU


def test_every_file_of_the_folder_has_a_record_of_its_name() -> None:
    folder = pathlib.Path(providers.__file__).parent
    files = sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
    assert list(providers.names()) == [record.name for record in providers.every()] == files
    assert [providers.provider(name).ort_name for name in MEASURED] == ["CPUExecutionProvider", "CUDAExecutionProvider"]


@pytest.mark.parametrize("record", providers.every(), ids=lambda record: record.name)
def test_every_operator_has_an_answer_that_says_where_it_is_known_from(record: ExecutionProvider) -> None:
    assert set(record.operators) <= set(OPERATORS)
    assert record.known_from
    for op in OPERATORS:
        found = support(op, record)
        if isinstance(found, Reason):
            assert (found.code, op in found.message, record.name in found.message) == ("no-kernel-for-device", True, True)
        else:
            assert found.known_from
            assert found.runs
            assert found.written
            assert found.masks


@pytest.mark.parametrize("name", MEASURED)
def test_of_a_provider_that_was_measured_every_fact_is_known(name: str) -> None:
    record = providers.provider(name)
    assert set(record.operators) == {op for op in OPERATORS if not by_key()[op].support}
    assert all(found is None or found.kernels[-1] == ("MATH", ()) for found in record.operators.values())
    assert None not in (record.rounds_float16, record.keeps_nan_rows, record.takes_if, record.switching)
    assert (record.default_architecture in record.architectures) == bool(record.architectures)


def test_each_enabling_rule_has_a_name_of_its_own_that_some_provider_knows() -> None:
    names = [rule.pays for rule in dict.fromkeys((*BEFORE, *AFTER)) if rule.pays is not None]
    assert len(set(names)) == len(names)
    known: set[Paying] = set().union(*(record.pays for record in providers.every()))
    assert set(names) <= known


def test_a_chain_that_leaves_some_attention_without_a_kernel_is_no_record() -> None:
    with pytest.raises(ValueError, match="the last kernel takes all that is left"):
        OpSupport("made up", frozenset([FLOAT]), frozenset([FLOAT]), (("ONLY", (masks("none"),)),))
    assert OpSupport("made up", frozenset([FLOAT]), frozenset([FLOAT]), (("FIRST", (masks("none"),)), ("LAST", ()))).kernels


def test_a_provider_that_nobody_knows_is_refused_with_the_names_of_those_known(npu: ExecutionProvider) -> None:
    *others, last = ("auto", *providers.names())
    assert {"cpu", "cuda", npu.name} <= {*others, last}
    with pytest.raises(OptionError, match=rf"^ep is 'tpu'; choose {', '.join(others)} or {last}$"):
        resolve("tpu")
    assert resolve("npu").name == npu.name


def test_an_architecture_is_refused_where_there_are_none(npu: ExecutionProvider) -> None:
    with pytest.raises(OptionError, match=r"^arch 'sm80' is a GPU's; choose --ep cuda with it$"):
        resolve(npu.name, "sm80")
    assert resolve("auto", "sm80") == resolve("cuda", "sm80") == Device("cuda", 80)


def test_auto_takes_what_is_installed_and_preferred_only(npu: ExecutionProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnx_attnfuse.kernels.device._is_installed", lambda distribution: distribution == npu.distribution)
    assert resolve("auto") == Device("cpu")
    monkeypatch.setitem(providers._records, npu.name, dataclasses.replace(npu, is_preferred=True))
    assert resolve("auto") == Device("npu")


def explained(model: onnx.ModelProto, **choices: object) -> onnx_attnfuse.SiteReport:
    """The report on the only attention of a model for the made-up provider."""
    (site,) = onnx_attnfuse.explain(model, **{"ep": "npu", "verify": "none", **choices}).sites
    return site


@pytest.mark.usefixtures("npu")
def test_a_new_provider_plans_the_operator_of_its_record() -> None:
    site = explained(small_models.parsed(small_models.ATTENTION))
    assert (site.status, site.op, site.mask_form) == ("fused", "MultiHeadAttention", "none")
    assert site.kernel is not None
    assert (site.kernel.device, site.kernel.forecast, site.kernel.gains) == ("npu", "UNKNOWN", ())


@pytest.mark.usefixtures("npu")
@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("GroupQueryAttention", "it is not known whether GroupQueryAttention has a kernel on npu"),
        ("onnx.Attention", "onnx.Attention has no kernel on npu"),
        ("packed", "it is not known whether PackedMultiHeadAttention has a kernel on npu"),
    ],
)
def test_an_operator_that_is_not_in_the_record_is_refused(target: str, message: str) -> None:
    text = small_models.ATTENTION.replace(": 18]", ": 23]").replace(", 4]", ", 8]")
    site = explained(small_models.parsed(text), target=target)
    assert (site.status, site.reasons) == ("skipped", (Reason("no-kernel-for-device", message),))
    assert explained(small_models.parsed(text), target="MultiHeadAttention").status == "fused"


def test_a_form_that_the_record_does_not_take_is_refused_with_what_the_mask_is(
    npu: ExecutionProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_name = {site.name: dataclasses.replace(site, dtype="float") for site in SITES}
    causal, padded = (explained(by_name[name].model(), padding="guarded") for name in ("causal", "padding"))
    assert (causal.status, causal.op, causal.mask_form) == ("fused", "MultiHeadAttention", "attention_bias 1 1 s t")
    assert (padded.status, padded.op, padded.mask_form) == ("fused", "MultiHeadAttention", "attention_bias b 1 1 t")
    known = npu.operators["MultiHeadAttention"]
    assert isinstance(known, OpSupport)
    plain = {"MultiHeadAttention": dataclasses.replace(known, masks=frozenset[MaskForm](["none"]))}
    monkeypatch.setitem(providers._records, npu.name, dataclasses.replace(npu, operators=plain))
    causal = explained(by_name["causal"].model())
    assert causal.status == "skipped"
    assert causal.reasons[0] == Reason("mask-form", "MultiHeadAttention has no exact form of the mask causal on npu")


def test_without_a_word_on_if_no_form_stands_behind_a_test(npu: ExecutionProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    known = npu.operators["MultiHeadAttention"]
    assert known is not None
    timed = dataclasses.replace(known, time=lambda params, kernel: 1.0 if params.mask == "none" else 9.0)
    padded = dataclasses.replace(next(site for site in SITES if site.name == "padding"), dtype="float").model()
    for takes_if, form in ((None, "attention_bias b 1 1 t"), (True, "none, else attention_bias b 1 1 t")):
        record = dataclasses.replace(npu, operators={"MultiHeadAttention": timed}, takes_if=takes_if)
        monkeypatch.setitem(providers._records, npu.name, record)
        assert explained(padded, padding="guarded").mask_form == form


@pytest.mark.parametrize(
    ("takes_if", "padding", "codes"),
    [(True, "auto", set()), (None, "auto", {"not-every-batch"}), (None, "assume-right", set())],
)
def test_without_a_word_on_if_padding_is_removed_only_where_the_caller_vouches_for_it(
    takes_if: bool | None, padding: str, codes: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = dataclasses.replace(providers.provider("cuda"), takes_if=takes_if)
    monkeypatch.setitem(providers._records, record.name, record)
    path = next(path for path in BUNDLED if path.stem == "bert__dyn18__sdpa")
    choices = {"ep": "cuda", "arch": "sm90", "target": "packed", "verify": "none", "padding": padding}
    sites = onnx_attnfuse.explain(path, **choices).sites
    assert {site.status for site in sites} == {"skipped" if codes else "fused"}
    assert {reason.code for site in sites for reason in site.reasons} == codes


def test_without_a_word_on_rounding_no_float16_attention_is_fused(
    npu: ExecutionProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = next(site for site in SITES if site.name == "no mask").model()
    (reason, *_) = explained(model).reasons
    assert (reason.code, "float16 on npu" in reason.message) == ("no-kernel-for-type", True)
    monkeypatch.setitem(providers._records, npu.name, dataclasses.replace(npu, rounds_float16=False))
    assert explained(model).op == "MultiHeadAttention"


@pytest.mark.usefixtures("npu")
def test_a_policy_switches_nothing_off_where_it_is_not_known_how() -> None:
    device = Device("npu")
    assert switches_for(Policy(flash=False, efficient=False), device) == device.switches
    assert session_for(device).provider == "NPUExecutionProvider"
    site = explained(small_models.parsed(small_models.ATTENTION), policy=Policy(flash=True))
    assert [reason.code for reason in site.reasons] == ["no-such-kernel"]


@pytest.mark.usefixtures("npu")
def test_an_operator_without_support_has_no_forecast() -> None:
    device, params = Device("npu"), AttentionParams(FLOAT, 2, 4, 64, 64, 64, 64, "none")
    assert forecast(params, device).kernel == "UNKNOWN"
    assert forecast_existing(params, device) is not None
    grouped = dataclasses.replace(params, op="GroupQueryAttention")
    assert forecast_existing(grouped, device) is None
    assert not has_kernel("GroupQueryAttention", device, frozenset(["UNKNOWN"]))
    with pytest.raises(Refused, match="it is not known whether GroupQueryAttention has a kernel on npu"):
        forecast(grouped, device)


@pytest.mark.parametrize(
    ("cached_times", "mask", "time"),
    [(None, "none", math.inf), ({"none": (1.0, 2.0)}, "none", 2.0), ({"none": (1.0, 2.0)}, "bias", math.inf)],
)
def test_a_time_that_is_not_known_is_infinite(
    cached_times: Mapping[MaskForm, tuple[float, float]] | None,
    mask: MaskForm,
    time: float,
    npu: ExecutionProvider,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = npu.operators["MultiHeadAttention"]
    assert known is not None
    record = dataclasses.replace(npu, operators={"MultiHeadAttention": dataclasses.replace(known, cached_times=cached_times)})
    monkeypatch.setitem(providers._records, npu.name, record)
    params = AttentionParams(FLOAT, 2, 4, 64, 128, 64, 64, mask, cached=True)
    assert forecast(params, Device("npu")).time == time
    assert forecast(dataclasses.replace(params, cached=False), Device("npu")).time == math.inf


@pytest.mark.usefixtures("npu")
def test_the_session_of_a_new_provider_falls_back_to_the_cpu() -> None:
    report = onnx_attnfuse.explain(small_models.parsed(small_models.ATTENTION), ep="npu", verify="none")
    assert onnx_attnfuse.providers(report) == [("NPUExecutionProvider", {}), "CPUExecutionProvider"]
