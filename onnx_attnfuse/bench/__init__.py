"""Running models in ONNX Runtime to see which kernels run, how fast, and with how much memory; each in a process of its own."""
