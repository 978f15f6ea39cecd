"""What Prometheus scrapes and Grafana draws is what the server tells: every metric by name and label."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from chatcache.config import ServerConfig
from chatcache.gateway.metrics import Metrics
from chatcache.types import EngineHealth
from tests.gateway.serving import Server

ROOT = Path(__file__).resolve().parents[2]
GRAFANA = ROOT / "loadtest" / "grafana"
LABEL = re.compile(r"\{\{(\w+)\}\}|by \(([\w, ]+)\)")


@pytest.fixture(scope="module")
def samples() -> dict[str, set[str]]:
    """The labels of every sample that a server which has seen everything tells."""
    metrics = Metrics()
    metrics.requests.labels("chat", "200").inc()
    metrics.finished.labels("stop").inc()
    metrics.prompt_tokens.labels("cached").inc()
    metrics.resumed.labels("ws").inc()
    metrics.duration.labels("chat").observe(1.0)
    metrics.first_token.labels("hit").observe(1.0)
    text = metrics.render(EngineHealth(ready=True)).decode()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def _targets() -> list[tuple[str, str]]:
    dashboard = json.loads((GRAFANA / "chatcache.json").read_text())
    return [(each["expr"], each["legendFormat"]) for panel in dashboard["panels"] for each in panel.get("targets", ())]


def _unknown(expr: str, legend: str, samples: dict[str, set[str]]) -> list[str]:
    names = set(re.findall(r"chatcache_\w+", expr))
    wrong = sorted(names - set(samples))
    known = set().union(*(samples.get(name, set()) for name in names))
    asked = {label.strip() for pair in LABEL.findall(f"{expr} {legend}") for part in pair for label in part.split(",")}
    return wrong + sorted(asked - known - {""})


def test_the_dashboard_draws_what_exists(samples: dict[str, set[str]]) -> None:
    targets = _targets()
    assert len(targets) > 20
    assert [(expr, wrong) for expr, legend in targets if (wrong := _unknown(expr, legend, samples))] == []


def test_a_name_or_label_that_does_not_exist_is_caught(samples: dict[str, set[str]]) -> None:
    assert _unknown("rate(chatcache_no_such_total[5m])", "x", samples) == ["chatcache_no_such_total"]
    assert _unknown("sum by (user) (chatcache_kv_pages)", "{{state}}", samples) == ["user"]


def test_panels_have_ids_and_places_of_their_own() -> None:
    panels = json.loads((GRAFANA / "chatcache.json").read_text())["panels"]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len({panel["id"] for panel in panels}) == len(places) == len(panels)


def _compose() -> dict[str, Any]:
    parsed: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return parsed


def test_what_the_services_mount_exists_and_fits_together() -> None:
    services = _compose()["services"]
    for name in ("prometheus", "grafana"):
        for volume in services[name]["volumes"]:
            source = volume.split(":")[0]
            assert not source.startswith(".") or (ROOT / source).exists(), volume
    (job,) = yaml.safe_load((GRAFANA / "prometheus.yml").read_text())["scrape_configs"]
    assert job["authorization"]["credentials_file"] in services["prometheus"]["command"][0]
    source = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "prometheus.yml").read_text())["datasources"][0]
    used = set(re.findall(r'"uid": "(\w+)"', (GRAFANA / "chatcache.json").read_text())) - {"chatcache"}
    assert used == {source["uid"]}


def test_the_scraped_name_is_let_in() -> None:
    """Compose's own settings, Prometheus's own Host and key: 200; without them 403 and 401."""
    environment = _compose()["x-environment"]
    (job,) = yaml.safe_load((GRAFANA / "prometheus.yml").read_text())["scrape_configs"]
    host = job["static_configs"][0]["targets"][0]
    aliases = _compose()["services"]["chatcache-cpu"]["networks"]["default"]["aliases"]
    assert host.split(":")[0] in {"chatcache", *aliases}
    key = "sk-scrape-12345678"
    with Server(
        ServerConfig(
            host="0.0.0.0", allowed_hosts=(environment["CHATCACHE_ALLOWED_HOST"],), api_keys=(key,), db=":memory:"
        )
    ) as server:
        server.wait_ready()
        known = {"host": host, "authorization": f"Bearer {key}"}
        assert server.request("GET", "/metrics", headers=known)[0] == 200
        assert server.request("GET", "/metrics", headers=known | {"host": "another:8000"})[0] == 403
        assert server.request("GET", "/metrics", headers={"host": host})[0] == 401
