"""WebSocket /v1/responses: OpenAI's WebSocket mode. Lanes of responses in, frames of their logs out."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from chatcache.errors import ChatcacheError, InvalidRequest, NotFound, Overloaded, UnsupportedParameter
from chatcache.gateway.body import parse_json
from chatcache.gateway.context import gateway_of, owner_of
from chatcache.gateway.errors import INTERNAL, error_body
from chatcache.gateway.fields import read
from chatcache.gateway.jsonio import encode
from chatcache.gateway.response_run import ResponseRun, start_response
from chatcache.gateway.wire import CancelFields, CreateFields
from chatcache.types import MAX_N

Frame = dict[str, Any]

log = logging.getLogger(__name__)

PROTOCOL = "chatcache.v1"
MAX_LANES = 16
MAX_QUEUED = 16
BAD_MESSAGE = 4400
TRY_LATER = 1013
_SEND_TIMEOUT_S = 60.0


async def responses_socket(socket: WebSocket) -> None:
    """Accept (the guard has already let it through), serve, and end what is still running when it goes."""
    extended = PROTOCOL in socket.scope.get("subprotocols", ())
    await socket.accept(subprotocol=PROTOCOL if extended else None)
    metrics = gateway_of(socket).metrics
    metrics.sockets.inc()
    connection = Connection(socket, extended)
    try:
        await connection.serve()
    except (WebSocketDisconnect, ConnectionError):
        pass
    finally:
        metrics.sockets.dec()
        await connection.close()


class Connection:
    """One socket. Lanes run side by side, the responses of a lane one after another."""

    def __init__(self, socket: WebSocket, extended: bool) -> None:
        self._socket = socket
        self._extended = extended
        self._gateway = gateway_of(socket)
        self._owner = owner_of(socket)
        self._sending = asyncio.Lock()
        self._queues: dict[str | None, deque[dict[str, Any]]] = {}
        self._lanes: set[asyncio.Task[Any]] = set()

    async def serve(self) -> None:
        """Read frames until the client leaves. Raises: WebSocketDisconnect."""
        if self._extended:
            await self._gateway.health()  # so that the limits are known as soon as they can be
            await self._send(self._session())
        while True:
            message = await self._socket.receive()
            if message["type"] == "websocket.disconnect":
                return
            try:
                text = message.get("text")
                if text is None:
                    raise InvalidRequest("send text frames", code="invalid_json")
                body = await parse_json(text)
            except InvalidRequest as error:
                await self._refuse(error, None)
                await self._socket.close(BAD_MESSAGE, "bad message")
                return
            await self._take(body)

    async def close(self) -> None:
        """Stop reading logs; the responses of this connection are cancelled by their lanes."""
        for task in self._lanes:
            task.cancel()
        await asyncio.gather(*self._lanes, return_exceptions=True)

    async def _take(self, body: dict[str, Any]) -> None:
        lane = body.get("stream_id")
        try:
            if body.get("type") == "response.create":
                self._enqueue(_flat(body))
            elif body.get("type") == "response.cancel":
                await self._cancel(read(body, CancelFields).response_id)
            else:
                raise InvalidRequest("type must be response.create or response.cancel", param="type")
        except ChatcacheError as error:
            await self._refuse(error, lane)

    def _enqueue(self, body: dict[str, Any]) -> None:
        lane = read(body, CreateFields).stream_id
        if body.get("background"):
            raise UnsupportedParameter("background is not supported over WebSocket", param="background")
        queue = self._queues.get(lane)
        if queue is None:
            if len(self._queues) >= MAX_LANES:
                raise Overloaded(f"at most {MAX_LANES} lanes at once", param="stream_id")
            queue = self._queues[lane] = deque()
            task = asyncio.create_task(self._run_lane(lane, queue))
            self._lanes.add(task)
            task.add_done_callback(self._lanes.discard)
        if len(queue) >= MAX_QUEUED:
            raise Overloaded(f"at most {MAX_QUEUED} responses may wait in a lane", param="stream_id")
        queue.append(body)

    async def _run_lane(self, lane: str | None, queue: deque[dict[str, Any]]) -> None:
        try:
            while queue:
                await self._respond(lane, queue.popleft())
        except (WebSocketDisconnect, ConnectionError, RuntimeError):
            pass  # the socket closed under a send; `serve` notices too
        finally:
            del self._queues[lane]

    async def _respond(self, lane: str | None, body: dict[str, Any]) -> None:
        try:
            run = await start_response(self._gateway, self._owner, body, watched=self._extended)
        except Exception as error:
            if not isinstance(error, ChatcacheError):
                log.exception("response.create failed")
            await self._refuse(error if isinstance(error, ChatcacheError) else INTERNAL, lane)
            return
        await self._forward(run, lane)

    async def _forward(self, run: ResponseRun, lane: str | None) -> None:
        """Send the run's frames. What becomes of a run whose readers leave early is its own affair."""
        with run.log.reader(extended=self._extended) as reader:
            try:
                async for frame in reader:
                    await self._send_data(in_lane(frame.data, lane))
            except BaseException:
                self._gateway.metrics.disconnects.inc()
                raise

    async def _cancel(self, response_id: str) -> None:
        run = self._gateway.responses.get(self._owner, response_id).run
        if run is None:
            raise NotFound(f"response {response_id!r} has ended", param="response_id")
        task = asyncio.create_task(run.cancel())
        self._lanes.add(task)
        task.add_done_callback(self._lanes.discard)

    async def _refuse(self, error: ChatcacheError, lane: object) -> None:
        frame: Frame = {"type": "error", "status": error.status, "error": error_body(error)}
        await self._send({**frame, "stream_id": lane} if isinstance(lane, str) else frame)

    async def _send(self, frame: Frame) -> None:
        await self._send_data(encode(frame))

    async def _send_data(self, data: bytes) -> None:
        text = data.decode("ascii")
        try:
            async with self._sending, asyncio.timeout(_SEND_TIMEOUT_S):
                await self._socket.send_text(text)
        except TimeoutError:
            await self._socket.close(TRY_LATER, "reading too slowly")
            raise WebSocketDisconnect(TRY_LATER) from None

    def _session(self) -> Frame:
        limits = {
            "max_frame_bytes": self._gateway.config.max_frame_bytes,
            "max_n": MAX_N,
            "max_beam_width": MAX_N,
            "max_lanes": MAX_LANES,
        }
        model = {"model": self._gateway.model_name, "max_model_len": self._gateway.max_model_len or None}
        return {"type": "session.created", "session": {**model, "limits": limits}}


def in_lane(data: bytes, lane: str | None) -> bytes:
    """An encoded frame with its lane spliced in."""
    return data if lane is None else b'%s,"stream_id":%s}' % (data[:-1], encode(lane))


def _flat(body: dict[str, Any]) -> dict[str, Any]:
    """`response.create` with its fields at the top, wherever they came."""
    nested = body.get("response")
    if nested is None:
        return body
    if not isinstance(nested, dict):
        raise InvalidRequest("response must be an object", param="response")
    return {**{name: value for name, value in body.items() if name != "response"}, **nested}
