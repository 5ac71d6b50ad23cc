"""Decomposition of fused attention into the standard's operators, for runtimes that lack it. Enter at `onnx_attnfuse.unfuse`.

Every operator has a file that brings its inputs into one form, `core.AttentionInputs`; that form is decomposed in one place. The
result is verified against the operator before it takes its place, and is what `onnx_attnfuse.optimize` reads as an attention.
"""
