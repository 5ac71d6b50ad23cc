"""After torch.onnx.export with dynamo: the program is changed in place."""

import torch

import onnx_attnfuse

layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True).eval()
sizes = {0: torch.export.Dim("batch", min=2), 1: torch.export.Dim("seq", min=2)}
program = torch.onnx.export(layer, (torch.randn(2, 10, 64),), dynamo=True, dynamic_shapes=(sizes,))

result = onnx_attnfuse.optimize(program)
print("fused", result.report.fused, "of", result.report.candidates)
program.save("model.onnx")
