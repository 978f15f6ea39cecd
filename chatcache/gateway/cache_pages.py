"""Every page of the KV cache in one letter."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from chatcache.gateway.context import gateway_of, owner_of
from chatcache.gateway.errors import json_response


async def page_map(request: Request) -> Response:
    """GET /v1/cache/map: a tenant sees others' pages as theirs and no more, an open server's visitors all."""
    gateway, owner = gateway_of(request), owner_of(request)
    await gateway.ready(None)
    pages = await gateway.engine.page_map(owner, operator=gateway.is_open)
    return json_response(
        {
            "object": "cache.map",
            "page_size": pages.page_size,
            "num_pages": pages.num_pages,
            "pages_per_cell": pages.num_pages_per_cell,
            "cells": pages.cells,
        }
    )
