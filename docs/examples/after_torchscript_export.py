"""After torch.onnx.export by way of TorchScript, which writes a file: the file is read and another one written."""

import torch

import onnx_attnfuse


class SelfAttention(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (4, 16)).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)


axes = {"x": {0: "batch", 1: "seq"}}
torch.onnx.export(SelfAttention(), (torch.randn(2, 10, 64),), "exported.onnx", dynamo=False, input_names=["x"], dynamic_axes=axes)
result = onnx_attnfuse.optimize("exported.onnx")
print("fused", result.report.fused, "of", result.report.candidates)
result.save("model.onnx")
