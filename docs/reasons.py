"""The index of reason codes: collected from the code, explained by the table of the command, written to docs/reasons.md.

python docs/reasons.py
"""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

from onnx_attnfuse_cli import reason_codes

ROOT = pathlib.Path(__file__).parents[1]
_COMPUTED = {"f'not-{name}'": ("not-float16", "not-float32")}
"""Codes that are put together when they are given, by the expression that does it."""
_HEAD = """\
# Reason codes

<!-- Written by `make reasons` from the code and from cli/onnx_attnfuse_cli/reason_codes.txt; do not edit. -->

Every attention that is left as it is has a reason with a stable code, and so has every faster kernel that will not run.
`attnfuse explain --code CODE` prints what stands here. A pattern of your own may refuse with codes of its own.
"""


def codes() -> dict[str, set[str]]:
    """Every code that the library gives, with the messages that are written beside it."""
    found: dict[str, set[str]] = {}
    for folder in ("onnx_attnfuse", "patterns/onnx_attnfuse_patterns"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for call in _calls(tree):
                for code in _codes(call.args[0]):
                    found.setdefault(code, set()).update(_message(_meant(call.args[1], tree)) if len(call.args) > 1 else ())
    return found


def page() -> str:
    """The page, as it is written."""
    given, entries = codes(), reason_codes.entries()
    lines = [_HEAD]
    for title, text in reason_codes.chapters().items():
        lines += [f"## {title}", ""] + ([text, ""] if text else [])
        for code in sorted(code for code, entry in entries.items() if entry.chapter == title):
            messages = "; ".join(f"*{message}*" for message in sorted(given.get(code, ())))
            lines += [f"### {code}", "", entries[code].meaning, ""]
            lines += [f"- Message: {messages}"] if messages else []
            lines += [f"- What to do: {entries[code].remedy}", ""]
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


def _meant(given: ast.expr, tree: ast.AST) -> ast.expr:
    """What a message is that was given a name first: the last thing before that had the name."""
    if not isinstance(given, ast.Name):
        return given
    named = [node for node in ast.walk(tree) if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == given.id]
    before = [node for node in named if node.lineno < given.lineno]
    return max(before, key=lambda node: node.lineno).value if before else given


def _message(given: ast.expr) -> tuple[str, ...]:
    """A message as written, with dots for what is filled in; nothing if it is made elsewhere."""
    match given:
        case ast.Constant(value=str(text)):
            return (text,)
        case ast.JoinedStr(values=parts):
            text = "".join(part.value if isinstance(part, ast.Constant) else "…" for part in parts)
            return (text,) if len(text.replace("…", "").split()) > 1 else ()
        case _:
            return ()


if __name__ == "__main__":
    (ROOT / "docs" / "reasons.md").write_text(page(), encoding="utf-8")
