"""Kernels that ONNX Runtime will run for a fused operator on a device, and what ONNX Runtime has to be told for that."""
