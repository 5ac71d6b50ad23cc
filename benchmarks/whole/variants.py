"""What a model is made into before it is run, by us and by others."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import io
import json
import pathlib
import re
import time
from typing import Any

import onnx

from benchmarks.harness import quietly
from benchmarks.whole.spec import Spec

ONNX = ("plain", "onnxruntime", "onnxscript", "ours")
"""Run by ONNX Runtime."""
TORCH = ("eager", "compile", "reduce-overhead")
"""Run by torch."""
GRAPH = " + graph"
"""What the name of a variant ends with that runs as a CUDA graph of ONNX Runtime's."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """One column of the table.

    Attributes:
        tool: One of `ONNX` or `TORCH`.
        choices: Options of ours, as ``name=value`` words joined by blanks; empty for the defaults.
        graph: Whether ONNX Runtime is to capture the run as a CUDA graph.
    """

    tool: str
    choices: str = ""
    graph: bool = False

    @property
    def label(self) -> str:
        """Its name in results.

        >>> Variant("ours", "padding=exact", graph=True).label
        'ours padding=exact + graph'
        """
        return f"{self.tool} {self.choices}".strip() + (GRAPH if self.graph else "")

    def path(self, folder: pathlib.Path, name: str) -> pathlib.Path:
        """Where the model is that it runs."""
        made = word(f"{self.tool} {self.choices}")
        return folder / (f"{name}.onnx" if self.tool == "plain" else f"{name}.{made}.onnx")


def word(text: str) -> str:
    """A text as part of a file's name.

    >>> word("decode 1x1 at 512, padded")
    'decode-1x1-at-512-padded'
    """
    return re.sub(r"[^\w.-]+", "-", text.strip())


def read(label: str) -> Variant:
    """The variant of a label."""
    words, _, rest = label.removesuffix(GRAPH).partition(" ")
    if words not in (*ONNX, *TORCH):
        raise ValueError(f"there is no variant {label!r}; take one of {', '.join((*ONNX, *TORCH))}")
    return Variant(words, rest, graph=label.endswith(GRAPH))


def make(spec: Spec, variant: Variant, folder: pathlib.Path, provider: str, arch: str) -> dict[str, Any]:
    """Writes the model of a variant, unless it is there; returns what is known of it, also beside it as JSON."""
    source, target = Variant("plain").path(folder, spec.name), variant.path(folder, spec.name)
    notes = target.with_suffix(".made.json")
    if notes.exists():
        return json.loads(notes.read_text())
    start = time.perf_counter()
    more: dict[str, Any] = {}
    with quietly(), contextlib.redirect_stdout(io.StringIO()):
        match variant.tool:
            case "onnxruntime":
                more = _by_onnxruntime(spec, source, target, provider)
            case "onnxscript":
                more = _by_onnxscript(source, target)
            case "ours":
                more = _by_us(spec, variant, source, target, provider, arch)
            case _:
                pass
    found = {"seconds": round(time.perf_counter() - start, 1), "operators": operators(target), **more}
    found["work"] = works(spec, target)
    notes.write_text(json.dumps(found))
    return found


def works(spec: Spec, path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """The work of one run of a model, by case; of steps in a row the first."""
    from onnx_attnfuse.bench.roofline import work
    from onnx_attnfuse.graph import io as models

    model = models.load(path)
    shapes = {case.label: {port.name: port.at(case.sizes) for port in spec.inputs} for case in spec.cases}
    return {label: dataclasses.asdict(work(model, given)) for label, given in shapes.items()}


def operators(path: pathlib.Path) -> dict[str, int]:
    """How often each operator stands in a model, branches included, the most frequent first."""

    def names(graph: onnx.GraphProto) -> list[str]:
        inner = [name for node in graph.node for attribute in node.attribute for name in names(attribute.g)]
        return [node.op_type for node in graph.node] + inner

    return dict(collections.Counter(names(onnx.load(path, load_external_data=False).graph)).most_common())


def _by_onnxruntime(spec: Spec, source: pathlib.Path, target: pathlib.Path, provider: str) -> dict[str, Any]:
    """ONNX Runtime's optimizer at the level it has for the type of model, or at 0 where that fails."""
    from onnxruntime.transformers import optimizer

    _mend()
    failed: list[str] = []
    for level in (None, 0):
        try:
            model = optimizer.optimize_model(
                str(source),
                spec.model_type,
                num_heads=spec.num_heads,
                hidden_size=spec.hidden_size,
                opt_level=level,
                use_gpu=provider == "cuda",
                only_onnxruntime=False,
            )
            model.save_model_to_file(str(target), use_external_data_format=True)
        except Exception as error:  # noqa: BLE001, PERF203 - the other level may do
            failed.append(" ".join(str(error).split())[:200])
        else:
            return {"level": "default" if level is None else level, "failed": failed}
    raise RuntimeError("; ".join(failed))


def _mend() -> None:
    """Lets that optimizer fuse GroupNorm in float16: it writes the bytes of float16 numbers as float32 and ends with an error."""
    import importlib

    import numpy as np

    Fusion = importlib.import_module("fusion_base").Fusion  # noqa: N806 - the optimizer has its folder on the path
    kept = Fusion.add_initializer

    def add_initializer(self: Any, name: str, data_type: int, dims: Any, vals: Any, raw: bool = True) -> Any:
        if isinstance(vals, np.ndarray):
            vals = vals.astype(onnx.helper.tensor_dtype_to_np_dtype(data_type))
        return kept(self, name, data_type, dims, vals, raw)

    Fusion.add_initializer = add_initializer


def _by_onnxscript(source: pathlib.Path, target: pathlib.Path) -> dict[str, Any]:
    import onnx_ir as ir
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    model, counts = optimize_for_ort(ir.load(source))
    ir.save(model, target, external_data=f"{target.name}.data")
    return {"fusions": {name: count for name, count in counts.items() if count}}


def _by_us(spec: Spec, variant: Variant, source: pathlib.Path, target: pathlib.Path, provider: str, arch: str) -> dict[str, Any]:
    import onnx_attnfuse

    choices: dict[str, Any] = {"ep": provider, "verify": "none", **({"arch": arch} if arch else {})}
    for word in variant.choices.split():
        name, _, value = word.partition("=")
        choices[name] = _value(spec, value)
    result = onnx_attnfuse.optimize(source, **choices)
    result.save(target)
    sites = collections.Counter(
        f"{site.status} {site.kernel.forecast if site.kernel else ''}".strip() for site in result.report.sites
    )
    return {"sites": dict(sites)}


def _value(spec: Spec, text: str) -> Any:
    """The value of an option: `typical` stands for the sizes of the first case, ``a:2,b:3`` for some sizes."""
    if text == "typical":
        return {name: size for name, size in spec.cases[0].sizes.items() if size}
    if text in {"true", "false"}:
        return text == "true"
    if ":" in text:
        return {name: int(size) for name, _, size in (part.partition(":") for part in text.split(","))}
    return int(text) if text.isdecimal() else text
