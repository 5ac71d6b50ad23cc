"""One rewrite after the other: accepted, refused, failing, in parts; the graph is exactly what it should be then."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
import pytest

from onnx_attnfuse.containment import Subject, collecting, contained
from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.scopes import all_names, scopes
from onnx_attnfuse.options import Options
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.transforms.rewriting import Edit, GraphContext
from onnx_attnfuse.verify.verifier import Verifier
from tests.support.small_models import LINEAR, parsed

SWAPPED = LINEAR.replace("[sum] y = Add(h, bias)", "[swapped] y = Add(bias, h)")
SUBJECT = Subject("swapping a sum")


@dataclasses.dataclass(frozen=True)
class Bench:
    """A product and a sum, `y = x · weight + bias`."""

    model: ir.Model
    graph: GraphContext

    @property
    def sum(self) -> ir.Node:
        return next(node for node in self.model.graph if node.name == "sum")

    def add(self, *inputs: ir.Value | None, hint: str = "swapped") -> ir.Value:
        return self.graph.builder.node("Add", inputs, hint=hint, dtype=ir.DataType.FLOAT)

    def replace(self, edit: Edit, new: ir.Value) -> None:
        edit.replace([(self.sum.outputs[0], new)], [value for value in self.sum.inputs if value is not None])

    def bytes(self) -> bytes:
        return ir.to_proto(self.model).SerializeToString(deterministic=True)


def bench_of(text: str = LINEAR, verify: str = "sites") -> Bench:
    model = ir.from_proto(parsed(text))
    (scope,) = scopes(model)
    builder = Builder(scope.graph, scope.facts, scope.opset, all_names(model))
    return Bench(model, GraphContext(scope, model, builder, Verifier(Options(verify=verify), keep_evidence=False)))


@pytest.fixture
def bench() -> Bench:
    return bench_of()


def test_an_accepted_rewrite_leaves_the_new_nodes_in_the_place_of_the_old_ones(bench: Bench) -> None:
    with bench.graph.rewrite(bench.sum, SUBJECT) as edit:
        left, right = bench.sum.inputs
        bench.replace(edit, bench.add(right, left))
    assert edit.reason is None
    assert edit.verified is not None
    assert bench.bytes() == bench_of(SWAPPED).bytes()


def test_what_an_accepted_rewrite_built_for_nothing_is_swept_away(bench: Bench) -> None:
    with bench.graph.rewrite(bench.sum, SUBJECT) as edit:
        left, right = bench.sum.inputs
        bench.add(left, bench.graph.builder.scalar(3.0, ir.DataType.FLOAT), hint="needless")
        bench.replace(edit, bench.add(right, left))
    assert bench.bytes() == bench_of(SWAPPED).bytes()


def test_a_rewrite_that_the_verifier_refuses_leaves_the_graph_as_it_was(bench: Bench) -> None:
    with collecting() as failures, bench.graph.rewrite(bench.sum, SUBJECT) as edit:
        left, _ = bench.sum.inputs
        bench.replace(edit, bench.add(left, left))
    assert edit.reason is not None
    assert edit.reason.code == "differs"
    assert (failures.all(), bench.graph.verifier.differing) == ((), 1)
    assert bench.bytes() == bench_of().bytes()


def test_without_verification_the_same_rewrite_is_believed() -> None:
    bench = bench_of(verify="none")
    with bench.graph.rewrite(bench.sum, SUBJECT) as edit:
        left, _ = bench.sum.inputs
        bench.replace(edit, bench.add(left, left))
    assert (edit.reason, edit.verified) == (None, None)
    assert bench.bytes() != bench_of().bytes()


def test_a_rewrite_that_is_refused_halfway_leaves_the_graph_as_it_was(bench: Bench) -> None:
    with collecting() as failures, bench.graph.rewrite(bench.sum, SUBJECT) as edit:
        left, right = bench.sum.inputs
        bench.add(bench.add(right, left), bench.graph.builder.scalar(3.0, ir.DataType.FLOAT))
        raise Refused("no-reason", "on purpose")
    assert edit.reason is not None
    assert (edit.reason.code, failures.all()) == ("no-reason", ())
    assert bench.bytes() == bench_of().bytes()


def test_branches_of_a_refused_rewrite_hold_nothing_any_more(bench: Bench) -> None:
    with bench.graph.rewrite(bench.sum, SUBJECT) as edit:
        new = bench.add(*bench.sum.inputs)
        branches: dict[str, ir.Graph] = {}
        for name in ("then_branch", "else_branch"):
            node = ir.node("Identity", [new], name=name)
            branches[name] = ir.Graph([], node.outputs, nodes=[node], name=name)
        bench.graph.builder.node("If", [bench.graph.builder.constant(np.asarray(True))], branches)
        raise Refused("no-reason", "on purpose")
    assert edit.reason is not None
    assert bench.bytes() == bench_of().bytes()
    assert len(bench.sum.inputs[0].uses() if bench.sum.inputs[0] is not None else ()) == 1


def test_what_nothing_used_before_a_refused_rewrite_is_still_there() -> None:
    """Nodes and weights that stood there for nothing are not the rewrite's."""
    text = LINEAR.replace("float[2] bias", "float[2] spare = {7, 8}, float[2] bias").replace("[sum]", "[idle] z = Neg(h) [sum]")
    bench = bench_of(text)
    with bench.graph.rewrite(bench.sum, SUBJECT) as edit:
        idle = next(node for node in bench.model.graph if node.name == "idle")
        bench.add(idle.outputs[0], bench.model.graph.initializers["spare"])
        raise Refused("no-reason", "on purpose")
    assert edit.reason is not None
    assert bench.bytes() == bench_of(text).bytes()


def test_a_rewrite_that_fails_halfway_leaves_the_graph_as_it_was_and_is_told(bench: Bench) -> None:
    with collecting() as failures, bench.graph.rewrite(bench.sum, SUBJECT) as edit:
        left, right = bench.sum.inputs
        bench.add(bench.add(right, left), left)
        raise KeyError("on purpose")
    assert edit.reason is not None
    assert edit.reason.code == "defect"
    assert [(item.subject, item.places, item.message) for item in failures.all()] == [
        ("swapping a sum", ("sum",), "KeyError: 'on purpose'")
    ]
    assert bench.bytes() == bench_of().bytes()


def test_a_rewrite_that_replaces_nothing_leaves_nothing_behind(bench: Bench) -> None:
    with bench.graph.rewrite(bench.sum, SUBJECT) as edit:
        bench.add(*bench.sum.inputs)
    assert edit.reason is None
    assert bench.bytes() == bench_of().bytes()


def test_a_failure_after_the_first_connection_goes_on_to_whoever_surrounds_the_rewrite(bench: Bench) -> None:
    around, edit = contained(Subject("the whole graph")), bench.graph.rewrite(bench.sum, SUBJECT)
    with collecting() as failures, around, edit:
        left, right = bench.sum.inputs
        edit.connect([(bench.sum.outputs[0], bench.add(right, left))])
        raise KeyError("on purpose")
    assert edit.reason is None
    assert around.reason is not None
    assert [item.subject for item in failures.all()] == ["the whole graph"]


def test_what_the_caller_has_to_change_ends_the_run(bench: Bench) -> None:
    with pytest.raises(OptionError, match="on purpose"), bench.graph.rewrite(bench.sum, SUBJECT):
        raise OptionError("on purpose")


@pytest.mark.parametrize("error", [Refused("no-reason", "on purpose"), KeyError("on purpose")])
def test_a_part_that_comes_to_nothing_costs_itself_alone(bench: Bench, error: Exception) -> None:
    with bench.graph.rewrite(bench.sum, SUBJECT) as edit:
        left, right = bench.sum.inputs
        new, three = bench.add(right, left), bench.graph.builder.scalar(3.0, ir.DataType.FLOAT)
        with edit.part(Subject("a faster sum")) as part:
            bench.add(new, three, hint="faster")
            raise error
        assert three.graph is bench.model.graph
        assert [node.name for node in edit.added] == ["swapped"]
        bench.replace(edit, new)
    assert part.reason is not None
    assert edit.reason is None
    assert bench.bytes() == bench_of(SWAPPED).bytes()


def test_what_a_part_built_belongs_to_the_whole(bench: Bench) -> None:
    with bench.graph.rewrite(bench.sum, SUBJECT) as edit:
        left, right = bench.sum.inputs
        with edit.part(Subject("a faster sum")) as part:
            new = bench.add(right, left)
        assert part.reason is None
        assert [node.name for node in edit.added] == ["swapped"]
        bench.replace(edit, new)
    assert bench.bytes() == bench_of(SWAPPED).bytes()


def test_a_whole_that_is_refused_takes_its_parts_with_it(bench: Bench) -> None:
    with bench.graph.rewrite(bench.sum, SUBJECT) as edit:
        with edit.part(Subject("a faster sum")):
            bench.add(*bench.sum.inputs)
        raise Refused("no-reason", "on purpose")
    assert bench.bytes() == bench_of().bytes()


def test_a_rewrite_inside_another_leaves_that_one_its_nodes(bench: Bench) -> None:
    product = next(iter(bench.model.graph))
    with bench.graph.rewrite(bench.sum, SUBJECT) as edit:
        left, right = bench.sum.inputs
        new = bench.add(right, left)
        with bench.graph.rewrite(product, Subject("another place")) as inner:
            bench.add(right, right, hint="gone")
            raise Refused("no-reason", "on purpose")
        assert inner.reason is not None
        assert [node.name for node in edit.added] == ["swapped"]
        bench.replace(edit, new)
    assert bench.bytes() == bench_of(SWAPPED).bytes()


def test_what_is_kept_waits_for_the_rewrite_that_adopts_it(bench: Bench) -> None:
    left, right = bench.sum.inputs
    with bench.graph.rewrite(bench.sum, SUBJECT) as first:
        new = bench.add(right, left)
        kept = first.keep()
    assert [node.name for node in bench.model.graph] == ["product", "swapped", "sum"]
    with bench.graph.rewrite(bench.sum, SUBJECT) as edit:
        edit.adopt(*kept)
        bench.replace(edit, new)
    assert bench.bytes() == bench_of(SWAPPED).bytes()


def test_what_is_adopted_goes_with_a_rewrite_that_is_refused(bench: Bench) -> None:
    with bench.graph.rewrite(bench.sum, SUBJECT) as first:
        bench.add(bench.sum.inputs[0], bench.graph.builder.scalar(3.0, ir.DataType.FLOAT))
        kept = first.keep()
    assert len(bench.model.graph.initializers) == 3
    with bench.graph.rewrite(bench.sum, SUBJECT) as edit:
        edit.adopt(*kept)
        raise Refused("no-reason", "on purpose")
    assert bench.bytes() == bench_of().bytes()


def test_a_rewrite_that_moved_on_is_undone_everywhere(bench: Bench) -> None:
    product = next(iter(bench.model.graph))
    with bench.graph.rewrite(bench.sum, SUBJECT) as edit:
        bench.add(*bench.sum.inputs)
        bench.graph.builder.at(product)
        bench.add(bench.sum.inputs[1], bench.sum.inputs[1])
        assert [node.name for node in edit.added] == ["swapped", "swapped_1"]
        raise Refused("no-reason", "on purpose")
    assert bench.bytes() == bench_of().bytes()
