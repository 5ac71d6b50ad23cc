"""Fuses a text encoder and compares the outputs: quickstart.py MODEL.onnx"""

import sys

import numpy as np
import onnxruntime

import onnx_attnfuse

result = onnx_attnfuse.optimize(sys.argv[1], ep="cpu")
result.save("model.onnx")
print("fused", result.report.fused, "of", result.report.candidates, "attentions")

tokens = np.random.default_rng(0).integers(0, 30, (2, 16))
mask = np.ones_like(tokens)
mask[1, 9:] = 0  # the second text is shorter
feeds = {"input_ids": tokens, "attention_mask": mask}
outputs = []
for path in (sys.argv[1], "model.onnx"):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    outputs.append(session.run(None, feeds)[0])
difference = np.abs(outputs[0] - outputs[1]).max()
print(f"largest difference {difference:.1e}")
assert difference < 1e-4
