"""Conditions of a CUDA graph in ONNX Runtime: kernels there are, inputs they read on the host, operators that wait for the GPU.

A session that is to capture refuses a model with control flow, and one in which values are copied between GPU and host: for nodes
without a CUDA kernel, and for inputs that kernels read on the host. What waits for the GPU fails while it is captured.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import onnx_ir as ir

from onnx_attnfuse.graph.constants import attribute
from onnx_attnfuse.graph.ops import CONTRIB, REDUCTIONS
from onnx_attnfuse.kernels.execution_provider import Capture
from onnx_attnfuse.kernels.kernel_table import read_table

_FIRST, _SECOND, _SECOND_THIRD, _FIFTH = (0,), (1,), (1, 2), (4,)
_STANDARD: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(REDUCTIONS, _SECOND),
    **dict.fromkeys(
        "CumSum Expand Reshape SequenceAt SequenceErase Split Squeeze Tile TopK Trilu Unsqueeze Upsample".split(), _SECOND
    ),
    **dict.fromkeys(["Dropout", "OneHot"], _SECOND_THIRD),
    **dict.fromkeys(["GRU", "LSTM", "RNN"], _FIFTH),
    "ConstantOfShape": _FIRST,
    "DynamicSlice": (1, 2, 3),
    "MatMulInteger": (2, 3),
    "Pad": (1, 2, 3),
    "Range": (0, 1, 2),
    "Resize": (1, 2, 3),
    "SequenceInsert": (2,),
    "Slice": (1, 2, 3, 4),
}
_CONTRIB: Mapping[str, tuple[int, ...]] = {
    "Attention": (6,),
    "BiasDropout": (3, 4),
    "BitmaskDropout": _SECOND_THIRD,
    "ConvTransposeWithDynamicPads": (2,),
    "DecoderMaskedMultiHeadAttention": (7, 8),
    "DecoderMaskedSelfAttention": (6, 7),
    "GroupQueryAttention": (6,),
    "MultiHeadAttention": (8,),
    "QAttention": (3, 4, 6, 7),
    "RelativePositionBias": _SECOND_THIRD,
    "SparseAttention": (7,),
    "Trilu": _SECOND,
}
_ITS_LENGTH = "the number of elements that it gives"
_WAITS: Mapping[tuple[str, str], str] = {
    **dict.fromkeys([("", "Compress"), ("", "NonMaxSuppression"), ("", "NonZero")], _ITS_LENGTH),
    (CONTRIB, "DynamicTimeWarping"): _ITS_LENGTH,
    (CONTRIB, "RemovePadding"): "the number of tokens",
    **dict.fromkeys([(CONTRIB, "DecoderAttention"), (CONTRIB, "LongformerAttention"), (CONTRIB, "SparseAttention")], "its masks"),
    ("", "SequenceLength"): "a length that it gives there",
}


def _not_run(node: ir.Node) -> str | None:
    """The attribute that cuDNN cannot do, for which the provider leaves a node to the CPU although there is a kernel."""
    match node.op_type:
        case "ArgMax" | "ArgMin":
            return "select_last_index" if attribute(node, "select_last_index", 0) else None
        case "ConvTranspose":
            pads = list(attribute(node, "pads", ()))
            half = len(pads) // 2
            automatic = str(attribute(node, "auto_pad", "NOTSET")).startswith("SAME")
            return "padding that is not the same on both sides" if automatic or pads[:half] != pads[half:] else None
        case "GRU":
            return None if attribute(node, "linear_before_reset", 0) == 1 else "linear_before_reset=0"
        case _:
            return None


CAPTURE = Capture(
    name="CUDA graph",
    known_from="memory types, waits and checks read in ONNX Runtime 1.25; cuda_kernels.txt has the sources of kernels",
    kernels=functools.partial(read_table, "cuda_kernels.txt"),
    host_inputs={
        **{("", op): places for op, places in _STANDARD.items()},
        **{(CONTRIB, op): places for op, places in _CONTRIB.items()},
    },
    waits=_WAITS,
    not_run=_not_run,
)
