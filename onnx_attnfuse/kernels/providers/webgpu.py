"""The WebGPU provider of ONNX Runtime, in browsers and native: masks as a bias only, a flash kernel that is wrong on one adapter.

MultiHeadAttention and GroupQueryAttention take the flash kernel where the head size is that of the values, a multiple of 4.
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.kernels.conditions import AttentionParams
from onnx_attnfuse.kernels.execution_provider import ExecutionProvider, OpSupport
from onnx_attnfuse.reasons import Reason

_FLOATS = frozenset([ir.DataType.FLOAT, ir.DataType.FLOAT16])
_READ = "kernels read in ONNX Runtime (contrib_ops/webgpu/bert), run with onnxruntime-webgpu 1.27 on SwiftShader"
_LANES = 4
"""The flash kernel reads so many channels at once."""


def _flash(params: AttentionParams) -> Reason | None:
    """The flash kernel gives something else on SwiftShader, and nobody has told that it is right on all adapters.

    A single query is computed by another kernel, which was right.
    """
    size, v_size = params.head_size, params.v_head_size
    if params.rows == 1 or (isinstance(size, int) and (size % _LANES or size != v_size)):
        return None
    shown = size if isinstance(size, int) else "an unknown number of"
    message = f"the flash kernel of webgpu, which runs {params.op} with heads of {shown} channels, was measured to be wrong"
    return Reason("wrong-on-device", f"{message} on one adapter (SwiftShader, onnxruntime-webgpu 1.27)")


PROVIDER = ExecutionProvider(
    name="webgpu",
    ort_name="WebGpuExecutionProvider",
    distribution="onnxruntime-webgpu",
    plugins=("onnxruntime-ep-webgpu",),
    known_from=f"{_READ}; how float16 is rounded and what rows without a key give is not known",
    operators={
        "MultiHeadAttention": OpSupport(
            f"{_READ}: no key_padding_mask, no causal attribute, nothing packed; a bias may broadcast over entries and heads",
            _FLOATS,
            _FLOATS,
            masks=frozenset(["none", "bias"]),
            keys_by_head=True,
            broadcasts_bias=True,
            is_wrong=_flash,
        ),
        "GroupQueryAttention": OpSupport(
            f"{_READ}: causal only; of a buffer the length of the first entry counts for all",
            _FLOATS,
            _FLOATS,
            masks=frozenset(["none"]),
            causal=True,
            is_wrong=_flash,
        ),
        "Attention": OpSupport(
            f"{_READ}: no mask and no past", _FLOATS, _FLOATS, by_default=False, broadcasts_bias=True, is_wrong=_flash
        ),
        "onnx.Attention": None,
        "PackedMultiHeadAttention": None,
    },
    takes_if=False,
)
