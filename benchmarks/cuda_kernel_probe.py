"""Which newer versions of operators the CUDA provider of the installed onnxruntime-gpu has kernels for, by trying.

    python benchmarks/cuda_kernel_probe.py [--provider cpu]

`cuda_kernels.txt` is of a documentation that is older than the build. Each operator here was changed after it was written, and is
put alone into a session that lets nothing run on the CPU. Prints a line for each version: whether there is a kernel.
"""

from __future__ import annotations

import argparse

import onnx
import onnxruntime

PLAIN = "y = {op}(x)"
NODES = {
    19: ("Equal", "Pad", "Resize", "Size"),
    20: ("ConstantOfShape", "ReduceMax", "ReduceMin"),
    21: ("ConstantOfShape", "Flatten", "Identity", "Pad", "Size"),
    22: (
        *("Cos", "Elu", "GlobalAveragePool", "GlobalMaxPool", "InstanceNormalization", "MaxPool", "Round", "Selu", "Sin"),
        *("Softplus", "Softsign", "ThresholdedRelu"),
    ),
    23: ("Attention", "ConstantOfShape", "Flatten", "Identity", "Pad", "Size"),
    24: (
        *("Attention", "Cast", "ConstantOfShape", "Flatten", "Identity", "Pad", "Reshape", "Shape", "Size", "Squeeze", "TopK"),
        *("Transpose", "Unsqueeze"),
    ),
}
FORMS = {
    "Equal": "z = Equal(x, x) y = Cast<to = 1>(z)",
    "Pad": "y = Pad(x, pads)",
    "Resize": "y = Resize(x, , scales)",
    "Size": "z = Size(x) y = Cast<to = 1>(z)",
    "Shape": "z = Shape(x) y = Cast<to = 1>(z)",
    "ConstantOfShape": "z = Shape(x) c = ConstantOfShape(z) y = Add(c, x)",
    "ReduceMax": "y = ReduceMax(x, last)",
    "ReduceMin": "y = ReduceMin(x, last)",
    "InstanceNormalization": "y = InstanceNormalization(x, ones, ones)",
    "MaxPool": "y = MaxPool<kernel_shape = [2, 2]>(x)",
    "Attention": "y = Attention(x, x, x)",
    "Cast": "z = Cast<to = 10>(x) y = Cast<to = 1>(z)",
    "Reshape": "y = Reshape(x, flat)",
    "Squeeze": "y = Squeeze(x, first)",
    "Unsqueeze": "y = Unsqueeze(x, first)",
    "TopK": "y, z = TopK(x, one)",
}
CONSTANTS = (
    "int64[8] pads = {0,0,0,0,0,0,0,1}, float[4] scales = {1,1,2,2}, int64[1] last = {3}, int64[1] first = {0}, "
    "int64[1] one = {1}, int64[1] flat = {-1}, float[8] ones = {1,1,1,1,1,1,1,1}"
)
PROVIDERS = {"cuda": "CUDAExecutionProvider", "cpu": "CPUExecutionProvider"}


def has_kernel(op: str, version: int, provider: str) -> str:
    """`yes`, or why there is no session."""
    nodes = FORMS.get(op, PLAIN).format(op=op)
    text = f'<ir_version: 10, opset_import: ["" : {version}]> g (float[1, 8, 16, 16] x) => (float y) <{CONSTANTS}> {{ {nodes} }}'
    model = onnx.parser.parse_model(text)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if provider == "cuda":
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=[PROVIDERS[provider]])
    except Exception as error:  # noqa: BLE001 - a refusal is an answer
        return f"no: {' '.join(str(error).split())[:160]}"
    return "yes"


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--provider", choices=tuple(PROVIDERS), default="cuda")
    chosen = parser.parse_args()
    for version, ops in NODES.items():
        for op in ops:
            print(f"{op} {version}: {has_kernel(op, version, chosen.provider)}", flush=True)


if __name__ == "__main__":
    main()
