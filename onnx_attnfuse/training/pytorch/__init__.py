"""Training on PyTorch itself, without ORTModule: attention in the graphs that Dynamo captures is read and replaced.

    fuse(module)                                   onnx_attnfuse.training.fuse
    torch.compile(module, backend="attnfuse")      the same, as a backend

`backend` is the way in; `trace` writes a captured graph down as ONNX operators, `sites` reads attentions in that, `plan` chooses
the call for each, `rewrite` puts it into the captured graph, and `calls`, `rows` and `flex` are what runs then.
"""
