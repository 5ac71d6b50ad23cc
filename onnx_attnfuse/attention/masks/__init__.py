"""The meaning of masks: read as terms over (b, n, i, j), named, and bounded."""
