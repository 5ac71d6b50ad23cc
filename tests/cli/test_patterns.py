"""`attnfuse patterns`."""

from __future__ import annotations

import importlib
import json
import pathlib
import subprocess
import sys

import pytest

from onnx_attnfuse_cli.main import main
from tests.support import small_models

GALLERY = pathlib.Path(__file__).parents[2] / "patterns" / "gallery"
NEAR = """<ir_version: 10, opset_import: ["" : 18]>
g (float[b, n, s, 8] q, float[b, n, 8, t] k, float[b, n, t, 6] v) => (float[b, n, s, 6] out)
<float one = {1}, int64[1] last = {-1}>
{
    scores = MatMul(q, k)
    [plus] shifted = Sigmoid(scores)
    total = ReduceSum<keepdims = 1>(shifted, last)
    more = Add(total, one)
    w = Div(shifted, more)
    out = MatMul(w, v)
}"""


def test_list_tells_name_kind_and_owner(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["patterns", "list", "--patterns", str(GALLERY / "talking_heads.py"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows[-1]["name"] == "talking_heads"
    assert rows[-1]["kind"] == "refusal"
    assert rows[-1]["from"] == str(GALLERY / "talking_heads.py")
    assert {"name": "soft_cap.tanh", "kind": "score step", "from": "pack builtin", "does": "`tanh(scores)`."} in rows
    assert main(["patterns", "list"]) == 0
    assert "soft_cap.tanh" in capsys.readouterr().out


def test_show_tells_the_formula_and_the_safety(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["patterns", "show", "differential", "--patterns", str(GALLERY)]) == 0
    out = capsys.readouterr().out
    assert "written: (softmax(scale * (q1 @ k1.T) + mask) - weight * softmax(scale * (q2 @ k2.T) + mask)) @ v" in out
    assert "means:   softmax(scale * (q1 @ k1.T) + mask) @ v - weight * (softmax(" in out
    assert main(["patterns", "show", "guards"]) == 0
    assert capsys.readouterr().out.count("Safety: the guard is part of the meaning") == 2


def test_show_of_what_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["patterns", "show", "nothing"]) == 2
    assert capsys.readouterr().err == "Error: no pattern is called 'nothing'; `attnfuse patterns list` shows them\n"


def test_new_writes_nothing_where_a_name_is_too_long_for_a_file(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["patterns", "new", "n" * 300, "-o", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("Error: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_new_writes_a_pattern_and_a_test_that_pass(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["patterns", "new", "mine", "-o", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"mine.py", "test_mine.py"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(tmp_path)], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert "2 passed" in done.stdout, done.stdout
    assert main(["patterns", "new", "mine", "-o", str(tmp_path)]) == 2
    assert "is there already; choose another name" in capsys.readouterr().err


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("class", "class_pattern"),
        ("None", "none"),
        ("match", "match_pattern"),
        ("my-attention", "my_attention"),
        ("my.attention.py", "my_attention"),
        ("2d", "attention_2d"),
        ("Mine!", "mine"),
        ("größer als", "größer_als"),
        ("_hidden", "hidden"),
        ("softmax", "softmax_pattern"),
        ("scores", "scores_pattern"),
        ("attention", "attention_pattern"),
        ("near_miss", "near_miss_pattern"),
        ("torch", "torch_pattern"),
        ("random", "random_pattern"),
        ("print", "print_pattern"),
    ],
)
def test_new_writes_python_whatever_the_name(
    name: str, written: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["patterns", "new", "-o", str(tmp_path), "--", name]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {f"{written}.py", f"test_{written}.py"}
    capsys.readouterr()
    assert main(["patterns", "check", str(tmp_path / f"{written}.py")]) == 0
    assert capsys.readouterr().out.startswith(f"{written}: pattern, Rows and columns")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module(f"test_{written}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("!!", "is no name for a function"),
        ("", "is no name for a function"),
        ("a/b", "give the name alone, and the folder with -o"),
        ("mine", "does not exist; make it first"),
    ],
)
def test_new_refuses_what_it_cannot_write(
    name: str, message: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["patterns", "new", name, "-o", str(tmp_path / "no")]) == 2
    assert message in capsys.readouterr().err


def test_check_tells_what_was_found_and_the_nearest_miss(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = small_models.written(small_models.parsed(NEAR), tmp_path / "near.onnx")
    assert main(["patterns", "check", str(GALLERY / "softmax_one.py"), str(model)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("softmax_one: pattern, The one is the weight of a key that scores 0 and has no value.\n")
    assert "nearest miss, of softmax_one(form=plain) and softmax_one(form=shifted): Sigmoid 'plus' where Exp was expected" in out
    assert out.endswith("\nfound nothing: softmax_one\n")
    good = small_models.written(small_models.parsed(NEAR.replace("Sigmoid", "Exp")), tmp_path / "good.onnx")
    assert main(["patterns", "check", str(GALLERY / "softmax_one.py"), str(good)]) == 0
    assert "matched softmax_one(form=plain), fused MultiHeadAttention" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_check_looks_at_torch_functions(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    code = tmp_path / "mine.py"
    code.write_text(
        "import torch\nQ = torch.ones(1, 2, 3, 4)\ndef f(q=Q, k=Q, v=Q):\n    return (q @ k.mT).softmax(-1) @ v\n",
        encoding="utf-8",
    )
    assert main(["patterns", "check", str(GALLERY / "talking_heads.py"), f"{code}:f"]) == 1
    out = capsys.readouterr().out
    assert "no pattern, fused MultiHeadAttention" in out
    assert "nearest miss, of talking_heads(mixed=before): MatMul" in out
    assert main(["patterns", "check", str(GALLERY / "talking_heads.py"), f"{code}:g"]) == 2
    assert capsys.readouterr().err.endswith("has no function g\n")


def test_what_each_pattern_did_is_told_when_asked_twice(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = small_models.written(small_models.ATTENTION, tmp_path / "model.onnx")
    assert main(["explain", str(model), "-vv", "--patterns", str(GALLERY / "differential.py")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("score step scaling.multiply (pack builtin): 1 of 1 tries, ") for line in lines)
