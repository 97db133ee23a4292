"""`--stage-env`: packs the Python environment and sends it to every node's own disk.

The batch script packs it again whenever it has changed, and sends it to all nodes by sbcast:

    python -m slurmft.cluster.slurm.stage_env send RUN_DIR   prints the archive's path there
    python -m slurmft.cluster.slurm.stage_env clean ARCHIVE  removes what killed tasks left

The tasks of the nodes unpack it: `slurmft.node.staged_env`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from slurmft.cluster.slurm import allocation
from slurmft.core import filesystem, own_program
from slurmft.core.config import JobConfig
from slurmft.core.errors import SlurmftError, UsageError, run_main
from slurmft.core.text import in_bytes
from slurmft.node.staged_env import NAME, StageError, unpacked
from slurmft.runs.rundir import RunDir

_ARCHIVES = ".environments"
"""Where packed environments are kept: in --runs-dir, which all nodes see and which has space."""
_SEND_TIMEOUT_S = 900


def check(job: JobConfig, cluster: str, prefix: str = sys.prefix) -> None:
    """Raises UsageError where the environment cannot be staged at all."""
    if not job.stage_env:
        return
    if cluster != "slurm":
        raise UsageError(
            f"--stage-env works under Slurm, not with --cluster {cluster}", "leave it out"
        )
    if job.container is not None:
        raise UsageError(
            f"--stage-env cannot stage an environment in --container {job.container!r}",
            "leave one of the two out: an image is a single file already",
        )
    if _is_conda(prefix):
        if importlib.util.find_spec("conda_pack") is None:
            raise UsageError(
                f"--stage-env: {prefix!r} is a conda environment without conda-pack",
                "conda install conda-pack; or use a venv",
            )
    elif not Path(prefix, "pyvenv.cfg").is_file():
        raise UsageError(
            f"--stage-env: {prefix!r} is not an environment, but a whole Python installation",
            "install slurmft into a venv, and submit with that: python -m venv DIR",
        )


def _is_conda(prefix: str) -> bool:
    return Path(prefix, "conda-meta").is_dir()


# --- in the batch script --------------------------------------------------------------------------


def send(run: RunDir, environment: Mapping[str, str]) -> str:
    """Packs the environment of the ranks and sends it to all nodes of the job; returns the path of
    the archive there.

    Raises:
        StageError: it cannot be packed, or a node has no place for it.
    """
    config = run.load_config()
    job, prefix = config.job, own_program.environment_of(config.program)
    folder = node_folder(job, environment)
    if (place := filesystem.of(folder)).is_shared:
        raise StageError(f"{folder} is on the {place}: see --stage-dir")
    began = time.monotonic()
    archive = pack(prefix, Path(job.runs_dir) / _ARCHIVES)
    packed_s = time.monotonic() - began
    target = f"{folder}/{NAME}-{os.getuid()}-{secrets.token_hex(6)}.tar"
    try:
        allocation.broadcast(archive, target, _SEND_TIMEOUT_S)
    except SlurmftError as error:
        clean(target, job.nodes)  # on the nodes that have it
        raise StageError(error.message) from error
    sent_s = time.monotonic() - began - packed_s
    print(
        f"slurmft: {prefix} packed or found packed in {packed_s:.1f} s "
        f"({in_bytes(archive.stat().st_size)}), sent to {folder} in {sent_s:.1f} s",
        file=sys.stderr,
    )
    return target


def node_folder(job: JobConfig, environment: Mapping[str, str]) -> str:
    """The folder on a node's own disk."""
    named = (environment.get(name) for name in ("SLURM_TMPDIR", "TMPDIR"))
    return (job.stage_dir or next(filter(None, named), "/tmp")).rstrip("/") or "/"


def pack(prefix: str, archives: Path) -> Path:
    """The archive of an environment in its current state; packed, if there is none yet.

    Raises:
        StageError: it cannot be packed.
    """
    if not _is_conda(prefix) and not Path(prefix, "pyvenv.cfg").is_file():
        raise StageError(f"{prefix} is not an environment, but a whole Python installation")
    place = f"{_digest([prefix])[:8]}-"
    archive = archives / f"{place}{_digest(content(prefix))[:24]}.tar"
    if archive.exists():
        with contextlib.suppress(OSError):
            os.utime(archive)
        return archive
    aside = archives / f".{archive.name}.{secrets.token_hex(4)}"
    try:
        archives.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(_pack_command(prefix, aside), capture_output=True, text=True)
        # 1: a file changed meanwhile. In an environment in use, only compiled modules change.
        if done.returncode > (0 if _is_conda(prefix) else 1):
            raise StageError(f"{prefix} cannot be packed: {done.stderr.strip()[-300:]}")
        os.replace(aside, archive)
    except OSError as error:
        raise StageError(f"{prefix} cannot be packed in {archives}: {error}") from error
    finally:
        aside.unlink(missing_ok=True)
    for old in archives.glob(f"{place}*.tar"):  # of earlier states of this environment
        if old != archive:
            old.unlink(missing_ok=True)
    return archive


def _pack_command(prefix: str, target: Path) -> list[str]:
    if not _is_conda(prefix):
        return ["tar", "-C", prefix, "-cf", str(target), "."]
    command = [sys.executable, "-m", "conda_pack.cli", "--prefix", prefix, "--output", str(target)]
    command += ["--format", "tar", "--quiet", "--force"]
    return [*command, "--ignore-editable-packages", "--ignore-missing-files"]


def content(prefix: str) -> list[str]:
    """The files of an environment with their sizes and times, by which its states are told apart.

    Without compiled modules, which come and go.
    """
    found = []
    for folder, folders, files in os.walk(prefix):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(files):
            path = os.path.join(folder, name)
            facts = os.lstat(path)
            found.append(f"{path} {facts.st_size} {facts.st_mtime_ns}")
    return found


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()


def clean(archive: str, nodes: int) -> None:
    """Removes archive and environment from all nodes of the job."""
    with contextlib.suppress(SlurmftError):  # the next job on the node will
        allocation.on_all_nodes(nodes, ["rm", "-rf", archive, unpacked(archive)])


def main(argv: list[str]) -> int:
    what, argument = argv
    if what == "clean":
        clean(argument, allocation.allocated_nodes() or 1)
    else:
        try:
            print(send(RunDir.open(argument), os.environ))
        except StageError as error:
            words = f"warning: --stage-env: {error}: using the shared environment"
            print(words, file=sys.stderr, flush=True)
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(run_main(lambda: main(sys.argv[1:])))
