"""The graph and what can be known of it: loading, saving, sizes, shapes, contents, and adding and removing nodes."""
