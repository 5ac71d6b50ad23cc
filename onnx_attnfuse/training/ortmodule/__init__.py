"""Training with ORTModule, ONNX Runtime's own: attention in its graphs of gradients is fused, forward and backward.

    ORTModule(module)       onnxruntime's, in the module `module`
    enable()                in any ORTModule, by the `hook` that ONNX Runtime calls with each graph

The last onnxruntime-training is 1.19.2, so nothing else imports this package: it stays as it is.
"""
