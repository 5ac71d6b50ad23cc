"""The fusions of onnxscript, which has no command for them: `python -m benchmarks.by_onnxscript MODEL OUTPUT`."""

from __future__ import annotations

import sys

import onnx_ir as ir
from onnxscript.rewriter.ort_fusions import optimize_for_ort

if __name__ == "__main__":
    ir.save(optimize_for_ort(ir.load(sys.argv[1]))[0], sys.argv[2])
