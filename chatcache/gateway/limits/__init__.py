"""Limits of the gateway: admission control, rate limits of API keys and daily token usage.

Reading order: `rate_limits`, `admission`.
"""
