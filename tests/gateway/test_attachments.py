"""Files in messages: text files and PDFs become a block of text, over every route; limits are named."""

from __future__ import annotations

import base64
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection

from chatcache.config import ServerConfig
from chatcache.conversations.file_blocks import file_block, split_files
from chatcache.errors import InvalidRequestError
from chatcache.gateway.api import attachments as parts
from chatcache.transfer import attachments
from chatcache.transfer.attachments import FileText, FileTexts, clean_name, read_file
from tests.gateway.described import Described
from tests.gateway.frames import ask, receive, send
from tests.gateway.serving import Server
from tests.gateway.test_openapi import described
from tests.support.pdfs import encrypted, pdf_of, pdf_of_stream

__all__ = ["described"]

NOTES = "Buy milk.\nCall Ada.\n"
BLOCK = "File: notes.txt\n```\nBuy milk.\nCall Ada.\n```\n"
GREEDY = {"temperature": 0, "max_output_tokens": 4}


def data_url(data: bytes, media_type: str = "text/plain") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def input_file(data: bytes, name: str = "notes.txt") -> dict[str, Any]:
    return {"type": "input_file", "filename": name, "file_data": data_url(data)}


def respond(server: Server, *content: dict[str, Any], **fields: Any) -> tuple[int, Any]:
    body = {"input": [{"role": "user", "content": list(content)}], **GREEDY, **fields}
    status, _, answer = server.request("POST", "/v1/responses", body)
    return status, answer


def upload(server: Server, data: bytes, name: str) -> tuple[int, Any]:
    status, _, answer = server.request(
        "POST", f"/v1/attachments?filename={name}", raw=data, headers={"content-type": "application/octet-stream"}
    )
    return status, answer


def test_upload_of_a_form_is_refused_with_what_to_send(server: Server) -> None:
    form = {"content-type": "multipart/form-data; boundary=x"}
    status, _, answer = server.request("POST", "/v1/attachments", raw=b"--x--", headers=form)
    assert status == 415 and "send the file itself (curl" in answer["error"]["message"]


def input_text(server: Server, response: dict[str, Any]) -> str:
    """The stored text of the response's last input message."""
    _, _, page = server.request("GET", f"/v1/responses/{response['id']}/input_items")
    text: str = page["data"][0]["content"][0]["text"]
    return text


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"a\r\nb\rc\n\n", "a\nb\nc"),
        ("\ufeffé".encode(), "é"),
        ("é\n".encode("utf-16"), "é"),
        ("Größe".encode("cp1252"), "Größe"),
        (b"\x1b[1mbold", "\x1b[1mbold"),
    ],
)
def test_text_file_is_decoded_and_its_line_ends_are_equal(data: bytes, text: str) -> None:
    assert read_file("a.txt", data) == FileText("a.txt", text)


@pytest.mark.parametrize("text", ["one", "```\ncode\n```", "a ```` b", "`"])
def test_fence_of_a_block_is_longer_than_every_run_of_backticks(text: str) -> None:
    lines = FileText("a.md", text).block.split("\n")
    fence = lines[1]
    assert lines[0] == "File: a.md" and set(fence) == {"`"} and len(fence) >= 3
    assert lines[-2:] == [fence, ""] and "\n".join(lines[2:-2]) == text
    assert fence not in text


@pytest.mark.parametrize(
    ("content", "names", "text"),
    [
        ("What next?", [], "What next?"),
        (f"{BLOCK}\n{file_block('b.md', '```')}\nWhat next?", ["notes.txt", "b.md"], "\nWhat next?"),
        (BLOCK, ["notes.txt"], ""),
        ("File: a\n```\nnever closed", [], "File: a\n```\nnever closed"),
        (f"Text, {BLOCK}", [], f"Text, {BLOCK}"),
    ],
)
def test_message_is_split_into_its_files_and_its_text(content: str, names: list[str], text: str) -> None:
    assert split_files(content) == (names, text)


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("notes.txt", "notes.txt"),
        ("/home/ada/notes.txt", "notes.txt"),
        ("C:\\docs\\notes.txt", "notes.txt"),
        ("two\nlines\x00.txt", "two lines .txt"),
        ("", "file"),
        ("/", "file"),
    ],
)
def test_name_of_a_file_is_one_line_without_its_folder(name: str, clean: str) -> None:
    assert clean_name(name) == clean


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"\x89PNG\r\n\x1a\n\x00", "is a binary file; only text files and PDFs are read"),
        (b"PK\x03\x04", "is a binary file"),
        (b"\x81\x8d", "is a binary file"),
        (b"\xff\xfea", "is a binary file"),
        (b" \n\n", "is empty"),
        (b"x" * (attachments.MAX_TEXT_CHARS + 1), "has 2000001 characters; the limit is 2000000"),
        (b"x" * ((16 << 20) + 1), "has 16777217 bytes; the limit is 16 MiB"),
    ],
)
def test_file_without_readable_text_is_refused_with_the_limit(data: bytes, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^a.bin {problem}") as caught:
        read_file("a.bin", data)
    assert caught.value.code == "unreadable_file"


@pytest.mark.parametrize("text", ["Files that begin with %PDF- are PDFs.", '_MARK = b"%PDF-1.4"'])
def test_text_that_names_the_mark_of_a_pdf_is_text(text: str) -> None:
    assert read_file("a.md", text.encode()) == FileText("a.md", text)


@pytest.mark.parametrize("head", [b"", b"@PJL ENTER\r\n", b"\n", b"\xef\xbb\xbf", b"\0" * 128])
def test_pdf_after_other_bytes_is_read(head: bytes) -> None:
    assert read_file("a.pdf", head + pdf_of(["Hello"]) + b"\0").text == "Hello"


def test_text_of_a_pdf_is_read_page_by_page() -> None:
    assert read_file("a.pdf", pdf_of(["First page", "", "Third page"])) == FileText(
        "a.pdf", "First page\n\nThird page", 3
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: encrypted(pdf_of(["secret"]), "pw"), "is encrypted: remove its password first"),
        (lambda: pdf_of(["", ""]), "has no text on its 2 pages; pictures of text are not read"),
        (lambda: pdf_of(["x"] * 7), "has 7 pages; the limit is 6 pages"),
        (lambda: pdf_of(["x" * 60]), "has more than 50 characters of text, which is the limit"),
        (lambda: pdf_of_stream(b"0" * (100 << 20)), "contains a stream that expands to more than the limit of 75 MB"),
        (
            lambda: pdf_of_stream(b"BT /F1 12 Tf" + b" (a) Tj" * (4 << 20) + b" ET"),
            "takes more than the limit of 1 s of computing to read",
        ),
        (lambda: b"%PDF-1.4\nnothing", "is not a readable PDF: "),
        (lambda: pdf_of(["x"])[:300], "is not a readable PDF: "),
    ],
    ids=["encrypted", "no text", "pages", "characters", "bomb", "time", "broken", "truncated"],
)
def test_pdf_that_cannot_be_read_is_refused_with_the_limit(
    make: Callable[[], bytes], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attachments, "MAX_PDF_PAGES", 6)
    monkeypatch.setattr(attachments, "MAX_TEXT_CHARS", 50)
    if "computing" in problem:
        monkeypatch.setattr(attachments, "PDF_CPU_S", 1)  # a busy machine may take that long for the others
    with pytest.raises(InvalidRequestError, match=f"^a.pdf {problem}"):
        read_file("a.pdf", make())


def test_pdf_whose_reader_ends_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "child.py"
    script.write_text("raise SystemExit(1)")
    monkeypatch.setattr(attachments, "_PDF_CHILD", script)
    with pytest.raises(InvalidRequestError, match=r"^a\.pdf is not a readable PDF: the reader ended$"):
        read_file("a.pdf", pdf_of(["x"]))


@pytest.mark.slow
def test_pdf_that_only_restricts_printing_is_read() -> None:
    assert read_file("a.pdf", encrypted(pdf_of(["open"]), "")).text == "open"


def test_texts_of_pdfs_are_kept_up_to_a_number_of_characters() -> None:
    files = FileTexts(max_chars=10)
    files.add("ada", b"1", FileText("a", "x" * 6))
    assert files.find("ada", b"1") is not None and files.find("bob", b"1") is None
    files.add("ada", b"2", FileText("b", "x" * 4))
    assert files.find("ada", b"1") is not None  # now the newest
    files.add("ada", b"3", FileText("c", "x"))
    assert [files.find("ada", digest) is not None for digest in (b"1", b"2", b"3")] == [True, False, True]


def test_uploaded_file_is_returned_as_a_block_with_its_tokens(server: Server, described: Described) -> None:
    status, answer = upload(server, NOTES.encode(), "notes.txt")
    assert status == 200
    described.check("POST", "/v1/attachments", status, answer)
    _, _, counted = server.post("/tokenize", prompt=BLOCK, add_special_tokens=False)
    assert answer == {
        "object": "attachment",
        "filename": "notes.txt",
        "num_bytes": 20,
        "num_pages": None,
        "num_chars": 19,
        "num_tokens": counted["count"],
        "text": BLOCK,
    }
    status, answer = upload(server, pdf_of(["Hello", "there"]), "a%20b.pdf")
    described.check("POST", "/v1/attachments", status, answer)
    assert (answer["num_pages"], answer["text"]) == (2, "File: a b.pdf\n```\nHello\n\nthere\n```\n")


def test_tokens_of_an_uploaded_file_are_those_that_it_has_in_a_message(server: Server) -> None:
    def num_prompt_tokens(content: str) -> int:
        messages = [{"role": "user", "content": content}]
        usage = server.post("/v1/chat/completions", messages=messages, max_tokens=1)[2]["usage"]
        return int(usage["prompt_tokens"])

    status, answer = upload(server, b"<|im_end|>\n<|im_start|>", "notes.txt")
    assert status == 200
    assert answer["num_tokens"] == num_prompt_tokens(answer["text"]) - num_prompt_tokens("")


def test_refused_upload_names_the_file_and_the_limit(server: Server, described: Described) -> None:
    status, answer = upload(server, b"\x00\x01", "photo.png")
    described.check("POST", "/v1/attachments", status, answer)
    assert status == 400 and answer["error"]["code"] == "unreadable_file"
    assert answer["error"]["message"].startswith("photo.png is a binary file")
    status, answer = upload(server, b"x", "n" * 300)
    assert status == 400 and "has 300 characters; the limit is 255" in answer["error"]["message"]


@pytest.fixture
def small_server(tmp_path: Path) -> Iterator[Server]:
    """Takes files of 1,000 bytes."""
    with Server(ServerConfig(db=str(tmp_path / "c.db"), max_import_bytes=1000)) as server:
        yield server.wait_ready()


def test_upload_over_the_limit_is_refused_before_it_is_read(small_server: Server) -> None:
    status, answer = upload(small_server, b"x" * 1001, "a.txt")
    assert (status, answer["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize(
    "content",
    [
        [input_file(NOTES.encode()), {"type": "input_text", "text": "What next?"}],
        [
            {"type": "input_file", "filename": "notes.txt", "file_data": base64.b64encode(NOTES.encode()).decode()},
            {"type": "input_text", "text": "What next?"},
        ],
        [{"type": "input_text", "text": f"{BLOCK}\nWhat next?"}],
    ],
    ids=["data URL", "base64", "block"],
)
def test_input_file_is_stored_as_its_block(server: Server, content: list[dict[str, Any]]) -> None:
    status, answer = respond(server, *content)
    assert status == 200, answer
    assert input_text(server, answer) == f"{BLOCK}\nWhat next?" and "ignored" not in answer


@pytest.mark.parametrize(("text", "title"), [("What next?", "What next?"), ("", "notes.txt")])
def test_title_of_a_conversation_is_the_text_after_its_files(server: Server, text: str, title: str) -> None:
    _, answer = respond(server, input_file(NOTES.encode()), {"type": "input_text", "text": text})
    _, _, conversation = server.request("GET", f"/v1/conversations/{answer['conversation']['id']}")
    assert conversation["title"] == title


def test_file_part_of_a_chat_has_the_prompt_of_its_block(server: Server) -> None:
    part = {"type": "file", "file": {"filename": "notes.txt", "file_data": data_url(NOTES.encode())}}
    question = {"type": "text", "text": "What next?"}
    prompts = []
    for content in ([part, question], f"{BLOCK}\nWhat next?"):
        message = {"role": "user", "content": content}
        status, headers, answer = server.post("/v1/chat/completions", messages=[message], max_tokens=1)
        assert status == 200 and "x-chatcache-ignored" not in headers, answer
        _, _, tokens = server.post("/tokenize", messages=[message])
        _, _, explained = server.post("/v1/cache/explain", messages=[message])
        assert tokens["count"] == answer["usage"]["prompt_tokens"] == explained["prompt_tokens"]
        prompts.append(tokens["tokens"])
    assert prompts[0] == prompts[1]


def test_file_in_a_second_conversation_is_served_from_the_cache(server: Server) -> None:
    """The text after the file differs; the prompt up to its end is cached."""
    pdf = input_file(pdf_of(["A long report " * 12, "and its second page"]), "report.pdf")
    texts = [{"type": "input_text", "text": text} for text in ("Summarize it.", "Who wrote this?")]
    (_, first), (_, second) = [respond(server, pdf, text) for text in texts]
    assert first["conversation"] != second["conversation"]
    block = input_text(server, second).removesuffix("\nWho wrote this?")
    _, _, counted = server.post("/tokenize", prompt=block)
    assert second["usage"]["input_tokens_details"]["cached_tokens"] >= counted["count"] - 4 > 100


def test_pdf_that_is_sent_again_is_not_read_again(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    pdf = input_file(pdf_of(["Read once"]), "first.pdf")
    assert respond(server, pdf)[0] == 200
    monkeypatch.setattr(subprocess, "run", None)
    status, answer = respond(server, {**pdf, "filename": "renamed.pdf"})
    assert status == 200 and input_text(server, answer) == "File: renamed.pdf\n```\nRead once\n```\n"


def test_file_in_appended_messages_and_function_output_is_its_block(server: Server) -> None:
    message = {"role": "user", "content": [input_file(NOTES.encode())]}
    status, _, created = server.post("/v1/conversations", items=[message])
    assert status == 200, created
    status, _, page = server.request("POST", f"/v1/conversations/{created['id']}/items", {"items": [message]})
    assert status == 200 and page["data"][0]["content"][0]["text"] == BLOCK
    call = {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": [input_file(NOTES.encode())]}
    given = [{"role": "user", "content": "Read"}, call, output]
    status, _, answer = server.post("/v1/responses", input=given, **GREEDY)
    assert status == 200, answer
    _, _, page = server.request("GET", f"/v1/responses/{answer['id']}/input_items")
    assert page["data"][0]["output"] == BLOCK


def test_file_over_the_websocket_is_its_block(server: Server, socket: ClientConnection) -> None:
    message = {"role": "user", "content": [input_file(NOTES.encode())]}
    answer = ask(socket, input=[message], **GREEDY)
    assert input_text(server, answer) == BLOCK
    send(socket, "response.create", input=[{"role": "user", "content": [input_file(b"\x00", "a.bin")]}])
    frame = receive(socket)
    assert (frame["type"], frame["error"]["code"]) == ("error", "unreadable_file")


@pytest.mark.parametrize(
    ("part", "code", "param", "message"),
    [
        ({"file_id": "file_x"}, "unsupported_parameter", ".file_id", "send the file as file_data"),
        ({"file_url": "http://127.0.0.1:9/a.pdf"}, "unsupported_parameter", ".file_url", "send the file as file_data"),
        ({}, "missing_required_parameter", ".file_data", "is required"),
        ({"file_data": "???"}, "invalid_value", ".file_data", "is not valid base64"),
        ({"file_data": "data:text/plain,hi"}, "invalid_value", ".file_data", 'must be "data:...;base64,"'),
        ({"file_data": "AAEC", "filename": "a.png"}, "unreadable_file", ".file_data", "a.png is a binary file"),
    ],
)
def test_refused_file_part_names_the_field(
    server: Server, part: dict[str, Any], code: str, param: str, message: str
) -> None:
    status, answer = respond(server, {"type": "input_text", "text": "See"}, {"type": "input_file", **part})
    error = answer["error"]
    assert (status, error["code"], error["param"]) == (400, code, f"input[0].content[1]{param}")
    assert message in error["message"]
    nested = {"role": "user", "content": [{"type": "file", "file": part}]}
    status, _, answer = server.post("/v1/chat/completions", messages=[nested], max_tokens=1)
    error = answer["error"]
    assert (status, error["code"], error["param"]) == (400, code, f"messages[0].content[0].file{param}")


def test_request_has_at_most_32_files(server: Server) -> None:
    file = input_file(b"x", "x")
    assert respond(server, *[file] * parts.MAX_FILES)[0] == 200
    status, answer = respond(server, *[file] * (parts.MAX_FILES + 1))
    assert status == 400 and answer["error"]["message"] == "input[0].content: a request may have 32 files"


def test_file_without_a_body_is_refused_by_name(server: Server) -> None:
    nested = {"role": "user", "content": [{"type": "file"}]}
    status, _, answer = server.post("/v1/chat/completions", messages=[nested], max_tokens=1)
    assert (status, answer["error"]["param"]) == (400, "messages[0].content[0].file")
