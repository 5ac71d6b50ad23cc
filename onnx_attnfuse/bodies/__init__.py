"""Each fused operator as a function body: its node in operators of the standard, built from its inputs and attributes.

    fused = FusedNode(node, builder, tuple(node.inputs))
    attention.body(fused).values

A body is the one description of its operator. `attnfuse unfuse` puts it in the operator's place, `verify.references` runs it,
and certificates execute it. That a kernel computes the same is shown by `tests/verify/references/test_kernels.py`.
"""
