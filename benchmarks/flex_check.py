"""Whether flex attention of fused modules has the loss and the gradients that the module has without fusing, mask by mask.

    PYTHONPATH=.:patterns:cli python benchmarks/flex_check.py OUT_FOLDER --jobs 12 --seconds 240

Each mask, with 1, 2 and 4 entries, in float32 and bfloat16, the rest run eagerly and compiled by inductor, at two lengths one
after the other, by a graph for each and by one for both; the truth is the same module in float64 without fusing. A line for each,
as it is done. The first rows sort blocks in other ways and tell which strides the kernels were given for the axis of heads, of
length 1. On a CPU flex attention has a gradient only where it is not compiled: `--device cpu --rests eager --entries 2` tries the
script out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import pathlib
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

LENGTHS = (300, 640)
MASKS = (
    "right padding",
    "documents",
    "window",
    "left padding",
    "prefix",
    "window and padding",
    "alibi in a window",
    "soft cap",
    "soft cap and padding",
    "causal",
)
WAYS = ("library", "four sorts", "one stack", "sorted by torch")
_WIDTH, _HEADS, _SHARED, _LAYERS, _WINDOW = 256, 4, 2, 2, 100
_MOST = {torch.float32: 2e-4, torch.bfloat16: 4e-2}
Row = dict[str, Any]


class Layer(torch.nn.Module):
    """Attention as it is written out."""

    def __init__(self, mask: str) -> None:
        super().__init__()
        self.mask, self.size = mask, _WIDTH // _HEADS
        self.query, self.out = torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.Linear(_WIDTH, _WIDTH)
        self.key, self.value = (torch.nn.Linear(_WIDTH, _SHARED * self.size) for _ in range(2))
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, _HEADS + 1.0))

    def forward(self, hidden: Tensor, seen: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        heads = (layer(hidden).view(batch, length, -1, self.size).transpose(1, 2) for layer in (self.query, self.key, self.value))
        query, key, value = (item.repeat_interleave(_HEADS // item.shape[1], 1) for item in heads)
        scores = query @ key.transpose(2, 3) / math.sqrt(self.size)
        if "soft cap" in self.mask:
            scores = 5.0 * torch.tanh(scores / 5.0)
        if "alibi" in self.mask:
            place = torch.arange(length, device=hidden.device)
            scores = scores + self.slopes[:, None, None] * (place - place[:, None])
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
        return self.out((scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, length, -1))


class Model(torch.nn.Module):
    """Layers that share a mask."""

    def __init__(self, mask: str) -> None:
        super().__init__()
        self.mask = mask
        self.layers = torch.nn.ModuleList([Layer(mask) for _ in range(_LAYERS)])

    def forward(self, hidden: Tensor, given: Tensor) -> Tensor:
        place = torch.arange(hidden.shape[1], device=hidden.device)
        seen = place <= place[:, None]
        if "window" in self.mask:
            seen = seen & (place > place[:, None] - _WINDOW)
        if "padding" in self.mask:
            seen = seen & given[:, None, None, :]
        if self.mask == "documents":
            seen = seen & (given[:, None, :, None] == given[:, None, None, :])
        if self.mask == "prefix":
            seen = seen | (place < given[:, None, None, None])
        for layer in self.layers:
            hidden = hidden + layer(hidden, seen)
        return hidden.float().square().mean() if hidden.dtype != torch.float64 else hidden.square().mean()


def inputs(mask: str, entries: int, length: int) -> tuple[Tensor, Tensor]:
    """Hidden states, and what the mask is made of, another one for each entry."""
    generator = torch.Generator().manual_seed(length + entries)
    hidden = torch.randn(entries, length, _WIDTH, generator=generator)
    places = torch.arange(length)
    lengths = torch.linspace(length // 3, length, entries).long()[:, None]
    if "padding" in mask:
        return hidden, places >= length - lengths if "left" in mask else places < lengths
    if mask == "documents":
        return hidden, (torch.rand(entries, length, generator=generator) < 1 / 100).long().cumsum(1)
    return hidden, lengths[:, 0]


def rows(chosen: argparse.Namespace) -> Iterator[Row]:
    """What is compared, the most important first."""
    entries, rests, dtypes = (
        [part for part in item.split(",") if part] for item in (chosen.entries, chosen.rests, chosen.dtypes)
    )
    known = [mask for mask in MASKS if any(part in mask for part in chosen.masks.split(","))]
    for way in WAYS[1:]:
        for mask in ("right padding", "documents"):
            if chosen.ways and "inductor" in rests:
                yield {"mask": mask, "entries": 4, "rest": "inductor", "dtype": "float32", "way": way, "dynamic": False}
    for dynamic in (shapes == "dynamic" for shapes in chosen.shapes.split(",")):
        for rest, dtype, mask, count in itertools.product(rests, dtypes, known, map(int, entries)):
            if not dynamic or count > 1:
                row = {"mask": mask, "entries": count, "rest": rest, "dtype": dtype, "way": WAYS[0], "dynamic": dynamic}
                yield row


def compare(row: Row, device: str) -> Row:
    """A row, and how far its losses and gradients are from the truth, in parts of them."""
    from onnx_attnfuse.training import fuse
    from onnx_attnfuse.training.pytorch import blocks, flex

    start, dtype = time.monotonic(), getattr(torch, row["dtype"])
    found: Row = {**row, "device": "CPU" if device == "cpu" else torch.cuda.get_device_name(), "torch": torch.__version__}
    codes: list[str] = []
    try:
        torch._dynamo.reset()
        torch._dynamo.config.automatic_dynamic_shapes = row["dynamic"]
        _listen(codes)
        library: Any = flex
        library.sort_blocks = _sorting(row["way"]) or blocks.sort_blocks
        torch.manual_seed(0)
        plain = Model(row["mask"]).to(device, dtype)
        true, fused = Model(row["mask"]).to(device, torch.float64), Model(row["mask"]).to(device, dtype)
        true.load_state_dict(plain.state_dict())
        fused.load_state_dict(plain.state_dict())
        fuse(fused, rest=row["rest"], flex=True)
        found["apart"], found["eager"] = 0.0, 0.0
        for length in LENGTHS:
            hidden, given = (item.to(device) for item in inputs(row["mask"], row["entries"], length))
            expected = step(true, hidden.to(dtype).double(), given)
            found["apart"] = max(found["apart"], apart(step(fused, hidden.to(dtype), given), expected))
            found["eager"] = max(found["eager"], apart(step(plain, hidden.to(dtype), given), expected))
        sites = [site for report in fused.__dict__["attention_reports"] for site in report.sites]
        found["kernels"] = sorted({str(site.kernel) for site in sites})
        found["right"] = found["apart"] <= max(_MOST[dtype], 3 * found["eager"]) and math.isfinite(found["apart"])
    except Exception as error:  # noqa: BLE001 - a row that fails does not stop the rest
        lines = str(error).strip().splitlines() or [""]
        found |= {"right": None, "failure": f"{type(error).__name__}: {lines[0][:200]}"}
    found["strides"] = sorted({item for code in codes for item in re.findall(r"stride_(\w+_h = \d+)", code)})
    found["seconds"] = round(time.monotonic() - start, 1)
    return found


def step(module: torch.nn.Module, hidden: Tensor, given: Tensor) -> dict[str, Tensor]:
    """The loss, and the gradients of all parameters and of the hidden states."""
    module.zero_grad(set_to_none=True)
    hidden = hidden.detach().requires_grad_()
    loss = module(hidden, given)
    loss.backward()
    grads = {name: item.grad for name, item in module.named_parameters() if item.grad is not None}
    assert hidden.grad is not None
    return {"loss": loss.detach(), "hidden": hidden.grad, **grads}


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative distance; gradients that are 0 but for rounding (of key biases) are told by those of all."""
    floor = 1e-3 * max(float(item.norm()) for name, item in expected.items() if name != "loss")
    distances = [
        float((found[name].double() - item).norm() / item.norm().clamp(min=1e-30 if name == "loss" else floor))
        for name, item in expected.items()
    ]
    return math.nan if any(map(math.isnan, distances)) else max(distances)


def _listen(codes: list[str]) -> None:
    """Keeps the code that inductor writes."""
    from torch._inductor.graph import GraphLowering

    lowering: Any = GraphLowering
    lowering.save_output_code = staticmethod(codes.append)


def _sorting(way: str) -> Callable[[Tensor, int], Any] | None:
    """Another way to sort blocks; None: the library's."""
    from onnx_attnfuse.training.pytorch.blocks import sorted_columns

    def kinds(seen: Tensor, whole: int) -> tuple[Tensor, Tensor]:
        full = seen == whole
        return (seen > 0) & ~full, full

    def four(seen: Tensor, whole: int) -> list[Tensor]:
        partial, full = kinds(seen, whole)
        turned = (item.transpose(2, 3) for item in (partial, full))
        return [item for blocks in (partial, full, *turned) for item in sorted_columns(blocks)]

    def stacked(seen: Tensor, whole: int) -> list[Tensor]:
        both, found = torch.stack(kinds(seen, whole)), list[Tensor]()
        for blocks in (both, both.transpose(3, 4)):
            counts, order = sorted_columns(blocks)
            found += [counts.unbind(0)[0], order.unbind(0)[0], counts.unbind(0)[1], order.unbind(0)[1]]
        return found

    def by_torch(seen: Tensor, whole: int) -> list[Tensor]:
        from torch.nn.attention import flex_attention

        module: Any = flex_attention
        partial, full = kinds(seen, whole)
        turned = (item.transpose(2, 3) for item in (partial, full))
        return [item for blocks in (partial, full, *turned) for item in module._dense_to_ordered(blocks)]

    return {"four sorts": four, "one stack": stacked, "sorted by torch": by_torch}.get(way)


def words(row: Row) -> str:
    """A row as a line."""
    verdict = {True: "right", False: "WRONG", None: "failed"}[row.get("right")]
    lengths = "one graph for both lengths" if row["dynamic"] else "a graph for each length"
    name = f"{row['mask']}, entries {row['entries']}, rest {row['rest']}, {row['dtype']}, {lengths}, {row['way']}"
    told = row.get("failure") or f"{row['apart']:.1e} from the truth, eager {row['eager']:.1e}, {'/'.join(row['kernels'])}"
    strides = f"; {', '.join(row['strides'])}" if row["way"] != WAYS[0] or row.get("right") is False else ""
    return f"{verdict}  {name}: {told} ({row['seconds']} s){strides}"


def table(found: list[Row]) -> str:
    """The worst of each mask, backend and type, and what other ways to sort blocks came to."""
    lines = [
        "# Flex attention beside float64",
        "",
        "How far losses and gradients of fused modules are from those of the module in float64, the largest of all numbers of",
        "entries, lengths and parameters; in brackets what the module without fusing has in the same type, where inductor",
        "compiles nothing.",
        f"{found[0].get('device', '')}, torch {found[0].get('torch', '')}.",
        "",
        "    PYTHONPATH=.:patterns:cli python benchmarks/flex_check.py OUT_FOLDER --jobs 12 --seconds 240",
        "",
    ]
    own = [row for row in found if row["way"] == WAYS[0]]
    columns = list(dict.fromkeys((row["rest"], row["dtype"], row["dynamic"]) for row in own))
    names = [f"{rest}, {dtype}" + (", one graph" if dynamic else "") for rest, dtype, dynamic in columns]
    lines += [f"| | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for mask in dict.fromkeys(row["mask"] for row in own):
        cells = [
            [row for row in own if (row["mask"], row["rest"], row["dtype"], row["dynamic"]) == (mask, *key)] for key in columns
        ]
        lines.append(f"| {mask} | {' | '.join(map(cell, cells))} |")
    others = [f"- {words(row)}" for row in found if row["way"] != WAYS[0]]
    return (
        "\n".join(
            [*lines, "", *(["Blocks sorted in other ways, with the strides that kernels got:", "", *others] if others else [])]
        )
        + "\n"
    )


def cell(found: list[Row]) -> str:
    """The worst of some rows."""
    failures = [row for row in found if row.get("right") is None]
    if failures or not found:
        return failures[0]["failure"] if failures else ""
    worst = "" if all(row["right"] for row in found) else "WRONG "
    counts = "/".join(str(row["entries"]) for row in sorted(found, key=lambda row: row["entries"]))
    kernels = "/".join(sorted({name for row in found for name in row["kernels"]}))
    numbers = f"{max(row['apart'] for row in found):.1e} ({max(row['eager'] for row in found):.1e})"
    return f"{worst}{numbers} {'left' if kernels == 'None' else kernels}, entries {counts}"


def work(device: str) -> None:
    """Takes rows from the standard input, and writes what was found to the standard output."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(1)
    for line in sys.stdin:
        found = compare(json.loads(line), device)
        out.write(json.dumps(found) + "\n")
        if re.search("CUDA error|device-side|AcceleratorError", found.get("failure", "")):
            os._exit(3)


def serve(pending: queue.SimpleQueue[Row], done: Callable[[Row], None], device: str, until: float) -> None:
    """Hands rows to a process, and starts another where one has ended."""
    process: subprocess.Popen[str] | None = None
    while time.monotonic() < until:
        try:
            row = pending.get_nowait()
        except queue.Empty:
            break
        if process is None or process.poll() is not None:
            command = [sys.executable, __file__, "-", "--worker", "--device", device]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            threading.Timer(max(until + 30 - time.monotonic(), 1), process.kill).start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(row) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        done(json.loads(line) if line else {**row, "right": None, "failure": "the process ended", "seconds": 0, "strides": []})
    if process is not None:
        process.kill()


def main() -> None:
    """Compares every row, and exits with 1 if the library is wrong anywhere."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--masks", default="", help="parts of the names of masks, with commas")
    parser.add_argument("--entries", default="4,1,2")
    parser.add_argument("--rests", default="inductor,eager")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--shapes", default="static,dynamic", help="a graph for each length, one for both")
    parser.add_argument("--ways", action=argparse.BooleanOptionalAction, default=True, help="other ways to sort blocks as well")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    os.environ |= {"ATTNFUSE_DEBUG": "0", "TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    if chosen.worker:
        return work(chosen.device)
    chosen.folder.mkdir(parents=True, exist_ok=True)
    pending: queue.SimpleQueue[Row] = queue.SimpleQueue()
    plan = list(rows(chosen))
    for row in plan:
        pending.put(row)
    results, lock, start = list[Row](), threading.Lock(), time.monotonic()

    def done(row: Row) -> None:
        with lock, (chosen.folder / "flex_check.jsonl").open("a") as file:
            results.append(row)
            file.write(json.dumps(row) + "\n")
            (chosen.folder / "flex_check.md").write_text(table(results))
            print(f"{time.monotonic() - start:6.1f} s  {words(row)}", flush=True)

    arguments = (pending, done, chosen.device, start + chosen.seconds)
    threads = [threading.Thread(target=serve, args=arguments) for _ in range(min(chosen.jobs, len(plan)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    own = [row for row in results if row["way"] == WAYS[0]]
    wrong = [row for row in own if not row["right"]]
    print(f"{len(own) - len(wrong)} of {len(own)} right; {len(plan) - len(results)} not compared", flush=True)
    sys.stdout.flush()
    os._exit(bool(wrong))


if __name__ == "__main__":
    main()
