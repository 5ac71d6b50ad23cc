"""A model quantised by ONNX Runtime with everything but its attentions, which are fused then."""

import sys
from collections.abc import Iterator, Mapping

import numpy as np
import onnx
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

import onnx_attnfuse


class Tokens(CalibrationDataReader):
    """Four batches of random tokens; take text of yours."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self._batches: Iterator[Mapping[str, np.ndarray]] = iter(
            [{"input_ids": random.integers(0, 30, (2, 8)), "attention_mask": np.ones((2, 8), np.int64)} for _ in range(4)]
        )

    def get_next(self) -> Mapping[str, np.ndarray] | None:
        """The next batch; None behind the last."""
        return next(self._batches, None)


source = onnx.load(sys.argv[1])
nodes = onnx_attnfuse.explain(source).attention_nodes
quantize_static(source, "quantised.onnx", Tokens(), quant_format=QuantFormat.QDQ, nodes_to_exclude=list(nodes))
result = onnx_attnfuse.optimize("quantised.onnx")
result.save("model.onnx")
print("fused", result.report.fused, "of", result.report.candidates, "attention sites")
