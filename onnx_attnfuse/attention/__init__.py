"""What one attention means, apart from how the graph spells it: its description, axes, masks, and how it is read."""
