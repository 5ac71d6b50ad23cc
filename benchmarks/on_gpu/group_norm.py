"""Group normalization with SiLU as exporters spell it and in other forms, alone and between convolutions.

`one image` takes the batch into the groups, `rows` normalizes rows, `operator` is that of ai.onnx, `turned` that of com.microsoft
between two Transposes, `last` the same where channels are last already, `nhwc` lays images out by channel in the whole session.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.harness import Benchmark, Bound, Race, Setting, model, numbers

SIZES = (
    (2, 320, 64, 64),
    (2, 960, 64, 64),
    (2, 640, 32, 32),
    (2, 1280, 16, 16),
    (2, 1280, 8, 8),
    (8, 320, 64, 64),
    (2, 64, 8, 8),
)
GROUPS, _EPSILON = 32, 1e-5
_INSTANCE = "r = Reshape(x, flat) i = InstanceNormalization<epsilon = 0.00001>(r, ones, zeros) s = Reshape(i, whole) "
_AFFINE = "m = Mul(s, gain) a = Add(m, shift) t = Sigmoid(a) y = Mul(a, t)"
_THEIRS = "com.microsoft.GroupNorm<groups = 32, activation = 1, channels_last = 1, epsilon = 0.00001>({}, wide_gain, wide_shift)"
FORMS = {
    "spelled": _INSTANCE + _AFFINE,
    "one image": _INSTANCE + _AFFINE,
    "rows": "r = Reshape(x, flat) i = LayerNormalization<axis = -1, epsilon = 0.00001>(r, ones) s = Reshape(i, whole) " + _AFFINE,
    "operator": """a = GroupNormalization<num_groups = 32, epsilon = 0.00001>(x, flat_gain, flat_shift)
        t = Sigmoid(a) y = Mul(a, t)""",
    "turned": f"l = Transpose<perm = [0, 2, 3, 1]>(x) n = {_THEIRS.format('l')} y = Transpose<perm = [0, 3, 1, 2]>(n)",
    "last": f"y = {_THEIRS.format('x')}",
}


def constants(form: str, shape: tuple[int, ...], dtype: Any) -> dict[str, Any]:
    """What a form reads."""
    batch, channels, height, width = shape
    count = batch * GROUPS if form == "one image" else GROUPS
    size = (channels // GROUPS * height * width,) if form == "rows" else (count,)
    gain, shift = (numbers((channels,), dtype, 1, seed) for seed in (1, 2))
    found: dict[str, Any] = {
        "flat": np.asarray([1 if form == "one image" else batch, count, -1]),
        "whole": np.asarray(shape),
        "ones": np.ones(size, dtype),
        "zeros": np.zeros(size, dtype),
    }
    found |= {"gain": gain.reshape(-1, 1, 1), "shift": shift.reshape(-1, 1, 1), "flat_gain": gain, "flat_shift": shift}
    return found | {"wide_gain": gain.astype(np.float32), "wide_shift": shift.astype(np.float32)}


class Images(Bound):
    """A model whose result may have its channels last."""

    last = False

    def output(self) -> Any:
        return super().output().transpose(0, 3, 1, 2) if self.last else super().output()


def bound(name: str, shape: tuple[int, ...], setting: Setting, mean: int = 0) -> Bound:
    """One form; `conv` before it: between two convolutions of 3 x 3."""
    form = name.removeprefix("nhwc ").removeprefix("conv ")
    arrays, text, ends, x = constants(form, shape, setting.dtype), FORMS[form], ["x", "y"], images(shape, setting, mean)
    if "conv" in name:
        channels = shape[1]
        arrays["k"] = numbers((channels, channels, 3, 3), setting.dtype, 1 / (3 * channels**0.5), 3)
        pads = "Conv<pads = [1, 1, 1, 1]>"
        text, ends = f"x = {pads}(first, k) {text} final = {pads}(y, k)", ["first", "final"]
    x = x.transpose(0, 2, 3, 1) if form == "last" else x
    dims = ", ".join(map(str, x.shape))
    sides = f"({setting.type}[{dims}] {ends[0]}) => ({setting.type}[{dims}] {ends[1]})"
    options = {"prefer_nhwc": "1"} if "nhwc" in name else {}
    made = Images(model(text, sides, arrays, 21), setting, {ends[0]: x}, options)
    made.last = form == "last"
    return made


def images(shape: tuple[int, ...], setting: Setting, mean: int) -> Any:
    """Numbers of standard deviation 1."""
    return (numbers(shape, np.float32) + np.float32(mean)).astype(setting.dtype)


def truth(shape: tuple[int, ...], setting: Setting, mean: int) -> Any:
    """Group normalization and SiLU in float64."""
    x, read = images(shape, setting, mean).astype(np.float64), constants("spelled", shape, setting.dtype)
    grouped = x.reshape(shape[0], GROUPS, -1)
    found = ((grouped - grouped.mean(-1, keepdims=True)) / np.sqrt(grouped.var(-1, keepdims=True) + _EPSILON)).reshape(shape)
    found = found * read["gain"].astype(np.float64) + read["shift"].astype(np.float64)
    return found / (1 + np.exp(-found))


def races(setting: Setting) -> Iterator[Race]:
    """Two rows for each size."""
    between = [f"conv {form}" for form in ("spelled", "one image", "rows", "turned")]
    for shape in setting.sizes(SIZES):
        words = "x".join(map(str, shape))
        for mean in (0, 30):
            forms = {name: functools.partial(bound, name, shape, setting, mean) for name in FORMS}
            yield Race(f"{words}, mean {mean}", forms, truth(shape, setting, mean))
        names = between + [f"nhwc {name}" for name in between if setting.cuda]
        yield Race(f"{words}, between convolutions", {name: functools.partial(bound, name, shape, setting) for name in names})


BENCHMARK = Benchmark("Group normalization", races)
