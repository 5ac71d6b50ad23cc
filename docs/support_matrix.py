"""The support matrix, docs/support.md: what each kernel takes, found by asking its conditions in the records.

python docs/support_matrix.py
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator

import onnx_ir as ir

from onnx_attnfuse.kernels import providers
from onnx_attnfuse.kernels.conditions import AttentionParams, Condition
from onnx_attnfuse.kernels.operators import by_key
from onnx_attnfuse.kernels.support import support
from onnx_attnfuse.reasons import Reason

PATH = pathlib.Path(__file__).parent / "support.md"
_ARCHS = (70, 75, 80, 86, 89, 90, 100, 120)
_SIZES = (32, 64, 128, 256, 512, 1024, 60)
_TYPES = {"f32": ir.DataType.FLOAT, "f16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
_MASKS = ("bias", "lengths", "ranges")
_GROUPED = ("GroupQueryAttention", "onnx.Attention")
"""The operators that have an attribute for the number of heads of keys; for others these are repeated."""
_TEXT = """# Support matrix

<!-- Written by `make support` from the records in kernels/; do not edit. -->

This page lists the attention that each kernel of ONNX Runtime supports, in the order in which ONNX Runtime tries them.
MATH takes everything else. `attnfuse kernels MODEL` names the kernel for each attention of a model.

{tables}

- **Type**: float32, float16, bfloat16. A type in brackets needs a long sequence, of 256 to 513 tokens.
- **Mask**: a bias is any additive mask, lengths are padding on the right, ranges padding on both sides. Any: all of these.
- **Heads**: the largest head size, and the number that it must be a multiple of. **Causal** is an attribute, without a mask.
- **Grouped**: heads share keys and values. For other operators attnfuse repeats keys and values.
- **Window** and **cap** (soft cap) are attributes. Other operators take a window as a bias, and no cap.
- ONNX Runtime does not document which kernels are deterministic, so this page cannot list them.

Conditions come from the source of ONNX Runtime 1.31, and from measurements on CPUs and an H200.
[Other execution providers](providers.md) have their own pages.
"""


def page() -> str:
    """The page."""
    return _TEXT.format(tables="\n\n".join(_table(name) for name in ("cpu", "cuda")))


def _table(name: str) -> str:
    architecture = ["from"] if name == "cuda" else []
    head = ("operator and kernel", *architecture, "type", "mask", "causal", "heads", "grouped", "window", "cap")
    rows = [head, ("---",) * len(head)]
    record = next(record for record in providers.every() if record.name == name)
    for key, info in sorted(by_key().items()):
        found = support(key, record) if info.kind == "attention" and info.target is not None else None
        if found is None or isinstance(found, Reason):
            continue
        rows.append((f"**{key}**", *[""] * (len(head) - 1)))
        for kernel, conditions in found.kernels:
            wrong = (found.is_wrong, found.math_fails if kernel == "MATH" else None)
            checks = (*conditions, *filter(None, wrong))
            rows.append((kernel, *_cells(key, checks, found.written, found.masks, found.causal, name == "cuda")))
    title = {"cpu": "## CPU", "cuda": "## CUDA"}[name]
    return "\n".join([title, "", *(f"| {' | '.join(row)} |" for row in rows)])


def _cells(
    key: str, conditions: tuple[Condition, ...], types: frozenset[ir.DataType], masks: frozenset[str], causal: bool, on_gpu: bool
) -> Iterator[str]:
    """The cells of a kernel: it is asked about an attention that it takes, changed in one thing at a time."""

    def takes(params: AttentionParams) -> bool:
        return not any(isinstance(condition(params), Reason) for condition in conditions)

    plain = AttentionParams(ir.DataType.FLOAT16, 1, 8, 512, 512, 64, 64, "none", op=key)
    tried = (
        dataclasses.replace(plain, arch=arch, dtype=dtype, rows=rows, columns=rows)
        for rows in (512, 1024, 256)
        for dtype in (ir.DataType.FLOAT16, ir.DataType.FLOAT)
        for arch in _ARCHS
    )
    base = next(filter(takes, tried))

    def with_any(**changes: object) -> bool:
        return takes(dataclasses.replace(base, **changes))

    if on_gpu:
        archs = [arch for arch in _ARCHS if with_any(arch=arch)]
        assert archs == [arch for arch in _ARCHS if archs[0] <= arch <= archs[-1]]
        yield f"sm{archs[0]}" if archs[-1] == _ARCHS[-1] else f"sm{archs[0]} to sm{archs[-1]}"
    yield ", ".join(
        name if with_any(dtype=dtype, rows=64, columns=64) or not with_any(dtype=dtype) else f"({name})"
        for name, dtype in _TYPES.items()
        if dtype in types and (with_any(dtype=dtype) or with_any(dtype=dtype, rows=64, columns=64))
    )
    forms = [form for form in _MASKS if form in masks and with_any(mask=form)]
    yield "any" if len(forms) == len(_MASKS) else ", ".join(forms) or "none"
    yield "yes" if causal and with_any(causal=True) else "no"
    sizes = [size for size in _SIZES if with_any(head_size=size, v_head_size=size)]
    yield "any" if set(sizes) == set(_SIZES) else f"{max(sizes)}, × 8" if 60 not in sizes else f"{max(sizes)}"
    yield "yes" if key in _GROUPED and with_any(grouped=True) else "no"
    yield "yes" if key == "GroupQueryAttention" and with_any(windowed=True) else "no"
    yield "yes" if key in _GROUPED and with_any(capped=True) else "no"


if __name__ == "__main__":
    PATH.write_text(page(), encoding="utf-8")
