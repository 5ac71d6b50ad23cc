"""Patterns applied before attention is looked for: what they find becomes plain attention, and is put back if that was of no use.

Three kinds, in this order: rules of onnxscript (`rules`), operators of other domains by their definitions (`operators`), formulas
by what they mean (`formulas`). Each change is built beside the old nodes, judged, and connected (`changes`). The old nodes are
kept until it is known what became of the new ones.
"""
