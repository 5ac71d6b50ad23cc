"""The table of many models on an execution provider: what counts as wrong, and what a row says."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.on_providers import tensors, writer
from benchmarks.on_providers.children import Child
from benchmarks.on_providers.judge import Row, Side, apart, judged
from benchmarks.on_providers.tables import page
from benchmarks.providers import chosen, main
from onnx_attnfuse.verify.subprocess_runner import ProcessDied
from tests.support.bundled import BUNDLED, cases

VIT = next(path for path in BUNDLED if path.stem == "vit__dyn18__sdpa")
OUT = {"y": np.asarray([1.0, 2.0, -4.0], np.float32)}
GOOD = Row("folder/model", sites={"fused": 2}, operators={"X": 2}, export=Side(attention=2, claimed=0, on_cpu={"Softmax": 2}))
SOFTMAX = frozenset(["Softmax"])


def changed(**found: float) -> dict[str, np.ndarray]:
    """The outputs with one number changed."""
    array = OUT["y"].copy()
    array[int(found["place"])] = found["to"]
    return {"y": array}


@pytest.mark.parametrize(
    ("found", "expected"),
    [(OUT, 0.0), (changed(place=0, to=1.4), 0.1), (changed(place=0, to=np.nan), np.inf), ({"y": OUT["y"][:2]}, np.inf)],
)
def test_a_difference_is_a_part_of_the_magnitude(found: dict[str, np.ndarray], expected: float) -> None:
    assert apart(OUT, found) == pytest.approx(expected, abs=1e-6)


def test_where_the_provider_makes_nan_of_the_export_by_itself_nothing_is_asked() -> None:
    nan = changed(place=0, to=np.nan)
    assert apart(OUT, changed(place=0, to=9), nan) == 0
    assert apart(OUT, changed(place=1, to=9), nan) > 1
    assert apart(nan, nan) == 0


def test_numbers_that_stand_for_a_mask_are_no_magnitude() -> None:
    masked = changed(place=0, to=-3e38)
    assert apart(masked, {"y": np.asarray([-np.inf, 2.4, -4.0], np.float32)}) == pytest.approx(0.1)
    assert apart(masked, changed(place=0, to=5)) == np.inf


def row(ours: Any, export: Any = OUT, *, narrow: bool = False, folder: pathlib.Path) -> Row:
    """The row of two models that gave these outputs, or ended with these errors."""

    def told(name: str, outputs: Any) -> dict[str, Any]:
        found = {"error": outputs} if isinstance(outputs, str) else {"outputs": tensors.save(outputs, folder / name)}
        return {"cases": [found], "on cpu": {"Softmax": 1, "Shape": 3}}

    wrote = {
        "cases": [{"name": "example", "expected": tensors.save(OUT, folder / "expected")}],
        "attention": {"export": 2, "ours": 2},
        "sites": {"fused": 2},
        "operators": {"X": 2},
        "left": {},
    }
    answer = {"export": told("export", export), "ours": told("ours", ours), "ms": {"export": [2.0] * 7, "ours": [3.0] * 7}}
    return judged("folder/model", wrote, answer, SOFTMAX, narrow=narrow)


@pytest.mark.parametrize(
    ("off", "export_off", "narrow", "is_wrong"),
    [
        (0.01, 0.0, False, True),
        (0.001, 0.0, False, False),
        (0.01, 0.01, False, False),
        (0.04, 0.0, True, False),
        (0.1, 0.0, True, True),
    ],
)
def test_ours_is_wrong_where_it_is_further_off_than_the_export_and_the_tolerance(
    off: float, export_off: float, narrow: bool, is_wrong: bool, tmp_path: pathlib.Path
) -> None:
    found = row(changed(place=0, to=1 + off), changed(place=0, to=1 + export_off), narrow=narrow, folder=tmp_path)
    assert bool(found.wrong) == is_wrong
    assert any(problem.startswith("wrong: example") for problem in found.problems(emulated=True)) == is_wrong


def test_a_row_tells_what_the_cpu_ran_and_how_long_it_took(tmp_path: pathlib.Path) -> None:
    found = row(OUT, folder=tmp_path)
    assert (found.ours.claimed, found.ours.attention, found.ratio) == (1, 2, 1.5)
    assert found.problems(emulated=False) == ["slower: 1.50"]
    assert found.problems(emulated=True) == []


@pytest.mark.parametrize(("ours", "export", "problem"), [("no", OUT, True), (OUT, "no", False), ("no", "no", False)])
def test_what_does_not_run_is_a_problem_where_the_export_does(
    ours: Any, export: Any, problem: bool, tmp_path: pathlib.Path
) -> None:
    found = row(ours, export, folder=tmp_path).problems(emulated=True)
    assert found == (["does not run, the export does: no"] if problem else [])


def test_more_nodes_on_the_cpu_are_a_problem() -> None:
    more = dataclasses.replace(GOOD, ours=Side(attention=2, claimed=2, on_cpu={"Shape": 3}))
    fewer = dataclasses.replace(GOOD, ours=Side(attention=2, claimed=2, on_cpu={"Shape": 1}))
    assert more.problems(emulated=True) == ["more on the CPU: 3 Shape"]
    assert fewer.problems(emulated=True) == []


def test_the_page_names_no_folder_of_the_machine() -> None:
    lost = Row("folder/lost", lost="Fail: Load model from /home/someone/models/lost.onnx failed")
    found = page("openvino", {"onnxruntime-openvino": "1.24.1"}, [GOOD, lost], ["models", "--ep", "openvino"])
    assert "/home" not in found
    assert "| folder/model | 2 X | 0/2 → – |" in found
    assert "1 not written: Fail: Load model from it failed" in found


def test_exports_are_chosen_by_the_beginnings_of_their_names() -> None:
    folder = BUNDLED[0].parent
    assert [path.stem for path in chosen([folder], "vit,swin")] == ["swin__dyn18__sdpa", "vit__dyn18__sdpa"]
    assert len(chosen([folder], "")) == len([path for path in BUNDLED if path.with_suffix(".npz").exists()])


def test_arrays_come_back_from_files_as_they_were(tmp_path: pathlib.Path) -> None:
    feeds = cases(BUNDLED[0])["example"]
    for name, array in tensors.load(tensors.save(feeds, tmp_path / "x")).items():
        np.testing.assert_array_equal(array, feeds[name])


@pytest.mark.parametrize(("slow", "runs"), [(False, 1), (True, 2)])
def test_a_page_has_every_export_and_one_that_seemed_slower_is_timed_again(
    slow: bool, runs: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, to, asked = tmp_path / "models", tmp_path / "page.md", list[int]()
    folder.mkdir()
    for suffix in (".onnx", ".npz"):
        shutil.copy(VIT.with_suffix(suffix), folder / f"model{suffix}")
    monkeypatch.setattr(Row, "slower", property(lambda _: slow))
    ask = Child.ask

    def noted(self: Child, task: Mapping[str, Any]) -> dict[str, Any]:
        if "models" in task:
            asked.append(task["most"])
        return ask(self, task)

    monkeypatch.setattr(Child, "ask", noted)
    done = CliRunner().invoke(main, ["--ep", "cpu", str(folder), "--time", "0", "--cases", "1", "--to", str(to)])
    assert done.exit_code == int(slow), done.output
    assert asked == [51, 204][:runs]
    text = to.read_text(encoding="utf-8")
    assert "| models/model | 2 MultiHeadAttention |" in text
    assert "`python -m benchmarks.providers models --ep cpu --cases 1`" in text


ECHO = "import json, sys, time, os\nfor line in sys.stdin:\n    task = json.loads(line)\n    "
DYING = f"{ECHO}sys.exit('the last words') if 'die' in task else print(line, end='', flush=True)"


def test_a_child_answers_and_is_started_again_after_it_died() -> None:
    with Child([sys.executable, "-c", DYING], seconds=60) as child:
        assert child.ask({"a": 1}) == {"a": 1}
        with pytest.raises(ProcessDied, match=r"the process with status 1: the last words$"):
            child.ask({"die": 1})
        assert child.ask({"a": 2}) == json.loads('{"a": 2}')


def test_a_child_that_takes_too_long_is_ended() -> None:
    with (
        Child([sys.executable, "-c", f"{ECHO}time.sleep(600)"], seconds=0.5) as child,
        pytest.raises(ProcessDied, match=r"did not end within 0\.5 s$"),
    ):
        child.ask({})


def test_inputs_that_the_export_does_not_run_are_left_out_and_torch_is_asked_where_it_runs_none(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with np.load(VIT.with_suffix(".npz")) as arrays:
        kept = {key: arrays[key] for key in arrays.files if key.startswith(("in/", "out/"))}
    outputs = {f"odd/{key}": array for key, array in kept.items() if key.startswith("out/")}
    odd = {f"odd/{key}": array[..., :1] for key, array in kept.items() if key.startswith("in/")}
    np.savez(tmp_path / "vit.npz", **kept, **odd, **outputs)
    (tmp_path / "vit.onnx").write_bytes(VIT.read_bytes())
    out = tmp_path / "out"
    out.mkdir()
    assert [case["name"] for case in writer.written(tmp_path / "vit.onnx", "cpu", out, {}, None)["cases"]] == ["example"]
    monkeypatch.setattr(writer.compare, "run", lambda *_: "it does not run")
    assert [case["name"] for case in writer.written(tmp_path / "vit.onnx", "cpu", out, {}, None)["cases"]] == ["example", "odd"]
