"""Models in half precision, with what cannot bear it left in float32. Enter at `onnx_attnfuse.convert`.

`keep_float32` decides operator by operator what stays float32 and rounds numbers, `convert` inserts the casts.
"""
