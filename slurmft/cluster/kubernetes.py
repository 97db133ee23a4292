"""Jobs on Kubernetes: manifests of Kubeflow's two kinds of job, for users to apply."""

import dataclasses
import importlib.metadata
import json
import re
from dataclasses import dataclass
from pathlib import Path

import slurmft
from slurmft.cluster.templates import fill
from slurmft.core.config import RunConfig, flag
from slurmft.core.errors import UsageError

KINDS = ("pytorchjob", "trainjob")
RUNS = "/runs"
"""Where the volume claim is mounted."""

_FOLDER, _PACKAGE = Path(__file__).parent, Path(slurmft.__file__).parent
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
        for pair in self.node_selector:
            if not re.fullmatch(r"[\w./-]+=[\w.-]*", pair, re.ASCII):
                raise UsageError(
                    f"--node-selector {pair!r} is not KEY=VALUE",
                    "such as --node-selector node.kubernetes.io/instance-type=r7iz.metal-16xl",
                )

    @property
    def run_dir(self) -> str:
        return f"{RUNS}/{self.name}"


def _check_dns(name: str, value: str | None) -> None:
    limit, pattern, words = _NAMES[name]
    if value is not None and (len(value) > limit or not re.fullmatch(pattern, value)):
        raise UsageError(
            f"{flag(name)} {value!r} is not a valid name in Kubernetes",
            f"{words}, at most {limit}: {dns_name(value, min(limit, _LABEL[0]))}",
        )


def dns_name(text: str, limit: int = _NAME_MAX) -> str:
    found = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:limit].strip("-")
    return found if found[:1].isalpha() else f"run-{found}"[:limit].strip("-")


def manifest(kind: str, config: RunConfig, cluster: Cluster) -> str:
    """The objects of a job as YAML, in the order in which they are to be made."""
    return fill(
        _FOLDER / "kubernetes.yaml.jinja",
        kind=kind,
        cluster=cluster,
        job=config.job,
        # ASCII alone: YAML takes more characters than JSON for ends of lines.
        config=json.dumps(dataclasses.asdict(config), indent=2),
        restarts=config.job.max_requeues * config.job.nodes,  # of pods: an evicted one restarts all
        runs=RUNS,
        user=_USER,
    )


def dockerfile() -> str:
    """An image with slurmft, built in a checkout, or in the folder of the installed package."""
    needs = [] if _is_checkout() else importlib.metadata.requires("slurmft") or []
    return fill(
        _FOLDER / "Dockerfile.jinja",
        user=_USER,
        is_checkout=_is_checkout(),
        version=slurmft.__version__,
        requirements=[need for need in needs if "extra ==" not in need],
    )


def _is_checkout() -> bool:
    return (_PACKAGE.parent / "pyproject.toml").is_file()


def commands(kind: str, cluster: Cluster, folder: Path | None) -> list[str]:
    """Shell lines that build, deploy, watch and delete a job."""
    place = str(folder or ".")
    text = fill(
        _FOLDER / "kubernetes.sh.jinja",
        kind=kind,
        cluster=cluster,
        folder=place,
        manifest=f"{place}/{cluster.name}.yaml",
        source=str(_PACKAGE.parent if _is_checkout() else _PACKAGE),
        kubectl=f"kubectl --namespace {cluster.namespace}",
    )
    return text.rstrip("\n").split("\n")
