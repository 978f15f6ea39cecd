"""Sampling on the host and on the device. Start at `sampler`."""
