"""The fusion of attention in a model, from candidates to connected operators; enter at `pipeline`."""
