"""`chatcache manifests`: print Kubernetes manifests for gateways and workers that share a Redis.

Redis is the operator's own: its URLs are read from a Secret. All containers satisfy the "restricted" Pod Security
Standard (https://kubernetes.io/docs/concepts/security/pod-security-standards/).
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

import typer
import yaml

from chatcache.cli.options import integer_option
from chatcache.config import ServerConfig
from chatcache.engine_process.process import EXIT_GRACE_S

PORT = 8000
USER_ID = 10001  # of the image
READY_FILE = "/tmp/ready"
DOMAIN = "cluster.local"  # of most clusters; for another one give the full name as --host
STOP_DELAY_S = 5  # until the load balancers have learned that a gateway ends
MAX_NAME_CHARS = 40
MAX_REPLICAS = 1000
OWED_SECONDS_PER_WORKER = 5

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_QUANTITY = re.compile(r"[1-9][0-9]*(Mi|Gi|Ti)")
_IMAGE = re.compile(r"[a-z0-9][a-zA-Z0-9._/:@-]*")
_HOST = re.compile(r"([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.|$))*")
_URL = re.compile(r"(https?://[^\s/]+\S*)?")

Manifest = dict[str, Any]


class _PlainDumper(yaml.SafeDumper):  # type: ignore[misc]
    """Writes equal parts in full instead of as references."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _checked(pattern: re.Pattern[str], what: str) -> Any:
    def check(value: str) -> str:
        if not pattern.fullmatch(value):
            raise typer.BadParameter(f"{value!r} is not {what}.")
        return value

    return check


def _checked_name(value: str) -> str:
    if not _NAME.fullmatch(value) or len(value) > MAX_NAME_CHARS:
        raise typer.BadParameter(
            f"{value!r} is not a name of at most {MAX_NAME_CHARS} lower-case letters, digits and hyphens, "
            "which starts with a letter."
        )
    return value


def manifests(
    model: Annotated[
        str | None, typer.Argument(help="Model folder in the image, or Hugging Face id; default: the demo model.")
    ] = None,
    name: Annotated[str, typer.Option(callback=_checked_name, help="Prefix of all names.")] = "chatcache",
    image: Annotated[
        str, typer.Option(callback=_checked(_IMAGE, "the name of an image"), help="Image with the version to run.")
    ] = "chatcache:local",
    gateways: Annotated[
        int, integer_option("--gateways", min=1, max=MAX_REPLICAS, help="Least number of gateways.")
    ] = 2,
    workers: Annotated[int, integer_option("--workers", min=1, max=MAX_REPLICAS, help="Number of workers.")] = 2,
    max_workers: Annotated[
        int | None,
        integer_option(
            "--max-workers", min=1, max=MAX_REPLICAS, help="Let KEDA add workers up to this number; needs --prometheus."
        ),
    ] = None,
    prometheus: Annotated[
        str,
        typer.Option(
            metavar="URL", callback=_checked(_URL, "an http URL"), help="Prometheus that KEDA asks for the load."
        ),
    ] = "",
    gpus: Annotated[int, integer_option("--gpus", min=0, max=1, help="NVIDIA GPUs of a worker.")] = 1,
    cpus: Annotated[int, integer_option("--cpus", min=1, max=1024, help="CPU cores of a worker.")] = 4,
    memory: Annotated[
        str, typer.Option(callback=_checked(_QUANTITY, "a size such as 16Gi"), help="Memory of a worker.")
    ] = "16Gi",
    cache_size: Annotated[
        str,
        typer.Option(
            callback=_checked(_QUANTITY, "a size such as 50Gi"),
            help="Volume of a worker for model files and compiled kernels.",
        ),
    ] = "50Gi",
    host: Annotated[
        str,
        typer.Option(callback=_checked(_HOST, "one host name"), help="Host name by which clients reach the gateways."),
    ] = "",
) -> None:
    """Print Kubernetes manifests: gateways and workers that share a Redis.

    The Secret NAME-redis must have the keys `store` (persistent) and `bus` with the URLs of the Redis servers. Apply
    the output with `kubectl apply -n NAMESPACE -f -`.
    """
    if (max_workers is None) != (not prometheus):
        raise typer.BadParameter("needs --prometheus, and the reverse.", param_hint="--max-workers")
    if max_workers is not None and max_workers < workers:
        raise typer.BadParameter(f"{max_workers} is less than --workers {workers}.", param_hint="--max-workers")
    serving = [model] if model else []
    documents = [
        _gateway(name, image, serving, host),
        _service(name),
        _disruption_budget(name, "gateway"),
        _gateway_scaler(name, gateways),
        _network_policy(name, "gateway", [{"ports": [{"port": PORT, "protocol": "TCP"}]}]),
        _worker(name, image, workers if max_workers is None else None, serving, gpus, cpus, memory, cache_size),
        _worker_service(name),
        _disruption_budget(name, "worker"),
        _network_policy(name, "worker", []),
    ]
    if max_workers is not None:
        documents.append(_worker_scaler(name, workers, max_workers, prometheus))
    typer.echo(yaml.dump_all(documents, Dumper=_PlainDumper, sort_keys=False), nl=False)


def _labels(name: str, role: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": name, "app.kubernetes.io/component": role}


def _manifest(version: str, kind: str, name: str, role: str, **fields: Any) -> Manifest:
    metadata = {"name": f"{name}-{role}", "labels": _labels(name, role)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **fields}


def _gateway(name: str, image: str, serving: list[str], host: str) -> Manifest:
    """Return the Deployment without a number of replicas, which its scaler sets: applying it again changes nothing."""
    probe = {"path": "/readyz", "port": PORT, "httpHeaders": [{"name": "Host", "value": "localhost"}]}
    alive = {**probe, "path": "/livez"}
    service = f"{name}-gateway.$(POD_NAMESPACE)"
    allowed = " ".join(filter(None, (f"{name}-gateway", service, f"{service}.svc", f"{service}.svc.{DOMAIN}", host)))
    container = _container(image, ["gateway", *serving], {"cpu": "1", "memory": "2Gi"}, {"cache": "/cache"})
    container |= {
        "env": [
            _secret(name, "CHATCACHE_REDIS", "store"),
            _secret(name, "CHATCACHE_BUS", "bus"),
            *_optional(name),
            # Kubernetes replaces references only to variables that are defined before.
            {"name": "POD_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
            {"name": "CHATCACHE_ALLOWED_HOST", "value": allowed},
        ],
        "ports": [{"name": "http", "containerPort": PORT}],
        "readinessProbe": {"httpGet": probe, "periodSeconds": 5, "timeoutSeconds": 3},
        "startupProbe": {"httpGet": alive, "periodSeconds": 5, "failureThreshold": 60},
        "livenessProbe": {"httpGet": alive, "periodSeconds": 10, "timeoutSeconds": 5},
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(STOP_DELAY_S)]}}},
    }
    pod = _pod(name, "gateway", container, [{"name": "cache", "emptyDir": {}}])
    spec = {"selector": {"matchLabels": _labels(name, "gateway")}, "template": pod}
    return _manifest("apps/v1", "Deployment", name, "gateway", spec=spec)


def _service(name: str) -> Manifest:
    spec = {"selector": _labels(name, "gateway"), "ports": [{"name": "http", "port": 80, "targetPort": PORT}]}
    return _manifest("v1", "Service", name, "gateway", spec=spec)


def _worker_service(name: str) -> Manifest:
    """Return the headless service that gives the pods of the StatefulSet their names. Nothing connects to workers."""
    return _manifest("v1", "Service", name, "worker", spec={"clusterIP": "None", "selector": _labels(name, "worker")})


def _worker(
    name: str, image: str, replicas: int | None, serving: list[str], gpus: int, cpus: int, memory: str, cache_size: str
) -> Manifest:
    """Return the StatefulSet. `replicas` is None if a scaler sets it. A worker has the name of its pod, which stays."""
    device = "cuda" if gpus else "cpu"
    command = ["worker", *serving, "--device", device, "--ready-file", READY_FILE]
    container = _container(image, command, {"cpu": str(cpus), "memory": memory}, {"cache": "/cache"})
    container |= {
        "env": [_secret(name, "CHATCACHE_BUS", "bus"), *_optional(name)],
        "readinessProbe": {"exec": {"command": ["test", "-e", READY_FILE]}, "periodSeconds": 5},
    }
    if gpus:
        container["resources"]["limits"]["nvidia.com/gpu"] = str(gpus)
    spec = {
        "serviceName": f"{name}-worker",
        **({} if replicas is None else {"replicas": replicas}),
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": _labels(name, "worker")},
        "template": _pod(name, "worker", container, []),
        "volumeClaimTemplates": [
            {
                "metadata": {"name": "cache"},
                "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": cache_size}}},
            }
        ],
    }
    return _manifest("apps/v1", "StatefulSet", name, "worker", spec=spec)


def _container(image: str, command: list[str], resources: dict[str, str], mounts: dict[str, str]) -> Manifest:
    return {
        "name": "chatcache",
        "image": image,
        "args": command,
        "resources": {"requests": resources, "limits": {"memory": resources["memory"]}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": volume, "mountPath": path} for volume, path in {"tmp": "/tmp", **mounts}.items()],
    }


def _pod(name: str, role: str, container: Manifest, volumes: list[Manifest]) -> Manifest:
    grace_s = math.ceil(STOP_DELAY_S + ServerConfig().drain_timeout_s + EXIT_GRACE_S) + STOP_DELAY_S
    labels = _labels(name, role)
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": labels},
    }
    spec = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # their variables would be taken for settings
        "terminationGracePeriodSeconds": grace_s,
        "topologySpreadConstraints": [spread],
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {}}, *volumes],
    }
    return {"metadata": {"labels": labels}, "spec": spec}


def _secret(name: str, variable: str, key: str) -> Manifest:
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": f"{name}-redis", "key": key}}}


def _optional(name: str) -> list[Manifest]:
    """Return the token for Hugging Face, of a Secret that need not exist."""
    reference = {"name": f"{name}-huggingface", "key": "token", "optional": True}
    return [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": reference}}]


def _disruption_budget(name: str, role: str) -> Manifest:
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": _labels(name, role)}}
    return _manifest("policy/v1", "PodDisruptionBudget", name, role, spec=spec)


def _network_policy(name: str, role: str, ingress: list[Manifest]) -> Manifest:
    """Return the policy of what may connect to the pods. They may connect to anything: Redis, and model files."""
    selector = {"matchLabels": _labels(name, role)}
    spec = {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": ingress}
    return _manifest("networking.k8s.io/v1", "NetworkPolicy", name, role, spec=spec)


def _gateway_scaler(name: str, replicas: int) -> Manifest:
    target = {"type": "Utilization", "averageUtilization": 70}
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": f"{name}-gateway"},
        "minReplicas": replicas,
        "maxReplicas": 4 * replicas,
        "metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": target}}],
    }
    return _manifest("autoscaling/v2", "HorizontalPodAutoscaler", name, "gateway", spec=spec)


def _worker_scaler(name: str, replicas: int, max_replicas: int, prometheus: str) -> Manifest:
    """Return the ScaledObject of KEDA: workers by the seconds of prompts that wait.

    Every gateway reports the sum over all workers, hence the maximum.
    """
    query = f'max(chatcache_owed_seconds{{pod=~"{name}-gateway-.*"}})'
    metadata = {"serverAddress": prometheus, "query": query, "threshold": str(OWED_SECONDS_PER_WORKER)}
    spec = {
        "scaleTargetRef": {"kind": "StatefulSet", "name": f"{name}-worker"},
        "minReplicaCount": replicas,
        "maxReplicaCount": max_replicas,
        "cooldownPeriod": 300,
        "triggers": [{"type": "prometheus", "metricType": "AverageValue", "metadata": metadata}],
    }
    return _manifest("keda.sh/v1alpha1", "ScaledObject", name, "worker", spec=spec)
