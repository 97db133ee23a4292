"""From the command line of `slurmft run` to what the nodes need to know."""

import dataclasses
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmft.core import fingerprint
from slurmft.core.config import JobConfig, RunConfig, with_absolute_paths
from slurmft.core.errors import UsageError
from slurmft.core.files import write_text
from slurmft.core.filesystem import absolute
from slurmft.core.options import build
from slurmft.core.program import Program
from slurmft.core.site import merge, site_defaults
from slurmft.programs import environment, snapshot
from slurmft.programs.description import FLAGS, OwnProgram
from slurmft.runs.rundir import RunDir


def configure(
    words: list[str], flags: dict[str, Any], site_options: Mapping[str, Any], make: bool = True
) -> RunConfig:
    """The resolved configuration: flags over the site file, and the program.

    Args:
        words: the program and its arguments, as they were typed.
        site_options: name -> field of every option that the site file may have.
        make: whether to make the environment of --env uv.
    """
    values = merge(site_defaults(site_options), flags)
    values.setdefault("hang_timeout_s", 0)  # its output may rest for as long as it likes
    job = with_absolute_paths(build(JobConfig, values))
    given = {k: v for k, v in values.items() if k in FLAGS}
    if env := given.get("env"):
        near = Path(words[0]).absolute().parent if words[0].endswith(".py") else Path.cwd()
        given["env"] = env = environment.folder(env, near, job, make)
    if file := given.get("accelerate_config"):
        given["accelerate_config"] = file = str(absolute(file))
    argv, executed, name = command(words, env, job.container is not None)
    own = build(OwnProgram, {"argv": argv, "file": executed, "folder": os.getcwd()} | given)
    if own.per == "auto":
        alone = "process" if job.cluster == "mpirun" else "node"
        own = dataclasses.replace(own, per="torchrun" if own.is_python else alone)
    if job.cluster == "mpirun" and own.per in ("node", "gpu"):
        raise UsageError(
            f"--per {own.per}: mpirun starts --nproc-per-node processes on a host",
            "use --per process",
        )
    if own.per == "torchrun" and not own.is_python:
        raise UsageError(
            f"--per torchrun starts Python programs, and {words[0]!r} is none",
            "use --per node, or --per process",
        )
    if own.integrate:
        own = _integrated(own)
    if file:
        environment.check_accelerate(own)
    inputs = _inputs([*words, *filter(None, [file])])
    paths = (own.folder, *filter(None, [env]), *inputs)
    program = own.marked().program(name, paths=paths, inputs=inputs)
    return RunConfig(program=program, job=job)


def _integrated(own: OwnProgram) -> OwnProgram:
    """The program, started by its integration."""
    if not own.is_python or own.integrate is None:
        raise UsageError(
            f"--integrate {own.integrate} is for Python programs, and {own.file!r} is none",
            "give the script itself, not what starts it",
        )
    python, *rest = own.argv
    command = (python, "-m", "slurmft.plugins.integrations", own.integrate, *rest)
    return dataclasses.replace(own, argv=command)


def in_image(words: list[str], flags: dict[str, Any]) -> Program:
    """A program whose code and Python are those of a container's image."""
    is_python = words[0].endswith(".py") or words[0] == "-m"
    argv = ["python3", *words] if is_python else words
    given = {"per": "torchrun" if is_python else "node"} | flags
    own = build(OwnProgram, {"argv": argv, "file": "", "folder": ".", "snapshot": "none"} | given)
    return own.program(_name(words[0] if words[0] != "-m" else words[-1]))


def source(config: RunConfig) -> snapshot.Source | None:
    """The code that is frozen; None: the job runs no program of the user's own. UsageError where it
    cannot be, or is too large."""
    own, runs_dir = OwnProgram.of(config.program), Path(config.job.runs_dir)
    if own is None:
        code = config.program.code
        return snapshot.source(Path(code), runs_dir=runs_dir) if code else None
    limit_mb = own.snapshot_limit_mb
    return snapshot.source(Path(own.file), own.snapshot, runs_dir=runs_dir, limit_mb=limit_mb)


def freeze(config: RunConfig, run: RunDir, found: snapshot.Source | None) -> None:
    """Copies the code of a program into its run, whose configuration then names the copy."""
    if found is None or found.mode == "none":
        return
    submission = config.submission | {"snapshot": snapshot.take(found, run)}
    own, program = OwnProgram.of(config.program), config.program
    if own is None:
        copy = str(snapshot.copy_of(Path(program.code), found.root, run))
        program = dataclasses.replace(program, code=copy)
    else:
        program = _frozen(own, program, found, run)
    config = dataclasses.replace(config, program=program, submission=submission)
    write_text(run.config, config.to_json())


def _frozen(own: OwnProgram, program: Program, found: snapshot.Source, run: RunDir) -> Program:
    """The program, with the copies in its run for what it is started from."""
    argv = list(own.argv)
    paths = [*os.environ.get("PYTHONPATH", "").split(os.pathsep), *sys.path[1:]]
    if own.file == own.folder:  # a module: -P keeps the folder itself off its path
        argv.insert(1, "-P")
        paths.insert(0, own.folder)
    elif own.file in argv:  # its first place: later ones are arguments
        argv[argv.index(own.file)] = str(snapshot.copy_of(Path(own.file), found.root, run))
    copies = {p: str(snapshot.copy_of(Path(p), found.root, run)) for p in filter(None, paths)}
    code = os.pathsep.join(dict.fromkeys(copy for path, copy in copies.items() if copy != path))
    return dataclasses.replace(program, settings=program.settings | {"argv": argv, "code": code})


def command(
    words: list[str], env: str | None = None, in_container: bool = False
) -> tuple[list[str], str, str]:
    """The command that starts a program from anywhere, in the environment `env`; what it executes
    (see `OwnProgram.file`), and its name. In a container, Python, and what is no file here, are the
    image's. UsageError where there is no such program, or it cannot be executed."""
    first, *rest = words
    python = f"{env}/bin/python" if env else "python3" if in_container else sys.executable
    if first == "-m":
        if not rest:
            raise UsageError("no module after -m", "slurmft run -- -m package.module")
        return [python, *words], os.getcwd(), _name(rest[0])
    if first.endswith(".py"):
        found = [python, *_absolute_script(words)]
        return found, found[1], _name(first)
    if in_container and not os.path.isfile(first):
        return words, f"/usr/bin/{first}", _name(first)
    executable = _executable(first, env)
    if Path(first).name.startswith("python") and (script := _absolute_script(rest)):
        name = _name(script[0])
        return [executable, *script], os.getcwd() if script[0] == "-m" else script[0], name
    return [executable, *rest], executable, _name(first)


def _absolute_script(words: list[str]) -> list[str]:
    """A Python's arguments, the script with its whole path."""
    if not words or words[0].startswith("-"):
        return words
    if not os.path.isfile(words[0]):
        raise UsageError(f"no such program: {words[0]!r} in {os.getcwd()!r}", "give its path")
    return [os.path.abspath(words[0]), *words[1:]]


def _executable(name: str, env: str | None) -> str:
    if found := (env and shutil.which(name, path=f"{env}/bin")) or shutil.which(name):
        return os.path.abspath(found)
    if os.path.isfile(name):
        if "/" not in name:
            raise UsageError(f"{name!r} is not on the PATH, but in this folder", f"write ./{name}")
        raise UsageError(f"{name!r} is not executable", f"chmod +x {name}")
    raise UsageError(f"no such program: {name!r}", "give a .py file, -m MODULE, or an executable")


def _name(program: str) -> str:
    """What names of runs begin with."""
    stem = Path(program).name.removesuffix(".py")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-.")[:40] or "program"


def _inputs(words: list[str]) -> dict[str, dict[str, Any]]:
    """Fingerprints of the files that the arguments name: a change before a start is told."""
    found = {}
    for word in words[1:]:
        path = Path(word.partition("=")[2] if word.startswith("-") else word)
        if path.is_file() and not word.endswith(".py"):
            found[os.path.abspath(path)] = fingerprint.of(path) | {"what": "file"}
    return found
