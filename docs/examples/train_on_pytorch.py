"""Trains a module whose triangle is a buffer; its attention becomes one call, forward and backward."""

import math

import torch

from onnx_attnfuse.training import fuse


class Attention(torch.nn.Module):
    """Attention as many people write it."""

    def __init__(self, width: int = 32, heads: int = 4, length: int = 64) -> None:
        super().__init__()
        self.heads = heads
        self.project, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.register_buffer("seen", torch.ones(length, length, dtype=torch.bool).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attends to earlier positions."""
        batch, length, width = x.shape
        query, key, value = self.project(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        scores = scores.masked_fill(~self.seen[:length, :length], -math.inf)
        return self.out((scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, length, width))


model = fuse(Attention(), rest="eager")  # without rest, everything else is compiled too
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = model(torch.randn(2, 16, 32)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

report = model.attention_reports[0]
print(f"fused {report.fused} of {len(report.sites)}", *report.lines(), sep="\n")
