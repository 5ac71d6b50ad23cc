"""As a pass of Olive, here after one of its own."""

import sys

from olive.hardware.accelerator import AcceleratorSpec
from olive.model import ONNXModelHandler
from olive.model.utils import resolve_onnx_path
from olive.passes import Pass
from olive.passes.olive_pass import create_pass_from_dict
from olive.passes.onnx.peephole_optimizer import OnnxPeepholeOptimizer
from olive.passes.pass_config import BasePassConfig, PassConfigParam

import onnx_attnfuse


class AttentionFusion(Pass):
    """Fuses attention; what can be configured are fields of `onnx_attnfuse.Options`."""

    @classmethod
    def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
        return {"padding": PassConfigParam(type_=str, default_value="auto")}

    def _run_for_config(self, model: ONNXModelHandler, config: BasePassConfig, output_model_path: str) -> ONNXModelHandler:
        result = onnx_attnfuse.optimize(model.model_path, padding=config.padding)
        print("fused", result.report.fused, "of", result.report.candidates)
        path = resolve_onnx_path(output_model_path)
        result.save(path)
        return ONNXModelHandler(path)


model = ONNXModelHandler(sys.argv[1])
model = create_pass_from_dict(OnnxPeepholeOptimizer, {}, disable_search=True).run(model, "optimized")
model = create_pass_from_dict(AttentionFusion, {"padding": "exact"}, disable_search=True).run(model, "fused")
