"""`--stage-env`: packs the Python environment and sends it to every node's own disk.

The batch script packs it again whenever it has changed, and sends it to all nodes by sbcast:

    python -m slurmft.plugins.stage_env.pack send RUN_DIR    prints the archives there, as JSON
    python -m slurmft.plugins.stage_env.pack clean ARCHIVES  removes what killed tasks left,
                                                             by `remove` on each node

The tasks of the nodes unpack it: `slurmft.plugins.stage_env.unpack`.
"""

import contextlib
import importlib.util
import json
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmft.cluster.slurm import allocation, commands
from slurmft.core import filesystem, interpreter, process, removal
from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.errors import SlurmftError, UsageError, run_main
from slurmft.core.files import fingerprint, to_json
from slurmft.core.text import in_bytes
from slurmft.core.trusted import NotOwnError, for_children
from slurmft.plugins.stage_env.options import StageOptions
from slurmft.plugins.stage_env.unpack import (
    ARCHIVE,
    NAME,
    OLD,
    Sent,
    StageError,
    check_disk,
    leftovers,
    start_removal,
    unpacked,
)
from slurmft.programs.description import OwnProgram
from slurmft.runs.job_ids import own_job_id
from slurmft.runs.rundir import RunDir

MODULE = "slurmft.plugins.stage_env.pack"
_ARCHIVES = ".environments"
"""Begins the name of the folder for packed environments: in --runs-dir, which all nodes see and
which has space."""
_PACKED = re.compile(r"\.?[0-9a-f]{8}-[0-9a-f]{24}[-.][0-9a-f]{8,64}\.tar")
"""Names of archives in it, and of those that are being packed."""
_ROOM = 2.1
"""Space that a node needs, in sizes of the archive: for a moment, the archive and its content."""
_SEND_TIMEOUT_S = 900


@dataclass(frozen=True, slots=True)
class Archive:
    """A packed environment, or a part of an installation."""

    path: Path
    sha256: str


def check(job: JobConfig, cluster: str, prefix: str = sys.prefix) -> None:
    """Raises UsageError where the environment cannot be staged at all."""
    if cluster != "slurm":
        raise UsageError(
            f"--stage-env works under Slurm, not with --cluster {cluster}",
            "leave it out",
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
    """Packs environments and sends them to all nodes of the job.

    They are slurmft's environment, that of the program, and the installations that their Pythons
    belong to.

    Returns:
        JSON: path on the nodes -> the archive there.

    Raises:
        StageError: an environment cannot be packed, or has no place on the nodes.
    """
    config = run.join()
    runs_dir = Path(config.job.runs_dir)
    try:
        kept = ARCHIVE.place(runs_dir / f"{_ARCHIVES}-{os.getuid()}")
        with ARCHIVE.private(kept) as private:
            ARCHIVE.check_place(kept, private)
            return _send(config, private, environment)
    except NotOwnError as error:
        raise StageError(error.message) from error
    except OSError as error:
        raise StageError(f"no archives can be kept in {runs_dir}: {error}") from error


def _send(config: RunConfig, kept: Path, environment: Mapping[str, str]) -> str:
    """Packs into a folder for archives, and sends what is there."""
    began_at = time.monotonic()
    archives = _pack_all(config, kept)
    packed_at = time.monotonic()
    folder = node_folder(config.job, environment)
    size_bytes = 0
    for archive in archives.values():
        size_bytes += archive.path.stat().st_size
    # A random name: other jobs of the user may be on the same node, and leave their own there.
    random_part = secrets.token_hex(6)
    name = f"{folder}/{NAME}-{os.getuid()}-{random_part}"
    # The first is slurmft's, which the nodes unpack at the top of their folder.
    targets: dict[str, Sent] = {}
    for number, (prefix, archive) in enumerate(archives.items()):
        suffix = ".tar"
        if number > 0:
            suffix = f".{number}.tar"
        targets[name + suffix] = Sent(prefix, archive.sha256)
    sent = to_json(targets)
    try:
        check_folder(folder, size_bytes)
        for target, each in targets.items():
            path = for_children(archives[each.folder].path)
            # Without --force, it makes the file: one that is there is not written.
            commands.call("sbcast", path, target, timeout_s=_SEND_TIMEOUT_S)
    except SlurmftError as error:
        clean(sent)  # some nodes may have it
        raise StageError(error.message) from error
    pack_s = packed_at - began_at
    send_s = time.monotonic() - packed_at
    print(
        f"slurmft: {', '.join(archives)} packed or found packed in {pack_s:.1f} s "
        f"({in_bytes(size_bytes)}), sent to {folder} in {send_s:.1f} s",
        file=sys.stderr,  # stdout is for the archives
    )
    return sent


def _pack_all(config: RunConfig, folder: Path) -> dict[str, Archive]:
    """Packs what a job needs; returns folder -> its archive, slurmft's environment first."""
    program = OwnProgram.of(config.program)
    prefixes = [sys.prefix]
    if program and program.env and program.env != sys.prefix:
        prefixes.append(program.env)
    archives = {}
    for prefix in prefixes:
        archives[prefix] = pack(prefix, folder)
    # Two environments may be of one installation, and need different parts of it.
    parts_of: dict[str, set[str]] = {}
    for prefix in prefixes:
        base, parts = installation(prefix)
        parts_of.setdefault(base, set()).update(parts)
    for base, parts_to_pack in parts_of.items():
        if parts_to_pack:
            archives[base] = pack(base, folder, sorted(parts_to_pack))
    return archives


def installation(prefix: str) -> tuple[str, list[str]]:
    """Returns the installation that an environment's Python belongs to, and the parts of it to be
    staged: interpreter and standard library. There are none where the environment has them, or
    every node."""
    code = (
        "import sys; print(sys.base_prefix, '%d.%d' % sys.version_info[:2], sep='\\n')"
    )
    # -I, -S: neither variables nor .pth files may change what it prints.
    python = [f"{prefix}/bin/python", "-I", "-S", "-c", code]
    # A Python that does not start prints nothing: there is nothing to stage then.
    output = process.run(python, None).stdout
    base, _, version = output.strip("\n").partition("\n")
    # The distribution's Python is on every node; a conda environment is its own installation.
    if base in ("", "/usr", "/usr/local", prefix):
        return base, []
    if not filesystem.of(base).is_shared:
        return base, []
    settings = Path(prefix, "pyvenv.cfg").read_text(encoding="utf-8").lower()
    with_packages = "include-system-site-packages = true" in settings
    paths: list[Path] = []
    paths += Path(base).glob("bin/python*")
    paths += Path(base).glob("ssl")  # certificates, in conda's layout
    for folder in Path(base).glob("lib*"):
        if folder.is_symlink():  # lib64 -> lib
            continue
        paths += folder.glob("*.so*")
        paths += folder.glob(f"python{version}/*")
    # Its own packages may be many; an environment sees them only if it was made so.
    parts = []
    for path in paths:
        if with_packages or path.name != "site-packages":
            parts.append(str(path.relative_to(base)))
    return base, parts


def node_folder(job: JobConfig, environment: Mapping[str, str]) -> str:
    """Returns the folder on a node's own disk."""
    # Sites that make a folder for each job name it in one of these variables.
    places = (
        job.options_of(StageOptions).stage_dir,
        environment.get("SLURM_TMPDIR"),
        environment.get("TMPDIR"),
    )
    folder = next(filter(None, places), "/tmp")
    # Of "/" itself nothing would be left.
    return folder.rstrip("/") or "/"


def check_folder(folder: str, size_bytes: int) -> None:
    """Raises StageError where this node, and so most likely the others, cannot take archives of
    `size_bytes` and their content. Leftovers of ended jobs give way first."""
    where = f"{folder} on {os.uname().nodename}"
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        raise StageError(f"{where} is not a writable folder")
    check_disk(Path(folder))
    file_system = filesystem.of(folder)
    if file_system.is_shared:
        raise StageError(
            f"{where} is a shared file system ({file_system.type}): see --stage-dir"
        )
    needed_bytes = _ROOM * size_bytes
    if shutil.disk_usage(folder).free < needed_bytes:
        paths = leftovers(Path(folder))
        if paths:
            start_removal(paths).join()
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise StageError(
            f"{where} has {in_bytes(free_bytes)} free, {in_bytes(needed_bytes)} are needed"
        )


def pack(prefix: str, folder: Path, parts: Sequence[str] = ()) -> Archive:
    """Packs an environment in its current state, or some parts of a folder; returns the archive,
    which may be there from an earlier job.

    Args:
        folder: one that is this user's alone: what is in it was packed by an earlier job.

    Raises:
        StageError: it cannot be packed.
    """
    is_environment = _is_conda(prefix) or Path(prefix, "pyvenv.cfg").is_file()
    if not parts and not is_environment:
        raise StageError(
            f"{prefix} is not an environment, but a whole Python installation"
        )
    # All archives of one folder begin with the same characters; the rest is of its state.
    digest_of_place = _digest([prefix])
    place = f"{digest_of_place[:8]}-"
    state: list[str] = []
    for part in parts or [""]:
        state += content(os.path.join(prefix, part))
    digest_of_state = _digest([*parts, *state])
    name = f"{place}{digest_of_state[:24]}"
    for archive in folder.glob(f"{name}-*.tar"):
        # Its time is that of its last use.
        with contextlib.suppress(OSError):
            os.utime(archive)
        _, _, digest = archive.stem.rpartition("-")
        return Archive(archive, digest)
    # Another job may pack the same: each writes its own, and renames it when it is whole.
    random_part = secrets.token_hex(4)
    aside = folder / f".{name}.{random_part}.tar"
    try:
        command = _pack_command(prefix, for_children(aside), parts)
        done = process.run(
            command,
            None,
            env=interpreter.library_environment(dict(os.environ)),
        )
        highest_good_code = 0
        # tar's 1: a file changed meanwhile. In an environment in use, only compiled modules change.
        if command[0] == "tar":
            highest_good_code = 1
        if done.returncode > highest_good_code:
            problem = done.stderr.strip()
            raise StageError(f"{prefix} cannot be packed: {problem[-300:]}")
        digest = fingerprint(aside)["sha256"]
        # In the name: archive and sum come and go together.
        archive = folder / f"{name}-{digest}.tar"
        os.replace(aside, archive)
    except OSError as error:
        raise StageError(f"{prefix} cannot be packed in {folder}: {error}") from error
    finally:
        removal.discard(aside, _PACKED)
    for old in folder.glob(f"{place}*"):  # of earlier states of this environment
        # Another job may be sending one of this state.
        if not old.name.startswith(name):
            removal.discard(old, _PACKED)
    return Archive(archive, digest)


def _pack_command(prefix: str, target: str, parts: Sequence[str]) -> list[str]:
    """Returns the command that packs: tar, or conda-pack, which makes the environment movable."""
    if parts or not _is_conda(prefix):
        names = parts or ["."]
        return ["tar", "-C", prefix, "-cf", target, *names]
    command = interpreter.module(
        "conda_pack.cli", "--prefix", prefix, "--output", target
    )
    command += ["--format", "tar", "--quiet", "--force"]
    # conda-pack refuses environments in which pip has installed over conda's files, or editable
    # packages; these are on the shared file system, and work from there.
    command += ["--ignore-editable-packages", "--ignore-missing-files"]
    return command


def content(prefix: str) -> list[str]:
    """Returns the files of an environment, or one file, with sizes and times: its states differ in
    them. Compiled modules are left out: they come and go.
    """
    lines = []
    # As text, not as Path: an environment has tens of thousands of files.
    if os.path.isdir(prefix):
        walk: Iterable[tuple[str, list[str], list[str]]] = os.walk(prefix)
    else:
        walk = [("", [], [prefix])]
    for folder, folders, files in walk:
        # In place: `os.walk` goes into those that are left, in their order.
        folders[:] = [name for name in sorted(folders) if name != "__pycache__"]
        for name in sorted(files):
            path = os.path.join(folder, name)
            facts = os.lstat(path)
            lines.append(f"{path} {facts.st_size} {facts.st_mtime_ns}")
    return lines


def _digest(lines: list[str]) -> str:
    import hashlib  # not for every command

    # A file's name may be no UTF-8: Python then has surrogates in its place.
    text = "\n".join(lines).encode(errors="surrogateescape")
    return hashlib.sha256(text).hexdigest()


def clean(sent: str) -> None:
    """Removes archives and environments from all nodes of the job."""
    archives = list(json.loads(sent))
    with contextlib.suppress(SlurmftError):  # the next job on the node will
        # Not by the job's variables: nodes that died since it started are not in it any more, and
        # srun would wait for them.
        nodes = commands.allocated_nodes(own_job_id(os.environ))
        remove = interpreter.module(MODULE, "remove", json.dumps(archives))
        srun = allocation.on_hosts(commands.hostnames(nodes), remove)
        commands.call(*srun, timeout_s=120)


def main(argv: list[str]) -> int:
    operation, argument = argv
    if operation == "remove":
        archives = json.loads(argument)
        folder = unpacked(archives[0])
        paths = [Path(name) for name in (*archives, folder, folder + OLD)]
        start_removal(paths).join()
        return 0
    if operation == "clean":
        clean(argument)
        return 0
    try:
        print(send(RunDir.open(argument), os.environ))
    except StageError as error:
        warning = f"warning: --stage-env: {error}: using the shared environment"
        print(warning, file=sys.stderr, flush=True)
        return 1  # the batch script then sets no variable, and goes on
    return 0


if __name__ == "__main__":
    raise SystemExit(run_main(lambda: main(sys.argv[1:])))
