"""Encoders without padding: it is removed once before the first layer and restored once after the last.

`region.grow` finds what can be computed on packed tokens between the attentions, `weave.Weaving` builds and judges it beside the
graph, `step.Packing` connects it.
"""
