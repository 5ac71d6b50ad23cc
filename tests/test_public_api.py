"""What is promised to importers: names, kinds in and out, what the import needs, and that a second run finds nothing."""

from __future__ import annotations

import copy
import os
import pathlib
import pickle
import subprocess
import sys
import textwrap
from collections import Counter
from typing import Any

import onnx
import onnx_ir as ir
import onnx_ir.passes.common
import pytest

import onnx_attnfuse
from onnx_attnfuse import AttentionFusionPass, Options, optimize
from tests.support.bundled import BUNDLED, name_of
from tests.support.small_models import ATTENTION, LINEAR, parsed, written


def ops(model: onnx.ModelProto | ir.Model) -> Counter[str]:
    """Operators of the main graph."""
    nodes = model.graph.node if isinstance(model, onnx.ModelProto) else model.graph
    return Counter(node.op_type for node in nodes)


def has_only_fused(model: onnx.ModelProto | ir.Model) -> bool:
    return ops(model)["MultiHeadAttention"] == 1 and not ops(model)["Softmax"]


@pytest.mark.parametrize("name", onnx_attnfuse.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(onnx_attnfuse, name) is not None


def test_the_list_of_public_names_is_honest() -> None:
    public = set(onnx_attnfuse.__all__)
    assert sorted(public) == sorted(onnx_attnfuse.__all__)
    assert set(onnx_attnfuse._HOMES) < public
    classes = [value for value in vars(onnx_attnfuse).values() if isinstance(value, type)]
    assert {cls.__name__ for cls in classes if cls.__module__.startswith("onnx_attnfuse")} <= public
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = onnx_attnfuse.no_such_name


ABSENT = """
import importlib.machinery

find_spec = importlib.machinery.PathFinder.find_spec

def find_spec_of_others(name, path=None, target=None):
    return None if name.partition(".")[0] in {"torch", "onnxruntime"} else find_spec(name, path, target)

importlib.machinery.PathFinder.find_spec = find_spec_of_others
"""


def in_a_process_of_its_own(code: str, *arguments: str) -> str:
    """What a Python without torch and onnxruntime prints."""
    script = ABSENT + textwrap.dedent(code)
    paths = [str(pathlib.Path(__file__).parents[1] / folder) for folder in (".", "patterns", "cli")]
    script = f"import sys; sys.path[:0] = {paths!r}\n{script}"
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_fusing_needs_neither_torch_nor_onnxruntime(tmp_path: pathlib.Path) -> None:
    source = written(ATTENTION, tmp_path / "model.onnx")
    code = """
        import onnx_attnfuse
        print(sorted(name for name in onnx_attnfuse.__all__ if getattr(onnx_attnfuse, name) is None))
        print(onnx_attnfuse.optimize(sys.argv[1], verify="none").report.fused)
    """
    assert in_a_process_of_its_own(code, str(source)).split() == ["[]", "1"]


def test_without_onnxruntime_verification_is_left_out_or_refused(tmp_path: pathlib.Path) -> None:
    source = written(ATTENTION, tmp_path / "model.onnx")
    code = """
        import onnx_attnfuse
        report = onnx_attnfuse.optimize(sys.argv[1]).report
        print(report.sites[0].verified, sum("nothing was verified" in note for note in report.notes))
        print(len(onnx_attnfuse.optimize(sys.argv[1], verify="none").report.notes))
        try:
            onnx_attnfuse.optimize(sys.argv[1], verify="sites")
        except onnx_attnfuse.MissingDependencyError as error:
            print("refused")
    """
    assert in_a_process_of_its_own(code, str(source)).split() == ["None", "1", "0", "refused"]


@pytest.mark.parametrize("error", ["ImportError('libcudart.so.12: not found')", "OSError('no memory in static TLS')"])
def test_an_onnxruntime_that_cannot_be_imported_ends_what_verifies_in_one_line(tmp_path: pathlib.Path, error: str) -> None:
    source = written(ATTENTION, tmp_path / "model.onnx")
    (tmp_path / "onnxruntime").mkdir()
    (tmp_path / "onnxruntime" / "__init__.py").write_text(f"raise {error}\n")
    paths = [tmp_path, *(pathlib.Path(__file__).parents[1] / folder for folder in (".", "patterns", "cli"))]
    for level, status in (("sites", 2), ("none", 0)):
        out = tmp_path / f"{level}.onnx"
        command = [sys.executable, "-m", "onnx_attnfuse", "optimize", str(source), "-o", str(out), "--verify", level]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
        assert done.returncode == status, done.stderr
        assert out.exists() == (status == 0)
        if status:
            assert done.stderr.startswith(f"Error: onnxruntime cannot be imported, {error.partition('(')[0]}: ")
            assert done.stderr.count("\n") == 1
    assert not list(tmp_path.glob("attnfuse-error*"))


@pytest.mark.parametrize("options", [onnx_attnfuse.Options, onnx_attnfuse.Trials, onnx_attnfuse.Conversion])
def test_a_field_that_options_do_not_have_is_named_with_the_nearest(options: type[Any]) -> None:
    with pytest.raises(onnx_attnfuse.OptionError, match=r"has no field 'verfy'; (did you mean 'verify'|choose )"):
        options(verfy="none")
    assert options() == copy.copy(options()) == pickle.loads(pickle.dumps(options()))


def test_importing_the_package_loads_no_engine() -> None:
    code = """
        import onnx_attnfuse
        print([name for name in sys.modules if name in {"onnx", "onnx_ir", "numpy", "onnx_attnfuse.fusion.pipeline"}])
    """
    assert in_a_process_of_its_own(code).strip() == "[]"


def test_a_path_comes_back_as_a_model_that_can_be_saved(tmp_path: pathlib.Path) -> None:
    source = written(ATTENTION, tmp_path / "model.onnx")
    before = source.read_bytes()
    for path in (source, str(source)):
        result = optimize(path, verify="none")
        assert isinstance(result.model, ir.Model)
        assert has_only_fused(result.model)
    result.save(tmp_path / "fused.onnx")
    result.save(str(tmp_path / "again.onnx"))
    assert has_only_fused(onnx.ModelProto.FromString((tmp_path / "fused.onnx").read_bytes()))
    assert (tmp_path / "again.onnx").read_bytes() == (tmp_path / "fused.onnx").read_bytes()
    assert source.read_bytes() == before


def test_a_proto_comes_back_as_a_new_proto() -> None:
    model = parsed(ATTENTION)
    before = model.SerializeToString(deterministic=True)
    result = optimize(model, verify="none")
    assert isinstance(result.model, onnx.ModelProto)
    assert has_only_fused(result.model)
    assert model.SerializeToString(deterministic=True) == before


def test_an_ir_model_comes_back_as_a_new_ir_model() -> None:
    model = ir.from_proto(parsed(ATTENTION))
    result = optimize(model, verify="none")
    assert isinstance(result.model, ir.Model)
    assert has_only_fused(result.model)
    assert ops(model)["Softmax"] == 1


class Program:
    """What torch.onnx.export returns, as far as it matters here."""

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self.released = 0

    def release(self) -> None:
        self.released += 1


def test_a_program_comes_back_itself_with_another_model() -> None:
    program = Program(ir.from_proto(parsed(ATTENTION)))
    original = program.model
    result = optimize(program, verify="none")
    assert result.model is program
    assert program.model is not original
    assert has_only_fused(program.model)
    assert ops(original)["Softmax"] == 1
    assert program.released == 1


def test_anything_else_is_refused() -> None:
    with pytest.raises(onnx_attnfuse.ModelError, match="a int is not a model"):
        optimize(3)


def test_options_are_given_as_an_object_or_by_name() -> None:
    model = parsed(ATTENTION)
    assert optimize(model, Options(verify="none")).report.fused == 1
    assert optimize(model, Options(verify="sites"), verify="none").report.sites[0].verified is None


@pytest.mark.parametrize("ep", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("target", "opset", "op"),
    [
        ("auto", 18, "MultiHeadAttention"),
        ("MultiHeadAttention", 23, "MultiHeadAttention"),
        ("onnx.Attention", 23, "Attention"),
        ("onnx.Attention", 18, "Attention"),
        ("GroupQueryAttention", 18, "head-size"),
    ],
)
def test_the_operator_that_is_asked_for(ep: str, target: str, opset: int, op: str) -> None:
    model = parsed(ATTENTION.replace(": 18", f": {opset}"))
    (site,) = optimize(model, ep=ep, target=target).report.sites
    if target == "GroupQueryAttention" and ep == "cuda":
        op = "no-kernel-for-type"
    assert (site.op or site.reasons[0].code) == op


def test_it_is_taken_where_what_is_spelled_out_is_faster() -> None:
    choices = {"ep": "cuda", "arch": "sm80", "dim": {"b": 8, "s": 8192, "t": 8192}}
    for target, code in (("auto", "unfused-faster"), ("MultiHeadAttention", None)):
        (site,) = optimize(parsed(ATTENTION), target=target, **choices).report.sites
        assert (site.reasons[0].code if site.reasons else None) == code


def test_an_operator_that_does_not_exist() -> None:
    with pytest.raises(onnx_attnfuse.OptionError, match="target is 'SDPA'; choose auto, MultiHeadAttention, "):
        optimize(parsed(ATTENTION), target="SDPA")


def test_explaining_changes_nothing() -> None:
    model = ir.from_proto(parsed(ATTENTION))
    report = onnx_attnfuse.explain(model, verify="none")
    assert (report.candidates, report.fused) == (1, 1)
    assert ops(model)["Softmax"] == 1


def test_the_pass_works_among_others_in_place() -> None:
    fusion = AttentionFusionPass(verify="none")
    manager = ir.passes.PassManager([fusion, ir.passes.common.RemoveUnusedNodesPass()], steps=1)
    model = ir.from_proto(parsed(ATTENTION))
    result = manager(model)
    assert result.model is model
    assert result.modified
    assert has_only_fused(model)
    assert fusion.report is not None
    assert fusion.report.fused == 1


@pytest.mark.parametrize("text", [LINEAR, ATTENTION])
def test_the_pass_says_truthfully_whether_it_changed_anything(text: str) -> None:
    model = ir.from_proto(parsed(text))
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    modified = AttentionFusionPass(verify="none")(model).modified
    assert modified == (ir.to_proto(model).SerializeToString(deterministic=True) != before)
    assert modified == (text is ATTENTION)
    assert not AttentionFusionPass(verify="none")(model).modified


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("path", BUNDLED, ids=name_of)
def test_a_second_run_over_a_bundled_model_changes_nothing(path: pathlib.Path) -> None:
    once = optimize(onnx.load(path), verify="none")
    assert once.report.fused == once.report.candidates > 0
    twice = optimize(once.model, verify="none")
    assert twice.report.fused == 0
    assert twice.report.ops_after == twice.report.ops_before
    assert twice.model.SerializeToString(deterministic=True) == once.model.SerializeToString(deterministic=True)


def test_an_editor_is_offered_the_public_names_before_they_are_used() -> None:
    script = "import onnx_attnfuse, sys; print(*dir(onnx_attnfuse)); assert 'onnx_attnfuse.api' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == sorted(onnx_attnfuse.__all__)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("verfy", "did you mean 'verify'"), ("target_name", "did you mean 'target'"), ("zzz", "choose ep, arch, ")],
)
def test_an_option_that_does_not_exist_is_an_option_error_with_a_remedy(name: str, remedy: str) -> None:
    choices: dict[str, Any] = {name: "none"}
    for call in (optimize, onnx_attnfuse.explain, onnx_attnfuse.unfuse):
        with pytest.raises(onnx_attnfuse.OptionError, match=f"^Options has no field '{name}'; {remedy}"):
            call(parsed(ATTENTION), **choices)
    with pytest.raises(onnx_attnfuse.OptionError, match=name):
        AttentionFusionPass(**choices)


def test_a_result_says_in_a_line_what_was_done() -> None:
    assert repr(optimize(parsed(ATTENTION), verify="none")) == "<Result: fused 1 of 1 attention site>"


def test_the_package_runs_as_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "onnx_attnfuse", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("attnfuse ")
