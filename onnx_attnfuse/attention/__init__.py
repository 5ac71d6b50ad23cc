"""The meaning of one attention, apart from its form in the graph: its description, axes, masks, and how it is read."""
