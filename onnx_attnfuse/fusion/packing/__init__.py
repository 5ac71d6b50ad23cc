"""Encoders on packed tokens: padding is removed once before the first layer (unpad) and restored once after the last (pad).

`region.grow` finds what can be computed on packed tokens between the attentions, `build_region.RegionBuilder` builds and verifies
it beside the graph, `packer.Packer` connects it, `packer.pack` drives all of that for one graph.
"""
