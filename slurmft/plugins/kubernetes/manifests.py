"""Jobs on Kubernetes: manifests of Kubeflow's two kinds of job, for users to apply."""

import dataclasses
import importlib.metadata
import json
import re
from argparse import Namespace
from pathlib import Path

import slurmft
from slurmft.cluster.templates import fill
from slurmft.core.config import RunConfig
from slurmft.core.errors import UsageError
from slurmft.core.options import flag

KINDS = ("pytorchjob", "trainjob")
RUNS = "/runs"
"""Where the volume claim is mounted."""

_FOLDER = Path(__file__).parent
_PACKAGE = Path(slurmft.__file__).parent
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


def check(cluster: Namespace, nodes: int) -> None:
    """Checks what the flags of `slurmft render kubernetes` ask of the cluster."""
    for name, (limit, pattern, words) in _NAMES.items():
        value = getattr(cluster, name)
        if value is not None and (len(value) > limit or not re.fullmatch(pattern, value)):
            raise UsageError(
                f"{flag(name)} {value!r} is not a valid name in Kubernetes",
                f"{words}, at most {limit}: {dns_name(value, min(limit, _LABEL[0]))}",
            )
    if not _IMAGE.fullmatch(cluster.image):
        raise UsageError(f"--image {cluster.image!r} is not an image name", "use registry/name:tag")
    for pair in cluster.node_selector:
        if not re.fullmatch(r"[\w./-]+=[\w.-]*", pair, re.ASCII):
            raise UsageError(
                f"--node-selector {pair!r} is not KEY=VALUE",
                "such as --node-selector node.kubernetes.io/instance-type=r7iz.metal-16xl",
            )
    if not 1 <= (cluster.min_nodes or 1) <= nodes:
        raise UsageError(f"--min-nodes {cluster.min_nodes} of --nodes {nodes}", "from 1 to --nodes")


def dns_name(text: str, limit: int = _NAME_MAX) -> str:
    """Returns a name that Kubernetes takes, as near to a text as possible."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not name[:1].isalpha():
        name = f"run-{name}"
    return name[:limit].strip("-")


def manifest(config: RunConfig, cluster: Namespace) -> str:
    """The objects of a job as YAML, in the order in which they are to be made."""
    return fill(
        _FOLDER / "manifests.yaml.jinja",
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


def commands(cluster: Namespace) -> list[str]:
    """Shell lines that build, deploy, watch and delete a job."""
    place = str(cluster.output or ".")
    text = fill(
        _FOLDER / "submit.sh.jinja",
        cluster=cluster,
        folder=place,
        manifest=f"{place}/{cluster.name}.yaml",
        source=str(_PACKAGE.parent if _is_checkout() else _PACKAGE),
        kubectl=f"kubectl --namespace {cluster.namespace}",
    )
    return text.rstrip("\n").split("\n")
