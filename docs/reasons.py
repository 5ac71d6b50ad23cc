"""The page of reason codes, docs/reasons.md, written from the table of the library.

python docs/reasons.py
"""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

from onnx_attnfuse.report import reason_codes

ROOT = pathlib.Path(__file__).parents[1]
_COMPUTED = {"f'not-{name}'": ("not-float16", "not-float32")}
"""Codes that are put together when they are given, by the expression that does it."""
_HEAD = """\
# Reason codes

<!-- Written by `make reasons` from onnx_attnfuse/report/reason_codes.txt; do not edit. -->

Every attention that is left as it is has a reason with a stable code, and so has every faster kernel that will not run.
Codes with one cause are a family. `attnfuse explain --code NAME` prints a code or a family.
After the meaning of a code comes what to do, unless that is what the family says.
A pattern of your own may refuse with codes of its own.
"""


def codes() -> set[str]:
    """Every code that the library gives."""
    found: set[str] = set()
    for folder in ("onnx_attnfuse", "patterns/onnx_attnfuse_patterns"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for call in _calls(ast.parse(path.read_text(encoding="utf-8"))):
                found.update(_codes(call.args[0]))
    return found


def page() -> str:
    """The page, as it is written."""
    lines = [_HEAD]
    for family in reason_codes.families().values():
        lines += [f"## {family.name}", "", f"**{family.title}.** {family.meaning}", ""]
        lines += ["```text", family.example, "```", "", f"What to do: {family.remedy}", ""]
        for name, code in family.codes.items():
            own = "" if code.remedy == family.remedy else f" *{code.remedy}*"
            lines.append(f"- `{name}`: {code.meaning}{own}")
        lines.append("")
    return "\n".join(lines)


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"Reason", "Refused"} and node.args:
            yield node


def _codes(given: ast.expr) -> tuple[str, ...]:
    match given:
        case ast.Constant(value=str(code)):
            return (code,)
        case ast.IfExp(body=body, orelse=other):
            return (*_codes(body), *_codes(other))
        case ast.JoinedStr():
            return _COMPUTED[ast.unparse(given)]
        case _:
            return ()  # a reason that is handed on


if __name__ == "__main__":
    (ROOT / "docs" / "reasons.md").write_text(page(), encoding="utf-8")
