"""The calls of PyTorch that training on a GPU is planned with, run as they are planned, against attention in float64.

    python -m benchmarks.training_on_gpu [--provider cpu] [--to PAGE]

Kernels, what is done around them for rows without a key, and the order of
their arguments are those of `onnx_attnfuse.training`; where PyTorch is another version, operators that are called otherwise are
named.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from benchmarks.harness import WRONG, Benchmark, Cells, Row, Setting, command
from onnx_attnfuse.attention.axes.factors import new_axes
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.training.fully_masked_rows import levelled
from onnx_attnfuse.training.kernels import Demand, TrainingDevice
from onnx_attnfuse.training.ortmodule.kernels import KERNELS, AtenKernel, BackwardCall, KernelOperands
from onnx_attnfuse.training.ortmodule.products import ATEN
from onnx_attnfuse.training.ortmodule.row_corrections import AddedMaskCorrection, RowCorrection

BATCH, HEADS, SIZE, SCALE = 2, 4, 64, 0.11
Array = np.ndarray[Any, Any]
DTYPES = {ir.DataType.FLOAT: torch.float32, ir.DataType.FLOAT16: torch.float16, ir.DataType.BFLOAT16: torch.bfloat16}
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
    kernel: AtenKernel, kind: Kind, dtype: ir.DataType, given: list[torch.Tensor], bias: torch.Tensor | None
) -> list[torch.Tensor]:
    """Result and gradients as they are planned; everything as (b, n, s, h)."""
    swap = kernel.layout == "bsnh"
    feeds = {name: item.transpose(1, 2) if swap else item for name, item in zip(("q", "k", "v", "dy"), given, strict=True)}
    feeds |= {} if bias is None else {"bias": bias}
    values = {name: ir.val(name, ir.DataType.FLOAT if name == "bias" else dtype, item.shape) for name, item in feeds.items()}
    last = ir.node("Identity", [values["q"]])
    graph = ir.Graph(values.values(), [], nodes=[last], opset_imports={"": 18, ATEN: 1}, name="kernel")
    builder, correction, added = Builder(graph, Facts(graph), 18, set(values)), RowCorrection(), values.get("bias")
    builder.at(last)
    if bias is not None and added is not None and kind.dead:
        rows = levelled(builder, IndexedValue(added, new_axes(list(bias.shape))), "added", 1.0)
        dead, lost = (builder.transpose(test, [0, 2, 1, 3]) if swap else test for test in (rows.fully_masked, rows.all_infinite))
        added = builder.cast(rows.bias.value, dtype)
        rows = dataclasses.replace(rows, bias=dataclasses.replace(rows.bias, value=added))
        correction = AddedMaskCorrection(builder, dtype, rows, dead, lost, 1 if swap else 2)
    elif added is not None:
        added = builder.cast(added, dtype)
    query, key, value, gradient = (values[name] for name in ("q", "k", "v", "dy"))
    handed = KernelOperands(correction.query(query), key, value, added, kind.causal, kind.dropout, SCALE)
    saved = kernel.forward(builder, handed, "forward")
    call = BackwardCall(kernel, handed, saved, correction.gradient(gradient), "backward", kind.trained)
    found = correction.gradients(kernel.backward(builder, call), call, query, keys=True)
    wanted = [correction.result(saved["output"]), found.query, found.key, found.value]
    graph.outputs.extend([*wanted, *([found.bias] if found.bias is not None and kind.trained else [])])
    results = ran(ir.Model(graph, ir_version=10), feeds, given[0].device)
    return [item.transpose(1, 2) if swap and place < len(wanted) else item for place, item in enumerate(results)]


def ran(model: ir.Model, feeds: Mapping[str, torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """The outputs of a model by onnx's own evaluator, and calls of PyTorch in it on the device.

    Raises:
        LookupError: PyTorch has no such operator, or another signature.
    """
    kept = dict[int, tuple[Array, Any]]()

    class ATen(OpRun):
        op_domain = ATEN

        def _run(self, *values: Array | None, operator: str, **places: Any) -> tuple[Array, ...]:
            overload = getattr(torch.ops.aten, operator, None)
            schema = None if overload is None else overload.default._schema
            if overload is None or schema is None or len(schema.arguments) != len(values):
                raise LookupError(f"torch {torch.__version__} has another {operator}")
            items = [None if item is None else kept[id(item)][1] if id(item) in kept else _argument(item) for item in values]
            pairs = list(zip(schema.arguments, items, strict=True))
            named = {slot.name: item for slot, item in pairs if slot.kwarg_only}
            found = overload.default(*[item for slot, item in pairs if not slot.kwarg_only], **named)
            arrays = tuple(map(_array, found))
            kept.update({id(array): (array, item) for array, item in zip(arrays, found, strict=True)})
            return arrays

    def _argument(array: Array) -> Any:
        return array.item() if array.ndim == 0 else _tensor(array).to(device)

    evaluator = ReferenceEvaluator(ir.to_proto(model), new_ops=[ATen])
    with np.errstate(all="ignore"):
        found = evaluator.run(None, {name: _array(item) for name, item in feeds.items()})
    return [_tensor(array).to(device) for array in found]


def _array(item: Any) -> Array:
    """A tensor, a number, or nothing, as an array."""
    if not isinstance(item, torch.Tensor):
        return np.empty(0, np.float32) if item is None else np.asarray(item)
    item = item.detach().cpu().contiguous()
    return item.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if item.dtype == torch.bfloat16 else item.numpy()


def _tensor(array: Array) -> torch.Tensor:
    array = np.ascontiguousarray(array)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if array.dtype.kind == "V" else torch.from_numpy(array)


def is_planned(kernel: AtenKernel, kind: Kind, dtype: ir.DataType, device: TrainingDevice) -> bool:
    """Whether a kernel is planned for this, by the PyTorch that it is written for."""
    more = {"bias": kind.bias is not None, "causal": kind.causal, "dropout": kind.dropout, "bias_gradient": kind.trained}
    demand = Demand(dtype, SIZE, SIZE, square=True, **more)  # type: ignore[arg-type]
    return kernel.refuse(demand, dataclasses.replace(device, torch=(2, 4))) is None


def outcome(kernel: AtenKernel, kind: Kind, dtype: ir.DataType, length: int, device: str) -> str:
    """How far results are from float64, relative to the largest value."""
    torch.manual_seed(0)
    given = [torch.randn(BATCH, HEADS, length, SIZE, device=device).to(DTYPES[dtype]) for _ in range(4)]
    bias = None if kind.bias is None else kind.bias(length, length).to(device)
    try:
        found = planned(kernel, kind, dtype, given, bias)
    except (LookupError, RuntimeError) as error:
        return f"{'' if isinstance(error, LookupError) else WRONG} {str(error).splitlines()[0][:80]}".strip()
    if kind.dropout:
        pairs = (found[0].double() * given[3].double()).sum(), (found[3].double() * given[2].double()).sum()
        errors = [float((pairs[0] - pairs[1]).abs() / (found[0].double() * given[3].double()).abs().sum())]
        words = f"⟨O, dO⟩ = ⟨V, dV⟩ to {errors[0]:.0e}"
    else:
        wanted = truth(given[:3], given[3], kind, bias)
        errors = [float((one.double() - two).abs().max() / two.abs().max()) for one, two in zip(found, wanted, strict=True)]
        words = f"{errors[0]:.0e}, {max(errors[1:]):.0e}"
    return words if max(errors) < TOLERANCES[dtype] else f"{WRONG} {words}"


def measure(case: tuple[AtenKernel, Kind, ir.DataType], setting: Setting) -> Cells:
    """A column for each length."""
    return {f"{length} keys": outcome(*case, length, setting.provider) for length in (128, 77)}


def rows(setting: Setting) -> Iterator[Row]:
    """A row for each kernel, mask and type that is planned."""
    major, minor = torch.cuda.get_device_capability() if setting.cuda else (0, 0)
    device = TrainingDevice("cuda", major * 10 + minor) if setting.cuda else TrainingDevice("cpu")
    for case in itertools.product(KERNELS, KINDS, TOLERANCES):
        if is_planned(*case, device):
            kernel, kind, dtype = case
            yield Row((kernel.name, kind.name, dtype.name.lower()), functools.partial(measure, case))


NOTE = """\
Largest error of the result, and of the gradients, against float64, relative to the largest value. With dropout: whether forward
and backward drop the same, by an identity that holds then only. Lengths of 77 are no multiple of 8."""
BENCHMARK = Benchmark("The kernels of training, as they are called", rows, NOTE, ("kernel", "mask", "type"))
main = command("training_on_gpu", BENCHMARK)

if __name__ == "__main__":
    main()
