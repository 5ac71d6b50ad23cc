"""onnxscript has no command for its fusions; this is the shortest there can be: ``python onnxscript_command.py MODEL OUTPUT``."""

import sys

import onnx_ir as ir
from onnxscript.rewriter.ort_fusions import optimize_for_ort

model = ir.load(sys.argv[1])
model, counts = optimize_for_ort(model)
ir.save(model, sys.argv[2])
print(counts)
