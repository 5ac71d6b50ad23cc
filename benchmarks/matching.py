"""What looking for patterns costs: ``python -m benchmarks.matching [--layers 96] [--out FILE]``.

A decoder as its exporter writes it, looked at with ever more patterns: of one family, which share their outermost operators and
differ inside, and of many families. What is timed is the net alone, in one process, as CPU time, best of five.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx_ir as ir

from onnx_attnfuse import Options
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.language import Pattern, Tensor, exp, log, pattern, refusal, relu, sigmoid, softmax, sqrt, tanh
from onnx_attnfuse.language.expression import apply
from onnx_attnfuse.language.matcher.discrimination_net import Net
from onnx_attnfuse.language.matcher.matcher import Matcher
from onnx_attnfuse.language.registry.discovery import load

COUNTS = (0, 5, 50, 500)
UNARY = (exp, log, relu, sigmoid, sqrt, tanh)


def digits(number: int, count: int) -> Iterator[Callable[[Tensor], Tensor]]:
    """Functions in the place of digits, so that each number has its own row of them."""
    for _ in range(count):
        yield UNARY[number % len(UNARY)]
        number //= len(UNARY)


def alike(number: int) -> Pattern:
    """Attention with four functions of the scores of its own: all begin at the same product and softmax."""

    def formula(q: Tensor, k: Tensor, v: Tensor, scale: Tensor, mask: Tensor) -> object:
        scores = scale * (q @ k.T)
        for function in digits(number, 4):
            scores = function(scores)
        return refusal(softmax(scores + mask) @ v, "benchmark", "a pattern of the benchmark")

    return pattern(name=f"alike{number}")(formula)  # type: ignore[arg-type]


def unlike(number: int) -> Pattern:
    """Something that begins with an operator of its own, as far as there are any."""
    names = "Add Sub Div Mul Exp Sigmoid Tanh Erf Softplus Elu Relu Sqrt Abs Min Max Pow Where MatMul ReduceSum ReduceMax".split()

    def formula(q: Tensor, k: Tensor) -> object:
        inner = q @ k.T
        for function in digits(number, 4):
            inner = function(inner)
        name = names[number % len(names)]
        count = {"Where": 3}.get(
            name, 1 if name in {"Exp", "Sigmoid", "Tanh", "Erf", "Softplus", "Elu", "Relu", "Sqrt", "Abs"} else 2
        )
        count = 1 if name.startswith("Reduce") else count
        return refusal(apply(name, *[inner, q, k][:count]) @ q, "benchmark", "a pattern of the benchmark")

    return pattern(name=f"unlike{number}")(formula)  # type: ignore[arg-type]


def seconds(net: Net, model: ir.Model, facts: Facts) -> float:
    """CPU time to look at every node, the best of five."""
    readers = load(Options()).readers
    times: list[float] = []
    for _ in range(5):
        matcher = Matcher(net, facts, model.opset_imports.get("", 18), readers)
        start = time.process_time()
        for node in model.graph:
            matcher.at(node)
        times.append(time.process_time() - start)
    return min(times)


def main() -> None:
    """Exports, measures, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=96)
    parser.add_argument("--exporter", default="ts")
    parser.add_argument("--cache", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/matching.md"))
    chosen = parser.parse_args()
    chosen.cache.mkdir(parents=True, exist_ok=True)
    path = chosen.cache / f"{chosen.exporter}_{chosen.layers}_small.onnx"
    if not path.exists():
        command = [sys.executable, "benchmarks/decoders.py", chosen.exporter, str(chosen.layers), "small", str(path)]
        subprocess.run(command, check=True)
    model = ir.load(path)
    facts = Facts(model.graph)
    lines = [
        "# What looking for patterns costs",
        "",
        f"A decoder of {chosen.layers} layers, {len(list(model.graph))} nodes, by `python -m benchmarks.matching`.",
        "CPU time of the net for the whole graph, and as a multiple of that with 5. *Alike* patterns share their product",
        "and softmax and differ inside; *unlike* ones begin with twenty different operators.",
        "",
        "| patterns | alike, ms | | unlike, ms | |",
        "|---|---|---|---|---|",
    ]
    base: list[float] = []
    for count in COUNTS:
        times = [seconds(Net([make(number) for number in range(count)]), model, facts) for make in (alike, unlike)]
        base = times if count == COUNTS[1] else base
        ratios = [f"{item / least:.2f}" for item, least in zip(times, base, strict=True)] if base else ["", ""]
        lines.append(f"| {count} | {times[0] * 1000:.1f} | {ratios[0]} | {times[1] * 1000:.1f} | {ratios[1]} |")
    chosen.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
