"""The gateway on a real socket, as in tests/gateway: each test must leave it without a page in use."""

from tests.gateway.conftest import module_server, server, url

__all__ = ["module_server", "server", "url"]
