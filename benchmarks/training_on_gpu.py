"""The calls of PyTorch that training on a GPU is planned with, run as they are planned, against attention in float64.

    PYTHONPATH=. OUT=results python benchmarks/training_on_gpu.py

It needs PyTorch and this package, not ONNX Runtime. Kernels, what is done around them for rows without a key, and the order of
their arguments are those of `onnx_attnfuse.training`; where PyTorch is another version, operators that are called otherwise are
named.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable
from unittest import mock

import onnx_ir as ir
import torch

from benchmarks.eager_builder import DTYPES, EagerBuilder
from onnx_attnfuse.attention.axes.factors import new_axes
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.training.fully_masked_rows import levelled
from onnx_attnfuse.training.kernels import Demand, TrainingDevice
from onnx_attnfuse.training.ortmodule import kernels
from onnx_attnfuse.training.ortmodule.kernels import KERNELS, AtenKernel, BackwardCall, KernelOperands
from onnx_attnfuse.training.ortmodule.row_corrections import AddedMaskCorrection, RowCorrection

BATCH, HEADS, SIZE, SCALE = 2, 4, 64, 0.11
LOWEST = torch.finfo(torch.float32).min
TOLERANCES = {ir.DataType.FLOAT: 3e-3, ir.DataType.FLOAT16: 5e-3, ir.DataType.BFLOAT16: 4e-2}
"""Of the largest value; float32 may be computed in TF32 on a GPU."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """What is masked, added and dropped."""

    name: str
    bias: Callable[[int, int], torch.Tensor] | None = None
    causal: bool = False
    dropout: float = 0.0
    trained: bool = False
    dead: bool = False
    """Rows without a key occur, and are taken care of."""


def _padding(rows: int, keys: int, *, dead: bool = False) -> torch.Tensor:
    mask = torch.zeros(BATCH, 1, 1, keys)
    mask[0, ..., keys // 2 :] = LOWEST
    if dead:
        mask[1] = LOWEST
    return mask


def _rows(rows: int, keys: int) -> torch.Tensor:
    mask = torch.zeros(BATCH, 1, rows, keys).masked_fill(torch.ones(rows, keys).tril() == 0, LOWEST)
    mask[0, :, 3] = LOWEST
    return mask


def _numbers(rows: int, keys: int) -> torch.Tensor:
    return torch.randn(BATCH, HEADS, rows, keys, generator=torch.Generator().manual_seed(1))


KINDS = (
    Kind("no mask"),
    Kind("causal", causal=True),
    Kind("padding", _padding),
    Kind("padding throughout", lambda rows, keys: _padding(rows, keys, dead=True), dead=True),
    Kind("causal and padding, rows without a key", _rows, dead=True),
    Kind("numbers added", _numbers),
    Kind("numbers added, trained", _numbers, trained=True),
    Kind("dropout 0.2", dropout=0.2),
    Kind("dropout 0.2, padding", _padding, dropout=0.2),
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How far results are from float64, relative to the largest value."""

    words: str
    good: bool = True


def truth(operands: list[torch.Tensor], gradient: torch.Tensor, kind: Kind, bias: torch.Tensor | None) -> list[torch.Tensor]:
    """Result and gradients in float64; rows that are masked throughout have equal weights, as float32 gives them."""
    query, key, value = (item.double().requires_grad_() for item in operands)
    added = None if bias is None else bias.double().requires_grad_()
    scores = query @ key.transpose(-1, -2) * SCALE + (0 if added is None else added)
    if kind.causal:
        scores = scores.masked_fill(torch.ones_like(scores).tril() == 0, float("-inf"))
    result = scores.softmax(-1) @ value
    result.backward(gradient.double())
    leaves = [query, key, value, *([added] if kind.trained and added is not None else [])]
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def planned(
    builder: EagerBuilder, kernel: AtenKernel, kind: Kind, given: list[torch.Tensor], bias: torch.Tensor | None
) -> list[torch.Tensor]:
    """Result and gradients as they are planned; everything as (b, n, s, h)."""
    swap = kernel.layout == "bsnh"
    *operands, gradient = (item.transpose(1, 2).contiguous() if swap else item for item in given)
    dtype, correction, added = builder.facts.dtype(operands[0]), RowCorrection(), bias
    if bias is not None and kind.dead:
        rows = levelled(builder, IndexedValue(bias, new_axes(list(bias.shape))), "added")
        dead, lost = (builder.transpose(test, [0, 2, 1, 3]) if swap else test for test in (rows.fully_masked, rows.all_infinite))
        rows = dataclasses.replace(rows, bias=dataclasses.replace(rows.bias, value=rows.bias.value.to(operands[0].dtype)))
        correction, added = AddedMaskCorrection(builder, dtype, rows, dead, lost, 1 if swap else 2), rows.bias.value
    elif bias is not None:
        added = bias.to(operands[0].dtype)
    handed = KernelOperands(correction.query(operands[0]), operands[1], operands[2], added, kind.causal, kind.dropout, SCALE)
    saved = kernel.forward(builder, handed, "forward")
    call = BackwardCall(kernel, handed, saved, correction.gradient(gradient), "backward", kind.trained)
    found = correction.gradients(kernel.backward(builder, call), call, operands[0], keys=True)
    results = [correction.result(saved["output"]), found.query, found.key, found.value]
    results = [item.transpose(1, 2) if swap else item for item in results]
    return [*results, found.bias] if kind.trained else results


def outcome(kernel: AtenKernel, kind: Kind, dtype: ir.DataType, length: int, device: TrainingDevice) -> Outcome | None:
    """One cell of the table; None where the kernel is not planned for that."""
    demand = Demand(
        dtype,
        SIZE,
        SIZE,
        bias=kind.bias is not None,
        causal=kind.causal,
        square=True,
        dropout=kind.dropout,
        bias_gradient=kind.trained,
    )
    here = dataclasses.replace(device, torch=(2, 4))
    if kernel.refuse(demand, here) is not None:
        return None
    torch.manual_seed(0)
    given = [torch.randn(BATCH, HEADS, length, SIZE, device=device.kind).to(DTYPES[dtype]) for _ in range(4)]
    bias = None if kind.bias is None else kind.bias(length, length).to(device.kind)
    builder = EagerBuilder(device.kind)
    try:
        with mock.patch.object(kernels, "emit_call", lambda building, call, hint: building.run(call, hint)):
            found = planned(builder, kernel, kind, given, bias)
    except (LookupError, RuntimeError) as error:
        return Outcome(str(error).splitlines()[0][:80], good=isinstance(error, LookupError))
    if kind.dropout:
        pairs = (found[0].double() * given[3].double()).sum(), (found[3].double() * given[2].double()).sum()
        error = float((pairs[0] - pairs[1]).abs() / (found[0].double() * given[3].double()).abs().sum())
        return Outcome(f"⟨O, dO⟩ = ⟨V, dV⟩ to {error:.0e}", error < TOLERANCES[dtype])
    wanted = truth(given[:3], given[3], kind, bias)
    errors = [float((one.double() - two).abs().max() / two.abs().max()) for one, two in zip(found, wanted, strict=True)]
    return Outcome(f"{errors[0]:.0e}, {max(errors[1:]):.0e}", max(errors) < TOLERANCES[dtype])


def device_here() -> TrainingDevice:
    """The GPU, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return TrainingDevice("cpu")
    major, minor = torch.cuda.get_device_capability()
    return TrainingDevice("cuda", major * 10 + minor)


def main() -> int:
    device = device_here()
    name = torch.cuda.get_device_name() if device.kind == "cuda" else "CPU"
    types = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    lines, good = ["| kernel | mask | type | 128 keys | 77 keys |", "|---|---|---|---|---|"], True
    for kernel in KERNELS:
        for kind in KINDS:
            for dtype in types:
                cells = [outcome(kernel, kind, dtype, length, device) for length in (128, 77)]
                if any(cells):
                    good = good and all(cell is None or cell.good for cell in cells)
                    shown = ["-" if cell is None else cell.words + ("" if cell.good else " **wrong**") for cell in cells]
                    lines.append(f"| {kernel.name} | {kind.name} | {dtype.name.lower()} | {shown[0]} | {shown[1]} |")
    text = [
        "# The kernels of training, as they are called",
        "",
        f"{name}, torch {torch.__version__}. Largest error of the result, and of the gradients, against float64, relative to the",
        "largest value. With dropout: whether forward and backward drop the same, by an identity that holds then only.",
        "Lengths of 77 are no multiple of 8.",
        "",
        *lines,
        "",
        "All right." if good else "**Something is wrong.**",
    ]
    out = pathlib.Path(os.environ.get("OUT", "."))
    out.mkdir(parents=True, exist_ok=True)
    (out / f"training_{device.kind}.md").write_text("\n".join(text) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
