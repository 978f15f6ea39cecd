"""Fixtures: the gateway on a real socket, as in tests/gateway; each test must leave no page in use."""

from tests.gateway.conftest import module_server, server, url

__all__ = ["module_server", "server", "url"]
