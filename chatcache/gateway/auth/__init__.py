"""Authentication of requests: API keys, session cookies and principals.

Reading order: `principal`, `keys`, `middleware`.
"""
