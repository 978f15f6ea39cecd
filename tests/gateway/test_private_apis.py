"""The private parts of uvicorn, websockets and sse-starlette that are overridden or used exist as expected.

pyproject.toml has upper bounds for these libraries; this test shows whether a bound can be raised.
"""

from __future__ import annotations

import inspect
import tomllib
from importlib.metadata import version
from pathlib import Path
from types import CodeType, FunctionType

import pytest
from packaging.requirements import Requirement
from sse_starlette import EventSourceResponse
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.server import ServerProtocol

from chatcache.gateway.api.sse import EventStream
from chatcache.gateway.uvicorn_limits import BoundedHttp, BoundedWebSocket, StrictWebSocketProtocol

ROOT = Path(__file__).parents[2]
# Our class, the library's, the names that must be overridden or used.
OVERRIDES = [
    (
        BoundedHttp,
        HttpToolsProtocol,
        "connection_made data_received on_url on_header on_headers_complete on_body on_message_complete "
        "handle_websocket_upgrade on_response_complete _start_asgi_task connection_lost send_400_response "
        "pause_writing resume_writing",
        "connections cycle pipeline transport loop",
    ),
    (
        BoundedWebSocket,
        WebSocketsSansIOProtocol,
        "__init__ connection_made data_received receive send handle_events connection_lost pause_writing "
        "resume_writing",
        "conn frames queue transport close_sent handshake_initiated handshake_complete config logger stop_keepalive "
        "read_paused scope",
    ),
    (StrictWebSocketProtocol, ServerProtocol, "__init__ reject recv_frame fail", "close_rcvd parser reader"),
    (EventStream, EventSourceResponse, "__init__ __call__ _stream_response _ping", "active _ping_interval"),
]
IDS = [own.__name__ for own, *_ in OVERRIDES]


def inherited(own: type, library: type, name: str) -> object:
    """Return the library's definition that a method of our class replaces."""
    found = inspect.getattr_static(library, name)
    assert found is not inspect.getattr_static(own, name), f"{own.__name__}.{name} is not overridden"
    return found


def parameters(function: object) -> list[str]:
    assert isinstance(function, FunctionType)
    kinds = inspect.signature(function).parameters.values()
    return [each.name for each in kinds if each.kind is not inspect.Parameter.KEYWORD_ONLY]


def names_in(code: CodeType) -> set[str]:
    """Return the names of attributes and variables in a function and the functions inside it."""
    inner = [names_in(each) for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(*inner)


@pytest.mark.parametrize(("own", "library", "methods", "attributes"), OVERRIDES, ids=IDS)
def test_overridden_methods_have_the_expected_parameters(
    own: type, library: type, methods: str, attributes: str
) -> None:
    for name in methods.split():
        base = inherited(own, library, name)
        if name != "__init__":
            assert parameters(inspect.getattr_static(own, name)) == parameters(base), name
        assert inspect.iscoroutinefunction(base) == inspect.iscoroutinefunction(getattr(own, name)), name


@pytest.mark.parametrize(("own", "library", "methods", "attributes"), OVERRIDES, ids=IDS)
def test_all_overrides_of_private_methods_are_listed(own: type, library: type, methods: str, attributes: str) -> None:
    """A new override must be added to the table above."""
    defined = {
        name for each in own.__mro__[: own.__mro__.index(library)] for name, f in vars(each).items() if callable(f)
    }
    replaced = {name for name in defined if hasattr(library, name) and not hasattr(object, name)}
    assert replaced <= set(methods.split())


@pytest.mark.parametrize(("own", "library", "methods", "attributes"), OVERRIDES, ids=IDS)
def test_used_attributes_exist_in_the_library(own: type, library: type, methods: str, attributes: str) -> None:
    functions = [f for each in library.__mro__ for f in vars(each).values() if isinstance(f, FunctionType)]
    known = set(dir(library)).union(*(names_in(function.__code__) for function in functions))
    assert set(attributes.split()) <= known


@pytest.mark.parametrize("name", ["uvicorn", "websockets", "sse-starlette"])
def test_libraries_with_overridden_parts_have_an_upper_bound(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (found,) = [each for each in map(Requirement, project["dependencies"]) if each.name == name]
    assert "<" in {each.operator for each in found.specifier}
    assert found.specifier.contains(version(name)) and not found.specifier.contains("1000")
