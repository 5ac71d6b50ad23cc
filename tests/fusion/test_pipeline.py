"""The pipeline as a list of passes: each tells truly whether it changed a graph, and leaves nothing behind where it fails."""

from __future__ import annotations

import dataclasses
from typing import Any

import onnx_ir as ir
import pytest

import onnx_attnfuse
from onnx_attnfuse.fusion import pass_context, pipeline
from onnx_attnfuse.fusion.pass_context import ModelPass, Pass, PassContext
from onnx_attnfuse.graph.edit import Snapshot
from tests.fusion.test_containment import BERT, LAYERS, MODEL, same, x
from tests.support.bundled import BUNDLED, name_of
from tests.support.small_models import LINEAR, parsed

CHOICES: dict[str, dict[str, Any]] = {
    "cpu": {},
    "cuda": {"ep": "cuda", "arch": "sm90"},
    "packed": {"ep": "cuda", "target": "packed"},
    "newer_opset": {"target": "onnx.Attention"},
}


def serialized(graph: PassContext) -> bytes:
    return ir.to_proto(graph.run.model).SerializeToString(deterministic=True)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("path", BUNDLED, ids=name_of)
def test_a_pass_that_reports_no_change_has_changed_nothing(path: Any, choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    untrue: list[str] = []

    def watched(item: Pass) -> Pass:
        def apply(graph: PassContext) -> int:
            before = serialized(graph)
            changes = item.apply(graph)
            untrue.extend([item.name] if not changes and serialized(graph) != before else [])
            return changes

        return item if isinstance(item, ModelPass) else dataclasses.replace(item, apply=apply)

    monkeypatch.setattr(pipeline, "PASSES", tuple(map(watched, pipeline.PASSES)))
    report = onnx_attnfuse.explain(path, verify="none", **CHOICES[choice])
    assert report.sites
    assert not untrue


def break_pass(place: int, monkeypatch: pytest.MonkeyPatch) -> Pass:
    """Lets one pass fail when it is done."""
    item = pipeline.PASSES[place]

    def apply(subject: Any) -> int:
        item.apply(subject)
        raise KeyError("on purpose")

    broken = dataclasses.replace(item, apply=apply)
    monkeypatch.setattr(pipeline, "PASSES", (*pipeline.PASSES[:place], broken, *pipeline.PASSES[place + 1 :]))
    return item


def places(*, must_succeed: bool) -> Any:
    """A parameter for each pass that must succeed, or for each that need not."""
    found = [place for place, item in enumerate(pipeline.PASSES) if item.must_succeed == must_succeed]
    return pytest.mark.parametrize("place", found, ids=lambda place: pipeline.PASSES[place].name.replace(" ", "_"))


@places(must_succeed=True)
def test_a_pass_that_must_succeed_ends_the_run_where_it_fails(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    break_pass(place, monkeypatch)
    with pytest.raises(KeyError, match="on purpose"):
        onnx_attnfuse.optimize(parsed(MODEL))


@places(must_succeed=False)
def test_a_pass_that_fails_when_it_is_done_is_undone_and_told(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    item = break_pass(place, monkeypatch)
    before = parsed(MODEL)
    result = onnx_attnfuse.optimize(before)
    assert {(failure.subject, failure.message) for failure in result.report.failures} == {(item.name, "KeyError: 'on purpose'")}
    costs_all = item.name in {
        "fusing the attentions of a graph",
        "putting patterns back",
        "putting operators on quantised numbers back",
    }
    assert (result.report.fused, result.report.candidates) == (0 if costs_all else LAYERS, LAYERS)
    same(before, result.model, x0=x())


def snapshots(model: object, monkeypatch: pytest.MonkeyPatch, **choices: Any) -> tuple[int, onnx_attnfuse.Report]:
    """How often a graph is written down."""
    taken: list[Snapshot] = []

    def counted(graph: ir.Graph) -> Snapshot:
        taken.append(Snapshot(graph))
        return taken[-1]

    monkeypatch.setattr(pass_context, "Snapshot", counted)
    report = onnx_attnfuse.explain(model, verify="none", **choices)
    return len(taken), report


def test_a_graph_in_which_nothing_changes_is_written_down_once(monkeypatch: pytest.MonkeyPatch) -> None:
    count, report = snapshots(parsed(LINEAR), monkeypatch)
    assert (count, report.fused) == (1, 0)


def test_a_graph_that_only_fusing_changes_is_written_down_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    count, report = snapshots(parsed(MODEL), monkeypatch)
    assert (count, report.fused) == (2, LAYERS)


def test_packing_is_one_pass_and_fusing_leaves_its_attentions_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: dict[str, int] = {}

    def noted(item: Pass) -> Pass:
        def apply(graph: PassContext) -> int:
            counts[item.name] = item.apply(graph)
            return counts[item.name]

        return dataclasses.replace(item, apply=apply)

    monkeypatch.setattr(pipeline, "PASSES", tuple(map(noted, pipeline.PASSES)))
    told = []
    for choices in ({"target": "packed", "ep": "cuda", "padding": "assume-right"}, {}):
        onnx_attnfuse.explain(BERT, verify="none", **choices)
        told.append((counts["packing the attentions of a graph"], counts["fusing the attentions of a graph"]))
    assert told == [(2, 0), (0, 2)]


def test_a_length_for_a_size_that_the_model_has_not_is_told_and_one_that_it_has_is_not() -> None:
    told = onnx_attnfuse.explain(BERT, verify="none", dim={"seq": 512, "sequence": 512}).notes
    assert "--dim sequence matches no dimension; the inputs have batch, seq" in told
    right = onnx_attnfuse.explain(BERT, verify="none", dim={"seq": 512, "batch": 4}).notes
    assert not [note for note in right if "--dim" in note]


def test_a_dimension_of_same_that_no_input_has_is_reported_and_one_that_an_input_has_is_not() -> None:
    notes = onnx_attnfuse.explain(BERT, verify="none", same=("batch=b*=rows",)).notes
    assert "--same rows matches no dimension; the inputs have batch, seq" in notes
    assert not [note for note in onnx_attnfuse.explain(BERT, verify="none", same=("b*",)).notes if "--same" in note]
