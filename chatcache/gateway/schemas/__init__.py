"""Request and response types of the HTTP API; the OpenAPI document is generated from them."""
