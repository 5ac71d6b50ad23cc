"""The verifier: runs what a rewrite replaces and what replaces it on the same inputs, and says whether they are equal."""
