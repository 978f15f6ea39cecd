"""Test that documentation, Prometheus configuration and Grafana dashboard use existing metrics and labels."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from chatcache.config import ServerConfig
from chatcache.errors import ChatcacheError
from chatcache.gateway.metrics import Metrics, _EngineCollector
from chatcache.types.stats import EngineHealth, WorkerReport
from tests.gateway.documents import DOCS
from tests.gateway.serving import Server

ROOT = Path(__file__).resolve().parents[2]
GRAFANA = ROOT / "loadtest" / "grafana"
LABEL = re.compile(r"\{\{(\w+)\}\}|by \(([\w, ]+)\)")


@pytest.fixture(scope="module")
def exposition() -> str:
    """Metrics of a server after requests of every kind."""
    metrics = Metrics()
    metrics.requests.labels("chat", "200").inc()
    metrics.finished.labels("stop").inc()
    metrics.prompt_tokens.labels("cached").inc()
    metrics.resumed.labels("ws").inc()
    metrics.duration.labels("chat").observe(1.0)
    metrics.first_token.labels("hit").observe(1.0)
    metrics.store_seconds.labels("append").observe(0.001)
    metrics.record_refusal(ChatcacheError("no"))
    worker = WorkerReport(name="gpu-1", requests={"load": 1})
    return metrics.render(EngineHealth(ready=True, workers=(worker,))).decode()


@pytest.fixture(scope="module")
def samples(exposition: str) -> dict[str, set[str]]:
    """Label names of every sample."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def _exposed(exposition: str) -> dict[str, tuple[str, set[str]]]:
    """Return type and labels of each metric, without the creation times of the library."""
    families = text_string_to_metric_families(exposition)
    parsed = {each.name: each for each in families if not each.name.endswith("_created")}
    inner = {"le"}  # label of histograms
    return {
        name: (family.type, {label for sample in family.samples for label in sample.labels} - inner)
        for name, family in parsed.items()
    }


def _documented(readme: str) -> dict[str, tuple[str, set[str]]]:
    """Return the same from the table in the documentation; a row of several metrics may have a type for each."""
    table = readme.partition("\n## Metrics\n")[2].partition("\n## ")[0]
    found: dict[str, tuple[str, set[str]]] = {}
    for row in table.splitlines():
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        if not row.startswith("| `"):
            continue
        names, types = re.findall(r"`([\w:]+)`", cells[0]), cells[1].split(", ")
        labels = set(re.findall(r"`(\w+)`", cells[2]))
        for at, name in enumerate(names):
            of_second = cells[2].endswith("of the second")
            found[name] = types[at % len(types)], labels if not of_second or at == 1 else set()
    return found


def test_docs_list_every_metric_with_type_and_labels(exposition: str) -> None:
    readme = (DOCS / "deployment.md").read_text()
    exposed = _exposed(exposition)
    assert _documented(readme) == exposed
    # Injected: an undocumented metric, and one with another type.
    assert _documented(readme) != _exposed(exposition + "# TYPE chatcache_new gauge\nchatcache_new 1\n")
    assert _documented(readme.replace("_up` | gauge", "_up` | counter")) != exposed


def _broken_rules(exposition: str) -> list[str]:
    """Return violations of `promtool check metrics`, and repeated samples."""
    wrong: list[str] = []
    seen: set[tuple[str, frozenset[tuple[str, str]]]] = set()
    for family in text_string_to_metric_families(exposition):
        if not family.documentation:
            wrong.append(f"{family.name} has no help")
        if not re.fullmatch(r"(chatcache_|vllm:)[a-z0-9_]+", family.name) or family.name.endswith(
            ("_total", "_count", "_sum")
        ):
            wrong.append(f"{family.name} is an invalid name for a {family.type}")
        if family.type == "histogram" and not family.name.endswith("_seconds"):
            wrong.append(f"{family.name} has no unit")
        for sample in family.samples:
            if family.type == "counter" and not sample.name.endswith("_total"):
                wrong.append(f"{sample.name} does not end in _total")
            key = (sample.name, frozenset(sample.labels.items()))
            wrong += [f"{sample.name} is repeated"] if key in seen else []
            seen.add(key)
        if family.type == "histogram":
            wrong += _broken_buckets(family.name, family.samples)
    return wrong


def _broken_buckets(name: str, samples: list[Any]) -> list[str]:
    rows: dict[frozenset[tuple[str, str]], list[float]] = {}
    for sample in samples:
        if sample.name == f"{name}_bucket":
            labels = frozenset((label, value) for label, value in sample.labels.items() if label != "le")
            rows.setdefault(labels, []).append(sample.value)
    counts = [sample.value for sample in samples if sample.name == f"{name}_count"]
    is_whole = all(row == sorted(row) for row in rows.values()) and [row[-1] for row in rows.values()] == counts
    return [] if is_whole else [f"{name}: its buckets do not add up"]


def test_exposition_is_well_formed(exposition: str) -> None:
    assert exposition.endswith("\n") and _broken_rules(exposition) == []
    assert _broken_rules(exposition + "# TYPE chatcache_x counter\nchatcache_x 1\n")
    assert _broken_rules(exposition + "# HELP chatcache_x x\n# TYPE chatcache_x gauge\n" + "chatcache_x 1\n" * 2)
    assert _broken_rules(
        exposition.replace('queue_seconds_bucket{le="+Inf"} 0.0', 'queue_seconds_bucket{le="+Inf"} 9.0')
    )


WORDS = "zyxwv"


def _labels_of(text: str) -> set[tuple[str, str, str]]:
    families = text_string_to_metric_families(text)
    return {
        (sample.name, label, value)
        for family in families
        for sample in family.samples
        for label, value in sample.labels.items()
    }


def _talk(server: Server, number: int) -> None:
    """Send requests with distinct words: a conversation, an invalid field, an unknown route and an unknown model."""
    said = f"{WORDS}{number}"
    turn = server.post("/v1/responses", input=said, max_output_tokens=2, metadata={"tag": said})[2]
    server.post("/v1/responses", input=said, max_output_tokens=2, previous_response_id=turn["id"])
    server.stream("/v1/chat/completions", messages=[{"role": "user", "content": said}], max_tokens=2)
    server.post("/v1/chat/completions", messages=[{"role": "user", "content": said}], model=said)
    server.post("/v1/completions", prompt=said, max_tokens=said)
    server.request("GET", f"/v1/conversations/{said}")
    server.request("GET", f"/{said}")
    server.request("DELETE", f"/v1/responses/{said}")


def test_labels_do_not_grow_with_clients_or_texts() -> None:
    with Server(ServerConfig(db=":memory:")) as server:
        server.wait_ready()
        for _ in range(2):  # the metrics route itself adds a label
            _talk(server, 0)
            server.request("GET", "/metrics")
        before = _labels_of(server.request("GET", "/metrics")[2])
        for number in range(1, 6):
            _talk(server, number)
        text = server.request("GET", "/metrics")[2]
        new = _labels_of(text) - before
        assert {value for _, _, value in new} <= {"stop", "length", "hit", "partial", "miss"}
        assert WORDS not in text and "org/" not in text
        # Injected: a label with text of a request.
        server.gateway.metrics.requests.labels(route=f"/{WORDS}", status="404").inc()
        assert WORDS in server.request("GET", "/metrics")[2]


def _targets() -> list[tuple[str, str]]:
    dashboard = json.loads((GRAFANA / "chatcache.json").read_text())
    return [(each["expr"], each["legendFormat"]) for panel in dashboard["panels"] for each in panel.get("targets", ())]


def _unknown(expr: str, legend: str, samples: dict[str, set[str]]) -> list[str]:
    names = set(re.findall(r"chatcache_\w+", expr))
    wrong = sorted(names - set(samples))
    known = set().union(*(samples.get(name, set()) for name in names))
    asked = {label.strip() for pair in LABEL.findall(f"{expr} {legend}") for part in pair for label in part.split(",")}
    return wrong + sorted(asked - known - {""})


def test_dashboard_uses_existing_metrics_and_labels(samples: dict[str, set[str]]) -> None:
    targets = _targets()
    assert len(targets) > 20
    assert [(expr, wrong) for expr, legend in targets if (wrong := _unknown(expr, legend, samples))] == []


def test_injected_unknown_name_or_label_is_found(samples: dict[str, set[str]]) -> None:
    assert _unknown("rate(chatcache_no_such_total[5m])", "x", samples) == ["chatcache_no_such_total"]
    assert _unknown("sum by (user) (chatcache_kv_pages)", "{{state}}", samples) == ["user"]


def _added_wrongly(expr: str) -> list[str]:
    """Return the metrics of the expression whose samples of several gateways are not combined correctly.

    Every gateway reports sums over all workers, which are not added again. What a gateway reports of itself is added.
    """
    of_engine = {sample.name for family in _EngineCollector().collect() for sample in family.samples}
    wrong: list[str] = []
    for name in set(re.findall(r"chatcache_\w+", expr)):
        if name.endswith("_bucket"):
            right = r"sum by \([\w, ]+\) \(rate\("  # quantiles are the same if all buckets are added twice
        elif name in {*of_engine, "chatcache_store_up", "chatcache_worker_owed_seconds"}:
            right = r"(?:max|min)(?: by \(\w+\) )?\((?:(?:rate|increase)\()?"
        else:
            right = r"sum(?: by \(\w+\) )?\((?:(?:rate|increase)\()?"
        num_uses = len(re.findall(rf"{name}\b", expr))
        wrong += [name] if len(re.findall(rf"\b{right}{name}\b", expr)) < num_uses else []
    return wrong


def test_panels_of_several_gateways_count_each_worker_once() -> None:
    assert [(expr, wrong) for expr, _ in _targets() if (wrong := _added_wrongly(expr))] == []
    # Injected: sums over gateways that report the same workers, and lines of each gateway.
    assert _added_wrongly("sum(chatcache_requests_running)") == ["chatcache_requests_running"]
    assert _added_wrongly("rate(chatcache_output_tokens_total[5m])") == ["chatcache_output_tokens_total"]
    assert _added_wrongly("max(chatcache_ws_connections)") == ["chatcache_ws_connections"]


def test_panels_have_unique_ids_and_positions() -> None:
    panels = json.loads((GRAFANA / "chatcache.json").read_text())["panels"]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len({panel["id"] for panel in panels}) == len(places) == len(panels)


def _compose() -> dict[str, Any]:
    parsed: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return parsed


def test_mounted_files_exist_and_match() -> None:
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


@pytest.mark.parametrize("name", ["chatcache", "gateway-1", "gateway-2"])
def test_prometheus_host_and_key_are_accepted(name: str) -> None:
    """With Compose's settings, Prometheus's Host header and key give 200; without them 403 and 401."""
    service = _compose()["services"]["chatcache-cpu" if name == "chatcache" else name]
    (job,) = yaml.safe_load((GRAFANA / "prometheus.yml").read_text())["scrape_configs"]
    host = f"{name}:8000"
    assert host in job["static_configs"][0]["targets"]
    assert name.startswith("gateway") or service["networks"]["default"]["aliases"] == [name]
    allowed = service["environment"]["CHATCACHE_ALLOWED_HOST"].partition("$")[0]
    key = "sk-scrape-12345678"
    with Server(
        ServerConfig(
            host="0.0.0.0",
            allowed_hosts=tuple(allowed.split()),
            api_keys=(key,),
            db=":memory:",
        )
    ) as server:
        server.wait_ready()
        known = {"host": host, "authorization": f"Bearer {key}"}
        assert server.request("GET", "/metrics", headers=known)[0] == 200
        assert server.request("GET", "/metrics", headers=known | {"host": "another:8000"})[0] == 403
        assert server.request("GET", "/metrics", headers={"host": host})[0] == 401
