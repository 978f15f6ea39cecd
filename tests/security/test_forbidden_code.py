"""Check that the source contains no construct that executes data as code or whose checks can be disabled.

Each rule has a line that violates it and that the check must find. Exceptions are listed by file, with a reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = (ROOT / "chatcache", ROOT / "kernels" / "chatcache_kernels")

MODULES = frozenset(
    {
        *("pickle", "_pickle", "cPickle", "cloudpickle", "dill"),
        *("marshal", "shelve", "dbm", "joblib", "jsonpickle"),
        *("xxhash", "mmh3", "xmlrpc", "multiprocessing", "torch.multiprocessing"),
        *("torch.distributed.rpc", "telnetlib", "ftplib", "urllib.request", "requests"),
        *("aiohttp",),
    }
)
NAMES = frozenset({"eval", "exec", "compile", "__import__", "hash", "breakpoint", "__debug__"})
CALLS = frozenset(
    {
        *("torch.load", "np.load", "numpy.load", "torch.jit.load", "torch.hub.load"),
        *("yaml.load", "yaml.unsafe_load", "os.system", "os.popen", "hashlib.md5"),
        *(
            "hashlib.sha1",
            "tempfile.mktemp",
            "subprocess.getoutput",
            "jinja2.Environment",
            "asyncio.create_subprocess_shell",
        ),
        *("sys.settrace", "torch.jit.script"),  # the latter: CVE-2025-3000, fixed in no release of torch
    }
)
ATTRIBUTES = frozenset({"recv_pyobj", "send_pyobj", "recv_object_list", "send_object_list", "getstatusoutput"})
LAST_NAMES = {name.rpartition(".")[2] for name in CALLS} | ATTRIBUTES | {"splitlines", "url"}
KEYWORDS = frozenset({("shell", True), ("trust_remote_code", True), ("allow_pickle", True), ("verify", False)})

# File, construct, reason. An entry without a match is an error.
ALLOWED = {
    (
        "chatcache/demo_model/training/train.py",
        "torch.load",
    ): "the script's own state, weights_only; not in the wheel",
    (
        "chatcache/demo_model/training/train.py",
        "import torch.multiprocessing.spawn",
    ): "the same script starts its own workers",
    (
        "chatcache/kv_cache/page_table.py",
        "hash",
    ): "a tag of a page within one process, for the page map; never used for lookup",
    ("kernels/chatcache_kernels/cpu/bf16.py", "hash"): "__hash__ of a numba type",
}


def findings(source: str, where: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of every forbidden construct in a file."""
    for node in ast.walk(ast.parse(source)):
        line = getattr(node, "lineno", 0)
        for name in _found(node, where):
            yield line, name


def _found(node: ast.AST, where: str) -> Iterator[str]:
    match node:
        case ast.Import():
            yield from (f"import {alias.name}" for alias in node.names if _is_forbidden(alias.name))
        case ast.ImportFrom():
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            found = [name for name in names if _is_forbidden(name) or name in CALLS]
            yield from (f"import {name}" for name in found[:1])
        case ast.Assert():
            yield "assert"
        case ast.Name() if node.id in NAMES:
            yield node.id
        case ast.Attribute():
            yield from _attribute(node, where)
        case ast.Call():
            yield from _call(node)
        case ast.FunctionDef() | ast.ClassDef() if node.name in ("__reduce__", "__getstate__", "__setstate__"):
            yield node.name


def _attribute(node: ast.Attribute, where: str) -> Iterator[str]:
    is_collective = node.attr.endswith(("_object", "_object_list", "_objects"))
    if node.attr not in LAST_NAMES and not is_collective:
        return  # the next line is slow
    name = ast.unparse(node)
    if name in CALLS or node.attr in ATTRIBUTES or (is_collective and "dist" in name):
        yield name
    if "gateway" in where and node.attr == "splitlines":
        yield "splitlines"
    if "gateway" in where and name in ("request.url", "connection.url", "websocket.url"):
        yield "request.url"


def _call(node: ast.Call) -> Iterator[str]:
    for keyword in node.keywords:
        if (keyword.arg, getattr(keyword.value, "value", None)) in KEYWORDS:
            yield f"{keyword.arg}={ast.unparse(keyword.value)}"


def _is_forbidden(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in MODULES)


@pytest.fixture(scope="module")
def found() -> list[tuple[str, int, str]]:
    """All findings in the source: file, line, name."""
    files = sorted(file for folder in PRODUCT for file in folder.rglob("*.py"))
    assert len(files) > 200
    places = [(file, file.relative_to(ROOT).as_posix()) for file in files]
    return [(where, line, name) for file, where in places for line, name in findings(file.read_text(), where)]


def test_source_has_no_forbidden_construct(found: list[tuple[str, int, str]]) -> None:
    bad = [f"{where}:{line}: {name}" for where, line, name in found if (where, name) not in ALLOWED]
    assert not bad, "\n".join(bad)


def test_every_listed_exception_is_in_use(found: list[tuple[str, int, str]]) -> None:
    assert not set(ALLOWED) - {(where, name) for where, _, name in found}


@pytest.mark.parametrize(
    ("injected", "found"),
    [
        ("import pickle", "import pickle"),
        ("from pickle import loads", "import pickle"),
        ("import cloudpickle as c", "import cloudpickle"),
        ("def f():\n    import dill", "import dill"),
        ("from marshal import loads", "import marshal"),
        ("import shelve", "import shelve"),
        ("import xxhash", "import xxhash"),
        ("from multiprocessing import Queue", "import multiprocessing"),
        ("from urllib.request import urlopen", "import urllib.request"),
        ("eval(text)", "eval"),
        ("exec(text)", "exec"),
        ("run = eval", "eval"),
        ("compile(text, '', 'exec')", "compile"),
        ("__import__(name)", "__import__"),
        ("key = hash(tokens)", "hash"),
        ("torch.load(path, weights_only=True)", "torch.load"),
        ("from torch import load", "import torch.load"),
        ("np.load(path, allow_pickle=True)", "np.load"),
        ("torch.jit.script(module)", "torch.jit.script"),
        ("dist.broadcast_object_list(parts)", "dist.broadcast_object_list"),
        ("torch.distributed.all_gather_object(a, b)", "torch.distributed.all_gather_object"),
        ("socket.recv_pyobj()", "socket.recv_pyobj"),
        ("yaml.load(text)", "yaml.load"),
        ("subprocess.run(text, shell=True)", "shell=True"),
        ("os.system(text)", "os.system"),
        ("hashlib.md5(tokens)", "hashlib.md5"),
        ("AutoModel.from_pretrained(x, trust_remote_code=True)", "trust_remote_code=True"),
        ("httpx.get(url, verify=False)", "verify=False"),
        ("jinja2.Environment()", "jinja2.Environment"),
        ("assert n <= 64, 'too many'", "assert"),
        ("if __debug__:\n    check()", "__debug__"),
        ("def __reduce__(self): ...", "__reduce__"),
        ("text.splitlines()", "splitlines"),
        ("path = request.url.path", "request.url"),
    ],
)
def test_injected_line_is_found(injected: str, found: str) -> None:
    assert found in [name for _, name in findings(injected, "chatcache/gateway/injected.py")]


def test_harmless_lines_are_not_reported() -> None:
    source = (
        "re.compile('x')\nself.compile(grammar)\nbackend.json.load(file)\nmodel.eval()\nloads = msgspec.json.decode"
    )
    assert not list(findings(source, "chatcache/gateway/injected.py"))
