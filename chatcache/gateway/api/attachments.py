"""Files in requests: the route that returns a file's text, and `input_file` and `file` parts of messages."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from chatcache.errors import InvalidRequestError, UnsupportedParameterError
from chatcache.gateway.auth.principal import owner_of
from chatcache.gateway.context import Gateway, gateway_of
from chatcache.gateway.errors import UnsupportedMediaTypeError, json_response
from chatcache.gateway.limits.admission import UNTHROTTLED_BYTES
from chatcache.gateway.middleware import reject_encoding
from chatcache.gateway.schemas.requests import FileFields, MessageFields, Part
from chatcache.gateway.schemas.responses import Attachment
from chatcache.transfer.attachments import FileText, check_size, clean_name, is_pdf, read_file

MAX_FILES = 32  # of a request
FILE_PARTS = ("input_file", "file")
_DEFAULT_NAME = "file"


async def read_attachment(request: Request) -> Response:
    """POST /v1/attachments: return the text of the file in the body, as a message contains it. Stores nothing."""
    reject_encoding(request)
    if request.headers.get("content-type", "").startswith("multipart/"):
        raise UnsupportedMediaTypeError("send the file itself (curl --data-binary @FILE), with its name as ?filename=")
    gateway, owner = gateway_of(request), owner_of(request)
    name = clean_name(request.query_params.get("filename", _DEFAULT_NAME))
    model = await gateway.require_model(None)
    data = await request.body()
    file = await _file_text(gateway, owner, name, data)
    gateway.prompt_limits.check(len(file.block))
    async with gateway.tokenize_throttle.acquire(owner, len(file.block)):
        num_tokens = len(await asyncio.to_thread(model.tokenizer.encode_message, file.block))
    return json_response(
        Attachment("attachment", file.name, len(data), file.num_pages, len(file.text), num_tokens, file.block)
    )


async def replace_files(
    gateway: Gateway, owner: str, messages: Sequence[MessageFields], param: str
) -> list[MessageFields]:
    """Replace the file parts of messages by text parts.

    Raises: InvalidRequestError, UnsupportedParameterError with `param[i]...`.
    """
    num_files = 0
    replaced: list[MessageFields] = []
    for at, message in enumerate(messages):
        for name in ("content", "output"):
            parts = getattr(message, name)
            if not isinstance(parts, list) or not any(part.type in FILE_PARTS for part in parts):
                continue
            where = f"{param}[{at}].{name}"
            num_files += sum(part.type in FILE_PARTS for part in parts)
            if num_files > MAX_FILES:
                raise InvalidRequestError(f"{where}: a request may have {MAX_FILES} files", param=where)
            texts = [await _text_part(gateway, owner, part, f"{where}[{index}]") for index, part in enumerate(parts)]
            message = msgspec.structs.replace(message, **{name: texts})
        replaced.append(message)
    return replaced


async def _text_part(gateway: Gateway, owner: str, part: Part, where: str) -> Part:
    if part.type not in FILE_PARTS:
        return part
    fields: FileFields | Part = part
    if part.type == "file":
        if part.file is None:
            raise InvalidRequestError(f"{where}.file is required", param=f"{where}.file")
        fields, where = part.file, f"{where}.file"
    for name in ("file_id", "file_url"):
        if getattr(fields, name) is not None:
            raise UnsupportedParameterError(
                f"{where}.{name} is not supported here; send the file as file_data", param=f"{where}.{name}"
            )
    param = f"{where}.file_data"
    if fields.file_data is None:
        raise InvalidRequestError(f"{param} is required", param=param, code="missing_required_parameter")
    try:
        name = clean_name(fields.filename or _DEFAULT_NAME)
        file = await _file_text(gateway, owner, name, _decode(fields.file_data, name, param))
    except InvalidRequestError as error:
        raise InvalidRequestError(error.message, param=param, code=error.code) from None
    return Part(type="input_text", text=file.block)


def _decode(data: str, name: str, param: str) -> bytes:
    """Decode base64, with or without the head of a data URL. Raises: InvalidRequestError."""
    head, separator, encoded = data.partition(",")
    if not separator:
        encoded = data
    elif not (head.startswith("data:") and head.endswith(";base64")):
        raise InvalidRequestError(f'{param} must be "data:...;base64," and the file, or base64 alone', param=param)
    check_size(name, len(encoded) * 3 // 4)
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequestError(f"{param} is not valid base64", param=param) from None


async def _file_text(gateway: Gateway, owner: str, name: str, data: bytes) -> FileText:
    """Return the text of a file. Clients without conversations send a file with every turn: PDFs are read once."""
    if not is_pdf(data):
        return await asyncio.to_thread(read_file, name, data)
    digest = (await asyncio.to_thread(hashlib.sha256, data)).digest()
    if (known := gateway.pdf_texts.find(owner, digest)) is None:
        async with gateway.pdf_throttle.acquire(owner, max(len(data), UNTHROTTLED_BYTES + 1)):
            known = await asyncio.to_thread(read_file, name, data)
        gateway.pdf_texts.add(owner, digest, known)
    return FileText(name, known.text, known.num_pages)
