"""`--certify`, `--require-proof` and `attnfuse check-certificate`."""

from __future__ import annotations

import pathlib

import pytest

from onnx_attnfuse_cli.main import main

BERT = "models/bundled/bert__dyn18__sdpa.onnx"
SWIN = "models/bundled/swin__dyn18__sdpa.onnx"


def test_a_certificate_is_written_and_checked(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, certificate = str(tmp_path / "out.onnx"), str(tmp_path / "out.cert")
    assert main(["optimize", BERT, "-o", out, "--certify", certificate]) == 0
    assert "proved 6 of 6 changed values" in capsys.readouterr().err
    assert main(["check-certificate", BERT, out, certificate, "--solver", "cvc5"]) == 0
    assert "6 claims proved" in capsys.readouterr().out


def test_a_certificate_of_other_models_ends_with_a_line(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, certificate = str(tmp_path / "out.onnx"), str(tmp_path / "out.cert")
    assert main(["optimize", BERT, "-o", out, "--certify", certificate]) == 0
    capsys.readouterr()
    assert main(["check-certificate", SWIN, out, certificate]) == 2
    assert "is not about the first model; give the models" in capsys.readouterr().err


def test_an_obligation_that_is_taken_out_is_missed(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, certificate = str(tmp_path / "out.onnx"), tmp_path / "out.cert"
    assert main(["optimize", BERT, "-o", out, "--certify", str(certificate)]) == 0
    head, _, rest = certificate.read_text().partition("(reset)")
    certificate.write_text(head + "(reset)" + rest.partition("(reset)")[0])
    capsys.readouterr()
    assert main(["check-certificate", BERT, out, str(certificate)]) == 3
    assert "is not proved" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--certify", "{}/none/out.cert"], "does not exist; make it first"),
        (["--certify", "{}"], "is a folder; give the name of a file in it"),
        (["--certify", "{}/out.onnx"], "--certify is a model"),
        (["--certify", "{}/out.cert", "--dry-run"], "leave --dry-run out"),
        (["--require-proof", "--cache", "shared"], "--require-proof compares models of one interface"),
        (["--certify", "{}/out.cert", "--cuda-graph"], "--certify compares models of one interface"),
        (["--certify", "{}/out.cert", SWIN], "--certify is for one model"),
        (["--solver", "yices"], "yices"),
    ],
)
def test_what_cannot_be_certified_is_refused_before_any_work(
    more: list[str], said: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.onnx"
    assert main(["optimize", BERT, "-o", str(out), *(item.format(tmp_path) for item in more)]) == 2
    assert said in capsys.readouterr().err
    assert not out.exists()


def test_a_file_that_is_no_certificate_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-certificate", BERT, BERT, "README.md"]) == 2
    assert "README.md is no certificate" in capsys.readouterr().err
    assert main(["check-certificate", BERT, BERT, "missing.cert"]) == 2
    assert "missing.cert cannot be read" in capsys.readouterr().err


def test_what_is_not_proved_stays_as_it_is_where_a_proof_is_required(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from onnx_attnfuse.certify import solvers

    monkeypatch.setattr(solvers.Solver, "decide", lambda self, text: "unknown")
    out = str(tmp_path / "out.onnx")
    assert main(["optimize", BERT, "-o", out, "--require-proof"]) == 0
    told = capsys.readouterr().out
    assert "fused 0 of 2 attention sites" in told
    assert "unproved" in told
