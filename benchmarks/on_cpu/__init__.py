"""Benchmarks for a CPU, one subject in each module."""
