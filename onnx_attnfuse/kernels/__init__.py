"""Kernels that ONNX Runtime will run for a fused operator on a device, and the settings of ONNX Runtime for that."""
