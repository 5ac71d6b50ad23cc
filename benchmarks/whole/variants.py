"""What a model is made into before it is run, by us and by others: a variant is a tool and options, in words."""

# pyright: basic, reportMissingTypeStubs=false
from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import pathlib
import re
import unittest.mock
from typing import Any

import numpy as np
import onnx

from benchmarks.harness import one_line, quietly
from benchmarks.whole.spec import Whole
from onnx_attnfuse.kernels import providers

TORCH, RUNTIME = ("eager", "compile", "reduce-overhead"), "openvino"
"""Tools of torch, and another runtime for exports; `plain` is the export, and others write models of it."""
GRAPH = " + graph"
"""The end of the name of a variant that ONNX Runtime captures as a CUDA graph."""


@dataclasses.dataclass(frozen=True)
class Written:
    """The model of a variant.

    Attributes:
        path: Where it is.
        nodes: Its nodes as text; two variants of one text are the same.
    """

    path: pathlib.Path
    nodes: str


def write(whole: Whole, label: str, source: pathlib.Path, provider: str, arch: str) -> Written:
    """Writes the model of a variant beside the export.

    Raises:
        RuntimeError: The tool failed; the message says why, and comes back from another process.
    """
    made = label.removesuffix(GRAPH)
    tool, _, choices = made.partition(" ")
    target = source.with_suffix(f".{re.sub(r'[^a-z0-9.-]+', '-', made)}.onnx") if tool != "plain" or whole.bits else source
    floats = target.with_suffix(".float.onnx") if whole.bits else target
    try:
        with quietly(), contextlib.redirect_stdout(io.StringIO()):
            if tool == "ours":
                _by_us(whole, choices, source, floats, provider, arch)
            elif tool != "plain":
                _OTHERS[tool](whole, source, floats, provider)
            if whole.bits:
                _quantised(source if tool == "plain" else floats, target, whole.bits)
    except Exception as error:  # noqa: BLE001 - a tool may fail in any way
        raise RuntimeError(one_line(error)) from None
    nodes = onnx.load(target, load_external_data=False).graph.node
    return Written(target, "".join(f"{node.op_type} {node.input} {node.output}\n" for node in nodes))


def _by_us(whole: Whole, choices: str, source: pathlib.Path, target: pathlib.Path, provider: str, arch: str) -> None:
    """Ours with options, ``name=value`` words joined by blanks; ``without=a,b`` leaves out rules that pay."""
    import onnx_attnfuse

    options: dict[str, Any] = {"ep": provider, "verify": "none", **({"arch": arch} if provider == "cuda" else {})}
    options |= {name: _value(whole, value) for name, _, value in (word.partition("=") for word in choices.split())}
    record = providers.provider(provider)
    others = {provider: dataclasses.replace(record, pays=record.pays - set(options.pop("without", "").split(",")))}
    with unittest.mock.patch.dict("onnx_attnfuse.kernels.providers._records", others):
        onnx_attnfuse.optimize(source, **options).save(target)


def _value(whole: Whole, text: str) -> Any:
    """The value of an option: `typical` is the sizes of the first case, `kept` its tokens, `roomy` a quarter more."""
    case = whole.cases[0]
    known = {"typical": {name: size for name, size in case.sizes.items() if size}, "true": True}
    known |= {"kept": sum(case.lengths), "roomy": sum(case.lengths) * 5 // 4}
    return known.get(text, text)


def _by_onnxruntime(whole: Whole, source: pathlib.Path, target: pathlib.Path, provider: str) -> None:
    """ONNX Runtime's optimizer at the level it has for the type of model, or at 0 where that fails."""
    from onnxruntime.transformers import optimizer

    _mend()
    chosen = {"num_heads": whole.num_heads, "hidden_size": whole.hidden_size, "use_gpu": provider == "cuda"}
    for level in (None, 0):
        try:
            model = optimizer.optimize_model(str(source), whole.model_type, opt_level=level, only_onnxruntime=False, **chosen)
            model.save_model_to_file(str(target), use_external_data_format=True)
        except Exception:  # noqa: PERF203 - the other level may do
            if level == 0:
                raise
        else:
            return


def _mend() -> None:
    """Lets that optimizer fuse GroupNorm in float16: it writes the bytes of float16 numbers as float32 and ends with an error."""
    Fusion = importlib.import_module("fusion_base").Fusion  # noqa: N806 - the optimizer has its folder on the path
    kept = Fusion.add_initializer

    def add_initializer(self: Any, name: str, data_type: int, dims: Any, vals: Any, raw: bool = True) -> Any:
        if isinstance(vals, np.ndarray):
            vals = vals.astype(onnx.helper.tensor_dtype_to_np_dtype(data_type))
        return kept(self, name, data_type, dims, vals, raw)

    Fusion.add_initializer = add_initializer


def _by_onnxscript(whole: Whole, source: pathlib.Path, target: pathlib.Path, provider: str) -> None:
    import onnx_ir as ir
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    del whole, provider
    ir.save(optimize_for_ort(ir.load(source))[0], target, external_data=f"{target.name}.data")


def _by_transformers(whole: Whole, source: pathlib.Path, target: pathlib.Path, provider: str) -> None:
    """What transformers does of itself in an export for ONNX Runtime."""
    import onnx_ir as ir
    from transformers.exporters.onnxruntime_fusions import fuse_for_onnxruntime

    del whole
    model = ir.load(source)
    fuse_for_onnxruntime(model, provider)
    ir.save(model, target, external_data=f"{target.name}.data")


def _quantised(source: pathlib.Path, target: pathlib.Path, bits: int) -> None:
    """The weights of products in int4 by blocks, or in int8 for activations that are quantised when they are there."""
    from onnxruntime.quantization import matmul_nbits_quantizer, quantize_dynamic

    if bits == 8:
        quantize_dynamic(source, target, op_types_to_quantize=["MatMul"])
        return
    made: Any = matmul_nbits_quantizer.MatMulNBitsQuantizer(str(source), block_size=32, is_symmetric=True, accuracy_level=4)
    made.process()
    made.model.save_model_to_file(str(target), True)


_OTHERS = {"onnxruntime": _by_onnxruntime, "onnxscript": _by_onnxscript, "transformers": _by_transformers}
