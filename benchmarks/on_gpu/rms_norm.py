"""RMS normalization in half precision with factors in float32: spelled out, as BranchwiseRMSNorm, and with rounded factors.

ONNX Runtime makes of the first SimplifiedLayerNormalization between two Casts; rounded factors give another result. A run
is a chain of forty, a CUDA graph where there is CUDA. Shapes of length 0 are run too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.harness import Benchmark, Bound, Race, Setting, model, numbers

SHAPES = (
    *((1, 1, 1152), (8, 1, 1152), (1, 512, 1152), (8, 512, 1152), (1, 512, 4, 256), (8, 512, 4, 256), (8, 512, 4096)),
    *((0, 3, 64), (2, 0, 64), (2, 3, 64)),
)
_CHAIN, _EPSILON = 40, 1e-6
FORMS = {
    "spelled": """a{0} = Cast<to = 1>(x{0}) b{0} = Pow(a{0}, two) c{0} = ReduceMean(b{0}, last) d{0} = Add(c{0}, eps)
        e{0} = Sqrt(d{0}) f{0} = Div(a{0}, e{0}) h{0} = Mul(f{0}, w) x{1} = Cast<to = 10>(h{0})""",
    "branchwise": "x{1} = com.microsoft.BranchwiseRMSNorm<num_branches = 1, epsilon = 0.000001>(x{0}, w)",
    "rounded": "x{1} = SimplifiedLayerNormalization<axis = -1, epsilon = 0.000001>(x{0}, v)",
}


def factors_of(shape: tuple[int, ...]) -> Any:
    """What normalized numbers are multiplied by."""
    return 1 + numbers(shape[-1:], np.float32, 0.125, 1)


def chain(form: str, shape: tuple[int, ...], setting: Setting, length: int = _CHAIN) -> Bound:
    """So many normalizations, one after the other."""
    factors = factors_of(shape)
    arrays = {"w": factors, "v": factors.astype(np.float16), "two": np.float32(2), "last": np.int64([-1])}
    arrays["eps"] = np.float32([_EPSILON])
    lines = " ".join(FORMS[form].format(place, place + 1) for place in range(length))
    dims = ", ".join(map(str, shape))
    ends = f"(float16[{dims}] x0) => (float16[{dims}] x{length})"
    return Bound(
        model(lines, ends, arrays), setting, {"x0": numbers(shape, np.float16)}, captured=setting.cuda and 0 not in shape
    )


def truth(shape: tuple[int, ...]) -> Any:
    """One normalization in float64."""
    x = numbers(shape, np.float16).astype(np.float64)
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + _EPSILON) * factors_of(shape).astype(np.float64)


def races(setting: Setting) -> Iterator[Race]:
    """A row for each shape."""
    for shape in setting.sizes(SHAPES):
        variants = {form: functools.partial(chain, form, shape, setting) for form in FORMS}
        yield Race("x".join(map(str, shape)), variants, each=_CHAIN)
        ones = {form: functools.partial(chain, form, shape, setting, 1) for form in FORMS}
        yield Race(f"{'x'.join(map(str, shape))}, one beside float64", ones, truth(shape))


BENCHMARK = Benchmark("RMS normalization with factors in float32", races)
