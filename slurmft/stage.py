"""`--stage-env`: the Python environment on every node's own disk, before the ranks import from it.

The batch script packs it once for each state that it is in, and sends it to all nodes by sbcast:

    python -m slurmft.stage send RUN_DIR       prints where the archive is then, on every node
    python -m slurmft.stage look FOLDER BYTES  what a node has there
    python -m slurmft.stage clean ARCHIVE      removes what killed tasks left, on all nodes

Every node's task unpacks it, starts torchrun with it, and removes it. Whatever goes wrong, a node
uses the shared environment: it has the same content.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from slurmft import filesystem, process, slurm
from slurmft.config import JobConfig
from slurmft.errors import SlurmftError, UsageError, run_main
from slurmft.rundir import RunDir

ARCHIVE = "SLURMFT_STAGE"
"""Variable with the archive's path on the nodes, for their tasks; unset: there is none."""
STAGED = "SLURMFT_STAGED"
"""Variable of the ranks: the folder of the environment that they run from."""

_NAME = "slurmft-env"
_LOCK = ".slurmft-lock"
_OLD = ".old"
_ARCHIVES = ".environments"
"""Where packed environments are kept: in --runs-dir, which all nodes see and which has room."""
_ROOM = 2.1
"""Room that a node needs, in sizes of the archive: itself and its content, for a moment."""
_YOUNG_S = 1800
"""How long an archive may wait for its node's task, which then removes it."""
_SEND_TIMEOUT_S = 900


class StageError(Exception):
    """Why an environment cannot be staged; the run goes on without."""


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
            f"--stage-env is for environments outside of --container {job.container!r}",
            "leave one of the two out: an image is one file",
        )
    if _is_conda(prefix):
        if importlib.util.find_spec("conda_pack") is None:
            raise UsageError(
                f"--stage-env: {prefix!r} is a conda environment, and conda-pack is not in it",
                "conda install conda-pack; or use a venv",
            )
    elif not Path(prefix, "pyvenv.cfg").is_file():
        raise UsageError(
            f"--stage-env: {prefix!r} is no environment, but a whole Python installation",
            "install slurmft into a venv, and submit with that: python -m venv DIR",
        )


def _is_conda(prefix: str) -> bool:
    return Path(prefix, "conda-meta").is_dir()


# --- in the batch script --------------------------------------------------------------------------


def send(run: RunDir, environment: Mapping[str, str]) -> str:
    """Packs the environment and sends it to all nodes of the job; returns the archive's path there.

    Raises:
        StageError: it cannot be packed, or a node cannot take it.
    """
    job = run.load_config().job
    began = time.monotonic()
    archive = pack(sys.prefix, Path(job.runs_dir) / _ARCHIVES)
    packed_s = time.monotonic() - began
    folder = node_folder(job, environment)
    look = [sys.executable, "-m", "slurmft.stage", "look", folder]
    look += [str(archive.stat().st_size)]
    target = f"{folder}/{_NAME}-{os.getuid()}-{secrets.token_hex(6)}.tar"
    try:
        check_nodes(slurm.on_all_nodes(job.nodes, look), folder, archive.stat().st_size, job.nodes)
        slurm.broadcast(archive, target, _SEND_TIMEOUT_S)
    except SlurmftError as error:
        clean(target, job.nodes)  # of those nodes that have it
        raise StageError(error.message) from error
    sent_s = time.monotonic() - began - packed_s
    print(
        f"slurmft: {sys.prefix} packed or found packed in {packed_s:.1f} s "
        f"({archive.stat().st_size / 2**20:,.0f} MiB), sent to {folder} in {sent_s:.1f} s",
        file=sys.stderr,
    )
    return target


def node_folder(job: JobConfig, environment: Mapping[str, str]) -> str:
    """The folder on a node's own disk."""
    named = (environment.get(name) for name in ("SLURM_TMPDIR", "TMPDIR"))
    return (job.stage_dir or next(filter(None, named), "/tmp")).rstrip("/") or "/"


def check_nodes(answers: list[str], folder: str, size: int, nodes: int) -> None:
    """Raises StageError where a node, by its answer to `look`, cannot take an archive of `size`
    bytes and its content."""
    found = [json.loads(line) for line in answers if line.startswith("{")]
    if len(found) < nodes:
        raise StageError(f"{len(found)} of {nodes} nodes say what {folder} is there")
    for node in found:
        where = f"{folder} on {node['host']}"
        if node["free_bytes"] is None:
            raise StageError(f"{where} is no folder that can be written")
        if node["is_shared"]:
            raise StageError(f"{where} is a shared file system ({node['type']}): see --stage-dir")
        if node["free_bytes"] < _ROOM * size:
            room, needed = (n / 2**30 for n in (node["free_bytes"], _ROOM * size))
            raise StageError(f"{where} has {room:.1f} GiB free, {needed:.1f} GiB are needed")


def look(folder: str, size: int) -> dict[str, Any]:
    """What this node has in a folder for an archive of `size` bytes.

    Where that has too little room, what is left of ended jobs is removed first.
    """
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        return {"host": os.uname().nodename, "free_bytes": None}
    if _free_bytes(folder) < _ROOM * size and (left := leftovers(Path(folder))):
        _removal(left).wait()
    here = filesystem.of(folder)
    return {
        "host": os.uname().nodename,
        "free_bytes": _free_bytes(folder),
        "is_shared": here.is_shared,
        "type": here.type,
    }


def _free_bytes(folder: str) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def pack(prefix: str, archives: Path) -> Path:
    """The archive of an environment as it is now; packed, if it is not there yet.

    Raises:
        StageError: it cannot be packed.
    """
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
        # 1: a file changed meanwhile. Only compiled modules do, in an environment in use.
        if done.returncode > (0 if _is_conda(prefix) else 1):
            raise StageError(f"{prefix} cannot be packed: {done.stderr.strip()[-300:]}")
        os.replace(aside, archive)
    except OSError as error:
        raise StageError(f"{prefix} cannot be packed in {archives}: {error}") from error
    finally:
        aside.unlink(missing_ok=True)
    for old in archives.glob(f"{place}*.tar"):  # of this environment as it was before
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
    """The files of an environment with their sizes and times: another list, another environment.

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
    import hashlib  # not for every command

    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()


def clean(archive: str, nodes: int) -> None:
    """Removes what a job has on all its nodes."""
    with contextlib.suppress(SlurmftError):  # the job ends: its next one on the node will
        folder = _unpacked(archive)
        slurm.on_all_nodes(nodes, ["rm", "-rf", archive, folder, folder + _OLD])


# --- on a node ------------------------------------------------------------------------------------


@contextlib.contextmanager
def environment(
    variables: Mapping[str, str], is_stopped: Callable[[], bool]
) -> Iterator[tuple[str, dict[str, str]]]:
    """The Python to start torchrun with, and the variables that belong to it: those of the staged
    environment while the block runs, if there is one and it works, else this process's own.

    Args:
        variables: this process's.
        is_stopped: whether the job is to stop: it does not wait for an environment then.
    """
    archive = variables.get(ARCHIVE)
    folder = Path(_unpacked(archive)) if archive else None
    with contextlib.ExitStack() as stack:
        if archive and folder:
            began = time.monotonic()
            try:
                stack.enter_context(_own(folder))
                stack.callback(_remove_own, Path(archive), folder)
                _unpack(Path(archive), folder, is_stopped)
                Path(archive).unlink()
                print(f"slurmft: environment unpacked in {time.monotonic() - began:.1f} s")
            except (OSError, StageError) as error:
                words = f"warning: --stage-env: {error}: the shared environment it is"
                print(words, file=sys.stderr, flush=True)
                with contextlib.suppress(OSError):
                    Path(archive).unlink()
            else:
                # Beside the work, which it must not keep waiting.
                stack.callback(process.end, _removal(leftovers(folder.parent)))
                path = f"{folder}/bin:{variables.get('PATH', os.defpath)}"
                found = {STAGED: str(folder), "PATH": path}
                found[_variable(variables)] = str(folder)
                yield f"{folder}/bin/python", found
                return
        yield sys.executable, {}


def _variable(variables: Mapping[str, str]) -> str:
    return "CONDA_PREFIX" if "CONDA_PREFIX" in variables else "VIRTUAL_ENV"


def _unpacked(archive: str) -> str:
    return archive.removesuffix(".tar")


@contextlib.contextmanager
def _own(folder: Path) -> Iterator[None]:
    """Makes a folder that is this process's as long as it lives: others remove it after that."""
    folder.mkdir(mode=0o700)  # fails where somebody else has made it
    with open(folder / _LOCK, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _unpack(archive: Path, folder: Path, is_stopped: Callable[[], bool]) -> None:
    if archive.lstat().st_uid != os.getuid():
        raise StageError(f"{archive} is not ours")
    # The folder itself stays closed to others.
    command = ["tar", "-C", str(folder), "--no-overwrite-dir", "-xf", str(archive)]
    with process.start(command, stderr=subprocess.PIPE) as tar:
        while not is_stopped() and tar.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                tar.wait(0.2)
        if is_stopped():
            tar.kill()
            raise StageError("the job is to stop")
        words = tar.stderr.read().decode(errors="replace").strip() if tar.stderr else ""
    if tar.returncode:
        raise StageError(f"{archive} cannot be unpacked: {words[-300:]}")
    if (folder / "bin" / "conda-unpack").exists():
        _output(f"{folder}/bin/python", f"{folder}/bin/conda-unpack")
    prefix = _output(f"{folder}/bin/python", "-c", "import sys; print(sys.prefix)")
    if os.path.realpath(prefix) != os.path.realpath(folder):
        raise StageError(f"its Python takes {prefix!r} for its home, not {folder}")


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise StageError(f"{command[0]} fails: {done.stderr.strip()[-300:]}")
    return done.stdout.strip()


def leftovers(folder: Path) -> list[Path]:
    """What this user's tasks, which have ended, have not removed; nobody runs from it any more."""
    found = []
    for path in folder.glob(f"{_NAME}-{os.getuid()}-*"):
        with contextlib.suppress(OSError):
            if path.suffix == _OLD:
                found.append(path)
            elif path.is_dir():
                with open(path / _LOCK) as file:  # another one's, while its task lives
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    found.append(_retired(path))
            elif time.time() - path.stat().st_mtime > _YOUNG_S:
                found.append(path)
    return found


def _retired(folder: Path) -> Path:
    """The folder under a name by which others see that it is to be removed, if we do not finish."""
    return folder.rename(folder.with_name(folder.name + _OLD))


def _remove_own(archive: Path, folder: Path) -> None:
    paths = [archive]
    with contextlib.suppress(OSError):
        paths.append(_retired(folder))
    _removal(paths).wait()


def _removal(paths: list[Path]) -> subprocess.Popen[bytes]:
    # Not by Python, which is slower: it may take minutes on a slow disk.
    return process.start(["rm", "-rf", *map(str, paths)], stderr=subprocess.DEVNULL)


def main(argv: list[str]) -> int:
    what, argument = argv[:2]
    if what == "look":
        print(json.dumps(look(argument, int(argv[2]))))
    elif what == "clean":
        clean(argument, slurm.allocated_nodes() or 1)
    else:
        try:
            print(send(RunDir.open(argument), os.environ))
        except StageError as error:
            words = f"warning: --stage-env: {error}: the shared environment it is"
            print(words, file=sys.stderr, flush=True)
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(run_main(lambda: main(sys.argv[1:])))
