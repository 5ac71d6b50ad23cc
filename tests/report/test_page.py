"""The report as a page: complete, valid, by itself, and true to the model."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import pathlib
import re

import pytest
from justhtml import JustHTML

import onnx_attnfuse
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.report.files import index
from onnx_attnfuse.report.html import page
from onnx_attnfuse.report.model import CaptureReport, Report, SiteReport
from onnx_attnfuse.report.reason_codes import families
from tests.support.bundled import BUNDLED, name_of
from tests.support.small_models import ATTENTION, parsed, written

_ELSEWHERE = re.compile(
    r"https?:|(?<!:)//[a-z]|@import|url\((?!#)|<link(?! rel=\"icon\" href=\"data:)|<(?:iframe|object|embed|base)\b"
)


@functools.cache
def report_of(path: pathlib.Path) -> Report:
    """What a run with pictures tells of a bundled model."""
    return onnx_attnfuse.explain(path, pictures=True, ep="cuda", arch="sm90")


def document(text: str) -> JustHTML:
    """The page, parsed by the rules of HTML; what breaks one is an error."""
    parsed_page = JustHTML(text, collect_errors=True, sanitize=False)
    assert parsed_page.errors == []
    return parsed_page


def texts(found: JustHTML, selector: str) -> list[str]:
    return [" ".join(node.to_text().split()) for node in found.query(selector)]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("path", BUNDLED, ids=name_of)
def test_a_page_is_valid_and_needs_nothing_else(path: pathlib.Path) -> None:
    text = page(report_of(path), path.name)
    found = document(text)
    reasons = {family.url for family in families().values()}
    linked = {link.attrs["href"] for link in found.query("a[href]")} & reasons
    assert _ELSEWHERE.findall(re.sub("|".join(map(re.escape, sorted(reasons, key=len, reverse=True))), "", text)) == []
    ids = [node.attrs["id"] for node in found.query("[id]")]
    assert len(set(ids)) == len(ids)
    pointed = [node.attrs["href"].removeprefix("#") for node in found.query("body [href]")]
    named = [node.attrs["aria-labelledby"] for node in found.query("[aria-labelledby]")]
    assert set(pointed) | set(named) <= {*ids, *linked}
    assert all(node.attrs.get("aria-label") for node in found.query("[role=img]"))


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("path", BUNDLED, ids=name_of)
def test_every_site_is_there_with_what_is_known_of_it(path: pathlib.Path) -> None:
    report = report_of(path)
    text = " ".join(document(page(report, path.name)).to_text().split())
    assert report.sites
    for site in report.sites:
        assert site.name in text
        assert site.kernel is not None
        assert all(" ".join(refused.message.split()) in text for refused in site.kernel.refused)
        assert site.mask_text is None or " ".join(site.mask_text.split()) in text


@pytest.mark.parametrize("path", BUNDLED, ids=name_of)
def test_every_fused_site_is_drawn_before_and_after(path: pathlib.Path) -> None:
    report = report_of(path)
    assert report.fused
    for site, picture in zip(report.sites, report.pictures, strict=True):
        assert picture is not None
        assert picture.before is not None
        assert picture.after is not None
        start = [(box.title, box.name) for box in picture.before.boxes if box.kind in {"anchor", "fused"}]
        assert start in ([("Softmax", site.name)], [("Attention", site.name)])
        assert site.op in [box.title for box in picture.after.boxes if box.kind == "fused"]
        assert picture.after.node_count < picture.before.node_count


def test_a_plain_attention_is_drawn_node_by_node() -> None:
    (picture,) = onnx_attnfuse.explain(parsed(ATTENTION), pictures=True).pictures
    assert picture is not None
    assert picture.before is not None
    boxes = picture.before.boxes
    drawn = {(boxes[arrow.tail].name, boxes[arrow.head].name) for arrow in picture.before.arrows}
    assert drawn == {
        ("k", "transpose"),
        ("q", "scores"),
        ("transpose", "scores"),
        ("scores", "scaling"),
        ("scaling", "softmax"),
        ("softmax", "values"),
        ("v", "values"),
        ("values", "out"),
    }
    details = {box.name: box.detail for box in boxes}
    assert details["scaling"] == "× 0.5"
    assert details["transpose"] == "perm 0 1 3 2"
    assert details["scores"] == "b × 2 × s × t"


def test_the_node_that_decided_stands_out() -> None:
    text = ATTENTION.replace("Softmax<axis = -1>(scaled)", "Softmax<axis = -1>(odd)").replace(
        "[softmax]", "[odd_one] odd = Sin(scaled)\n    [softmax]"
    )
    report = onnx_attnfuse.explain(parsed(text), pictures=True)
    (site,), (picture,) = report.sites, report.pictures
    assert site.status == "skipped"
    assert picture is not None
    assert picture.before is not None
    assert picture.after is None
    found = document(page(report, "odd"))
    assert texts(found, ".badge") == ["skipped"]
    assert texts(found, ".drawing figcaption")[0].startswith("As it is")
    assert [node.to_text() for node in found.query(".decided title")] == [site.reasons[0].node]
    assert site.reasons[0].code in texts(found, ".site .reasons li")[0]


def test_layers_that_are_alike_share_a_card_and_none_is_lost() -> None:
    report = layers(12)
    found = document(page(report, "encoder"))
    assert texts(found, "article h2") == ["layer.{0..11} ×12"]
    assert texts(found, ".members th code") == [f"layer.{number}" for number in range(12)]


def layers(count: int, *, alike: bool = True) -> Report:
    """A report as of a model of `count` layers."""
    report = report_of(next(path for path in BUNDLED if "llama" in path.name))
    sites = [
        dataclasses.replace(report.sites[0], name=f"layer.{number}", module=None, num_heads=4 if alike else number + 1)
        for number in range(count)
    ]
    return dataclasses.replace(report, sites=tuple(sites), pictures=report.pictures[:1] * count)


def test_a_page_stays_small() -> None:
    assert len(page(layers(12), "encoder").encode()) < 75_000
    assert len(page(layers(12, alike=False), "encoder").encode()) < 302_000


def test_names_of_a_model_are_text_and_nothing_else() -> None:
    evil = "<script>alert(1)</script>\"'&"
    report = layers(1)
    sites = (dataclasses.replace(report.sites[0], name=evil, mask_text=evil),)
    text = page(dataclasses.replace(report, sites=sites, notes=(evil,)), evil)
    assert "<script>alert" not in text
    assert document(text).query("title")[0].to_text().startswith(evil)


def test_without_pictures_there_is_a_page_all_the_same() -> None:
    report = onnx_attnfuse.explain(parsed(ATTENTION))
    assert report.pictures == ()
    found = document(page(report, "plain", "would fuse"))
    assert texts(found, ".headline") == ["would fuse 1 of 1 attention site"]
    assert found.query(".drawing") == []


def test_whether_it_can_be_captured_stands_on_the_page() -> None:
    report = dataclasses.replace(layers(1), capture=CaptureReport("CUDA graph", True, ("seq",)))
    assert any(
        "can be captured once its sizes are fixed (seq)" in text for text in texts(document(page(report, "m")), ".notes li")
    )


def test_what_would_be_done_is_not_said_to_be_done() -> None:
    report = layers(1)
    for verb in ("fused", "would fuse"):
        found = document(page(report, "encoder", verb))
        assert texts(found, ".badge") == [verb]
        assert texts(found, ".tile.good") == [f"{verb} 1 of 1"]


def test_what_a_pattern_wrote_is_not_said_to_have_stood_there() -> None:
    report = layers(1)
    for pattern, caption in ((None, "Before 41 nodes"), ("softmax_one", "Before, as the pattern reads it 41 nodes")):
        sites = (dataclasses.replace(report.sites[0], pattern=pattern),)
        found = document(page(dataclasses.replace(report, sites=sites), "encoder"))
        assert texts(found, ".drawing figcaption")[0] == caption
        assert ("found by softmax_one" in texts(found, ".facts")[0]) == (pattern is not None)


def test_versions_stand_below() -> None:
    (told,) = texts(document(page(layers(1), "encoder")), ".foot")
    assert f"onnxruntime {importlib.metadata.version('onnxruntime')}" in told


def test_a_page_without_sites_says_that_there_is_no_attention() -> None:
    found = document(page(Report((), 0.0), "nothing"))
    assert texts(found, ".empty") == ["There is no attention in this model."]


def test_pictures_are_no_part_of_the_json() -> None:
    untimed = {"seconds": 0, "patterns": []}
    plain, drawn = (onnx_attnfuse.explain(parsed(ATTENTION), pictures=wanted).to_dict() for wanted in (False, True))
    assert {**plain, **untimed} == {**drawn, **untimed}


@pytest.mark.parametrize("what", ["report.pictures.album.trace", "verify.mask_check.samples"])
def test_a_picture_that_fails_costs_nothing_but_itself(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = next(path for path in BUNDLED if "gpt2" in path.name)
    good = onnx_attnfuse.explain(path, pictures=True)

    def broken(*args: object, **kwargs: object) -> None:
        raise KeyError("ours")

    monkeypatch.setattr(f"onnx_attnfuse.{what}", broken)
    report = onnx_attnfuse.explain(path, pictures=True)
    assert report.sites == good.sites
    assert {(failure.kind, failure.message) for failure in report.failures} == {("defect", "KeyError: 'ours'")}
    assert all(failure.subject.startswith("drawing ") for failure in report.failures)
    document(page(report, path.name))


def test_steps_account_for_the_run() -> None:
    report = onnx_attnfuse.optimize(parsed(ATTENTION), pictures=True).report
    assert set(report.steps) == {"read", "apply patterns", "find", "draw", "plan and rewrite", "verify"}
    assert sum(report.steps.values()) - report.steps["read"] <= report.seconds


def test_judging_the_whole_model_is_a_step_too() -> None:
    report = onnx_attnfuse.optimize(parsed(ATTENTION), verify="model").report
    assert report.steps["verify the whole model"] > 0
    assert report.notes[-1].startswith("whole model verified")


def test_written_by_its_suffix(tmp_path: pathlib.Path) -> None:
    report = layers(1)
    onnx_attnfuse.write_report(report, tmp_path / "report.HTML")
    onnx_attnfuse.write_report(report, tmp_path / "report.json")
    assert texts(document((tmp_path / "report.HTML").read_text()), "h1") == ["report"]
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(json.dumps(report.to_dict()))
    with pytest.raises(onnx_attnfuse.OptionError, match=r"cannot write .*; choose another file"):
        onnx_attnfuse.write_report(report, written(ATTENTION, tmp_path / "file") / "report.html")
    assert {path.name for path in tmp_path.iterdir()} == {"report.HTML", "report.json", "file"}


def test_what_is_missing_is_said_before_anything_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "grandalf" else find_spec(name))
    with pytest.raises(onnx_attnfuse.MissingDependencyError, match=r"needs grandalf; run pip install 'onnx-attnfuse\[report\]'"):
        page(Report((), 0.0), "nothing")


def test_an_index_leads_to_every_page() -> None:
    skipped = dataclasses.replace(layers(1).sites[0], status="skipped")
    reports = {"a b/one.onnx": layers(2), "two.onnx": Report((skipped,), 0.0), "three.onnx": None}
    found = document(index(reports).replace("<wbr>", ""))
    assert [node.attrs["href"] for node in found.query("a.model")] == ["a%20b/one.html", "two.html"]
    assert texts(found, ".model") == [
        "a b/one.onnx fused 2 of 2 attention sites",
        "two.onnx fused 0 of 1 attention site (1 skipped)",
        "three.onnx could not be done",
    ]
    assert texts(found, ".headline") == ["2 done, fused 2 of 3 attention sites"]


def test_a_code_leads_to_its_family_and_a_pattern_s_own_to_nothing() -> None:
    left = SiteReport("Softmax_1", "main", "skipped", reasons=(Reason("soft-fill", "masked with 5"), Reason("of-mine", "no")))
    found = document(page(Report((left,), 0.0), "model.onnx"))
    assert [link.attrs["href"] for link in found.query(".reasons a")] == [families()["mask-values"].url]
    assert "to do: Mask with -inf or the lowest finite number" in found.to_text()
    fused = dataclasses.replace(left, status="fused")
    assert "to do:" not in document(page(Report((fused,), 0.0), "model.onnx")).to_text()
