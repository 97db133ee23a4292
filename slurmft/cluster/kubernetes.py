"""Jobs on Kubernetes: manifests of Kubeflow's two kinds of job, for users to apply."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import slurmft
from slurmft.core.config import RunConfig, flag
from slurmft.core.errors import UsageError

KINDS = ("pytorchjob", "trainjob")
RUNS = "/runs"
"""Where the volume claim is mounted."""

_CONFIG = "/etc/slurmft"
_USER = 1000
"""Of the image, and of its group."""
_NAME_MAX = 40
"""Characters of a job's name: the operators append theirs, and a DNS label has 63."""

_LABEL = (63, r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", "small letters, digits and dashes")
_SUBDOMAIN = (253, rf"{_LABEL[1]}(\.{_LABEL[1]})*", "small letters, digits, dashes and dots")
_NAMES = {
    "name": (_NAME_MAX, r"[a-z]([a-z0-9-]*[a-z0-9])?", f"{_LABEL[2]}, a letter first"),
    "namespace": _LABEL,
    "claim": _SUBDOMAIN,
    "secret": _SUBDOMAIN,
}
"""What names of each kind may be in Kubernetes: how many characters, and which."""

_IMAGE = re.compile(r"\w[\w.-]*(:\d+)?(/[\w.-]+)*(:[\w.-]+)?(@sha256:[0-9a-f]+)?", re.ASCII)

Manifest = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """What the manifest asks of the cluster."""

    name: str
    namespace: str
    image: str
    claim: str
    """PersistentVolumeClaim (ReadWriteMany) that holds run directories and caches."""
    cpu: int
    """Of each pod."""
    memory: str
    gpus: int
    shm: str
    """Size of /dev/shm."""
    min_nodes: int | None
    """Fewest pods with which the job continues; None: as many as it starts with."""
    node_selector: tuple[str, ...]
    secret: str | None
    """Secret whose keys become variables, such as HF_TOKEN."""

    def __post_init__(self) -> None:
        for name in _NAMES:
            _check_dns(name, getattr(self, name))
        if not _IMAGE.fullmatch(self.image):
            raise UsageError(
                f"--image {self.image!r} is not an image name", "use registry/name:tag"
            )
        for name in ("memory", "shm"):
            # 1000 is k there, 1024 is Ki; K alone is invalid.
            if not re.fullmatch(r"\d+(\.\d+)?(k|[KMGTP]i|[MGTP])?", getattr(self, name)):
                raise UsageError(
                    f"--{name} {getattr(self, name)!r} is not a size",
                    "use a number and a unit, such as 64Gi",
                )
        if self.cpu < 1 or self.gpus < 0:
            raise UsageError(f"--cpu {self.cpu} --gpus {self.gpus}", "use at least one CPU per pod")
        for pair in self.node_selector:
            if not re.fullmatch(r"[\w./-]+=[\w.-]*", pair, re.ASCII):
                raise UsageError(
                    f"--node-selector {pair!r} is not KEY=VALUE",
                    "such as --node-selector node.kubernetes.io/instance-type=r7iz.metal-16xl",
                )

    @property
    def run_dir(self) -> str:
        return f"{RUNS}/{self.name}"

    def resources(self) -> Manifest:
        """Requests equal to limits: quality of service "Guaranteed", and cores of its own where the
        kubelet's CPU manager is static."""
        amount: Manifest = {"cpu": str(self.cpu), "memory": self.memory}
        if self.gpus:
            amount["nvidia.com/gpu"] = str(self.gpus)
        return {"requests": amount, "limits": dict(amount)}


def _check_dns(name: str, value: str | None) -> None:
    limit, pattern, words = _NAMES[name]
    if value is not None and (len(value) > limit or not re.fullmatch(pattern, value)):
        raise UsageError(
            f"{flag(name)} {value!r} is not a valid name in Kubernetes",
            f"{words}, at most {limit}: {dns_name(value, min(limit, _LABEL[0]))}",
        )


def dns_name(text: str, limit: int = _NAME_MAX) -> str:
    """The text as a DNS label."""
    found = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:limit].strip("-")
    return found if found[:1].isalpha() else f"run-{found}"[:limit].strip("-")


def manifests(kind: str, config: RunConfig, cluster: Cluster) -> list[Manifest]:
    """The objects of a job, in the order in which they are to be made."""
    objects = [_config_map(config, cluster)]
    if kind == "pytorchjob":
        return [*objects, _pytorch_job(config, cluster)]
    return [*objects, _runtime(config, cluster), _train_job(config, cluster)]


def _metadata(cluster: Cluster) -> Manifest:
    labels = {"app.kubernetes.io/name": "slurmft", "app.kubernetes.io/instance": cluster.name}
    return {"name": cluster.name, "namespace": cluster.namespace, "labels": labels}


def _config_map(config: RunConfig, cluster: Cluster) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(cluster),
        "data": {"config.json": config.to_json()},
    }


def _pytorch_job(config: RunConfig, cluster: Cluster) -> Manifest:
    job = config.job
    worker = {
        "replicas": job.nodes,
        # After a stop (an evicted pod), a fault or a lost peer: all resume from a checkpoint.
        "restartPolicy": "OnFailure",
        "template": {
            # Else a service mesh puts a proxy between the ranks.
            "metadata": {"annotations": {"sidecar.istio.io/inject": "false"}},
            "spec": _pod(config, cluster, "pytorch"),
        },
    }
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _metadata(cluster),
        "spec": {
            "nprocPerNode": str(job.nproc_per_node or "auto"),
            "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": _restarts(config)},
            "elasticPolicy": {
                "rdzvBackend": "c10d",
                "minReplicas": cluster.min_nodes or job.nodes,
                "maxReplicas": job.nodes,
                "maxRestarts": job.max_restarts,
            },
            "pytorchReplicaSpecs": {"Worker": worker},
        },
    }


def _restarts(config: RunConfig) -> int:
    """Restarts of pods: an evicted one restarts all."""
    return config.job.max_requeues * config.job.nodes


def _runtime(config: RunConfig, cluster: Cluster) -> Manifest:
    """A runtime of the job's own: the shared ones have neither its volumes nor its resources."""
    step = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    pod = _pod(config, cluster, "node") | {"restartPolicy": "OnFailure"}
    node = {
        "name": "node",
        "template": {
            "metadata": {"labels": step},
            "spec": {"backoffLimit": _restarts(config), "template": {"spec": pod}},
        },
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": _metadata(cluster),
        "spec": {
            "mlPolicy": {"numNodes": config.job.nodes, "torch": {}},
            "template": {"spec": {"replicatedJobs": [node]}},
        },
    }


def _train_job(config: RunConfig, cluster: Cluster) -> Manifest:
    trainer: Manifest = {
        "numNodes": config.job.nodes,
        "image": cluster.image,
        "resourcesPerNode": cluster.resources(),
    }
    if config.job.nproc_per_node:
        trainer["numProcPerNode"] = config.job.nproc_per_node
    runtime = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": cluster.name}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(cluster),
        "spec": {"runtimeRef": runtime, "trainer": trainer},
    }


def _pod(config: RunConfig, cluster: Cluster, container: str) -> Manifest:
    """The pod of each node; each operator expects its own name of the container."""
    mounts = {"runs": RUNS, "shm": "/dev/shm", "config": _CONFIG}
    command = ["python3", "-u", "-m", "slurmft.node.pod", f"{_CONFIG}/config.json", cluster.run_dir]
    found: Manifest = {
        # Else only root can write to the volume, and the image's user is not root.
        "securityContext": {"fsGroup": _USER},
        # Between SIGTERM and SIGKILL: the ranks agree on a step and save.
        "terminationGracePeriodSeconds": config.job.lead_s,
        "containers": [
            {
                "name": container,
                "image": cluster.image,
                "command": command,
                "env": [{"name": "HF_HOME", "value": f"{RUNS}/huggingface"}],
                "resources": cluster.resources(),
                "volumeMounts": [{"name": k, "mountPath": v} for k, v in mounts.items()],
            }
        ],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": cluster.claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": cluster.shm}},
            {"name": "config", "configMap": {"name": cluster.name}},
        ],
    }
    if cluster.secret:
        found["containers"][0]["envFrom"] = [{"secretRef": {"name": cluster.secret}}]
    if cluster.node_selector:
        pairs = (pair.partition("=") for pair in cluster.node_selector)
        found["nodeSelector"] = {key: value for key, _, value in pairs}
    return found


def source_folder() -> Path | None:
    """The folder of slurmft's source; None: it is installed without source."""
    folder = Path(slurmft.__file__).parent.parent
    return folder if (folder / "constraints.txt").is_file() else None


def dockerfile() -> str:
    """An image with slurmft, built in its source folder."""
    return f"""\
FROM python:3.11-slim
# tcmalloc: fewer page faults in training on CPUs
RUN apt-get update \\
 && apt-get install -y --no-install-recommends libtcmalloc-minimal4 \\
 && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/slurmft
COPY . .
RUN pip install --no-cache-dir -c constraints.txt .
USER {_USER}:{_USER}
"""


def commands(kind: str, cluster: Cluster, folder: Path | None) -> list[str]:
    """Shell lines that build, deploy, watch and delete a job."""
    resource = f"{kind}/{cluster.name}"
    source = shlex.quote(str(source_folder() or "."))
    kubectl = f"kubectl --namespace {cluster.namespace}"
    place = "." if folder is None else str(folder)
    manifest = shlex.quote(f"{place}/{cluster.name}.yaml")
    first = f"{cluster.name}-worker-0"
    logs = f"pod/{first}" if kind == "pytorchjob" else f"job/{cluster.name}-node-0"
    # By a pipe: all users of the host see arguments.
    secret = f"{kubectl} create secret generic {cluster.secret} --from-file HF_TOKEN=/dev/stdin"
    secret = f'printf %s "$HF_TOKEN" | {secret}'
    return [
        "# the image",
        f"docker build --tag {cluster.image} --file {shlex.quote(f'{place}/Dockerfile')} {source}",
        f"docker push {cluster.image}",
        *(["# once: the secret", secret] if cluster.secret else []),
        "# deploy",
        f"{kubectl} apply --filename {manifest}",
        "# watch",
        f"{kubectl} get {resource} --watch",
        f"{kubectl} logs --follow {logs}",
        "# delete; run directory and checkpoints stay on the volume",
        f"{kubectl} delete --filename {manifest}",
    ]
