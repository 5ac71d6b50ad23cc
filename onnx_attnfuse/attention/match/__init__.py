"""From a Softmax, or an attention operator, to the `AttentionSpec` of its meaning."""
