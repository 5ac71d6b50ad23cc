"""Layouts as algebra: axes are products of factors, views rearrange them, `arrange` emits a rearrangement."""
