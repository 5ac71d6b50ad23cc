"""Fused attention back to the operators it is made of, for runtimes that lack it. Enter at `onnx_attnfuse.unfuse`.

Every operator has a file that brings its inputs into one form, `core.Problem`; that form is spelled out in one place. What is
written is judged against the operator before it takes its place, and is what `onnx_attnfuse.optimize` reads as an attention.
"""
