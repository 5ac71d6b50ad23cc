"""What the README shows: the session of `make demo`, and the picture of its first attention before and after.

python docs/readme.py
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
README = ROOT / "README.md"
PICTURE = ROOT / "docs" / "images" / "attention.svg"
MODEL = "models/bundled/bert__dyn18__sdpa.onnx"
COLUMNS = 100
_BLOCK = re.compile(r"(?<=^```console\n).+?(?=^```)", re.DOTALL | re.MULTILINE)
_DECIMALS = re.compile(r"-?\d+\.\d+(?:e[-+]\d+)?")
_STYLE = """
text { font: 600 12.5px system-ui, sans-serif; text-anchor: middle; fill: #1b2028 }
text + text { font-weight: 400; font-size: 11px; fill: #5d6775 }
path { fill: none; stroke: #8a94a3; stroke-width: 1.2 }
rect { fill: #f9fafb; stroke: #b9c1cc; rx: 6px }
.operand rect, .result rect { fill: #eef1f6; stroke: none; rx: 20px }
.anchor rect { stroke: #3451c6; stroke-width: 2; fill: #e9edfc }
.fused rect { fill: #3451c6; stroke: #3451c6 }
.fused text { fill: #fff }
"""


def demo() -> tuple[str, str]:
    """The session on a terminal of 100 columns, and the picture."""
    places = os.pathsep.join(str(ROOT / place) for place in (".", "patterns", "cli"))
    environment = {**os.environ, "PYTHONPATH": places, "COLUMNS": str(COLUMNS), "NO_COLOR": "1"}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "model.onnx").write_bytes((ROOT / MODEL).read_bytes())
        command = ["-m", "onnx_attnfuse_cli", "optimize", "model.onnx", "-o", "bert.onnx", "--ep", "cpu"]
        command = [sys.executable, *command, "--report", "report.html"]
        done = subprocess.run(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
        )
        drawn = _drawn((folder / "report.html").read_text(encoding="utf-8"))
    said = re.sub(r"^wrote report\.html\n", "", done.stdout, flags=re.MULTILINE)
    return f"$ attnfuse optimize {MODEL} -o bert.onnx\n{said}", drawn


def page(session: str) -> str:
    """The README with the session in it."""
    return _BLOCK.sub(lambda _: session, README.read_text(encoding="utf-8"), count=1)


def without_decimals(text: str) -> str:
    """The text without measured numbers, whose last digits differ from machine to machine."""
    return _DECIMALS.sub("#", text)


def _drawn(report: str) -> str:
    """The first attention of a report before and after; the operator is drawn beside the upper nodes, where there is room."""
    drawings = re.findall(
        r'<svg role="img" aria-label="(?:Before|After)[^"]*" viewBox="0 0 (\d+) (\d+)"[^>]*>(.+?)</svg>', report, re.DOTALL
    )
    (wide, tall, before), (wide_after, tall_after, after) = (
        (int(x), int(y), re.sub(r"<title>.*?</title>", "", text.strip())) for x, y, text in drawings[:2]
    )
    boxes = [map(int, box) for box in re.findall(r'translate\((\d+) (\d+)\)"><rect width="(\d+)"', before)]
    reach = 40 + max(x + width for x, y, width in boxes if y < tall_after)
    left, height = max(wide, reach + wide_after), max(tall, tall_after) + 40
    parts = [
        f'<text x="{middle}" y="20">{title}</text><g transform="translate({start} 30)">{content}</g>'
        for title, middle, start, content in (("Before", reach // 2, 0, before), ("After", reach + wide_after // 2, reach, after))
    ]
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left} {height}" width="{left}" height="{height}">'
    parts = [
        re.sub(r"(?:<path [^>]*>)+", lambda arrows: "".join(sorted(re.findall("<[^>]*>", arrows[0]))), part) for part in parts
    ]
    ground = f'<path d="M0 0H{left}V{height}H0z" style="fill: #fff; stroke: none"/>'
    return "\n".join([start, f"<style>{_STYLE}</style>", ground, *parts, "</svg>", ""])


def main() -> None:
    """Writes both anew; measured numbers only where anything else changed."""
    session, picture = demo()
    for path, text in ((README, page(session)), (PICTURE, picture)):
        if not path.exists() or without_decimals(path.read_text(encoding="utf-8")) != without_decimals(text):
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
