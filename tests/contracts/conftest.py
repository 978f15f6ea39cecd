"""The gateway's server fixtures, for clients that are not ours."""

from tests.gateway.conftest import module_server, server

__all__ = ["module_server", "server"]
