"""Test that the Compose file parses in every profile (with Debian's docker-compose) and matches the README."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from chatcache.config import ServerConfig
from chatcache.engine_process.process import EXIT_GRACE_S
from tests.deploy.compose_processes import ROOT, compose_binary, dockerfile, resolved

SERVED = ("chatcache", "chatcache-cpu")
REPLICATED = ("redis-1", "redis-2", "redis-3", "sentinel-1", "sentinel-2", "sentinel-3")


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return resolved("gpu", "cpu", "scale", "monitoring")


@pytest.mark.parametrize(
    ("profiles", "names"),
    [
        (("gpu",), {"chatcache", "redis", "redis-acl"}),
        (("cpu",), {"chatcache-cpu", "redis", "redis-acl"}),
        (("scale",), {"gateway-1", "gateway-2", "worker", "proxy", *REPLICATED, "redis-acl"}),
        (("monitoring",), {"prometheus", "grafana"}),
        (("gpu", "monitoring"), {"chatcache", "redis", "redis-acl", "prometheus", "grafana"}),
    ],
)
@pytest.mark.slow
def test_every_profile_parses(profiles: tuple[str, ...], names: set[str]) -> None:
    every = resolved(*profiles)
    assert {name for name, service in every.items() if set(profiles) & set(service["profiles"])} == names


def test_default_profile_is_gpu() -> None:
    settings = [line for line in (ROOT / ".env").read_text().splitlines() if line and not line.startswith("#")]
    assert settings == ["COMPOSE_PROFILES=gpu"]  # and it has no secret


def test_broken_file_is_refused(tmp_path: Path) -> None:
    """Negative control: the parser refuses the same file with one misspelt key."""
    (tmp_path / "docker-compose.yml").write_text(
        (ROOT / "docker-compose.yml").read_text().replace("healthcheck:", "healthchek:")
    )
    done = subprocess.run([compose_binary(), "config"], cwd=tmp_path, capture_output=True, timeout=60, check=False)
    assert done.returncode != 0


def test_only_the_gpu_service_requests_a_gpu(services: dict[str, Any]) -> None:
    devices = services["chatcache"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices[0]["driver"] == "nvidia"
    assert "deploy" not in services["chatcache-cpu"]


@pytest.mark.parametrize("name", SERVED)
def test_services_wait_for_redis_and_are_published_on_loopback_only(services: dict[str, Any], name: str) -> None:
    service = services[name]
    assert "/readyz" in service["healthcheck"]["test"][-1]
    assert all(str(port).startswith("127.0.0.1:") for port in service["ports"])
    assert service["depends_on"]["redis"]["condition"] == "service_healthy"
    assert service["environment"]["CHATCACHE_REDIS"].startswith("redis://chatcache@redis:6379/")
    grace_s = float(re.fullmatch(r"(\d+)s", service["stop_grace_period"])[1])  # type: ignore[index]
    assert grace_s > ServerConfig().drain_timeout_s + EXIT_GRACE_S


def test_only_the_service_with_a_gpu_gets_the_image_with_cuda(services: dict[str, Any]) -> None:
    built = {name: service for name, service in services.items() if "build" in service}
    indexes = {name: service["build"].get("args", {}).get("TORCH_INDEX", "") for name, service in built.items()}
    cpu = "https://download.pytorch.org/whl/cpu"
    without = ("chatcache-cpu", "redis-acl", "gateway-1", "gateway-2", "worker")
    assert indexes == {"chatcache": "", **dict.fromkeys(without, cpu)}
    assert all(service["image"].endswith("-cpu") is (indexes[name] == cpu) for name, service in built.items())


def test_every_service_is_restricted(services: dict[str, Any]) -> None:
    """No capabilities, a read-only root (except Grafana), limited logs, an init process, and no root user."""
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"], name
        assert service["init"] is True and set(service["logging"]["options"]) == {"max-size", "max-file"}
        assert service["read_only"] is (name != "grafana")
        assert ":" in str(service.get("image", "")).rpartition("/")[2], f"{name}'s image has no version"
        if "build" not in service:
            assert name in ("prometheus", "grafana") or service["user"] in ("redis:10001", "101")
    assert dockerfile()["USER"] == "chatcache"


def test_redis_is_reachable_by_these_services_only_and_persists(services: dict[str, Any]) -> None:
    redis = services["redis"]
    assert "ports" not in redis and "ports" not in services["redis-acl"]
    words = redis["command"]
    settings = {word: words[at + 1] for at, word in enumerate(words) if word.startswith("--")}
    assert settings["--appendonly"] == "yes" and settings["--appendfsync"] == "always"
    assert settings["--maxmemory-policy"] == "noeviction" and settings["--aclfile"] == "/secret/users.acl"
    assert redis["depends_on"]["redis-acl"]["condition"] == "service_completed_successfully"
    assert all(str(volume).endswith(":ro") for volume in redis["volumes"] if "secret" in str(volume))


def test_scaled_services_share_one_redis_and_only_the_proxy_is_published(services: dict[str, Any]) -> None:
    assert [name for name in ("proxy", "gateway-1", "gateway-2", "worker") if services[name].get("ports")] == ["proxy"]
    assert all(str(port).startswith("127.0.0.1:") for port in services["proxy"]["ports"])
    empty = resolved("scale", CHATCACHE_REDIS="")  # two gateways cannot share the SQLite file
    bus = "redis+sentinel://chatcache@sentinel-1:26379,sentinel-2:26379,sentinel-3:26379/store/0?password_file=/secret/password"
    assert {empty[name]["environment"]["CHATCACHE_BUS"] for name in ("gateway-1", "gateway-2", "worker")} == {bus}
    assert empty["gateway-1"]["environment"]["CHATCACHE_REDIS"] == f"{bus}&wait_replicas=1"
    assert services["gateway-1"] == services["gateway-2"]


def test_replicated_servers_differ_in_name_role_and_volume_only(services: dict[str, Any]) -> None:
    for names in (REPLICATED[:3], REPLICATED[3:]):
        others = [
            {key: value for key, value in services[name].items() if key not in ("environment", "volumes")}
            for name in names
        ]
        assert others[0] == others[1] == others[2]
        assert [services[name]["environment"]["NAME"] for name in names] == list(names)
        data = [
            str(volume).split(":")[0] for name in names for volume in services[name]["volumes"] if ":/data" in volume
        ]
        assert len(set(data)) == 3
    assert services["redis-1"]["environment"]["ROLE"] == ""


def test_host_name_of_a_proxy_is_accepted_in_addition() -> None:
    environment = resolved("cpu", CHATCACHE_ALLOWED_HOST="chat.example.org")["chatcache-cpu"]["environment"]
    assert environment["CHATCACHE_ALLOWED_HOST"].split() == ["chatcache", "chat.example.org"]


def test_empty_store_setting_selects_the_sqlite_file() -> None:
    assert not resolved("cpu", CHATCACHE_REDIS="")["chatcache-cpu"]["environment"]["CHATCACHE_REDIS"]
    image = dockerfile()
    assert "CHATCACHE_DB" not in image["ENV"] and "WORKDIR /app" in image["last stage"]
    assert """RUN echo 'db = "/data/chatcache.db"' > chatcache.toml""" in image["last stage"]


def test_written_paths_are_on_volumes(services: dict[str, Any]) -> None:
    paths = {path: value for path, value in dockerfile()["ENV"].items() if str(value).startswith("/")}
    for name in SERVED:
        mounted = tuple(str(volume).split(":")[1] + "/" for volume in services[name]["volumes"])
        for variable, path in paths.items():
            assert f"{path}/".startswith(mounted), f"{variable} is outside the volumes of {name}"
        assert services[name]["tmpfs"] == ["/tmp"]
    for variable in ("HF_HOME", "TRITON_CACHE_DIR", "NUMBA_CACHE_DIR"):
        assert variable in paths


def test_image_is_pinned_and_its_layers_are_cacheable() -> None:
    """Base images have versions; dependencies are installed before the source is copied; no secret is copied."""
    image = dockerfile()
    bases = [line.partition("=")[2] for line in image["lines"] if line.startswith("ARG ") and "IMAGE=" in line]
    assert len(bases) == 2 and all(re.search(r":\d+\.\d+\.\d+-", base) for base in bases)
    lines = image["last stage"]

    def place(pattern: str) -> int:
        return next(at for at, line in enumerate(lines) if re.search(pattern, line))

    assert (
        place("COPY pyproject.toml")
        < place("pip install -r")
        < place("COPY chatcache ")
        < place(r"pip install --no-deps \.$")
    )
    installs = [line for line in lines if "pip install" in line and not line.endswith("--no-deps .")]
    assert all("constraints.txt" in line for line in installs) and len(installs) == 2
    copied = {word for line in image["lines"] if line.startswith("COPY ") for word in line.split()[1:-1]}
    assert not copied & {".", "./", ".env"}
    assert not re.search(r"(?i)(password|token|secret|api_key)\w*=", " ".join(line for line in lines if "ENV" in line))
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".env*", ".git", "*.db*"} <= set(ignored)
