"""Benchmarks of kernels and engine, each figure next to a limit measured in the same run."""
