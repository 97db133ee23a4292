"""What can be seen of a cluster from where jobs are submitted: Slurm, packages, hub, folders."""

from __future__ import annotations

import getpass
import os
import platform
import shutil
import subprocess
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
from slurmft.core.errors import SlurmftError
from slurmft.core.filesystem import Room, absolute
from slurmft.doctor.checks import Check, all_within, failure, in_words, installed, ok, warning

_TIMEOUT_S = 12.0
_HUB_TIMEOUT_S = 5.0
_LOW_BYTES, _LOW_INODES = 5 * 2**30, 10_000
_LOW_SHM_BYTES = 2**29
"""Less room than that is worth a word."""


def examine(job: JobConfig) -> list[Check]:
    """Everything that the login node shows, all of it at the same time.

    Args:
        job: cluster, runs directory, and partition and nodes of the jobs to come.
    """
    parts: dict[str, Callable[[], list[Check]]] = {}
    if job.cluster != "local":
        parts["Slurm"] = partial(controller, job)
    parts |= {"packages": packages, "hub": hub}
    for name, folder in folders(job.runs_dir).items():
        parts[name] = partial(place, name, folder)
    parts["quotas"] = quotas
    found: list[Check] = []
    for about, give in zip(parts, all_within(_TIMEOUT_S, list(parts.values())), strict=True):
        try:
            found += give()
        except Exception as error:
            found.append(failure(about, in_words(error), getattr(error, "hint", None)))
    return found


# --- Slurm ----------------------------------------------------------------------------------------


def controller(job: JobConfig) -> list[Check]:
    """Whether Slurm answers; if so, what it offers."""
    if not commands.available():
        return [no_slurm(job.cluster)]
    try:
        version, settings = commands.version(), commands.settings()
    except SlurmftError as error:
        cure = error.hint or "tell the site: jobs can be neither submitted nor watched"
        return [failure("Slurm", in_words(error), cure)]
    name = settings.get("ClusterName", "a cluster without a name")
    chosen = ("KillWait", "PreemptMode", "PreemptType", "MaxArraySize", "SelectType", "TaskPlugin")
    shown = {k: settings[k] for k in chosen if k in settings}
    here = ok("Slurm", f"{version}; the controller of {name} answers", **shown)
    return [
        here,
        judge_partitions(commands.partitions(), job.partition, job.nodes),
        judge_down(commands.unwell_hosts()),
        accounting(settings),
    ]


def no_slurm(asked: str) -> Check:
    """A machine without Slurm's commands: runs there are simulated nodes, unless Slurm is asked
    for."""
    cure = "where there is one: put its commands on the PATH, perhaps by module load slurm"
    text = "there is no Slurm here: sbatch is not on the PATH"
    if asked == "slurm":
        return failure("Slurm", text, cure)
    return warning("Slurm", f"{text}; runs are simulated nodes on this machine", cure)


def judge_down(unwell: dict[str, str]) -> Check:
    """The nodes that take no jobs, each with Slurm's reason."""
    if not unwell:
        return ok("nodes", "none is down, drained or without an answer")
    named = "; ".join(f"{host} is {why}" for host, why in sorted(unwell.items()))
    cure = "jobs run on the others; ask the site about these"
    return warning("nodes", named, cure, **unwell)


def judge_partitions(found: Sequence[Partition], wanted: str | None, nodes: int) -> Check:
    """What the partitions offer, and whether the one that is wanted is there and large enough."""
    if not found:
        return failure("partitions", "sinfo shows none", "ask the site for access")
    offered = "; ".join(str(partition) for partition in found)
    chosen = [p for p in found if wanted in (None, p.name)]
    if not chosen:
        return failure("partitions", f"there is no {wanted!r}; there are: {offered}")
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
        cure = "runs do without; jobs that have left the queue for long cannot be looked up"
        return warning("accounting", f"no accounting: {in_words(error)}", cure)
    return judge_accounting(getpass.getuser(), rows, settings)


def judge_accounting(
    user: str, rows: Sequence[Mapping[str, str]], settings: Mapping[str, str]
) -> Check:
    """The limits of a user's accounts; no account is a failure where Slurm insists on one."""
    if rows:
        known = "; ".join(" ".join(f"{k}={v}" for k, v in row.items()) for row in rows)
        return ok("accounting", f"sacct answers; limits of {user}: {known}")
    text = f"sacct answers; {user} has no account in it"
    enforced = settings.get("AccountingStorageEnforce", "none").lower()
    if any(word in enforced for word in ("associations", "limits", "all")):
        cure = "ask the site for an account"
        return failure("accounting", f"{text}, and Slurm insists on one ({enforced})", cure)
    return ok("accounting", f"{text}, and needs none: no limits")


# --- the environment ------------------------------------------------------------------------------


def packages() -> list[Check]:
    """What is installed here, against what slurmft requires; nothing is imported for it."""
    from importlib import metadata

    from packaging.requirements import Requirement

    here = f"Python {platform.python_version()}, slurmft {slurmft.__version__}"
    try:
        required = [Requirement(text) for text in metadata.requires("slurmft") or ()]
    except metadata.PackageNotFoundError:
        cure = "install it (pip install .): what it requires is not known otherwise"
        return [warning("packages", f"{here}; slurmft runs without being installed", cure)]
    wanted = [r for r in required if r.marker is None or r.marker.evaluate({"extra": ""})]
    versions = {r.name: installed(r.name) for r in wanted}
    wrong = [
        f"{r} is required, {versions[r.name] or 'none'} is installed"
        for r in wanted
        if not r.specifier.contains(versions[r.name] or "0", prereleases=True)
        or versions[r.name] is None
    ]
    if wrong:
        cure = "install slurmft again into this environment, with constraints.txt"
        return [failure("packages", f"{here}; {'; '.join(wrong)}", cure, **versions)]
    main = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers"))
    return [ok("packages", f"{here}, {main}; all {len(wanted)} requirements are met", **versions)]


def hub() -> list[Check]:
    """Whether models and data can be fetched from here."""
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return [ok("hub", "not asked: HF_HUB_OFFLINE is set; runs use what is in the caches")]
    cure = "runs use what is in the caches, or folders: --model DIR, --data DIR"
    give = all_within(_HUB_TIMEOUT_S, [partial(core_hub.hub_in_reach, _HUB_TIMEOUT_S)])[0]
    try:
        if give():
            return [ok("hub", f"{endpoint} answers")]
    except TimeoutError:
        pass  # a name server that does not answer is not bound by the timeout
    return [warning("hub", f"{endpoint} does not answer this machine", cure)]


# --- folders --------------------------------------------------------------------------------------


def folders(runs_dir: str) -> dict[str, Path]:
    """The folders that runs write to, by what they are."""
    found = {"runs": absolute(runs_dir), "home": Path.home(), "tmp": Path(tempfile.gettempdir())}
    try:
        found["cache"] = core_hub.hub_cache()
    except ImportError:  # said among the packages
        found["cache"] = absolute("~/.cache/huggingface/hub")
    if other := os.environ.get("HF_DATASETS_CACHE"):
        found["data cache"] = absolute(other)
    return found


def place(name: str, folder: Path) -> list[Check]:
    """A folder: its file system, whether it takes files, how much room there is."""
    here = filesystem.of(folder)
    text = f"{folder} on {here}"
    if name in ("cache", "data cache"):
        measured = locks.recorded(here)
        text += f"; file locks: {locks.primitive_for(folder)}"
        text += " (measured)" if measured else " (its default)" if here.is_shared else ""
    if name == "runs" and not here.is_shared:
        text += ", which other nodes may not see"
    return [judge_room(name, text, filesystem.room(folder))]


def judge_room(name: str, text: str, found: Room) -> Check:
    """Whether there is room; the figures are the folder's."""
    inodes = "" if found.free_inodes is None else f", {found.free_inodes:,} files"
    free = f"{text}: {size(found.free_bytes)} free{inodes}"
    figures = {"free_bytes": found.free_bytes, "free_inodes": found.free_inodes}
    if found.problem:
        cure = "make room, look at your quota, or choose another folder"
        cure += {"runs": ": --runs-dir", "cache": ": HF_HOME", "tmp": ": TMPDIR"}.get(name, "")
        return failure(name, f"{text}: cannot be written: {found.problem}", cure, **figures)
    few = found.free_inodes is not None and found.free_inodes < _LOW_INODES
    if found.free_bytes < (_LOW_SHM_BYTES if name == "shm" else _LOW_BYTES) or few:
        cure = "a checkpoint has three times the size of its model: make room"
        if name == "shm":
            cure = "what processes of a node share lies there: tell the site"
        return warning(name, free, cure, **figures)
    return ok(name, free, **figures)


def size(count: float) -> str:
    """Bytes in words: 3.2 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:,.3g} TiB" if count < 1000 else f"{count:,.0f} TiB"


def quotas() -> list[Check]:
    """What the quota command says: it fails when a limit is exceeded (quota(1))."""
    if shutil.which("quota") is None:
        return [ok("quotas", "there is no quota command here; the folders above took a trial file")]
    done = subprocess.run(
        ["quota"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    if done.returncode == 0:
        return [ok("quotas", "none of those that the quota command knows is exceeded")]
    said = (done.stdout or done.stderr).strip()
    return [warning("quotas", f"the quota command says:\n{said}", "make room")]
