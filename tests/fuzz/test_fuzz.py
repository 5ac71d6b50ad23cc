"""Some hundred generated graphs, and that the fuzzer notices what is wrong, shrinks it, and survives it."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np
import onnx
import pytest

import onnx_attnfuse
from tests.fuzz.feeds import sizes_of
from tests.fuzz.functions import DOMAIN
from tests.fuzz.judging import Subject
from tests.fuzz.model import write
from tests.fuzz.opinions import Opinions
from tests.fuzz.pool import Job, Pool
from tests.fuzz.recipe import Mask, Recipe, consistent, draw, read
from tests.fuzz.shrinking import cost, shrink, simpler
from tests.fuzz.unwell import Unwell

GRAPHS, BLOCK = 400, 25


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("first", range(0, GRAPHS, BLOCK))
def test_generated_graphs_compute_what_they_did(first: int) -> None:
    failures: list[str] = []
    kinds: set[str] = set()
    for seed in range(first, first + BLOCK):
        recipe = draw(seed)
        outcome = Subject(recipe).outcome("sites")
        kinds.add(outcome.kind)
        if outcome.bad:
            failures.append(f"seed {seed} {outcome.kind}: {outcome.detail}\n    --recipe '{recipe.line()}'")
    assert not failures, "\n".join(failures)
    assert "fused" in kinds


@pytest.mark.parametrize("line", (pathlib.Path(__file__).parent / "found.jsonl").read_text(encoding="utf-8").splitlines())
def test_what_was_wrong_once_is_right_without_verification_too(line: str) -> None:
    for level in ("none", "sites"):
        outcome = Subject(read(line)).outcome(level)
        assert not outcome.bad, f"--verify {level}: {outcome.kind}: {outcome.detail}"


def test_a_seed_gives_the_same_model_every_time() -> None:
    for seed in range(40):
        recipe = draw(seed)
        assert draw(seed) == recipe
        models = [write(recipe, sizes_of(recipe)[0]).model.SerializeToString(deterministic=True) for _ in range(2)]
        assert models[0] == models[1]


def test_a_printed_recipe_is_read_back() -> None:
    for seed in range(200):
        recipe = draw(seed)
        assert read(recipe.line()) == recipe
        assert consistent(recipe) == recipe
    assert read("{}") == Recipe()


def test_the_simplest_recipe_is_fused() -> None:
    for level in ("none", "sites"):
        assert Subject(Recipe()).outcome(level).kind == "fused"


def without_scale(model: Any, **choices: Any) -> Any:
    """A fusion that forgets a scale."""
    result = _OPTIMIZE(model, **choices)
    for node in result.model.graph.node:
        kept = [item for item in node.attribute if item.name != "scale"]
        del node.attribute[:]
        node.attribute.extend(kept)
    return result


_OPTIMIZE = onnx_attnfuse.optimize


def test_a_lost_scale_is_noticed_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_attnfuse, "optimize", without_scale)
    recipe = Recipe(
        scale="odd", layers=2, source="projected", masks=(Mask(kind="causal"), Mask(applied="add_where")), opset=17, numbers=77
    )

    def wrong(candidate: Recipe) -> bool:
        return Subject(candidate).outcome("none").kind == "wrong"

    assert wrong(recipe)
    smallest = shrink(recipe, wrong)
    assert smallest.scale in {"none", "odd"}
    assert not smallest.masks
    assert cost(smallest)[0] == 1
    assert not wrong(Recipe()), "one over the root of the channels is what is computed without a scale"


def test_a_lost_output_type_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_type(model: Any, **choices: Any) -> Any:
        result = _OPTIMIZE(model, **choices)
        result.model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.INT64
        return result

    monkeypatch.setattr(onnx_attnfuse, "optimize", without_type)
    assert Subject(Recipe()).outcome("none").kind == "invalid"


def test_an_exception_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model: Any, **choices: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(onnx_attnfuse, "optimize", broken)
    assert Subject(Recipe()).outcome("none").kind == "traceback"


@pytest.mark.parametrize("how", ["layers", "nested", "whole"])
@pytest.mark.parametrize("numbers", [2, 3])
def test_functions_are_called_and_compute_what_their_nodes_did(how: str, numbers: int) -> None:
    recipe = Recipe(function=how, layers=2, numbers=numbers, masks=(Mask(kind="causal"), Mask(kind="alibi")), opset=17)
    written = write(recipe, sizes_of(recipe)[0])
    assert written.model.functions
    assert not written.flat.functions
    calls = [node.op_type for function in written.model.functions for node in function.node if node.domain == DOMAIN]
    assert bool(calls) is (how == "nested")
    flat = Subject(dataclasses.replace(recipe, function="none"))
    cases = Subject(recipe).cases()
    assert cases
    for (_, _, inputs, old), (_, _, same, new) in zip(flat.cases(), cases, strict=True):
        assert all(np.array_equal(inputs[name], same[name]) for name in inputs)
        assert all(np.array_equal(left, right) for left, right in zip(old, new, strict=True))


def test_layers_of_one_body_call_one_function() -> None:
    recipe = Recipe(function="layers", layers=3, source="projected", reshapes="literal", dims="static", product="einsum")
    for numbers, kept in ((0, 1), (1, 1)):
        model = write(dataclasses.replace(recipe, numbers=numbers), sizes_of(recipe)[0]).model
        assert len(model.functions) == kept
        assert sum(node.domain == DOMAIN for node in model.graph.node) == 3


def _symbols(recipe: Recipe) -> list[str]:
    inputs = write(recipe, sizes_of(recipe)[0]).model.graph.input
    return [dim.dim_param for entry in inputs for dim in entry.type.tensor_type.shape.dim if not dim.dim_value]


def test_axes_apart_have_a_symbol_each() -> None:
    recipe = Recipe(cache="concat", masks=(Mask(),))
    apart, named = (_symbols(dataclasses.replace(recipe, dims=dims)) for dims in ("apart", "symbolic"))
    assert len(set(apart)) == len(apart) == len(named)
    assert set(named) == {"batch", "seq", "past", "keys"}
    assert not any(_symbols(dataclasses.replace(recipe, dims="anonymous")))


def _attention(recipe: Recipe) -> onnx.NodeProto:
    (node,) = [node for node in write(recipe, sizes_of(recipe)[0]).model.graph.node if node.op_type == "Attention"]
    return node


def test_one_node_says_what_its_opset_lets_it_say() -> None:
    recipe = Recipe(operator="heads", masks=(Mask(kind="band"),), window=8, opset=25)
    newest, older = _attention(recipe), _attention(dataclasses.replace(recipe, opset=24))
    sides = {item.name: item.i for item in newest.attribute}
    assert (sides, len(newest.input)) == ({"left_window_size": 7, "right_window_size": 7}, 3)
    assert (len(older.attribute), len(older.input)) == (0, 4)
    lengths = dataclasses.replace(recipe, masks=(Mask(kind="lengths"), Mask(kind="causal")))
    assert list(_attention(lengths).input)[5:] == ["", "lengths0"]
    assert len(_attention(dataclasses.replace(lengths, opset=23)).input) == 4


def test_a_lost_window_is_noticed_as_one_length_is_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_window(model: Any, **choices: Any) -> Any:
        for tensor in model.graph.initializer:
            if onnx.numpy_helper.to_array(tensor).tolist() == 40:
                tensor.CopyFrom(onnx.numpy_helper.from_array(np.asarray(1000), tensor.name))
        return _OPTIMIZE(model, **choices)

    monkeypatch.setattr(onnx_attnfuse, "optimize", without_window)
    for window, kind in ((40, "wrong"), (70, "fused")):
        assert Subject(Recipe(masks=(Mask(kind="window"),), window=window)).outcome("sites").kind == kind


def test_biases_mask_with_several_numbers() -> None:
    recipe = Recipe(masks=(Mask(kind="given_bias", dtype="float"), Mask(kind="given_bias", dtype="float")))
    found: set[tuple[float, ...]] = set()
    for numbers in range(20):
        for _, _, inputs, _ in Subject(dataclasses.replace(recipe, numbers=numbers)).cases():
            biases = [array for name, array in inputs.items() if name.startswith("bias")]
            found.add(tuple(float(array.min()) for array in biases))
    assert any(left < -1e30 and -1e10 < right < -1e3 for left, right in found)


def test_simpler_recipes_are_simpler() -> None:
    for seed in range(20):
        recipe = draw(seed)
        assert all(cost(candidate) < cost(recipe) and consistent(candidate) == candidate for candidate in simpler(recipe))
    assert not list(simpler(Recipe()))


@pytest.mark.exhaustive
def test_processes_that_die_or_hang_are_named_and_replaced() -> None:
    recipes = [Recipe(layers=layers) for layers in (1, 2, 3, 1, 2)] + [Recipe(kv_heads=0), Recipe()]
    jobs = [Job(seed, recipe, ("none", "sites")) for seed, recipe in enumerate(recipes)]
    with Pool(1, patience=8.0, subject=Unwell) as pool:
        found = {job.seed: {level: outcome.kind for level, outcome in outcomes.items()} for job, outcomes in pool.judged(jobs)}
    right, died, hung = ({"none": "fused", "sites": kind} for kind in ("fused", "crash", "hang"))
    before = {"none": "unrunnable", "sites": "unrunnable"}
    assert found == {0: right, 1: died, 2: hung, 3: right, 4: died, 5: before, 6: right}


class Constant:
    """A model with one number for a result."""

    def __init__(self, number: float) -> None:
        self.number = number

    def run(self, outputs: None, feeds: Any) -> list[Any]:
        return [np.asarray([self.number], np.float32)]


@pytest.mark.parametrize(("result", "covered"), [(1.0, True), (5.0, True), (3.0, False), (9.0, False)])
def test_a_converted_model_may_say_what_the_original_says_in_float16_and_nothing_between(result: float, covered: bool) -> None:
    opinions = Opinions(Constant(1.0), Constant(9.0), Recipe(journey="convert"), (Constant(5.0),))
    old, new = np.asarray([1.0], np.float32), np.asarray([result], np.float32)
    assert opinions.cover(old, new, [run[0] for run in opinions.of({})], ()) == covered


class _Averaging:
    """Averages of values weighted by scores, all of them beside one number."""

    def run(self, outputs: None, feeds: Any) -> list[Any]:
        scores = feeds["scores"] + feeds["mask"]
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return [(weights / weights.sum(axis=-1, keepdims=True)) @ feeds["values"]]


@pytest.mark.parametrize(("by", "covered"), [(5e-4, True), (2e-2, False)])
def test_sums_of_masks_may_round_a_score_beside_minus_ten_thousand_and_move_it_no_further(by: float, covered: bool) -> None:
    rng = np.random.default_rng(1)
    scores, values = (rng.standard_normal(size).astype(np.float32) for size in ((8, 6), (6, 4)))
    inputs = {"scores": scores, "values": values, "mask": np.full(6, -1e4, np.float32)}
    moved = {**inputs, "scores": scores + np.float32(by) * rng.choice((-1, 1), scores.shape).astype(np.float32)}
    opinions = Opinions(_Averaging(), None, Recipe())
    old, new = (_Averaging().run(None, item)[0] for item in (inputs, moved))
    assert opinions.cover(old, new, [run[0] for run in opinions.of(inputs, more=True)], ()) == covered
