"""Schemathesis: requests generated from the OpenAPI document get described responses."""

from __future__ import annotations

import json
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import checks

from chatcache.gateway.openapi import document
from chatcache.gateway.routes import ROUTES
from tests.gateway.serving import MODEL, Server
from tests.gateway.test_rest import converse

CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.missing_required_header,
    checks.unsupported_method,
    checks.allow_header_conformance,
]
# Schemathesis cannot generate JSON Lines files.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Skipped test cases with unsupported payload:UserWarning"),
]
# A request head of 64 KiB is refused by the HTTP parser, long before the application.
MAX_URL_BYTES = 32_000


def _document() -> dict[str, Any]:
    """The document as served, with the model's name as the only value: others would be a 404."""
    described = document(ROUTES, "0")
    for schema in described["components"]["schemas"].values():
        if "model" in schema.get("properties", {}) and schema["title"].endswith("Request"):
            schema["properties"]["model"] = {"enum": [MODEL, None]}
    return described


API = schemathesis.openapi.from_dict(_document())
RANDOM = schemathesis.openapi.from_dict(_document())
RANDOM.config.phases.update(phases=["fuzzing"])  # the cases of all edges are the others'; they take long to collect


def _bounded(max_examples: int) -> settings:
    """The same examples in every run."""
    return settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def _check(case: schemathesis.Case[Any], server: Server) -> None:
    conversation = _conversation(server)
    parameters = case.path_parameters or {}
    if case.path.startswith("/v1/conversations/") and len(str(parameters.get("id", ""))) % 2:
        case.path_parameters = {**parameters, "id": conversation}
    if len(requests.Request(**_place(case, server)).prepare().url or "") > MAX_URL_BYTES:
        return
    response = case.call(base_url=server.url)
    # A body of more than 4 MiB is rejected too, with a status that the tool does not count as a rejection.
    refused = [checks.negative_data_rejection] if response.status_code == 413 else []
    case.validate_response(response, checks=[check for check in CHECKS if check not in refused])
    if response.headers["content-type"] == ["application/json"]:
        json.loads(response.content, parse_constant=_not_json)
        assert response.content.isascii() or case.path.endswith("/export")  # a file, to be read


def _place(case: schemathesis.Case[Any], server: Server) -> dict[str, Any]:
    """Where a case goes, as it is written on the wire."""
    wanted = case.as_transport_kwargs(base_url=server.url)
    return {name: wanted[name] for name in ("method", "url", "params") if name in wanted}


def _conversation(server: Server) -> str:
    """One that is stored now."""
    listed = server.request("GET", "/v1/conversations")[2]["data"]
    found: str = listed[0]["id"] if listed else converse(server, "Hi")["conversation"]["id"]
    return found


def _not_json(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


@API.include(method="POST").parametrize()
@_bounded(5)
def test_generated_bodies_get_described_responses(case: schemathesis.Case[Any], server: Server) -> None:
    """Fewer: thinking one up takes a second, and it has all fields at once."""
    _check(case, server)


@API.exclude(method="POST").parametrize()
@_bounded(12)
def test_generated_requests_get_described_responses(case: schemathesis.Case[Any], server: Server) -> None:
    _check(case, server)


@pytest.mark.long
@RANDOM.parametrize()
@_bounded(80)
def test_many_generated_requests_get_described_responses(case: schemathesis.Case[Any], server: Server) -> None:
    _check(case, server)
