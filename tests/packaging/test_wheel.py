"""Test the contents of source distribution and wheel, and that an installed wheel serves."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import tomllib
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import httpx
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from chatcache import __version__
from tests.support.ports import free_port

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
NOT_SOURCE = shutil.ignore_patterns("__pycache__", "static", ".*_cache")
PAGE = Path("chatcache/gateway/static")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build as `python -m build` does: the source distribution, and the wheel from it.

    The page is the built one, or a placeholder: npm has its own tests.
    """
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in ("chatcache", "kernels/chatcache_kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=NOT_SOURCE)
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, source / name)
    if (ROOT / PAGE / "index.html").exists():
        shutil.copytree(ROOT / PAGE, source / PAGE)
    else:
        (source / PAGE).mkdir(parents=True)
        (source / PAGE / "index.html").write_text("<!doctype html><title>chatcache</title>")
    build(source, "sdist", folder)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    build(next(folder.glob("chatcache-*/")), "wheel", folder)
    return next(folder.glob("*.whl"))


def build(source: Path, target: str, folder: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.fixture(scope="module")
def about(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        return Parser().parsestr(archive.read(f"chatcache-{__version__}.dist-info/METADATA").decode())


def test_wheel_has_both_packages_with_types_page_and_demo_model(names: set[str]) -> None:
    assert {"chatcache/py.typed", "chatcache_kernels/py.typed", f"{PAGE}/index.html"} <= names
    model = ROOT / "chatcache" / "demo_model" / "model"
    assert {f"chatcache/demo_model/model/{path.name}" for path in model.iterdir()} <= names


def test_wheel_has_no_training_code_and_nothing_that_imports_it(wheel: Path, names: set[str]) -> None:
    assert (ROOT / "chatcache" / "demo_model" / "training" / "train.py").exists()
    assert not [name for name in names if "training" in name]
    with zipfile.ZipFile(wheel) as archive:
        sources = {name: archive.read(name).decode() for name in names if name.endswith(".py")}
    assert [name for name, text in sources.items() if "demo_model.training" in text] == []


def test_wheel_has_nothing_but_the_packages(names: set[str]) -> None:
    info = f"chatcache-{__version__}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"chatcache", "chatcache_kernels", info}


def test_wheel_takes_its_version_from_the_package(wheel: Path, about: Message) -> None:
    assert about["Version"] == __version__ and wheel.name.startswith(f"chatcache-{__version__}-")
    for name in ("pyproject.toml", "docker-compose.yml", "web/package.json"):
        assert __version__ not in (ROOT / name).read_text(), f"{name} repeats the version"


def test_triton_is_required_by_the_gpu_and_test_extras_only(about: Message) -> None:
    required = [text for text in about.get_all("Requires-Dist") or () if text.startswith("triton")]
    assert required and all("extra == 'gpu'" in text or "extra == 'test'" in text for text in required)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Environment with this wheel, where `triton` is hidden and the other dependencies are those of the tests."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*install, "--no-compile", str(wheel)], check=True, timeout=120)
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = Path(subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip())
    shared = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    # The folders of a .pth file are last in the path, and .pth files in them are not read.
    (own / "dependencies.pth").write_text("\n".join(shared))
    shutil.copy(Path(__file__).parent / "no_triton" / "sitecustomize.py", own)
    return folder


@pytest.fixture
def serving(installed: Path, tmp_path: Path) -> Iterator[str]:
    """A `chatcache serve` of the installed wheel; no kernel is compiled."""
    port = free_port()
    cleared = ("CHATCACHE_", "PYTHON", "TRITON")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(cleared)}
    settings = {
        "CHATCACHE_ATTENTION_BACKEND": "reference",
        "CHATCACHE_DTYPE": "float32",
        "CHATCACHE_KV_MEMORY": "64MiB",
    }
    command = [str(installed / "bin" / "chatcache"), "serve", "--port", str(port), "--db", str(tmp_path / "chat.db")]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(command, cwd=tmp_path, env=kept | settings, stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline_s = time.monotonic() + 120
        while not is_ready(port):
            assert server.poll() is None and time.monotonic() < deadline_s, (tmp_path / "log").read_text()
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        assert server.wait(60) == 0, (tmp_path / "log").read_text()


def is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=60).status_code == 200
    except httpx.TransportError:
        return False


def test_installed_wheel_serves_answers_and_the_page(installed: Path, serving: str) -> None:
    version = subprocess.run([installed / "bin" / "chatcache", "--version"], capture_output=True, text=True, cwd="/")
    assert version.stdout == f"chatcache {__version__}\n"
    body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 5, "temperature": 0}
    answer = httpx.post(f"{serving}/v1/chat/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["message"]["content"], answer
    page = httpx.get(serving, headers={"accept": "text/html"}, timeout=60)
    assert page.status_code == 200 and "<title>" in page.text and page.headers["content-type"].startswith("text/html")


def test_constraints_have_one_version_for_each_requirement() -> None:
    """Allow only names and versions: no paths, hashes or hosts, and no package whose exact version torch requires."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line) for line in lines)
    versions = dict(line.split("==") for line in lines)
    assert (
        list(versions) == sorted(versions)
        and len(versions) == len(lines)
        and not {"triton", "chatcache"} & versions.keys()
    )
    for text in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]:
        requirement = Requirement(text)
        assert versions[requirement.name] in requirement.specifier, text


def test_lock_script_prints_what_is_installed() -> None:
    """The script prints lines for this environment: the same packages, possibly at other versions."""
    done = subprocess.run([sys.executable, ROOT / ".ci" / "lock.py"], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    comment, *lines = done.stdout.splitlines()
    assert comment == (ROOT / "constraints.txt").read_text().splitlines()[0]
    versions = dict(line.split("==") for line in lines)
    for name in ("torch", "starlette", "anyio", "httpcore", "markupsafe"):  # direct and transitive dependencies
        assert versions[name] == Version(metadata.version(name)).public
    assert not {"triton", "chatcache", "pytest", "mypy"} & versions.keys()


@pytest.mark.linux  # elsewhere, pip's default build of torch is without CUDA
@pytest.mark.parametrize(
    ("settings", "installed", "index"),
    [
        (("GPU=/dev/nvidia0",), "-e '.[gpu]'", ""),
        (("GPU=",), "-e '.'", "https://download.pytorch.org/whl/cpu"),
        (("GPU=", "TORCH_INDEX="), "-e '.'", ""),
    ],
)
def test_make_installs_triton_and_cuda_only_where_it_finds_a_gpu(
    settings: tuple[str, ...], installed: str, index: str
) -> None:
    """Check the commands that `make install` would run on a Linux machine without installed packages."""
    folder = "VENV=nowhere"
    done = subprocess.run(["make", "-n", "install", folder, *settings], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"-m pip install --no-compile {installed}\n" in done.stdout
    assert f'--index-url "{index}" "torch>=' in done.stdout and f'if [ -n "{index}" ]' in done.stdout
