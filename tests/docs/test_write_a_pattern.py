"""`docs/write-a-pattern.md` does what it says: its files are written and its commands run as they stand there."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

from onnx_attnfuse import optimize
from onnx_attnfuse.testing import as_model, assert_fuses
from onnx_attnfuse_cli.main import main

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "write-a-pattern.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
SAID = re.findall(r"```\n(my_model\.py:attention\n.*?)```", PAGE, re.DOTALL)


def checked(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What is said of the function, without the line on the pattern."""
    main(["patterns", "check", str(folder / "one_more.py"), f"{folder / 'my_model.py'}:attention"])
    return capsys.readouterr().out.replace(f"{folder}/", "").partition("\n\n")[2]


@pytest.mark.exhaustive
def test_a_new_user_gets_there(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert set(FILES) == {"my_model.py", "one_more.py", "test_one_more.py", "gated.py"}
    assert main(["patterns", "new", "one_more", "-o", str(tmp_path)]) == 0
    capsys.readouterr()
    (tmp_path / "my_model.py").write_text(FILES["my_model.py"], encoding="utf-8")
    assert checked(tmp_path, capsys) == SAID[0]
    for name, content in FILES.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    assert checked(tmp_path, capsys) == SAID[1]
    command = [sys.executable, "-m", "pytest", "-q", "test_one_more.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert "2 passed" in done.stdout, done.stdout


GATED = """<ir_version: 10, opset_import: ["" : 18]>
g (float[b, n, s, 8] q, float[b, n, 8, t] k, float[b, n, t, 6] v, float[b, 1, {along}] gate) => (float[b, n, s, 6] out)
<float one = {{1}}, int64[1] last = {{-1}}>
{{
    scores = MatMul(q, k)
    e = Exp(scores)
    total = ReduceSum<keepdims = 1>(e, last)
    more = Add(one, total)
    w = Div(e, more)
    weights = {weights}
    out = MatMul(weights, v)
}}"""


@pytest.mark.parametrize(
    ("weights", "along", "pattern"),
    [
        ("Mul(gate, w)", "s, 1", "gated(gate=given)"),
        ("Identity(w)", "s, 1", "gated(gate=none)"),
        ("Mul(w, gate)", "1, t", None),
        ("Add(w, gate)", "s, 1", None),
    ],
)
def test_an_operand_that_may_be_missing(weights: str, along: str, pattern: str | None, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "gated.py"
    path.write_text(FILES["gated.py"], encoding="utf-8")
    model = GATED.format(weights=weights, along=along)
    if pattern is None:
        assert all(site.pattern is None for site in optimize(as_model(model), patterns=(path,), evidence=tmp_path).report.sites)
    else:
        (site,) = assert_fuses(model, path).report.sites
        assert site.pattern == pattern
