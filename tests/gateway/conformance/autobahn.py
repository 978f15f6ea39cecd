"""Run the Autobahn suite on the gateway: `python -m tests.gateway.conformance.autobahn`.

The suite needs Python 2.7 and CI does not run it; `test_conformance` runs the same conversations in CI. `--cases` takes
Autobahn's patterns. Section 9 sends larger messages in more fragments than the server accepts, so the limits are raised
unless `--strict`. Sections 12 and 13 test compression, which the server does not offer: they are UNIMPLEMENTED unless
`--deflate` enables the compression of uvicorn.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from chatcache.config import ServerConfig
from chatcache.gateway import uvicorn_limits as http
from tests.gateway.conformance.echoing import PATH, PROTOCOL, echoing

SUITE = "autobahntestsuite==25.10.1"
CASES = ("1.*", "2.*", "3.*", "4.*", "5.*", "6.*", "7.*", "10.*")
ROOMY_FRAME_BYTES = 32 * 1024 * 1024
_RUN = "import site, sys; site.addsitedir(sys.argv.pop(1)); from autobahntestsuite.wstest import run; run()"

Report = dict[str, dict[str, Any]]


def run_suite(port: int, python: str, folder: Path, cases: list[str]) -> Report:
    """Every case's behaviour. The suite is installed under `folder` first, unless it is there.

    Raises: CalledProcessError.
    """
    site, out = folder / "site", folder / "report"
    if not (site / "autobahntestsuite").is_dir():
        _python([python, "-m", "pip", "install", "--quiet", "--target", str(site), SUITE])
    spec = {
        "outdir": str(out),
        "servers": [{"agent": "chatcache", "url": f"ws://127.0.0.1:{port}{PATH}", "protocols": [PROTOCOL]}],
        "cases": cases,
    }
    (folder / "spec.json").write_text(json.dumps(spec))
    _python([python, "-c", _RUN, str(site), "-m", "fuzzingclient", "-s", str(folder / "spec.json")])
    report: Report = json.loads((out / "index.json").read_text())["chatcache"]
    return report


def _python(command: list[str]) -> None:
    """What is installed here is another Python's."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)


def show(report: Report) -> bool:
    """Print how many behaved in which way, and who did not; whether none failed."""
    for field in ("behavior", "behaviorClose"):
        print(f"{field}: {dict(Counter(str(case[field]) for case in report.values()))}")
    failed = [number for number, case in report.items() if "FAILED" in (case["behavior"], case["behaviorClose"])]
    for number, case in report.items():
        if case["behavior"] not in ("OK", "UNIMPLEMENTED") or number in failed:
            print(f"  {number}: {case['behavior']}, close {case['behaviorClose']} ({case['remoteCloseCode']})")
    print(f"{len(report)} cases, {len(failed)} failed")
    return not failed


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gateway.conformance.autobahn", description=__doc__)
    parser.add_argument("--python", default="python2.7", help="a Python 2.7 with pip")
    parser.add_argument("--folder", type=Path, help="where the suite is installed, and reports (default: a new one)")
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--strict", action="store_true", help="with the limits of a server as it is")
    parser.add_argument("--deflate", action="store_true", help="with compression, which a server never offers")
    args = parser.parse_args(argv)
    folder = (args.folder or Path(tempfile.mkdtemp(prefix="autobahn-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    config = ServerConfig(db=str(folder / "chat.db"))
    if not args.strict:
        config = msgspec.structs.replace(config, max_frame_bytes=ROOMY_FRAME_BYTES)
        http.MAX_FRAMES_PER_S = http.MAX_FRAME_BURST = http.MAX_FRAGMENTS = 10**6
    with echoing(config, deflate=args.deflate) as server:
        report = run_suite(server.wait_ready().port, args.python, folder, args.cases)
    return 0 if show(report) else 1


if __name__ == "__main__":
    sys.exit(main())
