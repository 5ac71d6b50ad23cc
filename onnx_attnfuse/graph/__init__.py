"""The graph and facts about it: loading, saving, sizes, shapes, contents, and adding and removing nodes."""
