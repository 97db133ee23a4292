"""From the command line of `slurmft run` to what the nodes need to know."""

import contextlib
import dataclasses
import itertools
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmft.core import fingerprint, interpreter, permissions, plugins
from slurmft.core.config import JobConfig, RunConfig, with_absolute_paths
from slurmft.core.errors import UsageError, nearest
from slurmft.core.files import write_text
from slurmft.core.filesystem import absolute
from slurmft.core.launchers import starts_ranks
from slurmft.core.options import build, check_credentials
from slurmft.core.program import PREDICT, Program
from slurmft.core.site import merge, site_defaults
from slurmft.programs import environment, snapshot
from slurmft.programs.description import FLAGS, OwnProgram
from slurmft.runs.rundir import RunDir

_NAME_CHARACTERS = 40
"""Most characters of a name that is taken from the program: a time and a random part follow."""
_NO_OPTIONS = {"argv": "the argument", "file": "the program", "folder": "the folder"}
"""Fields of a program that no flag sets -> what messages call them."""
_MOST_ENTRIES = 100
"""Of larger folders no fingerprint is taken: it reads up to 16 MiB of each file."""


def configure(
    words: list[str],
    flags: dict[str, Any],
    site_options: Mapping[str, Any],
    make: bool = True,
) -> RunConfig:
    """Resolves the configuration of a run: flags over the site file, and the program.

    Args:
        words: the program and its arguments, as they were typed.
        site_options: name -> declaration of every option that the site file may have.
        make: whether to make the environment of --env uv.

    Raises:
        UsageError: there is no such program, or the options do not fit it.
    """
    values = merge(site_defaults(site_options), flags)
    # Nobody knows how long a program of the user's own may print nothing.
    values.setdefault("hang_timeout_s", 0)
    job = with_absolute_paths(build(JobConfig, values))
    settings = {name: value for name, value in values.items() if name in FLAGS}
    env = settings.get("env")
    if env:
        # A script's project is where the script is; of all else, where the command is typed.
        project = Path.cwd()
        if words[0].endswith(".py"):
            project = Path(words[0]).absolute().parent
        env = environment.folder(env, project, job, make)
        settings["env"] = env
    accelerate_config = settings.get("accelerate_config")
    if accelerate_config:
        accelerate_config = str(absolute(accelerate_config))
        settings["accelerate_config"] = accelerate_config
    in_container = job.container is not None
    argv, executed, name = command(words, env, in_container)
    settings |= {"argv": argv, "file": executed, "folder": os.getcwd()}
    # Now: when the run directory is made, this process takes the umask of the run.
    settings["umask"] = permissions.current_umask()
    program = build(OwnProgram, settings)
    check_credentials(program, _NO_OPTIONS)
    program = _placed(program, job, words[0])
    if program.integrate:
        program = _integrated(program)
    # A change of these between submission and start is reported.
    files = list(words)
    if accelerate_config:
        environment.check_accelerate(program)
        files.append(accelerate_config)
    inputs = _inputs(files, program)
    paths = [program.folder, *inputs]
    if env:
        paths.append(env)
    # What is there now is of another run: see `OwnProgram.since_ns`.
    program = program.marked()
    described = program.program(name, paths=tuple(paths), inputs=inputs)
    return RunConfig(program=described, job=job)


def _placed(program: OwnProgram, job: JobConfig, name: str) -> OwnProgram:
    """Decides what starts the program, where --per is auto, and checks that it can."""
    # Decided here, once: nodes, requeues and reports read what was decided.
    if program.per == "auto":
        if program.is_python:
            per = "torchrun"
        # Under mpirun no task of a node could start it: mpirun starts the processes themselves.
        elif starts_ranks(job.cluster):
            per = "process"
        else:
            per = "node"
        program = dataclasses.replace(program, per=per)
    if program.per in ("node", "gpu") and starts_ranks(job.cluster):
        raise UsageError(
            f"--per {program.per}: {job.cluster} starts --nproc-per-node processes on a host",
            "use --per process",
        )
    if program.per == "torchrun" and not program.is_python:
        raise UsageError(
            f"--per torchrun starts Python programs, and {name!r} is none",
            "use --per node, or --per process",
        )
    return program


def _integrated(own: OwnProgram) -> OwnProgram:
    """Returns the program as its integration starts it."""
    if not own.is_python or own.integrate is None:
        raise UsageError(
            f"--integrate {own.integrate} is for Python programs, and {own.file!r} is none",
            "give the script itself, not what starts it",
        )
    python, *rest = own.argv
    entry = plugins.get(plugins.INTEGRATIONS, own.integrate, "--integrate")
    command = (python, "-m", entry.module, entry.name, *rest)
    return dataclasses.replace(own, argv=command)


def in_image(words: list[str], flags: dict[str, Any]) -> Program:
    """Returns a program whose code and Python are those of a container's image."""
    settings = {
        "argv": words,
        "per": "node",
        "file": "",
        "folder": ".",
        "snapshot": "none",
    }
    is_module = words[0] == "-m"
    if is_module or words[0].endswith(".py"):
        settings |= {"argv": ["python3", *words], "per": "torchrun"}
    program = build(OwnProgram, settings | flags)
    check_credentials(program, _NO_OPTIONS)
    name = words[0]
    if is_module:
        name = words[-1]
    return program.program(_name(name))


def source(config: RunConfig) -> snapshot.Source | None:
    """Lists the code that is to be frozen; None: the job runs no program of the user's own.

    Raises:
        UsageError: it cannot be copied, or is too large.
    """
    program = OwnProgram.of(config.program)
    runs_dir = Path(config.job.runs_dir)
    if program is None:
        code = config.program.code
        # That of a prediction is in the run of its training, which has frozen it.
        if not code or config.program.kind == PREDICT:
            return None
        return snapshot.source(Path(code), runs_dir=runs_dir)
    return snapshot.source(
        Path(program.file),
        program.snapshot,
        runs_dir=runs_dir,
        outputs=program.outputs(),
        limit_mb=program.snapshot_limit_mb,
    )


def freeze(config: RunConfig, run: RunDir, code: snapshot.Source | None) -> None:
    """Copies the code of a program into its run, whose configuration then names the copy."""
    if code is None or code.mode == "none":
        return
    # Before the configuration names the copy: where it fails, nothing refers to it.
    copy_facts = snapshot.take(code, run)
    submission = dataclasses.replace(config.submission, snapshot=copy_facts)
    program = config.program
    description = OwnProgram.of(program)
    if description is None:
        copy = snapshot.copy_of(Path(program.code), code.root, run)
        program = dataclasses.replace(program, code=str(copy))
    else:
        settings = program.settings | _copied(description, code.root, run)
        program = dataclasses.replace(program, settings=settings)
    config = dataclasses.replace(config, program=program, submission=submission)
    write_text(run.config, config.to_json())


def _copied(program: OwnProgram, root: Path, run: RunDir) -> dict[str, Any]:
    """Returns the settings that start a program from the copies in its run."""
    argv = list(program.argv)
    python_path = [*os.environ.get("PYTHONPATH", "").split(os.pathsep), *sys.path[1:]]
    # A module: the folder itself is not on its path.
    if program.file == program.folder:
        argv = interpreter.without_folder(argv)
        python_path.insert(0, program.folder)
    elif program.file in argv:
        # Its first place is that of the program; later ones are arguments.
        index = argv.index(program.file)
        argv[index] = str(snapshot.copy_of(Path(program.file), root, run))
    copied_folders: dict[str, None] = {}  # an ordered set: the first on the path wins
    for folder in filter(None, python_path):
        copy = str(snapshot.copy_of(Path(folder), root, run))
        if copy != folder:
            copied_folders[copy] = None
    return {"argv": argv, "code": os.pathsep.join(copied_folders)}


# --- the command ----------------------------------------------------------------------------------


def command(
    words: list[str], env: str | None = None, in_container: bool = False
) -> tuple[list[str], str, str]:
    """Resolves a program, so that it can be started from anywhere.

    Args:
        words: the program and its arguments, as they were typed.
        env: folder of the environment that it runs in.
        in_container: Python, and what is no file here, are those of the image.

    Returns:
        The command, what it executes (see `OwnProgram.file`), and the name of the program.

    Raises:
        UsageError: there is no such program, or it cannot be executed.
    """
    first, *arguments = words
    python = _python(env, in_container)
    if first == "-m":
        if not arguments:
            raise UsageError("no module after -m", "slurmft run -- -m package.module")
        # Python imports a module from the working directory first.
        return [python, *words], os.getcwd(), _name(arguments[0])
    if first.endswith(".py"):
        script = _absolute_script(words)
        return [python, *script], script[0], _name(first)
    # A file that is no file here is one of the image: nothing of it can be checked, or copied.
    if in_container and not os.path.isfile(first):
        return words, f"/usr/bin/{first}", _name(first)
    executable = _executable(first, env)
    if Path(first).name.startswith("python") and arguments:
        script = _absolute_script(arguments)
        executed = script[0]
        if executed == "-m":
            executed = os.getcwd()
        return [executable, *script], executed, _name(script[0])
    return [executable, *arguments], executable, _name(first)


def _python(env: str | None, in_container: bool) -> str:
    if env:
        return f"{env}/bin/python"
    if in_container:
        return "python3"
    return interpreter.PYTHON


def _near(script: str) -> str:
    """Returns which script is there that was probably meant."""
    folder, name = os.path.split(script)
    names = []
    # The folder may not be there either.
    with contextlib.suppress(OSError):
        names = [each for each in os.listdir(folder or ".") if each.endswith(".py")]
    near = nearest(name, names)
    if near is None:
        return "give its path"
    return f"did you mean {os.path.join(folder, near)}?"


def _absolute_script(words: list[str]) -> list[str]:
    """Returns a Python's arguments, with the whole path of the script."""
    script, *arguments = words
    if script.startswith("-"):
        return words
    if not os.path.isfile(script):
        here = os.getcwd()
        raise UsageError(f"no such program: {script!r} in {here!r}", _near(script))
    return [os.path.abspath(script), *arguments]


def _executable(name: str, env: str | None) -> str:
    executable = None
    if env:
        # The environment's own commands come first, as on its PATH.
        executable = shutil.which(name, path=f"{env}/bin")
    if executable is None:
        executable = shutil.which(name)
    if executable:
        return os.path.abspath(executable)
    if os.path.isfile(name):
        if "/" not in name:
            raise UsageError(
                f"{name!r} is not on the PATH, but in this folder", f"write ./{name}"
            )
        raise UsageError(f"{name!r} is not executable", f"chmod +x {name}")
    raise UsageError(
        f"no such program: {name!r}", "give a .py file, -m MODULE, or an executable"
    )


def _name(program: str) -> str:
    """Returns the first part of the names of a program's runs."""
    # It becomes the name of a folder, and of a job: nothing in it may need quotes.
    stem = Path(program).name.removesuffix(".py")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-.")
    return name[:_NAME_CHARACTERS] or "program"


def _inputs(words: list[str], program: OwnProgram) -> dict[str, dict[str, Any]]:
    """Returns the fingerprints of the files and folders that the arguments name: a change before a
    start is reported."""
    outputs = program.outputs()
    fingerprints = {}
    for word in words[1:]:
        name = word
        if word.startswith("-"):  # --data=FILE
            _, _, name = word.partition("=")
        path = Path(name)
        real = path.resolve()
        # The program itself has a snapshot.
        if str(path.absolute()) == program.file or real in outputs:
            continue
        if path.is_file():
            facts = fingerprint.of(path)
            fingerprints[os.path.abspath(path)] = facts | {"what": "file"}
        elif name and path.is_dir() and _is_input(real):
            facts = fingerprint.of(path)
            fingerprints[os.path.abspath(path)] = facts | {"what": fingerprint.FOLDER}
    return fingerprints


def _is_input(folder: Path) -> bool:
    """Returns whether a folder may be fingerprinted: it has files of its own, not too many to read,
    and is not the one in which programs run and write."""
    if Path.cwd().resolve().is_relative_to(folder):
        return False
    with os.scandir(folder) as entries:
        files = sum(
            entry.is_file() for entry in itertools.islice(entries, _MOST_ENTRIES + 1)
        )
    return 0 < files <= _MOST_ENTRIES


def description(config: RunConfig) -> list[str]:
    """Returns the lines of a dry run about a program of the user's own; none for other programs."""
    program = OwnProgram.of(config.program)
    if program is None:
        return []
    lines = [f"# each process of it, in {program.folder}"]
    lines.append(shlex.join(_command_line(program)))
    code = source(config)
    if code is not None:
        lines.append(f"# its code: {code.describe()}")
    environment_name = program.env or "as this one"
    lines.append(f"# its environment: {environment_name}; its Python: {program.python}")
    if program.accelerate_config:
        file = program.accelerate_config
        lines.append(f"# Accelerate's variables: decided on the nodes, from {file}")
    return lines


def _command_line(program: OwnProgram) -> Sequence[str]:
    """Returns the command line of a program that is to start: of a run that resumes, with what its
    checkpoint adds."""
    # The nodes may see a folder that this machine does not.
    with contextlib.suppress(OSError):
        checkpoint = program.newest_checkpoint()
        if checkpoint is not None:
            return program.arguments(checkpoint)
    return program.argv
