"""Among the passes of onnx-ir, on an onnx_ir.Model."""

import sys

import onnx_ir as ir
from onnx_ir.passes import common

import onnx_attnfuse

fusion = onnx_attnfuse.AttentionFusionPass(verify="sites")
passes = ir.passes.Sequential(common.IdentityEliminationPass(), fusion, common.RemoveUnusedNodesPass())
done = passes(ir.load(sys.argv[1]))
print("fused", fusion.report.fused, "of", fusion.report.candidates, "changed" if done.modified else "unchanged")
ir.save(done.model, "model.onnx")
