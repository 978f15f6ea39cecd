"""Admission control, rate limits and daily usage."""
