"""Text of a model in a line for a terminal or a log: a name may hold line breaks and escape sequences."""

from __future__ import annotations

import unicodedata


def one_line(text: str) -> str:
    r"""A text in one line, control characters escaped as Python writes them.

    one_line("softmax\n::error::all is well")   # "softmax\\n::error::all is well"

    Line and paragraph separators and what changes the direction of writing count as control characters.
    """
    return text if text.isprintable() else "".join(map(_shown, text))


def _shown(letter: str) -> str:
    is_control = unicodedata.category(letter) in {"Cc", "Cf", "Zl", "Zp", "Cs"}
    return letter.encode("unicode_escape").decode("ascii") if is_control else letter
