"""What a step costs the host where the rest of a model runs eagerly: flex attention compiled to kernels that compute nothing.

    PYTHONPATH=.:patterns:cli python benchmarks/training_torch_host.py [--layers 2] [--mask window]

Ours and by hand in turn, on the CPU, with small layers: what is left is what launches, guards and looks up. A GPU that waits for
launches waits for that.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import flex_attention

from benchmarks import training_torch_models as models
from benchmarks.training_torch_models import Case, Model
from onnx_attnfuse.training import fuse
from onnx_attnfuse.training.pytorch import flex

_WARM, _RUNS = 5, 300
_compile = torch.compile


def _empty(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """A graph compiled to results that nothing is written to."""
    (results,) = next(node.args for node in graph.graph.nodes if node.op == "output")

    def run(*given: Any) -> list[Any]:
        fakes = [item.meta["val"] if hasattr(item, "meta") else item for item in results]
        return [
            torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype) if isinstance(fake, torch.Tensor) else fake
            for fake in fakes
        ]

    return make_boxed_func(run)


def _stand_in() -> None:
    """Compiles to nothing wherever flex attention is compiled by itself, on a CPU too."""
    backend = aot_autograd(fw_compiler=_empty, bw_compiler=_empty)
    library: Any = flex
    compiled = library._compiled

    def attend(*given: Any) -> Any:
        *operands, traced = given
        _, _, _, _, program, _, bias, _, scale, softcap, rows = operands
        assert not traced
        return compiled(library._attend, program, bias, scale, softcap, rows)(*operands)

    def made(program: Any, *given: Any) -> Any:
        return compiled(library._blocks, program)(program, *given)

    torch.compile = functools.partial(_compile, backend=backend)
    library._made = made
    library.attend = attend
    checked: Any = flex_attention
    checked._validate_device = lambda *tensors: None


def _by_hand(case: Case) -> torch.nn.Module:
    """The model with compiled calls of flex attention, as `training_torch_models` has it on a GPU."""
    call, made = torch.compile(flex_attention.flex_attention, fullgraph=True), torch.compile(models.blocks, fullgraph=True)

    def attend(block: Any, query: Any, key: Any, value: Any, **given: Any) -> Any:
        return call(query, key, value, block_mask=given["blocks"], enable_gqa=query.shape[1] != key.shape[1])

    return Model(case, attend, made)


def main() -> None:
    """Prints milliseconds of both, forward and backward, and how many operators a step runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--mask", default="window", choices=["window", "padding", "documents"])
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    shape: dict[str, Any] = {"width": 64, "heads": 4, "kv_heads": 4, "layers": chosen.layers}
    case = Case(chosen.mask, chosen.mask, 1, 256, window=64, document=64, **shape)
    inputs = case.inputs("cpu", torch.float32)
    _stand_in()
    found = {"by hand": _by_hand(case), "ours": fuse(Model(case, models.spelled, models.seen), rest="eager", flex=True)}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in found}
    for run in range(_WARM + _RUNS):
        for name, module in found.items():
            module.zero_grad(set_to_none=True)
            first = time.perf_counter()
            loss = module(**inputs)
            second = time.perf_counter()
            loss.backward()
            if run >= _WARM:
                times[name].append((1e3 * (second - first), 1e3 * (time.perf_counter() - second)))
    for name, module in found.items():
        with torch.profiler.profile() as profile:
            module(**inputs).backward()
        forward, backward = (statistics.median(item[place] for item in times[name]) for place in (0, 1))
        count = sum(event.count for event in profile.key_averages())
        print(f"{name}: {forward:.2f} ms forward, {backward:.2f} ms backward, {count} operators")


if __name__ == "__main__":
    main()
