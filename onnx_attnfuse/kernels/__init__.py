"""What ONNX Runtime will run for a fused operator on a device, and what it has to be told for that."""
