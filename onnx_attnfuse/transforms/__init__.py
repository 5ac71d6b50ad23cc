"""Transformations of whole models beside fusion: decomposition of fused operators, and half precision."""
