"""Jobs on Kubernetes: manifests of Kubeflow's two kinds of job, for users to apply."""

import importlib.metadata
import json
import re
import shlex
from argparse import Namespace
from pathlib import Path
from typing import Any

import slurmft
from slurmft.core import interpreter
from slurmft.core.config import RunConfig
from slurmft.core.credentials import redact
from slurmft.core.errors import UsageError
from slurmft.core.options import flag
from slurmft.node import ccl, sealed

KINDS = ("pytorchjob", "trainjob")
PULL_POLICIES = ("Always", "IfNotPresent", "Never")
RUNS = "/runs"
"""Where the volume claim is mounted."""

_FOLDER = Path(__file__).parent
_PACKAGE = Path(slurmft.__file__).parent
_USER = 1000
"""Number of the image's user, and of its group."""
_NAME_MAX = 40
"""Characters of a job's name: the operators append theirs, and a DNS label has 63."""

# As in RFC 1123: a label is one part of a host's name, a subdomain is several with dots.
_LABEL = (63, r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", "small letters, digits and dashes")
_SUBDOMAIN = (
    253,
    rf"{_LABEL[1]}(\.{_LABEL[1]})*",
    "small letters, digits, dashes and dots",
)
_NAMES = {
    "name": (_NAME_MAX, r"[a-z]([a-z0-9-]*[a-z0-9])?", f"{_LABEL[2]}, a letter first"),
    "namespace": _LABEL,
    "claim": _SUBDOMAIN,
    "secret": _SUBDOMAIN,
}
"""What names of each kind may be in Kubernetes: how many characters, and which."""

_TORCH_FOR_CPUS = "https://download.pytorch.org/whl/cpu"
"""Index of wheels of torch without CUDA, which takes 4 GB in those of PyPI."""

# Host and port of a registry, path, tag, digest. It stands without quotes in shell lines, so that
# none of a shell's characters may be in it.
_IMAGE = re.compile(
    r"\w[\w.-]*(:\d+)?(/[\w.-]+)*(:[\w.-]+)?(@sha256:[0-9a-f]+)?", re.ASCII
)

_QUANTITY = re.compile(r"(?=[\d.]*[1-9])\d+(\.\d+)?([kMGTPE]|[KMGTPE]i)?", re.ASCII)


def check(cluster: Namespace, nodes: int) -> None:
    """Checks what the flags of `slurmft render kubernetes` ask of the cluster."""
    for name, (limit, pattern, rule) in _NAMES.items():
        value = getattr(cluster, name)
        if value is None:  # --secret need not be given
            continue
        if len(value) > limit or not re.fullmatch(pattern, value):
            # What is proposed is a label, also where a subdomain is allowed: that is always valid.
            valid_name = dns_name(value, min(limit, _LABEL[0]))
            raise UsageError(
                f"{flag(name)} {value!r} is not a valid name in Kubernetes",
                f"{rule}, at most {limit}: {valid_name}",
            )
    if not _IMAGE.fullmatch(cluster.image):
        raise UsageError(
            f"--image {cluster.image!r} is not an image name", "use registry/name:tag"
        )
    for name in ("memory", "shm"):
        value = getattr(cluster, name)
        if not _QUANTITY.fullmatch(value):
            raise UsageError(
                f"{flag(name)} {value!r} is not a size in Kubernetes",
                "such as 32Gi or 512Mi",
            )
    for pair in cluster.node_selector:
        if not re.fullmatch(r"[\w./-]+=[\w.-]*", pair, re.ASCII):
            raise UsageError(
                f"--node-selector {pair!r} is not KEY=VALUE",
                "such as --node-selector node.kubernetes.io/instance-type=r7iz.metal-16xl",
            )
    for pair in cluster.variables:
        name, equals, value = pair.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise UsageError(
                f"--env {redact(pair)!r} is not NAME=VALUE",
                "such as --env CCL_WORKER_COUNT=2; secrets go by --secret",
            )
        if "\n" in value:
            raise UsageError(
                f"the value of --env {name} has several lines", "give it in one line"
            )
    if cluster.min_nodes is not None and cluster.min_nodes > nodes:
        raise UsageError(
            f"--min-nodes {cluster.min_nodes} of --nodes {nodes}", "from 1 to --nodes"
        )


def dns_name(text: str, limit: int = _NAME_MAX) -> str:
    """Returns a name that Kubernetes takes, as near to a text as possible."""
    # One dash for each stretch of characters that a DNS label cannot have.
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    # A Service, which the operators make for a job, must begin with a letter.
    if not name[:1].isalpha():
        name = f"run-{name}"
    # Again: the cut may leave a dash at the end.
    return name[:limit].strip("-")


def manifest(config: RunConfig, cluster: Namespace) -> str:
    """Returns the objects of a job as YAML, in the order in which they are to be made."""
    # Kubernetes counts restarts of pods, and the end of one ends all of an attempt.
    restarts = config.job.max_requeues * config.job.nodes
    return _fill(
        "manifests.yaml.jinja",
        cluster=cluster,
        job=config.job,
        # ASCII alone: YAML takes more characters than JSON for ends of lines.
        config=json.dumps(config.as_dict(), indent=2),
        restarts=restarts,
        store_variable=sealed.SECRET,
        store_secret=sealed.new_secret(),
        runs=RUNS,
        user=_USER,
        command=_command(config, cluster),
    )


def _command(config: RunConfig, cluster: Namespace) -> list[str]:
    """Returns the command of a pod, with the lines of --setup before it."""
    run = f"{RUNS}/{cluster.name}"
    command = interpreter.module(
        "slurmft.plugins.kubernetes.pod",
        "/etc/slurmft/config.json",
        run,
        python="python3",
        unbuffered=True,
    )
    if not config.job.setup:
        return command
    # `exec`, so that the pod's SIGTERM reaches the program, not the shell.
    script = "\n".join(["set -e", *config.job.setup, "set +e", 'exec "$@"'])
    return ["bash", "-c", script, "setup", *command]


def dockerfile(config: RunConfig, cluster: Namespace) -> str:
    """Returns the Dockerfile of an image with slurmft, for pods with GPUs or without, and with
    oneCCL where the job asks for it.

    It is built in a checkout, or in the folder of the installed package. That has no
    pyproject.toml: the requirements are written out.
    """
    uses_ccl = config.job.backend == "ccl" and not cluster.gpus
    options, packages = _pip_arguments(uses_ccl)
    reasons = []
    # GPUs have NCCL, and torch of PyPI is built for them.
    if not cluster.gpus:
        reasons.append("torch without CUDA; Intel's OpenMP, for the profile xeon")
        options += ["--extra-index-url", _TORCH_FOR_CPUS]
        packages.append("intel-openmp")
    if uses_ccl:
        reasons.append("oneCCL's binding, with the last torch that it fits")
        options += ["--extra-index-url", ccl.WHEELS]
        for name in ("torch", "oneccl_bind_pt"):
            packages.append(f"{name}=={ccl.LAST_TORCH}.*")
    return _fill(
        "Dockerfile.jinja",
        user=_USER,
        is_checkout=_is_checkout(),
        version=slurmft.__version__,
        reasons=reasons,
        options=options,
        packages=packages,
    )


def _pip_arguments(uses_ccl: bool) -> tuple[list[str], list[str]]:
    """Returns pip's options and packages for slurmft itself.

    Args:
        uses_ccl: versions must fit oneCCL's binding.
    """
    if _is_checkout():
        constraints = "constraints.txt"
        if uses_ccl:
            constraints = "constraints-xeon.txt"
        return ["-c", constraints], ["."]
    declared = importlib.metadata.requires("slurmft") or []
    # An image has no extras: trackers and the like are the user's to add.
    packages = [need for need in declared if "extra ==" not in need]
    # An installed package comes with the versions for the newest torch alone.
    if uses_ccl:
        return [], packages
    return ["-c", "slurmft/shipped/constraints.txt"], packages


def _is_checkout() -> bool:
    # An installed package lies in site-packages, which has no such file.
    return (_PACKAGE.parent / "pyproject.toml").is_file()


def commands(cluster: Namespace) -> list[str]:
    """Returns shell lines that build, deploy, watch and delete a job."""
    # Without --output, the manifest is printed: wherever the user puts it.
    place = str(cluster.output or ".")
    source = _PACKAGE
    if _is_checkout():
        source = _PACKAGE.parent
    text = _fill(
        "submit.sh.jinja",
        cluster=cluster,
        folder=place,
        manifest=f"{place}/{cluster.name}.yaml",
        source=str(source),
        kubectl=f"kubectl --namespace {cluster.namespace}",
    )
    return text.rstrip("\n").split("\n")


def _fill(template: str, **values: Any) -> str:
    """Returns the text of a Jinja template of this folder. There, `quote` makes one word of a text
    for a shell, and `words` a command of a list."""
    import jinja2  # 60 ms

    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    environment.filters |= {"quote": shlex.quote, "words": shlex.join}
    text = (_FOLDER / template).read_text(encoding="utf-8")
    return environment.from_string(text).render(values)
