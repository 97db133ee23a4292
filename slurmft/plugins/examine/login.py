"""Checks of the host from which jobs are submitted: Slurm, packages, hub, folders."""

import getpass
import os
import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import slurmft
from slurmft import locks
from slurmft.cluster.slurm import commands
from slurmft.cluster.slurm.commands import Partition
from slurmft.core import filesystem
from slurmft.core import hub as core_hub
from slurmft.core.config import JobConfig
from slurmft.core.errors import SlurmftError, one_line
from slurmft.core.filesystem import Room, absolute
from slurmft.core.text import in_bytes
from slurmft.plugins.examine.checks import Check, failure, ok, warning
from slurmft.plugins.examine.host import call_all, installed

_TIMEOUT_S = 12.0
_HUB_TIMEOUT_S = 5.0
_LOW_BYTES, _LOW_INODES = 5 * 2**30, 10_000
_LOW_SHM_BYTES = 2**29
"""Less free space than that is a warning."""


def examine_this_host(job: JobConfig) -> list[Check]:
    """All checks of the login node, at the same time, for such jobs."""
    parts: dict[str, Callable[[], list[Check]]]
    parts = {"Slurm": partial(controller, job)} if job.cluster != "local" else {}
    parts |= {"packages": packages, "hub": hub}
    parts |= {name: partial(place, name, where) for name, where in folders(job.runs_dir).items()}
    found: list[Check] = []
    results = call_all(_TIMEOUT_S, list(parts.values()))
    for about, result in zip(parts, results, strict=True):
        if isinstance(result, Exception):
            found.append(failure(about, one_line(result), getattr(result, "hint", None)))
        else:
            found += result
    return found


# --- Slurm ----------------------------------------------------------------------------------------


def controller(job: JobConfig) -> list[Check]:
    """Whether Slurm answers; if so, what it offers."""
    if not commands.available():
        hint = "if this host should have Slurm, put its commands on the PATH (module load slurm?)"
        text = "there is no Slurm here: sbatch is not on the PATH"
        if job.cluster == "slurm":
            return [failure("Slurm", text, hint)]
        return [warning("Slurm", f"{text}; runs use simulated nodes on this machine", hint)]
    try:
        version, settings = commands.version(), commands.settings()
    except SlurmftError as error:
        hint = error.hint or "tell the site: jobs can be neither submitted nor watched"
        return [failure("Slurm", one_line(error), hint)]
    name = settings.get("ClusterName", "a cluster with no name")
    chosen = ("KillWait", "PreemptMode", "PreemptType", "MaxArraySize", "SelectType", "TaskPlugin")
    shown = {k: settings[k] for k in chosen if k in settings}
    return [
        ok("Slurm", f"{version}; the controller of {name} answers", **shown),
        check_partitions(commands.partitions(), job.partition, job.nodes),
        check_down_nodes(commands.unwell_hosts()),
        accounting(settings),
    ]


def check_down_nodes(unwell: dict[str, str]) -> Check:
    """The nodes that take no jobs, each with Slurm's reason."""
    if not unwell:
        return ok("nodes", "no node is down, drained or not responding")
    named = "; ".join(f"{host} is {why}" for host, why in sorted(unwell.items()))
    hint = "jobs run on the other nodes; ask the site about these"
    return warning("nodes", named, hint, **unwell)


def check_partitions(found: Sequence[Partition], wanted: str | None, nodes: int) -> Check:
    """What the partitions offer, and whether the requested one exists and is large enough."""
    if not found:
        return failure("partitions", "sinfo shows no partition", "ask the site for access")
    offered = "; ".join(str(partition) for partition in found)
    chosen = [p for p in found if wanted in (None, p.name)]
    if not chosen:
        return failure("partitions", f"there is no partition {wanted!r}; there are: {offered}")
    if not any(p.nodes >= nodes and p.state == "up" for p in chosen):
        where = wanted or "any partition that is up"
        text = f"no {nodes} nodes in {where}; there are: {offered}"
        return failure("partitions", text, "ask for fewer --nodes, or for another --partition")
    return ok("partitions", offered)


def accounting(settings: Mapping[str, str]) -> Check:
    """Whether finished jobs can be looked up, and what this user may have."""
    try:
        commands.check_accounting()
        rows = commands.associations(getpass.getuser())
    except SlurmftError as error:
        hint = "runs work without it, but jobs that left the queue long ago cannot be looked up"
        return warning("accounting", f"no accounting: {one_line(error)}", hint)
    return check_accounting(getpass.getuser(), rows, settings)


def check_accounting(
    user: str, rows: Sequence[Mapping[str, str]], settings: Mapping[str, str]
) -> Check:
    """The limits of a user's accounts; no account is a failure where Slurm requires one."""
    if rows:
        known = "; ".join(" ".join(f"{k}={v}" for k, v in row.items()) for row in rows)
        return ok("accounting", f"sacct answers; limits of {user}: {known}")
    text = f"sacct answers; {user} has no account"
    enforced = settings.get("AccountingStorageEnforce", "none").lower()
    if any(word in enforced for word in ("associations", "limits", "all")):
        hint = "ask the site for an account"
        return failure("accounting", f"{text}, and Slurm requires one ({enforced})", hint)
    return ok("accounting", f"{text}; Slurm requires none, so there are no limits")


# --- the environment ------------------------------------------------------------------------------


def packages() -> list[Check]:
    """The installed versions against slurmft's requirements; nothing is imported for it."""
    from importlib import metadata

    from packaging.requirements import Requirement

    here = f"Python {platform.python_version()}, slurmft {slurmft.__version__}"
    try:
        required = [Requirement(text) for text in metadata.requires("slurmft") or ()]
    except metadata.PackageNotFoundError:
        hint = "install it (pip install .): its requirements are not known otherwise"
        return [warning("packages", f"{here}; slurmft is not installed", hint)]
    wanted = [r for r in required if r.marker is None or r.marker.evaluate({"extra": ""})]
    versions = {r.name: installed(r.name) for r in wanted}
    wrong = [
        f"{r} is required, {version or 'none'} is installed"
        for r in wanted
        if not (version := versions[r.name]) or not r.specifier.contains(version, prereleases=True)
    ]
    if wrong:
        hint = "install slurmft again into this environment, with constraints.txt"
        return [failure("packages", f"{here}; {'; '.join(wrong)}", hint, **versions)]
    main = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers"))
    return [ok("packages", f"{here}, {main}; all {len(wanted)} requirements are met", **versions)]


def hub() -> list[Check]:
    """Whether models and data can be fetched from here."""
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return [ok("hub", "not checked: HF_HUB_OFFLINE is set; runs use the caches")]
    hint = "runs use the caches, or folders: --model DIR, --data DIR"
    # The timeout of the request does not cover a name server that does not answer.
    answer = call_all(_HUB_TIMEOUT_S, [partial(core_hub.hub_in_reach, _HUB_TIMEOUT_S)])[0]
    if answer is True:
        return [ok("hub", f"{endpoint} answers")]
    return [warning("hub", f"{endpoint} does not answer", hint)]


# --- folders --------------------------------------------------------------------------------------


def folders(runs_dir: str) -> dict[str, Path]:
    """The folders that runs write to, by what they are."""
    found = {"runs": absolute(runs_dir), "home": Path.home(), "tmp": Path(tempfile.gettempdir())}
    try:
        found["cache"] = core_hub.hub_cache()
    except ImportError:  # the check of the packages says so
        found["cache"] = absolute("~/.cache/huggingface/hub")
    if other := os.environ.get("HF_DATASETS_CACHE"):
        found["data cache"] = absolute(other)
    return found


def place(name: str, folder: Path) -> list[Check]:
    """A folder: its file system, whether it can be written, how much space is free."""
    here = filesystem.of(folder)
    text = f"{folder} on {here}"
    if name in ("cache", "data cache"):
        measured = locks.recorded(here)
        text += f"; file locks: {locks.primitive_for(folder)}"
        text += " (measured)" if measured else " (its default)" if here.is_shared else ""
    if name == "runs" and not here.is_shared:
        text += ", which other nodes may not see"
    return [check_room(name, text, filesystem.room(folder))]


def check_room(name: str, text: str, found: Room) -> Check:
    """Whether a folder can be written and has free space."""
    inodes = "" if found.free_inodes is None else f", {found.free_inodes:,} files"
    free = f"{text}: {in_bytes(found.free_bytes)} free{inodes}"
    figures = {"free_bytes": found.free_bytes, "free_inodes": found.free_inodes}
    if found.problem:
        hint = "free some space, check your quota, or choose another folder"
        hint += {"runs": ": --runs-dir", "cache": ": HF_HOME", "tmp": ": TMPDIR"}.get(name, "")
        return failure(name, f"{text}: cannot be written: {found.problem}", hint, **figures)
    few = found.free_inodes is not None and found.free_inodes < _LOW_INODES
    if found.free_bytes < (_LOW_SHM_BYTES if name == "shm" else _LOW_BYTES) or few:
        hint = "free some space: a checkpoint has three times the size of its model"
        if name == "shm":
            hint = "tell the site: the processes of a node share memory there"
        return warning(name, free, hint, **figures)
    return ok(name, free, **figures)
