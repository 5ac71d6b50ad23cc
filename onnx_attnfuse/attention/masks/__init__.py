"""What masks mean: read as expressions over (b, n, i, j), named, and bounded."""
