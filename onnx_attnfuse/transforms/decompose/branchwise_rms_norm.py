"""BranchwiseRMSNorm, spelled out."""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.graph import sizes
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.transforms.decompose.norms import over_root
from onnx_attnfuse.transforms.decompose.site import Answer, Site

_WIDE = ir.DataType.FLOAT


def spelled(site: Site) -> Answer:
    """Branches over the root of the mean of their squares, times factors, in float32 as the kernel computes it.

    Raises:
        Refused: The length of a branch, or the type, is not known.
    """
    build, x, scale = site.build, site.operand("X"), site.given("scale")
    dims, dtype, count = site.dims(x), build.facts.dtype(x), site.attribute("num_branches", 0)
    size = sizes.exact_quotient(dims[-1], count or 1)
    if size is None or dtype is None:
        raise Refused("not-spelled", "the length of a branch, or the type, is not known", site.node.name)
    grouped = build.cast(build.reshape(x, [*dims[:-1], count, size]) if count else x, _WIDE)
    level = over_root(build, grouped, _WIDE, [len(site.dims(grouped)) - 1], site.attribute("epsilon", 1e-5))
    if scale is not None:
        factors = build.cast(scale, _WIDE)
        if site.dims(scale) != (size,):
            factors = build.reshape(factors, site.dims(grouped)[-2:])
        level = build.elementwise("Mul", [level, factors], _WIDE)
    return Answer((build.cast(build.reshape(level, dims), dtype),), (x,))
