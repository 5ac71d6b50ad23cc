"""The harness of the benchmarks, and benchmarks that it runs in their smallest size."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable

import numpy as np
import onnx.parser
import pytest

pytest.importorskip("onnxruntime")

from click.testing import CliRunner

from benchmarks.harness import (
    WRONG,
    Benchmark,
    Race,
    Row,
    Setting,
    apart,
    command,
    in_turns,
    page,
    printed,
    subjects,
)
from benchmarks.on_gpu.__main__ import main as on_gpu
from benchmarks.sessions import Bound

_CPU = Setting("cpu", quick=True, rounds=3, threads=1)


def product(text: str = "y = MatMul(x, w)") -> Bound:
    """A product of ones with a matrix of twos."""
    head = '<ir_version: 10, opset_import: ["" : 20]> product (float[3, 4] x) => (float[3, 2] y)'
    model = onnx.parser.parse_model(f"{head} <float[4, 2] w = {{2, 2, 2, 2, 2, 2, 2, 2}}> {{ {text} }}")
    return Bound(model.SerializeToString(), _CPU, {"x": np.ones((3, 4), np.float32)})


def test_a_model_is_run_with_its_constants() -> None:
    assert (product().output() == np.full((3, 2), 8)).all()


def test_all_take_turns_and_another_one_is_first_in_each_round() -> None:
    order: list[str] = []
    runs: dict[str, Callable[[], object]] = {name: lambda name=name: order.append(name) for name in "abc"}
    in_turns(runs, 3)
    assert "".join(order) == "abcbcacab"


def test_a_gain_is_the_median_of_the_rounds_and_not_of_the_times() -> None:
    ticks = iter([0, 4, 4, 5, 5, 6, 6, 14, 14, 15, 15, 16])  # a: 4, 8, 1 and b: 1, 1, 1; the second round has b first
    found = in_turns({"a": lambda: None, "b": lambda: None}, 3, clock=lambda: float(next(ticks)))
    assert found["a"].ms == 4000
    assert found["b"].gain == 4


@pytest.mark.parametrize(
    ("found", "truth", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.2], [1.0, 2.0], 0.1),
        ([1.0, np.nan], [1.0, 2.0], np.inf),
        ([1.0], [1.0, 2.0], np.inf),
    ],
)
def test_results_are_compared(found: list[float], truth: list[float], expected: float) -> None:
    assert apart(found, truth) == pytest.approx(expected)


def test_what_is_not_known_of_a_truth_is_left_out_and_nothing_else() -> None:
    assert apart([1.0, 5.0], [1.0, np.nan], some=True) == 0
    assert apart([np.nan, 5.0], [1.0, np.nan], some=True) == np.inf


def test_a_difference_and_a_failure_are_told_in_their_cells() -> None:
    race = Race(
        "row", {"right": product, "wrong": lambda: product("z = MatMul(x, w) y = Add(z, z)"), "bad": lambda: product("y = No(x)")}
    )
    found = race.measure(_CPU)
    assert found["right"].endswith(" 0e+00")
    assert found["wrong"].endswith(" 1e+00")
    assert found["bad"].startswith("failed: ")


def test_a_page_has_its_command_and_a_line_for_each_row(tmp_path: pathlib.Path) -> None:
    to = tmp_path / "page.md"
    text = page(
        Benchmark("Title", lambda _: iter([Race("one", {"a": product}), Race("two", {"b": product})])), _CPU, "make this", to
    )
    assert to.read_text(encoding="utf-8") == text
    assert text.startswith("# Title\n\n    make this\n")
    assert [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ")] == ["| ", "| ---", "| one", "| two"]


@pytest.mark.parametrize(("cell", "status"), [("right", 0), (f"{WRONG} by 1", 1)])
def test_a_cell_that_is_wrong_makes_the_command_fail(cell: str, status: int, tmp_path: pathlib.Path) -> None:
    one = Benchmark("Title", lambda _: iter([Row("row", lambda _: {"column": cell})]))
    done = CliRunner().invoke(command("one", one, provider="cpu"), ["--folder", str(tmp_path)])
    assert done.exit_code == status
    assert "python -m benchmarks.one --provider cpu\n" in done.stdout


def test_a_row_that_fails_leaves_the_others(tmp_path: pathlib.Path) -> None:
    rows = [Row(("bad", "one"), lambda _: {"column": str(1 // 0)}), Row(("good", "two"), lambda _: {"column": "right"})]
    text = page(Benchmark("Title", lambda _: iter(rows), "Note.", ("what", "which")), _CPU, "make this")
    assert text.splitlines()[-4:] == [
        "| what | which | failed | column |",
        "| --- | --- | --- | --- |",
        f"| bad | one | {WRONG} ZeroDivisionError: integer division or modulo by zero |  |",
        "| good | two |  | right |",
    ]


def test_only_some_columns_are_measured_in_the_order_that_is_asked_for() -> None:
    race = Race("row", {"a": product, "b": product, "c": product})
    assert list(race.measure(dataclasses.replace(_CPU, columns="c;a"))) == ["c", "a"]


def test_what_a_module_prints_or_how_it_fails() -> None:
    assert printed("base64", "-t").startswith("b'")
    with pytest.raises(RuntimeError, match="No module named"):
        printed("benchmarks.gone")


@pytest.mark.newest  # it exports by onnxscript
@pytest.mark.exhaustive
@pytest.mark.parametrize("subject", ["attention"])
def test_a_benchmark_for_a_gpu_is_tried_out_on_a_cpu(subject: str, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("torch")
    done = CliRunner().invoke(on_gpu, [subject, "--provider", "cpu", "--quick", "--folder", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "failed" not in done.stdout
    assert f"python -m benchmarks.on_gpu {subject} --provider cpu --quick" in done.stdout


def test_rounds_end_in_time_but_not_before_some() -> None:
    order: list[str] = []
    in_turns({"a": lambda: order.append("a")}, 30, seconds=0)
    assert len(order) == 5


def test_every_subject_is_a_benchmark() -> None:
    pytest.importorskip("torch")
    found = [make() for name in ("on_cpu", "on_gpu", "on_torch") for make in subjects(name).values()]
    assert len(found) > 8
    assert all(isinstance(made, Benchmark) for made in found)


def test_numbers_of_different_sizes_are_compared_each_by_itself() -> None:
    found, truth = [0.002, 1.0], [0.001, 1.0]
    assert apart(found, truth) == pytest.approx(0.001)
    assert apart(found, truth, single=True) == pytest.approx(1)
