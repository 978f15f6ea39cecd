"""Benchmarks of kernels and engine, each figure beside what the same machine could do in the same run."""
