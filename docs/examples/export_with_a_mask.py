"""Exports a self-attention with a padding mask as an input, and fuses it."""

import torch

import onnx_attnfuse


class SelfAttention(torch.nn.Module):
    """Four heads of 16; `attention_mask` is 1 for a token and 0 for padding."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(64, 3 * 64)

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Attends to all tokens that are not padding."""
        query, key, value = self.project(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        visible = attention_mask[:, None, None, :].to(torch.bool)
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=visible)
        return out.transpose(1, 2).flatten(2)


batch, seq = torch.export.Dim("batch", min=2), torch.export.Dim("seq", min=2)
inputs = (torch.randn(2, 10, 64), torch.ones(2, 10, dtype=torch.int64))
shapes = ({0: batch, 1: seq}, {0: batch, 1: seq})
program = torch.onnx.export(SelfAttention().eval(), inputs, dynamic_shapes=shapes, dynamo=True)

result = onnx_attnfuse.optimize(program)
print("fused", result.report.fused, "of", result.report.candidates, "attentions, mask", result.report.sites[0].mask)
program.save("model.onnx")
