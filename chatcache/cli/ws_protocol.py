"""The WebSocket protocol as RFC 6455 has it where the library has it otherwise, and its refusals in our envelope."""

from __future__ import annotations

import codecs
from http import HTTPStatus

from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Response
from websockets.server import ServerProtocol

from chatcache.errors import InvalidRequest
from chatcache.gateway.errors import INTERNAL, error_body
from chatcache.gateway.jsonio import encode

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class StrictProtocol(ServerProtocol):
    """Text is looked at as it comes (8.1), not when it is whole and by uvicorn, which logs a traceback; whoever says
    goodbye between the pieces of a message (5.4) is answered so."""

    _decoder: codecs.IncrementalDecoder | None = None

    def reject(self, status: HTTPStatus | int, text: str) -> Response:
        error = InvalidRequest(text.strip(), code="handshake_refused") if status < 500 else INTERNAL
        response = super().reject(status, encode({"error": error_body(error)}).decode())
        del response.headers["Content-Type"]
        response.headers["Content-Type"] = "application/json"
        return response

    def recv_frame(self, frame: Frame) -> None:
        """Raises: ProtocolError, UnicodeDecodeError."""
        super().recv_frame(frame)
        if frame.opcode in (Opcode.TEXT, Opcode.BINARY):
            self._decoder = _Utf8Decoder() if frame.opcode is Opcode.TEXT else None
        if frame.opcode in (Opcode.TEXT, Opcode.CONT) and self._decoder is not None:
            self._decoder.decode(frame.data, final=frame.fin)

    def fail(self, code: int, reason: str = "") -> None:
        if self.close_rcvd is not None:  # the library takes what was left unfinished for a fault
            given = self.close_rcvd.code
            code, reason = CloseCode.NORMAL_CLOSURE if given == CloseCode.NO_STATUS_RCVD else given, ""
        super().fail(code, reason)
