"""Layouts as algebra: axes are products of factors, views rearrange them, `rearrange` emits a rearrangement."""
