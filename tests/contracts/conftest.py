"""Fixtures: the server of the gateway tests, for third-party clients."""

from tests.gateway.conftest import module_server, server

__all__ = ["module_server", "server"]
