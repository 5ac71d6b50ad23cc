"""From a file to a session of ONNX Runtime, without a file in between."""

import sys

import onnx
import onnxruntime

import onnx_attnfuse

result = onnx_attnfuse.optimize(onnx.load(sys.argv[1]), ep="cpu")
session = onnxruntime.InferenceSession(result.model.SerializeToString(), providers=["CPUExecutionProvider"])
print("fused", result.report.fused, "of", result.report.candidates)
print("outputs", *(output.name for output in session.get_outputs()))
