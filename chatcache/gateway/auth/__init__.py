"""Authentication: API keys, session cookies and the principal of each request."""
