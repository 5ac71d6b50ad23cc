"""The verifier: runs the old and the new nodes of a rewrite on the same inputs, and says whether they are equal."""
