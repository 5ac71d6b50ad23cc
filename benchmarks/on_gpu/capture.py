"""Whether ONNX Runtime captures in a CUDA graph what the report says it can capture, and refuses the rest.

Each bundled model is fused with `cuda_graph` at the sizes of its inputs, and run three times on two batches through bound inputs;
results are held against the source on the CPU. A process for each, as an error of CUDA ends all that comes after it.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

from benchmarks.harness import Benchmark, Race, Setting, apart, child, one_line
from onnx_attnfuse.fusion.pipeline import Fusion
from onnx_attnfuse.options import Options

BUNDLED = pathlib.Path(__file__).parents[2] / "models" / "bundled"
TOLERANCE = 2e-3
Arrays = dict[str, Any]


def outcome(path: pathlib.Path, provider: str) -> dict[str, str]:
    """What the report says of a model, what came of it, and whether the two agree."""
    source = onnx.load(path)
    with np.load(path.with_suffix(".npz")) as arrays:
        feeds = {key.removeprefix("in/"): arrays[key] for key in arrays.files if key.startswith("in/")}
    dims = [
        (dim.dim_param, size)
        for item in source.graph.input
        for dim, size in zip(item.type.tensor_type.shape.dim, feeds[item.name].shape, strict=True)
    ]
    fusion = Fusion(Options(ep="cuda", cuda_graph=True, dim={name: size for name, size in dims if name}, verify="none"))
    model, _ = fusion.read(str(path))
    capture = fusion.fuse(model).capture
    assert capture is not None
    batches = [feeds, feeds, {name: np.ascontiguousarray(np.flip(array, 0)) for name, array in feeds.items()}]
    try:
        given = runs(ir.to_proto(model), batches, provider)
    except Exception as error:  # noqa: BLE001 - what ONNX Runtime refuses is the question
        right = not capture.possible
        return {"report": str(capture), "outcome": f"refused: {one_line(error)}", "agree": "yes" if right else "NO"}
    pairs = zip(itertools.chain(*given), itertools.chain(*runs(source, batches, "cpu")), strict=True)
    error = max(apart(one, other) or 0.0 for one, other in pairs)
    right = error < TOLERANCE and (capture.possible or provider == "cpu")
    return {"report": str(capture), "outcome": f"{error:.1e} apart", "agree": "yes" if right else "NO"}


def runs(model: onnx.ModelProto, batches: list[Arrays], provider: str) -> list[list[Any]]:
    """The outputs of a model for each batch, all from one session and the same buffers."""
    captured = [("CUDAExecutionProvider", {"enable_cuda_graph": "1", "use_tf32": "0"}), "CPUExecutionProvider"]
    text = model.SerializeToString()
    session = onnxruntime.InferenceSession(text, providers=captured if provider == "cuda" else ["CPUExecutionProvider"])
    plain = onnxruntime.InferenceSession(text, providers=["CPUExecutionProvider"])
    first = {item.name: batches[0][item.name] for item in session.get_inputs()}
    binding, bound = session.io_binding(), dict[str, Any]()
    for name, array in first.items():
        bound[name] = onnxruntime.OrtValue.ortvalue_from_numpy(array.copy(), provider, 0)
        binding.bind_ortvalue_input(name, bound[name])
    for item, array in zip(session.get_outputs(), plain.run(None, first), strict=True):
        room = onnxruntime.OrtValue.ortvalue_from_shape_and_type(array.shape, array.dtype, provider, 0)
        binding.bind_ortvalue_output(item.name, room)
    found: list[list[Any]] = []
    for batch in batches:
        for name, value in bound.items():
            value.update_inplace(batch[name])
        session.run_with_iobinding(binding)
        found.append([np.array(array) for array in binding.copy_outputs_to_cpu()])
    return found


def measure(race: Race, setting: Setting) -> Mapping[str, str]:
    """The outcome of a model."""
    try:
        return child("benchmarks.on_gpu.capture", race.truth, setting.provider)
    except RuntimeError as error:
        return {"outcome": one_line(error), "agree": "NO"}


def races(setting: Setting) -> Iterator[Race]:
    """A row for each bundled model."""
    for path in setting.some(sorted(BUNDLED.glob("*.onnx"))):
        yield Race(path.stem, {}, path)


BENCHMARK = Benchmark("What is captured", races, f"At most {TOLERANCE} apart from the source on the CPU.", measure)

if __name__ == "__main__":
    print(json.dumps(outcome(pathlib.Path(sys.argv[1]), sys.argv[2])))
