"""Types of request and response bodies.

Handlers parse and return them; the OpenAPI document is generated from them.

Reading order: requests, fields, errors, completions, responses, server.
"""
