"""One failure costs one place, one pattern or one file: it is undone there, told, and the rest is done."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnx_ir as ir
import onnxruntime
import pytest

import onnx_attnfuse
from onnx_attnfuse.fusion.packing.packer import Packer
from onnx_attnfuse.fusion.site import SiteFuser
from onnx_attnfuse.graph.edit import Snapshot, connect
from onnx_attnfuse_cli.main import main
from tests.support.small_models import parsed, written

LAYERS = 3
HEADER = '<ir_version: 9, opset_import: ["" : 18]>'
SITE = """
    [kt{i}] kt{i} = Transpose<perm = [0, 1, 3, 2]>(x{i})
    [scores{i}] s{i} = MatMul(x{i}, kt{i})
    [softmax{i}] w{i} = Softmax<axis = -1>(s{i})
    [values{i}] y{i} = MatMul(w{i}, x{i})
    [next{i}] x{j} = Tanh(y{i})
"""
MODEL = f"""{HEADER}
layers (float[b, 2, s, 8] x0) => (float[b, 2, s, 8] x{LAYERS})
{{
{"".join(SITE.format(i=i, j=i + 1) for i in range(LAYERS))}
}}"""


def same(before: onnx.ModelProto, after: onnx.ModelProto, **inputs: np.ndarray) -> None:
    """Both models are valid and give the same, the first with nothing optimised."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    results = [
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"]).run(None, inputs)
        for model in (before, after)
    ]
    for left, right in zip(*results, strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5)


def x() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((2, 2, 5, 8), np.float32)


def raising(*args: object, **kwargs: object) -> Any:
    raise KeyError("on purpose")


def test_a_run_without_a_failure_tells_of_none() -> None:
    report = onnx_attnfuse.optimize(parsed(MODEL)).report
    assert (report.fused, report.failures, report.to_dict()["failures"]) == (LAYERS, (), [])


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_a_failure_while_the_graph_changes_costs_that_site(broken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The change is broken off halfway: after the result is renamed, before anything reads the new one."""

    def fail(old: ir.Value, new: ir.Value, builder: Any, users: Any) -> None:
        if old.name == f"y{broken}":
            old.name = "half"
            raise KeyError("on purpose")
        connect(old, new, builder, users)

    monkeypatch.setattr("onnx_attnfuse.transforms.rewriting.connect", fail)
    before = parsed(MODEL)
    result = onnx_attnfuse.optimize(before)
    told = {site.name: (site.status, [reason.code for reason in site.reasons]) for site in result.report.sites}
    assert told == {f"softmax{i}": ("skipped", ["defect"]) if i == broken else ("fused", []) for i in range(LAYERS)}
    (failure,) = result.report.failures
    assert (failure.kind, failure.places, failure.message) == ("defect", (f"softmax{broken}",), "KeyError: 'on purpose'")
    assert str(failure) in result.report.notes
    assert [node.op_type for node in result.model.graph.node].count("Softmax") == 1
    same(before, result.model, x0=x())


STEPS = {
    "onnx_attnfuse.attention.match.candidates.read_site": 0,
    "onnx_attnfuse.fusion.site.SiteBuilder.build": 0,
    "onnx_attnfuse.fusion.site.unfused": 0,
    "onnx_attnfuse.targets.multi_head_attention.emit": 0,
    "onnx_attnfuse.targets.multi_head_attention.refuse": 0,
    "onnx_attnfuse.fusion.passes.widen_caches": LAYERS,
    "onnx_attnfuse.fusion.passes.apply_rules": LAYERS,
    "onnx_attnfuse.fusion.passes.log_site": LAYERS,
    "onnx_attnfuse.fusion.passes.fuse_rotary": LAYERS,
    "onnx_attnfuse.fusion.passes.fold": LAYERS,
    "onnx_attnfuse.fusion.runtime_dispatch.Guards.sink_into_branches": LAYERS,
    "onnx_attnfuse.fusion.passes.apply_enabling": LAYERS,
    "onnx_attnfuse.fusion.passes.switches_for": LAYERS,
    "onnx_attnfuse.report.pictures.album.surroundings": LAYERS,
    "onnx_attnfuse.report.pictures.album.trace": LAYERS,
}
"""What fails, and how many sites are fused all the same."""


@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_fails_costs_itself(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, raising)
    before = parsed(MODEL.replace("Softmax<axis = -1>(s0)", "Softmax<axis = -2>(s0)") if "surroundings" in step else MODEL)
    result = onnx_attnfuse.optimize(before, pictures="album" in step, target="MultiHeadAttention", always=True)
    assert result.report.fused == STEPS[step] - ("surroundings" in step)
    assert {failure.kind for failure in result.report.failures} <= {"defect"}
    assert bool(result.report.failures) == ("surroundings" not in step)
    same(before, result.model, x0=x())


def test_a_cycle_costs_the_site_that_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `sort` finds at the end is looked for site by site."""
    connected = SiteFuser._connected

    def looped(sites: SiteFuser, node: Any, spec: Any, built: Any, *others: Any) -> Any:
        done = connected(sites, node, spec, built, *others)
        sites.unsorted = True
        if spec.name == "softmax1":
            built.emitted.node.replace_input_with(1, built.emitted.value)
        return done

    monkeypatch.setattr(SiteFuser, "_connected", looped)
    before = parsed(MODEL)
    result = onnx_attnfuse.optimize(before)
    assert {site.name: site.status for site in result.report.sites} == {
        "softmax0": "fused",
        "softmax1": "skipped",
        "softmax2": "fused",
    }
    same(before, result.model, x0=x())


BERT = pathlib.Path(__file__).parents[2] / "models" / "bundled" / "bert__dyn18__sdpa.onnx"


@pytest.mark.parametrize("broken", [False, True])
def test_packing_that_fails_halfway_leaves_the_graph_as_it_was(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(packing: Packer, woven: Any) -> None:
        packing._answer(woven.region)
        next(iter(woven.restored)).name = "half"
        raise KeyError("on purpose")

    if broken:
        monkeypatch.setattr(Packer, "connect", half)
    report = onnx_attnfuse.optimize(BERT, target="packed", ep="cuda", padding="assume-right", verify="none").report
    assert (report.fused, report.skipped, len(report.failures)) == ((0, 2, 1) if broken else (2, 0, 0))
    assert (dict(report.ops_before) == dict(report.ops_after)) == broken


NESTED = f"""{HEADER}
nested (float[b, 4] x, bool c) => (float[b, 4] y)
<float[4] weight = {{1, 2, 3, 4}}>
{{
    [first] a = Add(x, weight)
    [choice] z = If(c) <
        then_branch = then () => (float[b, 4] t) {{ [inner] t = Mul(a, weight) }},
        else_branch = other () => (float[b, 4] e) {{ [outer] e = Neg(a) }}
    >
    [last] y = Sub(z, a)
}}"""


def test_a_graph_is_put_back_as_it_was() -> None:
    model = ir.from_proto(parsed(NESTED))
    before, graph = ir.to_proto(model).SerializeToString(), model.graph
    snapshot = Snapshot(graph)
    first, choice, last = list(graph)
    inner = next(iter(choice.attributes["then_branch"].as_graph()))
    added = ir.node("Abs", [first.outputs[0]], name="added")
    graph.insert_before(choice, added)
    inner.replace_input_with(0, added.outputs[0])
    last.replace_input_with(1, None)
    graph.outputs[0] = added.outputs[0]
    graph.remove(last)
    assert inner.graph is not None
    inner.graph.remove(inner)
    del graph.initializers["weight"]
    first.outputs[0].name = "renamed"
    assert ir.to_proto(model).SerializeToString() != before
    snapshot.restore()
    assert ir.to_proto(model).SerializeToString() == before
    assert all(user.graph is not None for user, _ in first.outputs[0].uses())


def test_a_defect_at_a_site_ends_in_four_with_everything_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("onnx_attnfuse.fusion.passes.fold", raising)
    written(MODEL, pathlib.Path("model.onnx"))
    assert main(["optimize", "model.onnx", "--report", "report.json"]) == 4
    out, err = capsys.readouterr()
    (path,) = tmp_path.glob("attnfuse-error-*.txt")
    line = "folding constants: KeyError: 'on purpose' inside attnfuse, at layers; left as it was there, please report it"
    assert line in out.splitlines()
    assert err.splitlines() == [
        "wrote model.attnfuse.onnx",
        f"Error: folding constants failed, a defect; the rest is done, {path.name} has the details, please report it",
    ]
    assert "in raising" in path.read_text()
    report = json.loads(pathlib.Path("report.json").read_text())
    assert report["fused"] == LAYERS
    assert [(item["kind"], item["subject"], item["places"]) for item in report["failures"]] == [
        ("defect", "folding constants", ["layers"])
    ]
    assert main(["explain", "model.onnx"]) == 4


def test_a_page_that_fails_costs_the_page(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("onnx_attnfuse.report.files.page", raising)
    (tmp_path / "models").mkdir()
    for name in "ab":
        written(MODEL, tmp_path / "models" / f"{name}.onnx")
    assert main(["optimize", "models", "-o", "fused", "--report", "told"]) == 4
    err = capsys.readouterr().err.splitlines()
    assert all(": writing a report failed, a defect; the rest is done, " in line for line in err)
    path = err[-1].split(", ")[-2].split()[0]
    assert "KeyError: 'on purpose'" in (tmp_path / path).read_text()
    assert {item.name for item in (tmp_path / "fused").iterdir()} == {"a.attnfuse.onnx", "b.attnfuse.onnx"}
    assert {item.name for item in (tmp_path / "told").iterdir()} == {"a.json", "b.json", "index.html"}


def test_what_the_caller_has_to_change_still_ends_the_run(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    written(MODEL, pathlib.Path("model.onnx"))
    pathlib.Path("taken").write_text("a file", encoding="utf-8")
    pathlib.Path("wrong.py").write_text(WRONG, encoding="utf-8")
    assert main(["optimize", "model.onnx", "--patterns", "wrong.py", "--evidence", "taken"]) == 2
    assert capsys.readouterr().err.startswith("Error: evidence is taken, a file; choose a folder")


WRONG = """
from onnx_attnfuse.language import equation, pattern, softmax


@pattern
def wrong(scores, v):
    return equation(written=softmax(scores) @ v, meaning=softmax(2 * scores) @ v)
"""
CHAIN = """{header}
deep (float[b, 2, s, 8] q, float[b, 2, s, 8] k, float[b, 2, s, 8] v, float[b, 1, 1, s] m) => (float[b, 2, s, 8] out)
{{
    kt = Transpose<perm = [0, 1, 3, 2]>(k)
    s0 = MatMul(q, kt)
    {scores}
    m0 = Identity(m)
    {mask}
    masked = Add(s{n}, m{n})
    [softmax] w = Softmax<axis = -1>(masked)
    out = MatMul(w, v)
}}"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(("where", "fused"), [("neither", 1), ("scores", 0), ("mask", None)])
def test_ten_thousand_nodes_in_a_row_are_no_failure(where: str, fused: int | None) -> None:
    n = 2 if where == "neither" else 10_000
    rows = {name: "\n".join(f"{name}{i + 1} = Cast<to = 1>({name}{i})" for i in range(n)) for name in "sm"}
    scores = f"s{n} = Identity(s0)" if where == "mask" else rows["s"]
    mask = f"m{n} = Identity(m0)" if where == "scores" else rows["m"]
    report = onnx_attnfuse.explain(parsed(CHAIN.format(header=HEADER, scores=scores, mask=mask, n=n)), verify="none")
    assert report.failures == ()
    assert report.candidates == 1
    assert fused is None or report.fused == fused
    assert {reason.code for site in report.sites if site.status == "skipped" for reason in site.reasons} <= {"too-deep"}


@pytest.mark.parametrize("op", ["Add", "Mul", "Max"])
def test_a_mask_of_itself_over_and_over_is_not_read_exponentially(op: str) -> None:
    """Written out it would have 2 to the 60 parts."""
    n = 60
    mask = "\n".join(f"m{i + 1} = {op}(m{i}, m{i})" for i in range(n))
    report = onnx_attnfuse.explain(parsed(CHAIN.format(header=HEADER, scores=f"s{n} = Identity(s0)", mask=mask, n=n)))
    assert (report.candidates, report.failures) == (1, ())


@pytest.mark.exhaustive
def test_functions_that_call_functions_two_thousand_deep_are_read() -> None:
    names = ["q", "k", "v"]
    imports = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("f", 1)]
    body = parsed(CHAIN.format(header=HEADER, scores="s1 = Identity(s0)", mask="m1 = Identity(m0)", n=1)).graph
    functions = [onnx.helper.make_function("f", "f0", [*names, "m"], ["out"], list(body.node), imports)]
    for i in range(1, 2000):
        call = onnx.helper.make_node(f"f{i - 1}", [*names, "m"], ["out"], domain="f")
        functions.append(onnx.helper.make_function("f", f"f{i}", [*names, "m"], ["out"], [call], imports))
    call = onnx.helper.make_node("f1999", [*names, "m"], ["out"], domain="f")
    graph = onnx.helper.make_graph([call], "g", body.input, body.output)
    model = onnx.helper.make_model(graph, opset_imports=imports, functions=functions, ir_version=9)
    report = onnx_attnfuse.explain(model, verify="none")
    assert (report.fused, report.failures) == (1, ())
