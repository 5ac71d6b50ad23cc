"""Golden cases: small graphs as ONNX text with what must become of each attention in them.

A file holds cases that differ in the one thing that matters. Each case is

    # What it shows, in a line or two.
    # flags: keep_outputs, by_reference      only where there are any
    <the model in ONNX text>
    # ops: MatMul=0 Transpose=1              operators that are left, only where they matter
    # expect: fused MultiHeadAttention num_heads=2 scale=0.5
    # expect: skipped soft-fill

with one `expect` line for each Softmax or attention node, in the order of the report. After `fused` come the operator and the
attributes it must have, `bias` or `no-bias` for whether it gets an additive mask; after any other status the code of the reason,
where that is not the status itself.

    CASES = cases_in("my_attention.onnxtxt")

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_case(case):
        assert_case(case, my_pattern)
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
from collections.abc import Iterator

from onnx_attnfuse.errors import OptionError


@dataclasses.dataclass(frozen=True)
class Expectation:
    """The expected report on one attention."""

    status: str
    what: str | None
    """The operator it is fused into, or the codes of the reasons."""
    attributes: dict[str, float]
    bias: bool | None


@dataclasses.dataclass(frozen=True)
class Case:
    """One graph."""

    name: str
    flags: frozenset[str]
    text: str
    ops: dict[str, int]
    expected: tuple[Expectation, ...]


def cases_in(path: str | os.PathLike[str]) -> list[Case]:
    """Every case of a file, or of all `.onnxtxt` files of a folder.

    Raises:
        OptionError: There is none, or a case expects nothing.
    """
    place = pathlib.Path(path)
    files = sorted(place.glob("*.onnxtxt")) if place.is_dir() else [place]
    try:
        found = [case for file in files for case in _cases(file)]
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror}; give a file of cases or a folder of them") from error
    if not found:
        raise OptionError(f"{path} holds no case; write ONNX text and an `# expect:` line")
    return found


def _cases(path: pathlib.Path) -> Iterator[Case]:
    heads: list[str] = []
    graph: list[str] = []
    tails: list[str] = []
    count = 0
    for line in [*path.read_text(encoding="utf-8").splitlines(), "# end"]:
        is_comment = line.startswith("#")
        if is_comment and not graph:
            heads.append(line)
        elif not is_comment and not tails:
            graph += [line] if line.strip() or graph else []
        elif re.match(r"# (ops|expect):", line):
            tails.append(line)
        elif is_comment:
            count += 1
            yield _case(f"{path.stem}-{count}", heads, graph, tails)
            heads, graph, tails = [line], [], []


def _case(name: str, heads: list[str], graph: list[str], tails: list[str]) -> Case:
    flags = frozenset(flag.strip() for line in heads if line.startswith("# flags:") for flag in line[8:].split(","))
    ops = dict(item.split("=") for line in tails if line.startswith("# ops:") for item in line[6:].split())
    expected = tuple(_expectation(line[9:].split()) for line in tails if line.startswith("# expect:"))
    if not expected:
        raise OptionError(f"the case {name} expects nothing; write an `# expect:` line for each Softmax")
    return Case(name, flags, "\n".join(graph), {op: int(number) for op, number in ops.items()}, expected)


def _expectation(words: list[str]) -> Expectation:
    status, *rest = words
    plain = [word for word in rest if "=" not in word and word not in {"bias", "no-bias"}]
    attributes = {name: float(value) for name, _, value in (word.partition("=") for word in rest if "=" in word)}
    bias = True if "bias" in rest else False if "no-bias" in rest else None
    return Expectation(status, " ".join(plain) or None, attributes, bias)
