"""A program of the user's own, as `slurmft run` describes it to the nodes."""

# No `from __future__ import annotations`: options are read from the types of their fields.

import dataclasses
import itertools
import os
import re
import shlex
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmft.core import plugins
from slurmft.core.errors import UsageError
from slurmft.core.options import Needs, build, check_options, option, options
from slurmft.core.program import OWN, Program

MODULE = "slurmft.programs.process"
"""What every rank runs: it starts the program, and stays beside it."""

LATEST = "{latest}"
PERS = ("auto", "torchrun", "node", "process", "gpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnProgram:
    """A program, and how it is started, stopped, resumed and read."""

    argv: tuple[str, ...]
    """The program and its arguments, as they are started; of Python, with the interpreter."""
    folder: str
    """Where it runs."""
    file: str
    """The script or executable; of a module, the folder that it comes from."""
    code: str = ""
    """Folders of its frozen code, with colons between: they go to the front of PYTHONPATH."""
    since_ns: int = 0
    """When the newest of its checkpoints and files was written that were there at submission: they
    are of another run."""

    env: str | None = option(
        None,
        "Python environment of the program: a folder, or uv, of its uv.lock (default: slurmft's)",
        affects="both",
        at="node",
        path="there",
        usual=True,
    )
    accelerate_config: str | None = option(
        None,
        "file that `accelerate launch --config_file` would take; nodes and processes in it do not "
        "count",
        affects="both",
        at="node",
        metavar="FILE",
        path="input",
        usual=True,
    )
    per: str = option(
        "auto",
        "start a torchrun on each node, or the program once a node, a process or a GPU; auto: "
        "torchrun for Python, else node",
        affects="both",
        at="node",
        choices=PERS,
        usual=True,
        commands=("render",),
    )
    integrate: str | None = option(
        None,
        "attach an unchanged script through its library's Trainer (also TRL's)",
        affects="nothing",
        at="rank",
        choices=tuple(plugins.entries(plugins.INTEGRATIONS)),
        usual=True,
        commands=("render",),
    )
    stop_signal: str = option(
        "TERM",
        "signal that the program gets when the job is to stop: TERM, USR1, INT, ... (a program "
        "that attaches is asked by job.should_stop())",
        affects="nothing",
        at="node",
        metavar="NAME",
        usual=True,
        commands=("render",),
    )
    checkpoint_dir: str | None = option(
        None,
        "where the program writes its checkpoints: they count as progress",
        affects="nothing",
        at="node",
        metavar="DIR",
        path="output",
        usual=True,
        commands=("render",),
    )
    resume_args: str | None = option(
        None,
        "arguments from the second start on, where there is a checkpoint: "
        "'--resume_from_checkpoint {latest}'",
        affects="nothing",
        at="node",
        metavar="ARGS",
        needs=(Needs("checkpoint_dir"),),
        usual=True,
        commands=("render",),
    )
    finished_file: str | None = option(
        None,
        "file that the program writes at its end: an exit code of 0 after a stop signal means "
        "finished only with it, or with job.result()",
        affects="nothing",
        at="node",
        metavar="FILE",
        path="output",
        usual=True,
        commands=("render",),
    )
    result_file: str | None = option(
        None,
        "JSON of numbers that the program writes: its result, for reports",
        affects="result",
        at="node",
        metavar="FILE",
        path="output",
        usual=True,
        commands=("render",),
    )
    snapshot: str = option(
        "auto",
        "run the code of the submission: of the git work tree, or of the program's folder; auto: "
        "either; none: run the code as it is when the job starts",
        affects="result",
        at="submission",
        choices=("auto", "git", "folder", "none"),
    )
    snapshot_limit_mb: int = option(
        100,
        "largest size of a snapshot",
        affects="nothing",
        at="submission",
        metavar="MIB",
        least=0,
    )

    def __post_init__(self) -> None:
        check_options(self)
        signal_name = f"SIG{self.stop_signal.removeprefix('SIG')}"
        if signal_name not in signal.Signals.__members__:
            raise UsageError(
                f"--stop-signal {self.stop_signal} is the name of no signal",
                "TERM, USR1, INT, ...",
            )
        if self.resume_args is None:
            return
        if LATEST not in self.resume_args:
            raise UsageError(
                f"--resume-args {self.resume_args!r} does not say where the checkpoint goes",
                f"write {LATEST} there: --resume-args '--resume_from_checkpoint {LATEST}'",
            )
        # Here, where it is typed: on a node, a quote without its end would fail the second start.
        try:
            shlex.split(self.resume_args)
        except ValueError as error:
            raise UsageError(f"--resume-args {self.resume_args!r}: {error}") from None

    @classmethod
    def of(cls, program: Program) -> "OwnProgram | None":
        """Returns the description of a job's program; None: it runs another kind of program."""
        if program.kind != OWN:
            return None
        return build(cls, program.settings)

    @property
    def is_python(self) -> bool:
        return Path(self.argv[0]).name.startswith("python")

    @property
    def python(self) -> str:
        """The Python that it runs with, or that its environment has."""
        if self.is_python:
            return self.argv[0]
        return f"{self.env or sys.prefix}/bin/python"

    def program(self, name: str, **more: Any) -> Program:
        """Returns the program as a configuration has it; `more` are further fields of `Program`."""
        return Program(
            kind=OWN,
            name=name,
            module=MODULE,
            settings=dataclasses.asdict(self),
            **more,
        )

    def path(self, name: str) -> Path:
        """Returns the path of a file or folder of its own; relative ones begin where it runs."""
        return Path(self.folder, name)

    def marked(self) -> "OwnProgram":
        """Returns the description with the time of the newest of its files that are there now."""
        paths = self._checkpoints()
        for name in (self.finished_file, self.result_file):
            if name and self.path(name).exists():
                paths.append(self.path(name))
        since_ns = max((path.stat().st_mtime_ns for path in paths), default=0)
        return dataclasses.replace(self, since_ns=since_ns)

    def has_finished(self) -> bool:
        """Returns whether it has written its --finished-file."""
        if self.finished_file is None:
            return False
        return self._is_new(self.path(self.finished_file))

    def result(self) -> Path | None:
        """Returns the path of its --result-file; None: it has written none."""
        if self.result_file is None:
            return None
        path = self.path(self.result_file)
        if not self._is_new(path):
            return None
        return path

    def newest_checkpoint(self) -> Path | None:
        """Returns the newest entry of --checkpoint-dir that this run has written, and that looks
        whole; None: there is none.

        A folder that lacks a file which the one before it has is half-written.

        Raises:
            OSError: the folder cannot be read.
        """
        checkpoints = [path for path in self._checkpoints() if self._is_new(path)]
        for newer, older in itertools.pairwise(checkpoints):
            if _kinds_of_files(newer) >= _kinds_of_files(older):
                return newer
        if not checkpoints:
            return None
        # The oldest: there is none to compare it with.
        return checkpoints[-1]

    def _checkpoints(self) -> list[Path]:
        """Returns the entries of --checkpoint-dir that may be checkpoints, newest first."""
        if self.checkpoint_dir is None:
            return []
        folder = self.path(self.checkpoint_dir)
        if not folder.is_dir():
            return []
        candidates = [path for path in folder.iterdir() if _may_be_checkpoint(path)]

        def written_ns(path: Path) -> int:
            return path.stat().st_mtime_ns

        # By time: of names, nobody knows whether step-900 sorts before step-1000.
        return sorted(candidates, key=written_ns, reverse=True)

    def _is_new(self, path: Path) -> bool:
        return path.exists() and path.stat().st_mtime_ns > self.since_ns

    def arguments(self, latest: Path | None) -> list[str]:
        """Returns its command line; with --resume-args, if there is a checkpoint."""
        if latest is None or self.resume_args is None:
            return list(self.argv)
        # Split first: a space in the checkpoint's path must not make two arguments of it.
        template = shlex.split(self.resume_args)
        resume_arguments = [word.replace(LATEST, str(latest)) for word in template]
        return [*self.argv, *resume_arguments]


FLAGS = options(OwnProgram)
"""Options of `slurmft run`, besides those of the job."""

OWN_FILES = tuple(name for name, each in FLAGS.items() if each.path == "output")
"""Options that name what a program writes: every run must have its own."""


def signal_of(name: str) -> signal.Signals:
    """Returns the signal of a name with or without SIG."""
    return signal.Signals[f"SIG{name.removeprefix('SIG')}"]


def _may_be_checkpoint(path: Path) -> bool:
    """Returns whether a name in --checkpoint-dir has a number, and is no temporary one."""
    is_temporary = path.name.startswith((".", "tmp")) or path.name.endswith(".tmp")
    return not is_temporary and bool(re.search(r"\d", path.name))


def _kinds_of_files(path: Path) -> set[str]:
    """Returns the names in a folder without their numbers: there may be fewer ranks than before."""
    if not path.is_dir():
        return set()
    return {re.sub(r"\d+", "#", name) for name in os.listdir(path)}
