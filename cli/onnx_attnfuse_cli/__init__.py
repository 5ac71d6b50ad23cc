"""The command `attnfuse`: a thin layer over `onnx_attnfuse` that reads arguments, shows progress and prints."""
