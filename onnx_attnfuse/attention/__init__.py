"""The meaning of one attention, apart from how the graph spells it: its description, axes, masks, and how it is read."""
