"""`chatcache manifests`: valid for the Kubernetes API, restricted, and in line with the server's own settings."""

from __future__ import annotations

import re
from typing import Any

import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner, Result

from chatcache.cli.main import app
from chatcache.config import ServerConfig
from chatcache.engine_process.process import EXIT_GRACE_S
from tests.deploy.compose_processes import dockerfile
from tests.gateway.serving import Server

KUBERNETES = ("1.30", "1.37")
SCALED = ("--workers", "3", "--max-workers", "8", "--prometheus", "http://prometheus:9090")


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["manifests", *words])


def printed(*words: str) -> dict[tuple[str, str], Any]:
    """Return the documents by kind and name."""
    result = run(*words)
    assert result.exit_code == 0, result.output
    assert "&id" not in result.output
    documents = list(yaml.safe_load_all(result.output))
    found = {(each["kind"], each["metadata"]["name"]): each for each in documents}
    assert len(found) == len(documents)
    return found


def container_of(document: Any) -> Any:
    (container,) = document["spec"]["template"]["spec"]["containers"]
    return container


@pytest.mark.parametrize("words", [(), ("Qwen/Qwen3-0.6B", "--gpus", "0"), SCALED])
@pytest.mark.parametrize("version", KUBERNETES)
def test_manifests_are_valid(version: str, words: tuple[str, ...]) -> None:
    for (kind, _), document in printed(*words).items():
        if kind != "ScaledObject":  # of KEDA
            kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("path", [("spec", "replica"), ("spec", "template", "spec", "runAsRoot")])
def test_validator_refuses_an_unknown_field(path: tuple[str, ...]) -> None:
    """Negative control."""
    document = printed()["StatefulSet", "chatcache-worker"]
    part = document
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, KUBERNETES[0], strict=True)


@pytest.mark.parametrize("key", [("Deployment", "chatcache-gateway"), ("StatefulSet", "chatcache-worker")])
def test_pods_are_restricted_and_end_after_a_drain(key: tuple[str, str]) -> None:
    document = printed()[key]
    pod, container = document["spec"]["template"]["spec"], container_of(document)
    assert (
        pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    )
    assert f"--uid {pod['securityContext']['runAsUser']} " in "\n".join(dockerfile()["last stage"])
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not pod["automountServiceAccountToken"]
    stop = container.get("lifecycle", {}).get("preStop", {"exec": {"command": ["sleep", "0"]}})
    delay_s = float(stop["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > delay_s + ServerConfig().drain_timeout_s + EXIT_GRACE_S
    mounted = tuple(mount["mountPath"] + "/" for mount in container["volumeMounts"])
    written = {name: path for name, path in dockerfile()["ENV"].items() if str(path).startswith("/")}
    assert written and all(f"{path}/".startswith(mounted) for path in written.values())
    volumes = {volume["name"] for volume in pod["volumes"]}
    claims = {claim["metadata"]["name"] for claim in document["spec"].get("volumeClaimTemplates", ())}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes | claims


def test_commands_are_those_of_this_version() -> None:
    documents = printed("some/model", "--host", "chat.example.org")
    gateway = container_of(documents["Deployment", "chatcache-gateway"])
    worker = container_of(documents["StatefulSet", "chatcache-worker"])
    for container in (gateway, worker):
        command, *rest = container["args"]
        done = CliRunner().invoke(app, [command, "--help"])
        assert done.exit_code == 0
        assert all(word in done.stdout for word in rest if word.startswith("--"))
        assert "some/model" in rest
        sources = {each["name"]: each["valueFrom"] for each in container["env"] if "valueFrom" in each}
        secrets = {name: each["secretKeyRef"] for name, each in sources.items() if "secretKeyRef" in each}
        assert secrets["CHATCACHE_BUS"] == {"name": "chatcache-redis", "key": "bus"}
        assert secrets["HF_TOKEN"]["optional"]
    assert [each["name"] for each in gateway["env"] if "value" in each] == ["CHATCACHE_ALLOWED_HOST"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == "1" and "cuda" in worker["args"]
    on_cpu = container_of(printed("--gpus", "0")["StatefulSet", "chatcache-worker"])
    assert "nvidia.com/gpu" not in on_cpu["resources"]["limits"] and "cpu" in on_cpu["args"]


def environment_of(container: Any, namespace: str) -> dict[str, str]:
    """Return the variables with values as Kubernetes sets them: references to variables before them are replaced."""
    found: dict[str, str] = {}
    for each in container["env"]:
        if "value" in each:
            found[each["name"]] = re.sub(r"\$\((\w+)\)", lambda name: found.get(name[1], name[0]), each["value"])
        elif each["valueFrom"].get("fieldRef") == {"fieldPath": "metadata.namespace"}:
            found[each["name"]] = namespace
    return found


def test_gateway_accepts_the_names_of_its_service_in_all_namespaces() -> None:
    gateway = container_of(printed("--name", "chat", "--host", "chat.example.org")["Deployment", "chat-gateway"])
    allowed = environment_of(gateway, "models")["CHATCACHE_ALLOWED_HOST"].split()
    suffixes = ("", ".models", ".models.svc", ".models.svc.cluster.local")
    assert allowed == [*(f"chat-gateway{suffix}" for suffix in suffixes), "chat.example.org"]
    with Server(ServerConfig(host="0.0.0.0", allowed_hosts=tuple(allowed), db=":memory:")) as server:
        server.wait_ready()
        for host, status in ((allowed[1], 200), (f"{allowed[3]}:80", 200), ("chat-gateway.others", 403)):
            assert server.request("GET", "/v1/models", headers={"host": host})[0] == status
    # Injected: a reference to a variable that is defined after it stays as it is.
    turned = {"env": gateway["env"][::-1]}
    assert "$(POD_NAMESPACE)" in environment_of(turned, "models")["CHATCACHE_ALLOWED_HOST"]


def test_selectors_name_the_pods_and_workers_accept_no_connection() -> None:
    documents = printed("--name", "chat")
    for role, kind in (("gateway", "Deployment"), ("worker", "StatefulSet")):
        name = f"chat-{role}"
        labels = documents[kind, name]["spec"]["template"]["metadata"]["labels"]
        assert documents["Service", name]["spec"]["selector"] == labels
        assert documents["PodDisruptionBudget", name]["spec"]["selector"]["matchLabels"] == labels
        policy = documents["NetworkPolicy", name]["spec"]
        assert policy["podSelector"]["matchLabels"] == labels
        assert [rule["ports"][0]["port"] for rule in policy["ingress"]] == ([8000] if role == "gateway" else [])
    assert documents["Service", "chat-gateway"]["spec"]["ports"][0]["targetPort"] == 8000


def test_scalers_set_the_numbers_that_the_pods_leave_out() -> None:
    documents = printed("--gateways", "3", *SCALED)
    gateways = documents["HorizontalPodAutoscaler", "chatcache-gateway"]["spec"]
    assert gateways["minReplicas"] == 3 and "replicas" not in documents["Deployment", "chatcache-gateway"]["spec"]
    assert container_of(documents["Deployment", "chatcache-gateway"])["resources"]["requests"]["cpu"]  # of which 70 %
    scaled = documents["ScaledObject", "chatcache-worker"]["spec"]
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (3, 8)
    assert scaled["scaleTargetRef"] == {"kind": "StatefulSet", "name": "chatcache-worker"}
    (trigger,) = scaled["triggers"]
    assert "chatcache_owed_seconds" in trigger["metadata"]["query"]
    assert "replicas" not in documents["StatefulSet", "chatcache-worker"]["spec"]
    assert printed("--workers", "3")["StatefulSet", "chatcache-worker"]["spec"]["replicas"] == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--name", "Chat"), "'Chat' is not a name of at most 40"),
        (("--name", "c" * 41), "is not a name of at most 40"),
        (("--memory", "16"), "'16' is not a size such as 16Gi"),
        (("--cache-size", "0Gi"), "'0Gi' is not a size such as 50Gi"),
        (("--gpus", "2"), "must be at most 1, got 2"),
        (("--workers", "0"), "must be at least 1, got 0"),
        (("--image", ""), "'' is not the name of an image"),
        (("--host", "a b"), "'a b' is not one host name"),
        (("--prometheus", "prometheus"), "'prometheus' is not an http URL"),
        (("--max-workers", "4"), "needs --prometheus"),
        (("--prometheus", "http://prometheus"), "needs --prometheus, and the reverse"),
        (("--workers", "5", "--max-workers", "4", "--prometheus", "http://p"), "4 is less than --workers 5"),
    ],
)
def test_bad_options_are_named_with_their_limit(words: tuple[str, ...], message: str) -> None:
    result = run(*words)
    assert result.exit_code == 2
    text = " ".join(result.output.replace("│", " ").split())
    assert message in text and words[0].partition("=")[0] in text
