"""Checks of the host from which jobs are submitted: Slurm, packages, hub, folders."""

import getpass
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import slurmft
from slurmft import locks
from slurmft.cluster.slurm import commands
from slurmft.cluster.slurm.commands import Partition
from slurmft.core import filesystem, interpreter, site
from slurmft.core import hub as core_hub
from slurmft.core.config import JobConfig
from slurmft.core.errors import SlurmftError, one_line
from slurmft.core.filesystem import absolute
from slurmft.plugins.examine.checks import Check, failure, ok, warning
from slurmft.plugins.examine.host import call_all, installed
from slurmft.plugins.examine.node_rules import check_room

_TIMEOUT_S = 12.0
_HUB_TIMEOUT_S = 5.0


def examine_this_host(job: JobConfig) -> list[Check]:
    """Makes all checks of the login node, at the same time, for such jobs."""
    parts: dict[str, Callable[[], list[Check]]] = {}
    if job.cluster != "local":
        parts["Slurm"] = partial(controller, job)
    parts["site file"] = site_files
    parts["packages"] = packages
    parts["imports"] = imports
    parts["hub"] = hub
    for purpose, path in folders(job.runs_dir).items():
        parts[purpose] = partial(folder, purpose, path)
    checks: list[Check] = []
    # All together have this time, so that a file system that hangs holds up nothing else.
    results = call_all(_TIMEOUT_S, list(parts.values()))
    for about, result in zip(parts, results, strict=True):
        # A check that fails, or takes too long, is a finding itself: the report has all the others.
        if isinstance(result, Exception):
            hint = getattr(result, "hint", None)
            checks.append(failure(about, one_line(result), hint))
        else:
            checks += result
    return checks


def site_files() -> list[Check]:
    """Says which site files are in use, and what each of them sets."""
    files = site.origins(site.all_options())
    if not files:
        places = f"{site.OF_CENTRE}, ${site.NAMED_BY} or {site.OF_USER}"
        return [ok("site file", f"there is none ({places})")]
    parts = []
    for file, keys in files.items():
        parts.append(f"{file}: {', '.join(keys) or 'nothing'}")
    return [ok("site file", "; ".join(parts))]


# --- Slurm ----------------------------------------------------------------------------------------

# Slurm's settings that a report shows.
_SETTINGS = (
    "KillWait",
    "PreemptMode",
    "PreemptType",
    "MaxArraySize",
    "SelectType",
    "TaskPlugin",
)


def controller(job: JobConfig) -> list[Check]:
    """Checks that Slurm answers; if so, what it offers."""
    if not commands.available():
        hint = "if this host should have Slurm, put its commands on the PATH (module load slurm?)"
        text = "there is no Slurm here: sbatch is not on the PATH"
        if job.cluster == "slurm":
            return [failure("Slurm", text, hint)]
        text += "; runs use simulated nodes on this machine"
        return [warning("Slurm", text, hint)]
    try:
        version = commands.version()
        settings = commands.settings()
    # The commands are there, but the controller does not answer: nothing more can be asked of it.
    except SlurmftError as error:
        hint = error.hint or "tell the site: jobs can be neither submitted nor watched"
        return [failure("Slurm", one_line(error), hint)]
    cluster = settings.get("ClusterName", "a cluster with no name")
    figures = {}
    for name in _SETTINGS:
        if name in settings:
            figures[name] = settings[name]
    return [
        ok("Slurm", f"{version}; the controller of {cluster} answers", **figures),
        check_partitions(commands.partitions(), job.partition, job.nodes),
        check_down_nodes(commands.unwell_hosts()),
        accounting(settings),
    ]


def check_down_nodes(unwell: dict[str, str]) -> Check:
    """Checks for nodes that take no jobs, each with Slurm's reason."""
    if not unwell:
        return ok("nodes", "no node is down, drained or not responding")
    reasons = []
    for host, why in sorted(unwell.items()):
        reasons.append(f"{host} is {why}")
    hint = "jobs run on the other nodes; ask the site about these"
    return warning("nodes", "; ".join(reasons), hint, **unwell)


def check_partitions(
    partitions: Sequence[Partition],
    requested: str | None,
    nodes: int,
) -> Check:
    """Checks that the requested partition exists and is large enough, and says what there is."""
    if not partitions:
        text = "sinfo shows no partition"
        return failure("partitions", text, "ask the site for access")
    offered = "; ".join(str(partition) for partition in partitions)
    candidates = [p for p in partitions if requested in (None, p.name)]
    if not candidates:
        text = f"there is no partition {requested!r}; there are: {offered}"
        return failure("partitions", text)
    large_enough = []
    for p in candidates:
        # Nodes that are down count as well: they may come back, and a job would wait for them.
        if p.nodes >= nodes and p.state == "up":
            large_enough.append(p)
    if not large_enough:
        where = requested or "any partition that is up"
        text = f"no {nodes} nodes in {where}; there are: {offered}"
        hint = "ask for fewer --nodes, or for another --partition"
        return failure("partitions", text, hint)
    return ok("partitions", offered)


def accounting(settings: Mapping[str, str]) -> Check:
    """Checks that finished jobs can be looked up, and what this user may have."""
    user = getpass.getuser()
    try:
        commands.check_accounting()
        rows = commands.associations(user)
    except SlurmftError as error:
        hint = "runs work without it, but jobs that left the queue long ago cannot be looked up"
        return warning("accounting", f"no accounting: {one_line(error)}", hint)
    return check_accounting(user, rows, settings)


def check_accounting(
    user: str,
    rows: Sequence[Mapping[str, str]],
    settings: Mapping[str, str],
) -> Check:
    """Checks a user's accounts and says their limits. No account is a failure where Slurm requires
    one."""
    if rows:
        limits = []
        for row in rows:
            fields = []
            for name, value in row.items():
                fields.append(f"{name}={value}")
            limits.append(" ".join(fields))
        all_limits = "; ".join(limits)
        return ok("accounting", f"sacct answers; limits of {user}: {all_limits}")
    text = f"sacct answers; {user} has no account"
    enforced = settings.get("AccountingStorageEnforce", "none").lower()
    # With "limits" or "all", Slurm enforces associations, too.
    if any(word in enforced for word in ("associations", "limits", "all")):
        hint = "ask the site for an account"
        text += f", and Slurm requires one ({enforced})"
        return failure("accounting", text, hint)
    return ok("accounting", f"{text}; Slurm requires none, so there are no limits")


# --- the environment ------------------------------------------------------------------------------


def packages() -> list[Check]:
    """Checks the installed versions against slurmft's requirements, without importing them."""
    from importlib import metadata

    from packaging.requirements import Requirement

    here = f"Python {platform.python_version()}, slurmft {slurmft.__version__}"
    try:
        declared = [Requirement(text) for text in metadata.requires("slurmft") or ()]
    except metadata.PackageNotFoundError:
        hint = "install it (pip install .): its requirements are not known otherwise"
        return [warning("packages", f"{here}; slurmft is not installed", hint)]
    # Without the requirements of extras, which need not be installed.
    required = []
    for requirement in declared:
        marker = requirement.marker
        if marker is None or marker.evaluate({"extra": ""}):
            required.append(requirement)
    versions: dict[str, Any] = {}
    for each in required:
        versions[each.name] = installed(each.name)
    wrong = []
    for requirement in required:
        version = versions[requirement.name]
        # A site's own build of torch may be a pre-release.
        if not version or not requirement.specifier.contains(version, prereleases=True):
            installed_version = version or "none"
            wrong.append(f"{requirement} is required, {installed_version} is installed")
    if wrong:
        hint = "install slurmft again into this environment, with constraints.txt"
        all_wrong = "; ".join(wrong)
        return [failure("packages", f"{here}; {all_wrong}", hint, **versions)]
    torch = f"torch {versions['torch']}"
    transformers = f"transformers {versions['transformers']}"
    text = f"{here}, {torch}, {transformers}; all {len(required)} requirements are met"
    return [ok("packages", text, **versions)]


def imports() -> list[Check]:
    """Checks that nobody else can put modules where this Python imports from."""
    relative = interpreter.relative_folders()
    if relative:
        return [
            warning(
                "imports",
                f"PYTHONPATH={os.environ['PYTHONPATH']!r} names the folder that a command runs in: "
                "whoever can write there has modules run as you",
                "leave out what is empty or no absolute path: "
                "export PYTHONPATH=/code${PYTHONPATH:+:$PYTHONPATH}",
            )
        ]
    folders = [folder for folder in map(Path, sys.path) if folder.is_dir()]
    writable = [folder for folder in folders if folder.stat().st_mode & 0o022]
    if writable:
        names = ", ".join(map(repr, map(str, writable)))
        commands = shlex.join(["chmod", "go-w", *map(str, writable)])
        return [
            warning(
                "imports",
                f"others can put modules that run as you into {names}",
                f"if nobody else is to install there: {commands}",
            )
        ]
    text = f"nobody else can write the {len(folders)} folders that Python imports from"
    return [ok("imports", text)]


def hub() -> list[Check]:
    """Checks that models and data can be fetched from here."""
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if core_hub.is_hub_offline():
        return [ok("hub", "not checked: HF_HUB_OFFLINE is set; runs use the caches")]
    hint = "runs use the caches, or folders: --model DIR, --data DIR"
    # The timeout of the request does not cover a name server that does not answer.
    call = partial(core_hub.hub_in_reach, _HUB_TIMEOUT_S)
    answers = call_all(_HUB_TIMEOUT_S, [call])
    # A call that takes too long has an exception in place of its answer.
    if answers == [True]:
        return [ok("hub", f"{endpoint} answers")]
    return [warning("hub", f"{endpoint} does not answer", hint)]


# --- folders --------------------------------------------------------------------------------------


def folders(runs_dir: str) -> dict[str, Path]:
    """Returns the folders that runs write to, by purpose."""
    paths = {
        "runs": absolute(runs_dir),
        "home": Path.home(),
        "tmp": Path(tempfile.gettempdir()),
    }
    try:
        paths["cache"] = core_hub.hub_cache()
    except ImportError:  # the check of the packages says so
        paths["cache"] = absolute("~/.cache/huggingface/hub")
    data_cache = os.environ.get("HF_DATASETS_CACHE")
    if data_cache:
        paths["data cache"] = absolute(data_cache)
    return paths


def folder(purpose: str, path: Path) -> list[Check]:
    """Checks a folder: its file system, that it can be written, how much space is free."""
    file_system = filesystem.of(path)
    text = f"{path} on {file_system}"
    if purpose in ("cache", "data cache"):
        text += f"; file locks: {locks.primitive_for(path)}"
        # By an earlier examination, or by `slurmft doctor locks`.
        if locks.recorded(file_system):
            text += " (measured)"
        elif file_system.is_shared:
            text += " (its default)"
    if purpose == "runs" and not file_system.is_shared:
        text += ", which other nodes may not see"
    return [check_room(purpose, text, filesystem.room(path))]
