"""Benchmarks for a GPU, one subject in each module; `--provider cpu --quick` tries them out anywhere."""
