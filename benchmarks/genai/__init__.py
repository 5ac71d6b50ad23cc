"""Decoders run by onnxruntime-genai: the architectures, torch's tokens and onnxruntime-genai's."""
