"""Benchmarks of training on PyTorch, one subject in each module; `--provider cpu --quick` tries them out anywhere."""
