"""Whether ONNX Runtime captures what it is told to capture in a CUDA graph, and refuses what it is told that it refuses.

    python benchmarks/capture_on_gpu.py OUT.json [MODEL ...]        # the bundled models by default; needs onnxruntime-gpu
    python benchmarks/capture_on_gpu.py OUT.json --provider cpu     # the same without capturing, to try the script

Beside each model lies an .npz with inputs (`in/NAME`), whose sizes are fixed. Every model is fused with `cuda_graph`, also one
that would be refused, put into a session with `enable_cuda_graph`, and run three times on two batches through bound inputs;
results are held against the source on the CPU. A process each, as an error of CUDA ends all that comes after it. Exits 1 where
the report was wrong.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime as ort

from onnx_attnfuse.fusion.pipeline import Fusion
from onnx_attnfuse.options import Options

Arrays = dict[str, npt.NDArray[Any]]
BUNDLED = pathlib.Path(__file__).parents[1] / "models" / "bundled"
TOLERANCE = 2e-3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("models", nargs="*", type=pathlib.Path, default=sorted(BUNDLED.glob("*.onnx")))
    parser.add_argument("--provider", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--one", action="store_true", help="do the only model in this process")
    wanted = parser.parse_args()
    if wanted.one:
        wanted.out.write_text(json.dumps(outcome(wanted.models[0], wanted.provider)), encoding="utf-8")
        return 0
    found: list[dict[str, Any]] = []
    for path in wanted.models:
        command = [sys.executable, __file__, str(wanted.out), str(path), "--one", "--provider", wanted.provider]
        child = subprocess.run(command, check=False, capture_output=True, text=True)
        ended = {"model": path.stem, "failed": child.stderr.strip().splitlines()[-1:]}
        found.append(json.loads(wanted.out.read_text(encoding="utf-8")) if child.returncode == 0 else ended)
        print(json.dumps(found[-1]), flush=True)
    wanted.out.write_text(json.dumps({"onnxruntime": ort.__version__, "models": found}, indent=1), encoding="utf-8")
    wrong = [item["model"] for item in found if not item.get("as_told")]
    print(f"{len(found) - len(wrong)} of {len(found)} as told" + (f"; not {', '.join(wrong)}" if wrong else ""))
    return int(bool(wrong))


def outcome(path: pathlib.Path, provider: str) -> dict[str, Any]:
    """The forecast for a model, the outcome on the GPU, and whether the two agree."""
    source = onnx.load(path)
    feeds = inputs_of(path)
    fusion = Fusion(Options(ep="cuda", cuda_graph=True, dim=sizes_of(source, feeds), verify="none"))
    model, _ = fusion.read(str(path))
    capture = fusion.fuse(model).capture
    assert capture is not None
    found: dict[str, Any] = {"model": path.stem, "told": str(capture)}
    batches = [feeds, {name: np.ascontiguousarray(np.flip(array, 0)) for name, array in feeds.items()}]
    try:
        given = runs(ir.to_proto(model), [batches[0], batches[0], batches[1]], provider)
    except Exception as error:  # noqa: BLE001 - what ONNX Runtime refuses is what is to be seen
        return {**found, "refused": str(error)[:300], "as_told": not capture.possible}
    expected = runs(source, [batches[0], batches[0], batches[1]], "cpu")
    error = max(difference(left, right) for left, right in zip(given, expected, strict=True))
    return {**found, "error": error, "as_told": error < TOLERANCE and (capture.possible or provider == "cpu")}


def inputs_of(path: pathlib.Path) -> Arrays:
    with np.load(path.with_suffix(".npz")) as arrays:
        return {key.removeprefix("in/"): arrays[key] for key in arrays.files if key.startswith("in/")}


def sizes_of(model: onnx.ModelProto, feeds: Arrays) -> dict[str, int]:
    """The symbolic sizes of a model's inputs as its inputs have them."""
    named = [(dim.dim_param, number) for item in model.graph.input for dim, number in dims_of(item, feeds)]
    return {name: number for name, number in named if name}


def dims_of(item: onnx.ValueInfoProto, feeds: Arrays) -> list[tuple[Any, int]]:
    return list(zip(item.type.tensor_type.shape.dim, feeds[item.name].shape, strict=True))


def runs(model: onnx.ModelProto, batches: list[Arrays], provider: str) -> list[list[npt.NDArray[Any]]]:
    """The outputs of a model for each batch, all from one session and the same buffers."""
    captured = [("CUDAExecutionProvider", {"enable_cuda_graph": "1", "use_tf32": "0"}), "CPUExecutionProvider"]
    providers: list[Any] = captured if provider == "cuda" else ["CPUExecutionProvider"]
    session = ort.InferenceSession(model.SerializeToString(), providers=providers)
    names = [item.name for item in session.get_inputs()]
    binding = session.io_binding()
    bound = {name: ort.OrtValue.ortvalue_from_numpy(batches[0][name].copy(), provider, 0) for name in names}
    for name, value in bound.items():
        binding.bind_ortvalue_input(name, value)
    plain = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for item, array in zip(session.get_outputs(), plain.run(None, {name: batches[0][name] for name in names}), strict=True):
        binding.bind_ortvalue_output(item.name, ort.OrtValue.ortvalue_from_shape_and_type(array.shape, array.dtype, provider, 0))
    found: list[list[npt.NDArray[Any]]] = []
    for batch in batches:
        for name, value in bound.items():
            value.update_inplace(batch[name])
        session.run_with_iobinding(binding)
        found.append([np.array(array) for array in binding.copy_outputs_to_cpu()])
    return found


def difference(left: list[npt.NDArray[Any]], right: list[npt.NDArray[Any]]) -> float:
    """The largest difference of any output, relative where numbers are larger than 1."""
    pairs = [(one.astype(np.float64), other.astype(np.float64)) for one, other in zip(left, right, strict=True)]
    return float(max(np.max(np.abs(one - other) / np.maximum(1, np.abs(other)), initial=0) for one, other in pairs))


if __name__ == "__main__":
    sys.exit(main())
