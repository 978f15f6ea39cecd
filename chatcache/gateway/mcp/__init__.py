"""Tools of MCP servers that the operator configures (`--mcp-config`), for the chat page.

The page offers the tools to the model as functions, asks its user before it runs one, and sends the result back; the
gateway alone connects to the servers.

Reading order: `servers`, `client`, `http`.
"""
