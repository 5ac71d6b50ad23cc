"""Certificates as files: made, checked, damaged, and about other models."""

from __future__ import annotations

import pathlib
import threading

import pytest

import onnx_attnfuse
from onnx_attnfuse.certify.certificate import Certificate, certify, check, parse
from onnx_attnfuse.certify.solvers import Solver
from onnx_attnfuse.errors import OptionError

BUNDLED = pathlib.Path(__file__).parents[2] / "models" / "bundled"
LLAMA = str(BUNDLED / "llama_past__dyn18__sdpa.onnx")
Made = tuple[str, Certificate, pathlib.Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("certificate")
    result = str(folder / "fused.onnx")
    onnx_attnfuse.optimize(LLAMA, verify="none").save(result)
    certificate = certify(LLAMA, result)
    path = folder / "out.cert"
    path.write_text(certificate.text)
    return result, certificate, path


def test_a_certificate_is_what_it_was_when_it_is_read_again(made: Made) -> None:
    _, certificate, path = made
    assert certificate.is_complete
    again = parse(path.read_text(), "here")
    assert again.text == certificate.text
    assert again.obligations == certificate.obligations


def test_the_same_models_give_the_same_file(made: Made) -> None:
    result, certificate, _ = made
    assert certify(LLAMA, result).text == certificate.text


@pytest.mark.parametrize("solver", ["z3", "cvc5"])
def test_either_solver_decides_all_of_a_certificate(solver: str, made: Made) -> None:
    result, certificate, path = made
    verdict = check(LLAMA, result, path, solver)
    assert verdict.problems == ()
    assert verdict.proved == len(certificate.claims)
    assert verdict.obligations == len(certificate.obligations) > 10


def test_what_a_damaged_certificate_lacks_is_told(made: Made, tmp_path: pathlib.Path) -> None:
    result, certificate, path = made
    damaged = tmp_path / "damaged.cert"
    damaged.write_text(path.read_text().replace(certificate.obligations[-1], "(assert true)\n"))
    assert any("lacks an obligation" in problem for problem in check(LLAMA, result, damaged).problems)


def test_an_easier_question_in_a_file_proves_nothing(made: Made, tmp_path: pathlib.Path) -> None:
    """What is asked is made of the models, so that a false assertion in the file is another question than the one needed."""
    result, certificate, path = made
    easier = tmp_path / "easier.cert"
    easier.write_text(path.read_text().replace(certificate.obligations[0], certificate.obligations[0] + "(assert false)\n"))
    assert check(LLAMA, result, easier).problems


def test_a_certificate_of_other_models_is_refused(made: Made) -> None:
    result, _, path = made
    with pytest.raises(OptionError, match="not about the first model"):
        check(str(BUNDLED / "bert__dyn18__sdpa.onnx"), result, path)
    with pytest.raises(OptionError, match="not about the second model"):
        check(LLAMA, LLAMA, path)


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "is no certificate"), ("; attnfuse certificate 0\n", "another version"), ("; attnfuse certificate 1\n", "damaged")],
)
def test_what_is_no_certificate_is_refused_in_a_line(text: str, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        parse(text, "here")


def test_each_obligation_stands_by_itself_in_the_file(made: Made) -> None:
    _, certificate, _ = made
    parts = certificate.text.split("(reset)\n")[1:]
    assert len(parts) == len(certificate.obligations)
    assert all(part.count("(check-sat)") == 1 and "(set-logic ALL)" in part for part in parts)


def test_a_solver_that_does_not_exist_is_refused() -> None:
    with pytest.raises(OptionError, match="there is no solver 'yices'"):
        Solver("yices")


@pytest.mark.parametrize("solver", ["z3", "cvc5"])
def test_what_is_false_is_not_called_proved(solver: str) -> None:
    text = "(declare-const n0 Int)\n(assert (<= 0 n0))\n(assert (not (<= n0 5)))\n"
    assert Solver(solver).decide(text) == "sat"


def test_what_the_first_layer_rests_on_is_asked_of_a_second_one_that_is_compared_with_it(tmp_path: pathlib.Path) -> None:
    """The second sum is known by the first, and rests on the same simplifications: that indices are below their lengths."""
    bert, result = str(BUNDLED / "bert__dyn18__sdpa.onnx"), str(tmp_path / "fused.onnx")
    onnx_attnfuse.optimize(bert, verify="none").save(result)
    asked = {claim.name: claim.obligations for claim in certify(bert, result).claims}
    assert asked["add_171"]
    assert asked["add_274"] == asked["add_171"]


def test_a_proof_knows_nothing_of_one_in_another_thread(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each question to the solver another thread proves something else from beginning to end."""
    result, certificate, _ = made
    bert = str(BUNDLED / "bert__dyn18__sdpa.onnx")
    fused = onnx_attnfuse.optimize(bert, verify="none").model
    alone, others = certify(bert, fused).text, list[str]()
    decide, main = Solver.decide, threading.current_thread()

    def beside(solver: Solver, text: str) -> str:
        if threading.current_thread() is main and len(others) < 3:
            thread = threading.Thread(target=lambda: others.append(certify(bert, fused).text))
            thread.start()
            thread.join()
        return decide(solver, text)

    monkeypatch.setattr(Solver, "decide", beside)
    assert certify(LLAMA, result).text == certificate.text
    assert others == [alone] * 3
