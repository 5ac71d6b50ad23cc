"""The meaning of masks: read as expressions over (b, n, i, j), named, and bounded."""
