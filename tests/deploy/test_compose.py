"""The compose file parses in every profile (Debian's docker-compose is the oracle) and says what the README says."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def compose() -> str:
    path = shutil.which("docker-compose")
    if path is None:
        pytest.skip("needs a compose parser: apt-get install docker-compose")
    return path


def _config(compose: str, *args: str) -> dict[str, Any]:
    done = subprocess.run([compose, *args, "config"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    parsed = yaml.safe_load(done.stdout)
    assert isinstance(parsed, dict)
    return parsed


@pytest.mark.parametrize(
    ("profile", "services"),
    [
        ("gpu", {"chatcache"}),
        ("cpu", {"chatcache-cpu"}),
        ("redis", {"redis"}),
        ("monitoring", {"prometheus", "grafana"}),
    ],
)
def test_every_profile_parses(compose: str, profile: str, services: set[str]) -> None:
    every = _config(compose, "--profile", profile)["services"]
    assert {name for name, service in every.items() if profile in service["profiles"]} == services


def test_a_broken_file_is_refused(compose: str, tmp_path: Path) -> None:
    """The oracle can fail: the parser refuses the same file with one key misspelt."""
    (tmp_path / "docker-compose.yml").write_text(
        (ROOT / "docker-compose.yml").read_text().replace("healthcheck:", "healthchek:")
    )
    done = subprocess.run([compose, "config"], cwd=tmp_path, capture_output=True, timeout=60, check=False)
    assert done.returncode != 0


def test_the_gpu_service_asks_for_a_gpu_and_the_cpu_one_does_not(compose: str) -> None:
    services = _config(compose)["services"]
    devices = services["chatcache"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices[0]["driver"] == "nvidia"
    assert "deploy" not in services["chatcache-cpu"]


@pytest.mark.parametrize("service", ["chatcache", "chatcache-cpu"])
def test_services_are_healthchecked_and_published_on_loopback_only(compose: str, service: str) -> None:
    config = _config(compose)["services"][service]
    assert "/readyz" in config["healthcheck"]["test"][-1]
    assert all(str(port).startswith("127.0.0.1:") for port in config["ports"])
    assert config["init"] is True
