"""An ONNX Runtime that is too old: what it does not run, or computes differently, is unverified and no difference."""

from __future__ import annotations

import pathlib
import re

import onnxruntime
import pytest

from onnx_attnfuse import optimize, unfuse
from onnx_attnfuse.bench import doctor
from onnx_attnfuse.testing import as_model
from onnx_attnfuse.verify.compare_models import check_models
from onnx_attnfuse.verify.runtime import OLDEST, is_old
from onnx_attnfuse_cli.main import main
from tests.bench.test_doctor import machine
from tests.support import small_models
from tests.support.pairs import PLAIN, PLAIN_FUSED, graph, judged

WRONG = PLAIN_FUSED.replace("0.25", "0.5")
UNKNOWN = PLAIN_FUSED.replace("scale = 0.25", "scale = 0.25, of_tomorrow = 1")
TOO_OLD = "onnxruntime 1.19.2 is too old to verify with; run pip install 'onnxruntime>=1.28'"


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed runtime says that it is an old one."""
    monkeypatch.setattr(onnxruntime, "__version__", "1.19.2")


@pytest.mark.parametrize("version", ["1.19.2", "1.27.9", "0.99", "1.27.0.dev20260101"])
def test_what_is_old(version: str) -> None:
    assert is_old(version)
    assert not is_old(".".join(map(str, OLDEST)))
    assert not is_old("2.0")
    assert not is_old("built from source")


@pytest.mark.usefixtures("old")
@pytest.mark.parametrize(
    ("fused", "told"), [(WRONG, "with it at ["), (UNKNOWN, "with it the new nodes do not run: "), (UNKNOWN, "of_tomorrow")]
)
def test_with_an_old_runtime_nothing_is_said_to_differ(fused: str, told: str) -> None:
    verdict = judged(graph(PLAIN + fused))
    assert not verdict.equal
    assert verdict.undecided is not None
    assert verdict.undecided.startswith(f"{TOO_OLD} (")
    assert told in verdict.undecided


@pytest.mark.usefixtures("old")
def test_what_an_old_runtime_finds_equal_is_equal() -> None:
    assert judged(graph(PLAIN + PLAIN_FUSED)).equal


@pytest.mark.parametrize("fused", [WRONG, UNKNOWN])
def test_with_a_runtime_of_today_it_differs(fused: str) -> None:
    verdict = judged(graph(PLAIN + fused))
    assert not verdict.equal
    assert verdict.undecided is None


MODEL = """<ir_version: 10, opset_import: ["" : 18]>
g (float[b, n, s, 8] q, float[b, n, 8, t] k, float[b, n, t, 6] v) => (float[b, n, s, 6] out)
<float one = {1}, int64[1] last = {-1}>
{
    scores = MatMul(q, k)
    e = Exp(scores)
    total = ReduceSum<keepdims = 1>(e, last)
    more = Add(total, one)
    w = Div(e, more)
    out = MatMul(w, v)
}"""
CARELESS = """from onnx_attnfuse.language import equation, exp, pattern, softmax, sum


@pattern
def careless(scores, v):
    return equation(exp(scores) / (1 + sum(exp(scores))) @ v, softmax(scores) @ v)
"""


def run_with_a_careless_pattern(folder: pathlib.Path, *more: str) -> int:
    model = small_models.written(small_models.parsed(MODEL), folder / "model.onnx")
    (folder / "careless.py").write_text(CARELESS)
    evidence = str(folder / "evidence")
    return main(["optimize", str(model), "--patterns", str(folder / "careless.py"), "-v", "--evidence", evidence, *more])


def test_a_site_that_differs_ends_in_three(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_with_a_careless_pattern(tmp_path) == 3
    out, err = capsys.readouterr()
    assert "differs" in out
    assert "too old" not in out + err


@pytest.mark.usefixtures("old")
@pytest.mark.parametrize(("more", "status"), [((), 0), (("--require-all",), 1)])
def test_with_an_old_runtime_it_is_unverified_and_stays(
    more: tuple[str, ...], status: int, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_with_a_careless_pattern(tmp_path, *more) == status
    out = " ".join(capsys.readouterr().out.split())
    assert f"unverified: pattern 'careless': it could not be verified: {TOO_OLD}" in out
    assert "fused 0 of 1 attention site" in out
    assert not (tmp_path / "evidence").exists()


@pytest.mark.usefixtures("old")
def test_whole_models_are_unverified_too() -> None:
    text = MODEL.replace("more = Add(total, one)", "more = Mul(total, one)")
    verdict = check_models(as_model(MODEL), as_model(text))
    assert verdict.undecided is not None
    assert verdict.undecided.startswith(TOO_OLD)
    assert check_models(as_model(MODEL), as_model(MODEL)).equal


@pytest.mark.usefixtures("old")
def test_an_operator_that_differs_in_one_of_its_rehearsals_is_not_spelled_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several forms an old runtime may refuse one and find another different: then neither is believed."""
    from onnx_attnfuse.reasons import Refused
    from onnx_attnfuse.transforms.decompose import decompose
    from onnx_attnfuse.verify.verifier import Verifier

    model = optimize(as_model(small_models.ATTENTION), verify="none").model
    pairs, asked = Verifier.check, []
    monkeypatch.setattr(decompose, "rehearsals", lambda site: [site, site])

    def first_not(self, *arguments, **named):
        asked.append(arguments)
        if len(asked) == 1:
            raise Refused("unverified", "it could not be verified")
        return pairs(self, *arguments, **named)

    monkeypatch.setattr(Verifier, "check", first_not)
    (site,) = unfuse(model).report.sites
    assert site.status == "kept"
    assert site.reason is not None
    assert site.reason.code == "unverified"


def test_the_doctor_says_so() -> None:
    (found,) = doctor.missing(machine(versions={"onnxruntime": "1.19.2", "torch": "2.13.0"}))
    assert found.what.startswith("onnxruntime 1.28 or newer; 1.19.2 is too old to verify with")
    assert found.line == "pip install --upgrade 'onnx-attnfuse[cpu]'"
    assert not doctor.missing(machine(versions={"onnxruntime": "1.28.0", "torch": "2.13.0"}))


def test_the_extras_ask_for_the_oldest_to_judge_by() -> None:
    text = (pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    bounds = re.findall(r'"onnxruntime(?:-gpu)?>=([\d.]+)"', text)
    assert bounds == [".".join(map(str, OLDEST))] * 2
