"""Child process that extracts the text of one PDF: `python -P pdf_child.py LIMITS < FILE`.

A PDF of any client is read here, where limits of the operating system on time and memory end the work. LIMITS is JSON
with `cpu_s`, `memory_bytes`, `max_pages` and `max_chars`. Prints one JSON object: `text` and `num_pages`, or `error`,
the end of a sentence about the file.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys

from pypdf import PdfReader
from pypdf.errors import DependencyError, LimitReachedError, PyPdfError

try:
    import resource
except ImportError:  # not POSIX: only the parent's timeout applies
    resource = None  # type: ignore[assignment]

Result = dict[str, str | int]
ENCRYPTED = "is encrypted: remove its password first"


def extract(data: bytes, max_pages: int, max_chars: int) -> Result:
    """Extract the text of all pages, with an empty line between two."""
    reader = PdfReader(io.BytesIO(data))
    try:
        if reader.is_encrypted and not reader.decrypt(""):
            return {"error": ENCRYPTED}
        num_pages = reader.get_num_pages()
    except DependencyError:  # AES needs another package
        return {"error": ENCRYPTED}
    if num_pages > max_pages:
        return {"error": f"has {num_pages} pages; the limit is {max_pages} pages"}
    texts: list[str] = []
    num_chars = 0
    for page in reader.pages:
        text = page.extract_text().strip()
        num_chars += len(text)
        if num_chars > max_chars:
            return {"error": f"has more than {max_chars} characters of text, which is the limit"}
        if text:
            texts.append(text)
    if not texts:
        return {"error": f"has no text on its {num_pages} pages; pictures of text are not read"}
    return {"text": "\n\n".join(texts), "num_pages": num_pages}


def main() -> None:
    limits = json.loads(sys.argv[1])
    if resource is not None:
        wanted = ((resource.RLIMIT_CPU, "cpu_s"), (resource.RLIMIT_AS, "memory_bytes"))
        for kind, name in wanted:
            with contextlib.suppress(OSError, ValueError):  # not on this system; the parent's timeout applies
                resource.setrlimit(kind, (limits[name], limits[name]))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        result = extract(sys.stdin.buffer.read(), limits["max_pages"], limits["max_chars"])
    except LimitReachedError:
        result = {"error": "contains a stream that expands to more than the limit of 75 MB"}
    except MemoryError:
        result = {"error": f"needs more than the limit of {limits['memory_bytes'] >> 20} MiB of memory to read"}
    except (PyPdfError, ValueError, KeyError, TypeError, AttributeError, IndexError, OSError, RecursionError) as error:
        result = {"error": f"is not a readable PDF: {str(error)[:200] or type(error).__name__}"}
    sys.stdout.buffer.write(json.dumps(result).encode())


if __name__ == "__main__":
    main()
