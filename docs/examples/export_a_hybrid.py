"""A decoder of transformers with linear attention, exported with its states, for prompts of every length."""

import torch
import transformers
from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

import onnx_attnfuse

sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
linear = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
kinds = {"layer_types": ["linear_attention", "full_attention"], "vocab_size": 100, "intermediate_size": 96}
config = transformers.Qwen3NextConfig(**sizes, **linear, **experts, **kinds)
model = transformers.AutoModelForCausalLM.from_config(config).eval()  # or from_pretrained
tokens = torch.ones(2, 16, dtype=torch.int64)

with torch.no_grad():
    past = model(tokens, use_cache=True).past_key_values
inputs = {"input_ids": tokens, "attention_mask": torch.ones(2, 32, dtype=torch.int64), "past_key_values": past}
with onnx_attnfuse.mixers_as_operators(model):
    exported = OnnxExporter().export(model, inputs, config=OnnxConfig(dynamic=True))
result = onnx_attnfuse.optimize(exported.program)
operators = [site.op for site in result.report.sites if site.op]
print("fused", len(operators), "of", config.num_hidden_layers, "layers:", ", ".join(operators))
result.save("model.onnx")
