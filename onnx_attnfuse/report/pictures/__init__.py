"""Drawings in the report: each site before and after, its mask, and where it lies in the model."""
