"""PDF files made in a test: pages of text, encrypted ones, and ones that take too much to read."""

from __future__ import annotations

import io
import zlib
from collections.abc import Sequence

from pypdf import PdfReader, PdfWriter


def pdf_of(pages: Sequence[str]) -> bytes:
    """A PDF with one line of text on each page."""
    return _file([f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode() for text in pages])


def pdf_of_stream(data: bytes) -> bytes:
    """A PDF of one page, whose content is the deflated `data`."""
    return _file([zlib.compress(data, 9)], "/Filter /FlateDecode")


def encrypted(data: bytes, password: str) -> bytes:
    """The PDF with a password; "" restricts it without one."""
    writer = PdfWriter()
    writer.append(PdfReader(io.BytesIO(data)))
    writer.encrypt(password, "owner", algorithm="RC4-128")
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def _file(contents: Sequence[bytes], stream_fields: str = "") -> bytes:
    """Catalog, page tree and font are objects 1 to 3; each page is two more: itself and its content."""
    kids = " ".join(f"{4 + 2 * at} 0 R" for at in range(len(contents)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(contents)} >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for at, content in enumerate(contents):
        page = f"/Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {5 + 2 * at} 0 R"
        objects.append(f"<< {page} /Resources << /Font << /F1 3 0 R >> >> >>".encode())
        objects.append(f"<< /Length {len(content)} {stream_fields} >>\nstream\n".encode() + content + b"\nendstream")
    out, offsets = bytearray(b"%PDF-1.4\n"), []
    for number, body in enumerate(objects, 1):
        offsets.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    start = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    out += b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    out += b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, start)
    return bytes(out)
