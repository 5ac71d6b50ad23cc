"""The JSON of all reports: the documented keys in their order, and nothing that is not for programs."""

from __future__ import annotations

import importlib.metadata
import json
import pathlib

import onnx_attnfuse
from onnx_attnfuse.containment import Failure
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.report.model import Report, SiteReport
from onnx_attnfuse.transforms.decompose.decompose import UnfusedSite, UnfuseReport
from onnx_attnfuse.transforms.half_precision.convert import ConversionReport
from onnx_attnfuse.verify.verdict import OutputFinding, Verification
from onnx_attnfuse_cli.main import main
from tests.support import small_models

FAILURE = Failure("defect", "drawing before", "album.py", 7, "KeyError: 'x'", ("node_1",), trace="Traceback")
VERIFIED = Verification(True, 3, 0, (OutputFinding("y", 0, 0.0, 0.0, 0, 0),), "equal", (("x", "float"),))


def written(report: Report | UnfuseReport | ConversionReport | Verification) -> dict[str, object]:
    """What a program reads of a report."""
    return json.loads(json.dumps(report.to_dict()))


def test_a_report_on_fusing_has_the_documented_keys_in_their_order() -> None:
    site = SiteReport("Softmax_1", "main", "skipped", reasons=(Reason("not-causal", "no triangle"),))
    wanted = SiteReport("Softmax_2", "main", "decomposed")
    found = written(Report((site, wanted), 1.23456, {"Add": 2}, notes=("a note",), failures=(FAILURE,), steps={"read": 0.5}))
    run = ["model", "output", "device", "versions", "options"]
    counts = ["schema", "candidates", "fused", "already_fused", "decomposed", "skipped", "differing", "seconds"]
    parts = [
        "ops_before",
        "ops_after",
        "notes",
        "failures",
        "patterns",
        "policy",
        "session",
        "capture",
        "unshared",
        "off_target",
        "kv_cache",
        "dequantised",
        "sites",
        "mixers",
    ]
    assert list(found) == [counts[0], *run, *counts[1:], *parts]
    assert [found[name] for name in counts] == [1, 2, 0, 0, 1, 1, 0, 1.235]
    assert (found["ops_before"], found["notes"], found["session"]) == ({"Add": 2}, ["a note"], None)
    assert found["sites"][0]["reasons"] == [{"code": "not-causal", "message": "no triangle", "node": None, "family": "causality"}]
    assert found["failures"][0]["places"] == ["node_1"]
    assert "trace" not in found["failures"][0]


def test_a_report_on_decomposing_has_the_documented_keys_in_their_order() -> None:
    site = UnfusedSite("node", "main", "MultiHeadAttention", "com.microsoft", "unfused")
    found = written(UnfuseReport((site,), 0.00049, {}, {}))
    assert list(found) == [
        "schema", "unfused", "kept", "differing", "seconds", "ops_before", "ops_after", "failures", "sites",
    ]  # fmt: skip
    assert (found["schema"], found["unfused"], found["kept"], found["seconds"]) == (1, 1, 0, 0.0)


def test_a_report_on_a_conversion_has_that_on_its_verification_inside() -> None:
    converted = ConversionReport("float16", 3, {"Softmax": 1}, 2, 100, 50, 0.5, VERIFIED, ("a note",))
    found = written(converted)
    assert list(found) == [
        "schema", "dtype", "nodes", "islands", "casts", "bytes_before", "bytes_after", "seconds", "verification", "notes",
    ]  # fmt: skip
    assert found["verification"] == written(VERIFIED)
    assert written(ConversionReport("float16", 3, {}, 2, 100, 50, 0.5))["verification"] is None


def test_a_verification_has_the_documented_keys_in_their_order() -> None:
    found = written(VERIFIED)
    assert list(found) == ["schema", "equal", "cases", "refused", "outputs", "detail", "kinds", "divergence", "notes"]
    assert (found["schema"], found["kinds"], found["outputs"][0]["name"]) == (1, {"x": "float"}, "y")


def test_a_report_names_the_run(tmp_path: pathlib.Path) -> None:
    path, out = small_models.written(small_models.ATTENTION, tmp_path / "a.onnx"), tmp_path / "report.json"
    options = ["--ep", "cuda", "--arch", "sm90", "--dim", "b=2", "--assume", "none", "--flash"]
    assert main(["optimize", str(path), "-q", "--report", str(out), *options]) == 0
    found = json.loads(out.read_text())
    assert (found["model"], found["output"]) == (str(path), str(tmp_path / "a.attnfuse.onnx"))
    assert found["device"] == "cuda:sm90"
    assert found["versions"]["onnx"] == importlib.metadata.version("onnx")
    policy = {"flash": True, "efficient": None, "sdpa_fallback": None}
    assert found["options"] == {"ep": "cuda", "arch": "sm90", "dim": {"b": 2}, "assume": ["none"], "policy": policy}


def test_options_of_any_kind_are_plain() -> None:
    report = onnx_attnfuse.explain(small_models.parsed(small_models.ATTENTION), verify="none")
    assert (report.model, report.options) == (None, {"verify": "none"})
    assert onnx_attnfuse.Options(policy=onnx_attnfuse.Policy()).given() == {}
    given = onnx_attnfuse.Options(calibrate=pathlib.Path("a.npz"), patterns=(pathlib.Path("p.py"), len)).given()
    assert given == {"calibrate": "a.npz", "patterns": ["p.py", str(len)]}
