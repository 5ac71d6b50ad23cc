"""Shared caches in fewer bits; enter by `quantise.quantise_cache`."""
