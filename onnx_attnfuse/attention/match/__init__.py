"""From a Softmax, or an attention operator, to the `AttentionSpec` of what it means."""
