"""What every setting of the policy variables comes to on PyTorch: what is chosen, why, and what a profiler saw run.

Each setting is put into the environment, and one attention of each mask is trained for a step under the profiler of PyTorch.
"""

from __future__ import annotations

import os

os.environ |= {"KINETO_LOG_LEVEL": "5", "ATTNFUSE_DEBUG": "0"}

import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from unittest import mock

import torch

from benchmarks.harness import Benchmark, Cells, Row, Setting
from onnx_attnfuse.kernels.policy import Policy
from onnx_attnfuse.training import fuse

FLASH, EFFICIENT, FALLBACK = "ATTNFUSE_USE_FLASH_ATTENTION", "ATTNFUSE_USE_EFFICIENT_ATTENTION", "ATTNFUSE_SDPA_FALLBACK"
THEIRS = {"ORTMODULE_USE_FLASH_ATTENTION": "1", "ORTMODULE_USE_TRITON": "1"}
SETTINGS: tuple[Mapping[str, str], ...] = (
    *(
        {name: value for name, value in ((FLASH, flash), (EFFICIENT, efficient)) if value}
        for flash, efficient in itertools.product(("", "1", "0"), repeat=2)
    ),
    {FALLBACK: "1"},
    THEIRS,
    {"ORTMODULE_USE_FLASH_ATTENTION": "1"},
    {**THEIRS, FLASH: "0"},
)
MASKS = ("none", "triangle", "padding", "bias", "window")
BATCH, HEADS, LENGTH, SIZE = 2, 4, 128, 64
_OPERATOR = re.compile(
    r"aten::(_scaled_dot_product_\w*|_flash_attention_\w+|_efficient_attention_\w+|_cudnn_attention_\w+|_softmax\w*)"
)
_KERNEL = re.compile(r"flash_\w*?(?:fwd|bwd)\w*|fmha_cutlass[FB]|cudnn\w*sdpa\w*|triton_tem\w*|softmax_warp_\w+")


class Attention(torch.nn.Module):
    """One attention spelled out, with a mask."""

    def __init__(self, mask: str) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """(b, n, s, h) each; a padding mask (b, t) or what is added (n, s, t)."""
        scores = query @ key.transpose(2, 3) * SIZE**-0.5
        place = torch.arange(query.shape[2], device=query.device)
        if self.mask == "padding":
            scores = scores.masked_fill(~given[:, None, None], torch.finfo(scores.dtype).min)
        if self.mask == "bias":
            scores = scores + given
        if self.mask in {"triangle", "window"}:
            kept = place <= place[:, None]
            kept = kept & (place > place[:, None] - 32) if self.mask == "window" else kept
            scores = scores.masked_fill(~kept, -torch.inf)
        return scores.softmax(-1) @ value


def operands(mask: str, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """What an attention is given."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(BATCH, HEADS, LENGTH, SIZE, generator=generator).to(device, dtype).requires_grad_() for _ in range(3)]
    bias = torch.randn(HEADS, LENGTH, LENGTH, generator=generator).to(device, dtype)
    padding = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH // 2]])).to(device)
    return [*made, bias if mask == "bias" else padding]


def choice(chosen: Mapping[str, str], mask: str, setting: Setting) -> Cells:
    """Trains one attention for a step, with these variables alone of those that a policy is made of, and says what ran."""
    torch._dynamo.reset()
    device = setting.provider
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    others = ("ATTNFUSE_USE", "ATTNFUSE_SDPA", "ORTMODULE_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    with mock.patch.dict(os.environ, {**environment, **chosen}, clear=True):
        module = fuse(Attention(mask), rest="eager")
        expected, found = operands(mask, device, dtype), operands(mask, device, dtype)
        weight = torch.linspace(-1, 1, SIZE, device=device, dtype=dtype)
        (Attention(mask)(*expected) * weight).sum().backward()
        (module(*operands(mask, device, dtype)) * weight).sum().backward()  # captures and compiles
        kinds = [torch.profiler.ProfilerActivity.CPU]
        kinds += [] if device == "cpu" else [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds) as profile:
            (module(*found) * weight).sum().backward()
            if device != "cpu":
                torch.cuda.synchronize()
    (site,) = module.__dict__["attention_reports"][-1].sites
    seen = [event.name for event in profile.events() or ()]
    one, other = expected[0].grad, found[0].grad
    assert one is not None
    assert other is not None
    return {
        "chosen": site.kernel or "none: " + ", ".join(reason.code for reason in site.reasons),
        "not, and why": ", ".join(f"{name}: {reason.code}" for name, reason in site.others),
        "operators that ran": _matches(_OPERATOR, seen),
        "kernels of the GPU": _matches(_KERNEL, seen),
        "from eager": f"{float((one - other).abs().max() / one.abs().max()):.1e}",
    }


def _matches(pattern: re.Pattern[str], names: Sequence[str]) -> str:
    found = (pattern.search(name) for name in names)
    return ", ".join(dict.fromkeys(f"`{match.group(match.lastindex or 0)}`" for match in found if match is not None))


def rows(setting: Setting) -> Iterator[Row]:
    """A row for each setting and mask."""
    for chosen in setting.some(SETTINGS):
        given = " ".join(f"{name}={value}" for name, value in chosen.items()) or "nothing"
        for mask in MASKS:
            yield Row(f"{given} ({Policy.from_environment(chosen)}), {mask}", functools.partial(choice, chosen, mask))


BENCHMARK = Benchmark("Policies on PyTorch", rows, f"One attention ({BATCH}, {HEADS}, {LENGTH}, {SIZE}).")
