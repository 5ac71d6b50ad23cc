"""The WebGPU provider of ONNX Runtime, in browsers and native: masks as a bias only, and a flash kernel for wide subgroups.

MultiHeadAttention and GroupQueryAttention run the flash kernel if both head sizes are equal, and a multiple of 4.
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.graph.assumptions import AssumptionName
from onnx_attnfuse.kernels.conditions import AttentionParams
from onnx_attnfuse.kernels.execution_provider import ExecutionProvider, OpSupport
from onnx_attnfuse.reasons import Reason

_FLOATS = frozenset([ir.DataType.FLOAT, ir.DataType.FLOAT16])
_READ = "kernel sources (contrib_ops/webgpu/bert), tested with onnxruntime-webgpu 1.27 and onnxruntime-web 1.30 on SwiftShader"
_LANES = 4
"""The flash kernel reads so many channels at once."""


def _flash(params: AttentionParams) -> AssumptionName | None:
    """The flash kernel counts keys twice where a subgroup has fewer than 8 lanes; a single query is computed by another one.

    A size that is not known may be one that it takes.
    """
    sizes = [size for size in (params.head_size, params.v_head_size) if isinstance(size, int)]
    others = params.rows == 1 or any(size % _LANES for size in sizes) or len(set(sizes)) == 2
    return None if others else "wide-subgroups"


def _windowed(params: AttentionParams) -> Reason | None:
    """With a window, and no past, GroupQueryAttention gives back keys and values that are all zero."""
    if not params.windowed and not params.capped:
        return None
    return Reason("wrong-on-device", "GroupQueryAttention of webgpu was measured to be wrong with a window or a soft cap (1.27)")


_OPTIONS = frozenset(
    [
        *("dawnBackendType", "dawnProcTable", "defaultBufferCacheMode", "deviceId", "enableGraphCapture", "enableInt64"),
        *("enablePIXCapture", "forceCpuNodeNames", "maxStorageBufferBindingSize", "multiRotaryCacheConcatOffset"),
        *("powerPreference", "preferredLayout", "preserveDevice", "queryResolveBufferCacheMode", "storageBufferCacheMode"),
        *("uniformBufferCacheMode", "validationMode", "webgpuDevice", "webgpuInstance"),
    ]
)
"""The keys that the library of onnxruntime-webgpu 1.27 has; others were taken without a word."""
PROVIDER = ExecutionProvider(
    name="webgpu",
    ort_name="WebGpuExecutionProvider",
    distribution="onnxruntime-webgpu",
    plugins=("onnxruntime-ep-webgpu",),
    known_from=f"{_READ}; float16 rounding and rows without a key are not known",
    operators={
        "MultiHeadAttention": OpSupport(
            f"{_READ}: no key_padding_mask, no causal attribute, nothing packed; a bias may broadcast over entries and heads",
            _FLOATS,
            _FLOATS,
            masks=frozenset(["none", "bias"]),
            keys_by_head=True,
            broadcasts_bias=True,
            assumes=_flash,
        ),
        "GroupQueryAttention": OpSupport(
            f"{_READ}: causal only; of a buffer the length of the first entry counts for all",
            _FLOATS,
            _FLOATS,
            masks=frozenset(["none"]),
            causal=True,
            rotates_inside=True,
            is_wrong=_windowed,
            assumes=_flash,
        ),
        "Attention": OpSupport(
            f"{_READ}: no mask and no past", _FLOATS, _FLOATS, by_default=False, broadcasts_bias=True, assumes=_flash
        ),
        "onnx.Attention": None,
        "PackedMultiHeadAttention": None,
    },
    takes_if=False,
    session_options=_OPTIONS,
)
