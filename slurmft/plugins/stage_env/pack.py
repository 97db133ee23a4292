"""`--stage-env`: packs the Python environment and sends it to every node's own disk.

The batch script packs it again whenever it has changed, and sends it to all nodes by sbcast:

    python -m slurmft.plugins.stage_env.pack send RUN_DIR    prints the archives there, as JSON
    python -m slurmft.plugins.stage_env.pack clean ARCHIVES  removes what killed tasks left

The tasks of the nodes unpack it: `slurmft.plugins.stage_env.unpack`.
"""

import contextlib
import importlib.util
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurmft.cluster.slurm import allocation, commands
from slurmft.core import filesystem
from slurmft.core.config import JobConfig
from slurmft.core.errors import SlurmftError, UsageError, run_main
from slurmft.core.text import in_bytes
from slurmft.plugins.stage_env.unpack import NAME, OLD, StageError, leftovers, removal, unpacked
from slurmft.programs.description import OwnProgram
from slurmft.runs.rundir import RunDir

_ARCHIVES = ".environments"
"""Where packed environments are kept: in --runs-dir, which all nodes see and which has space."""
_ROOM = 2.1
"""Space that a node needs, in sizes of the archive: for a moment, the archive and its content."""
_SEND_TIMEOUT_S = 900


def check(job: JobConfig, cluster: str, prefix: str = sys.prefix) -> None:
    """Raises UsageError where the environment cannot be staged at all."""
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
    """Packs slurmft's environment, that of the program, and the installations that their Pythons
    are of, and sends them to all nodes of the job; returns JSON, archive there -> its folder here.
    StageError where one cannot be packed, or has no place there."""
    config = run.load_config()
    job, own = config.job, OwnProgram.of(config.program)
    began = time.monotonic()
    archives = Path(job.runs_dir) / _ARCHIVES
    prefixes = dict.fromkeys([sys.prefix, (own and own.env) or sys.prefix])
    packed = {prefix: pack(prefix, archives) for prefix in prefixes}
    bases: dict[str, set[str]] = {}
    for base, parts in map(interpreter, prefixes):
        bases.setdefault(base, set()).update(parts)
    packed |= {base: pack(base, archives, sorted(parts)) for base, parts in bases.items() if parts}
    packed_s = time.monotonic() - began
    folder = node_folder(job, environment)
    size = sum(archive.stat().st_size for archive in packed.values())
    name = f"{folder}/{NAME}-{os.getuid()}-{secrets.token_hex(6)}"
    targets = {f"{name}.{n}.tar" if n else f"{name}.tar": p for n, p in enumerate(packed)}
    sent = json.dumps(targets)
    try:
        check_folder(folder, size)
        for target, prefix in targets.items():
            commands.call("sbcast", str(packed[prefix]), target, timeout_s=_SEND_TIMEOUT_S)
    except SlurmftError as error:
        clean(sent, job.nodes)  # on the nodes that have it
        raise StageError(error.message) from error
    sent_s = time.monotonic() - began - packed_s
    print(
        f"slurmft: {', '.join(packed)} packed or found packed in {packed_s:.1f} s "
        f"({in_bytes(size)}), sent to {folder} in {sent_s:.1f} s",
        file=sys.stderr,
    )
    return sent


def interpreter(prefix: str) -> tuple[str, list[str]]:
    """The installation that an environment's Python is of, and what of it is staged: interpreter
    and standard library. Nothing, where the environment has them, or every node."""
    tell = "import sys; print(sys.base_prefix, '%d.%d' % sys.version_info[:2], sep='\\n')"
    python = [f"{prefix}/bin/python", "-I", "-S", "-c", tell]
    told = subprocess.run(python, capture_output=True, text=True).stdout.split("\n")
    base, version = [*told, ""][:2]
    if base in ("", "/usr", "/usr/local", prefix) or not filesystem.of(base).is_shared:
        return base, []
    settings = Path(prefix, "pyvenv.cfg").read_text(encoding="utf-8").lower()
    with_packages = "include-system-site-packages = true" in settings
    found = [*Path(base).glob("bin/python*"), *Path(base).glob("ssl")]
    for folder in (path for path in Path(base).glob("lib*") if not path.is_symlink()):
        found += [*folder.glob("*.so*"), *folder.glob(f"python{version}/*")]
    wanted = (path for path in found if with_packages or path.name != "site-packages")
    return base, [str(path.relative_to(base)) for path in wanted]


def node_folder(job: JobConfig, environment: Mapping[str, str]) -> str:
    """The folder on a node's own disk."""
    named = (environment.get(name) for name in ("SLURM_TMPDIR", "TMPDIR"))
    return (job.stage_dir or next(filter(None, named), "/tmp")).rstrip("/") or "/"


def check_folder(folder: str, size: int) -> None:
    """Raises StageError where this node, and so most likely the others, cannot take archives of
    `size` bytes and their content. Leftovers of ended jobs give way first."""
    where = f"{folder} on {os.uname().nodename}"
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        raise StageError(f"{where} is not a writable folder")
    if (here := filesystem.of(folder)).is_shared:
        raise StageError(f"{where} is a shared file system ({here.type}): see --stage-dir")
    if shutil.disk_usage(folder).free < _ROOM * size and (left := leftovers(Path(folder))):
        removal(left).wait()
    if (free := shutil.disk_usage(folder).free) < _ROOM * size:
        raise StageError(f"{where} has {in_bytes(free)} free, {in_bytes(_ROOM * size)} are needed")


def pack(prefix: str, archives: Path, parts: Sequence[str] = ()) -> Path:
    """The archive of an environment in its current state, or of some parts of a folder; packed, if
    there is none yet. StageError where it cannot be."""
    place = f"{_digest([prefix])[:8]}-"
    if not parts and not _is_conda(prefix) and not Path(prefix, "pyvenv.cfg").is_file():
        raise StageError(f"{prefix} is not an environment, but a whole Python installation")
    now = [line for part in parts or [""] for line in content(os.path.join(prefix, part))]
    archive = archives / f"{place}{_digest([*parts, *now])[:24]}.tar"
    if archive.exists():
        with contextlib.suppress(OSError):
            os.utime(archive)
        return archive
    aside = archives / f".{archive.name}.{secrets.token_hex(4)}"
    try:
        archives.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(_pack_command(prefix, aside, parts), capture_output=True, text=True)
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


def _pack_command(prefix: str, target: Path, parts: Sequence[str]) -> list[str]:
    if parts or not _is_conda(prefix):
        return ["tar", "-C", prefix, "-cf", str(target), *(parts or ["."])]
    command = [sys.executable, "-m", "conda_pack.cli", "--prefix", prefix, "--output", str(target)]
    command += ["--format", "tar", "--quiet", "--force"]
    return [*command, "--ignore-editable-packages", "--ignore-missing-files"]


def content(prefix: str) -> list[str]:
    """The files of an environment, or one file, with sizes and times: its states differ in them.

    Without compiled modules, which come and go.
    """
    found = []
    walk = os.walk(prefix) if os.path.isdir(prefix) else [("", [], [prefix])]
    for folder, folders, files in walk:
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(files):
            path = os.path.join(folder, name)
            facts = os.lstat(path)
            found.append(f"{path} {facts.st_size} {facts.st_mtime_ns}")
    return found


def _digest(lines: list[str]) -> str:
    import hashlib  # not for every command

    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()


def clean(sent: str, nodes: int) -> None:
    """Removes archives and environments from all nodes of the job."""
    archives = list(json.loads(sent))
    with contextlib.suppress(SlurmftError):  # the next job on the node will
        folder = unpacked(archives[0])
        remove = ["rm", "-rf", *archives, folder, folder + OLD]
        commands.call(*allocation.srun_command(nodes, ["--export=ALL"], remove), timeout_s=120)


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
