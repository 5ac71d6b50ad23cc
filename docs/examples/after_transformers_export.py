"""After the exporter of transformers 5, which gives an onnx_ir.Model."""

import torch
import transformers
from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

import onnx_attnfuse

sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 100}
model = transformers.BertModel(transformers.BertConfig(**sizes)).eval()  # or from_pretrained
tokens = torch.ones(2, 16, dtype=torch.int64)

exported = OnnxExporter().export(model, {"input_ids": tokens, "attention_mask": tokens}, config=OnnxConfig(dynamic=True))
result = onnx_attnfuse.optimize(exported.program)
print("fused", result.report.fused, "of", result.report.candidates, "attentions")
result.save("model.onnx")
