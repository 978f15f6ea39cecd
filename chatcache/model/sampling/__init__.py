"""Sampling: from logits to tokens, on the host or on the device.

Reading order: `sampler`, `ops`, `device_sampler`.
"""
