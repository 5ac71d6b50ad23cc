"""Models in half precision, with what cannot bear it left in float32. Enter at `onnx_attnfuse.convert`.

`islands` decides operator by operator what stays float32, `narrowing` carries it out, `rounding` makes numbers of the other type.
"""
