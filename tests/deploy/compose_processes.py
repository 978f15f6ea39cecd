"""Run the services of the Compose file as local processes, with their commands and environments.

Volumes become folders and host names become loopback ports; everything else is as in the resolved Compose file and in
the Dockerfile.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 120.0


def compose_binary() -> str:
    path = shutil.which("docker-compose")
    if path is None:
        pytest.skip("needs a compose parser: apt-get install docker-compose")
    return path


def resolved(*profiles: str, folder: Path = ROOT, **environment: str) -> dict[str, Any]:
    """Return the services of the resolved Compose file."""
    flags = [word for profile in profiles for word in ("--profile", profile)]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("CHATCACHE_", "COMPOSE_"))}
    done = subprocess.run(
        [compose_binary(), *flags, "config"],
        cwd=folder,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    services: dict[str, Any] = yaml.safe_load(done.stdout)["services"]
    return services


def dockerfile() -> dict[str, Any]:
    """Return the last stage of the Dockerfile: `ENTRYPOINT`, `CMD`, `USER`, `ENV`, and every instruction."""
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    last = max(at for at, line in enumerate(lines) if line.startswith("FROM "))
    stage: dict[str, Any] = {"ENV": {}, "lines": lines, "last stage": lines[last:]}
    for line in lines[last:]:
        word, _, rest = line.partition(" ")
        if word == "ENV":
            stage["ENV"] |= dict(re.findall(r"(\w+)=(\S+)", rest))
        elif word in ("ENTRYPOINT", "CMD"):
            stage[word] = yaml.safe_load(rest)
        elif word == "USER":
            stage[word] = rest
    return stage


class LocalServices:
    """Processes of the services, in one folder with a folder for each volume."""

    def __init__(self, folder: Path, services: Mapping[str, Any], gentle: Mapping[str, str]) -> None:
        """Set overrides: `gentle` are environment variables that a test machine needs in addition."""
        self._folder = folder
        self._services = services
        self._gentle = gentle
        self.ports = {name: free_port() for name in services}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> subprocess.Popen[bytes]:
        service = self._services[name]
        command = [self._translate(str(word), name) for word in self._command(service)]
        port = ("--port", str(self.ports[name])) if command[0] == "redis-server" else ()
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [*command, *port],
                cwd=self._volume_folder("cwd"),
                env=self._environment(name),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self._processes[name]

    def exec(self, name: str, *words: str) -> str:
        """Run `python -m chatcache ...` as `docker compose exec NAME` does; return its output."""
        arguments = [self._translate(word, name) for word in (*dockerfile()["ENTRYPOINT"], *words)]
        environment, cwd = self._environment(name), self._volume_folder("cwd")
        done = subprocess.run(
            arguments, env=environment, cwd=cwd, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def run(self, name: str) -> str:
        """Run a service that ends by itself with status 0; return its output."""
        assert self.start(name).wait(PATIENCE_S) == 0, self.log(name)
        return self.log(name)

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def is_healthy(self, name: str) -> bool:
        """Run the service's own healthcheck."""
        kind, *words = self._services[name]["healthcheck"]["test"]
        command = ["sh", "-c", *words] if kind == "CMD-SHELL" else words
        arguments = [self._translate(word, name) for word in command]
        done = subprocess.run(arguments, env=self._environment(name), capture_output=True, timeout=60, check=False)
        return done.returncode == 0

    def wait_healthy(self, name: str) -> None:
        self.wait(lambda: self.is_healthy(name), name)

    def wait(self, condition: Callable[[], bool], name: str) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert self._processes[name].poll() is None, f"{name} ended:\n{self.log(name)}"
            assert time.monotonic() < deadline_s, f"{name}:\n{self.log(name)}"
            time.sleep(0.1)

    def kill(self, name: str) -> None:
        """Kill the main process of a service with SIGKILL; its children must end by themselves."""
        self._processes[name].kill()
        self._processes[name].wait()

    def stop(self, name: str) -> int:
        """Stop a service as `docker compose stop` does; return the exit code."""
        self._processes[name].terminate()
        return self._processes[name].wait(PATIENCE_S)

    def close(self) -> None:
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def __enter__(self) -> LocalServices:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _command(self, service: Mapping[str, Any]) -> Sequence[str]:
        if "build" not in service:
            return [str(word) for word in (*(service.get("entrypoint") or ()), *service["command"])]
        image = dockerfile()
        return [*image["ENTRYPOINT"], *(service.get("command") or image["CMD"])]

    def _environment(self, service_name: str) -> dict[str, str]:
        service = self._services[service_name]
        given = {name: str(value) for name, value in (service.get("environment") or {}).items() if value is not None}
        image = dockerfile()["ENV"] if "build" in service else {}
        system = {
            "PATH": os.environ["PATH"],
            "HOME": str(self._volume_folder("home")),
            "TMPDIR": str(self._volume_folder("tmp")),
        }
        ours = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CHATCACHE_PORT": str(self.ports[service_name])}
        translated = {name: self._translate(value, service_name) for name, value in {**image, **given}.items()}
        if "NAME" in translated:  # the host name that a Redis or a Sentinel announces
            translated["NAME"] = "127.0.0.1"
        return {**system, **translated, **ours, **self._gentle}

    def _translate(self, text: str, service_name: str) -> str:
        """Replace volumes and /tmp by local folders, and the hosts and ports of the services by loopback ports."""
        volumes = [str(volume).split(":") for volume in self._services[service_name].get("volumes") or ()]
        folders = {path: str(self._volume_folder(name)) for name, path, *_ in volumes}
        folders["/tmp"] = str(self._volume_folder(f"tmp-{service_name}"))
        text = re.sub(rf"(?<![\w/])({'|'.join(folders)})(?!\w)", lambda found: folders[found[1]], text)
        own_port, hosts = self.ports[service_name], "|".join(self.ports)

        def use_local_port(found: re.Match[str]) -> str:
            host, mark, own_mark = found.groups()
            return f"{own_mark}{own_port}" if host is None else f"127.0.0.1{mark}{self.ports[host]}"

        # In one pass, as a local port may be one of these numbers.
        places = rf"(?:(?<![\w-])({hosts})([: ])|(^|:|port ))(?:8000|6379|26379)(?!\d)"
        text = re.sub(places, use_local_port, text)
        text = text.replace("listen 8080", f"listen 127.0.0.1:{own_port}")
        text = text.replace("redis-cli ", f"redis-cli -p {own_port} ").replace("$$", "$")
        return sys.executable if text == "python" else text

    def _volume_folder(self, name: str) -> Path:
        place = self._folder / name
        place.mkdir(exist_ok=True)
        return place

    def names(self, name: str) -> set[str]:
        return {path.name for path in self._volume_folder(name).iterdir()}
