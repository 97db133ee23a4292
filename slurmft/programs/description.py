"""A program of the user's own, as `slurmft run` describes it to the nodes."""

# No `from __future__ import annotations`: options are read from the types of their fields.

import dataclasses
import shlex
import signal
import sys
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from slurmft.core import plugins, trusted
from slurmft.core.errors import UsageError
from slurmft.core.options import Needs, build, check_options, option, options
from slurmft.core.program import OWN, Program
from slurmft.programs import checkpoints, memory_failures

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

    umask: int | None = None
    """The umask of the user at submission, for what the program writes; None: that of the run."""

    env: str | None = option(
        None,
        "Python environment of the program: a folder, or uv, of its uv.lock (default: slurmft's)",
        # Other packages are other versions of libraries, faster or slower, which may round
        # otherwise.
        affects="both",
        at="node",
        path="there",
        executes=True,
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
        executes=True,  # it decides how ranks are started, and with which variables
    )
    per: str = option(
        "auto",
        "how the program is started: by a torchrun on each node, or once a node, a process or a "
        "GPU; auto: torchrun for Python, else node",
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
        # Those that are installed: other packages may bring some.
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
        "arguments from the second start on: where there is a checkpoint, {latest}, "
        "'--resume_from_checkpoint {latest}', '--init_from=resume'",
        affects="nothing",
        at="node",
        metavar="ARGS",
        executes=True,  # arguments may be code
        takes_flags=True,
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
    open_rendezvous: bool = option(
        False,
        "do not seal the store of the program's process group: processes that slurmft does not "
        "start, or another Python, share it",
        affects="nothing",
        at="rank",
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
        most=1_000_000,
        read_with=(Needs("snapshot", ("auto", "git", "folder")),),
    )

    def __post_init__(self) -> None:
        check_options(self)
        signal_name = f"SIG{self.stop_signal.removeprefix('SIG')}"
        if signal_name not in signal.Signals.__members__:
            raise UsageError(
                f"--stop-signal {self.stop_signal} is the name of no signal",
                "TERM, USR1, INT, ...",
            )
        memory_failures.check(self.argv)
        if self.resume_args is None:
            return
        # Here, where it is typed: on a node, a quote without its end would fail the second start.
        try:
            memory_failures.check(shlex.split(self.resume_args))
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
        # By the files' own times: the clock of their server may not be that of this machine.
        newest_ns = max(self._written().values(), default=0)
        return dataclasses.replace(self, since_ns=newest_ns)

    def written_after(self, time_ns: int) -> list[Path]:
        """Returns its checkpoints and files that were written after a time, newest first.

        Raises:
            OSError: the folder of checkpoints cannot be read.
        """
        times = self._written()
        newer = [path for path, written_ns in times.items() if written_ns > time_ns]
        return sorted(newer, key=lambda path: times[path], reverse=True)

    def _written(self) -> dict[Path, int]:
        """Returns what may be its checkpoints, and its files, each with when it was written."""
        files = {path: checkpoints.changed_ns(path) for path in self._own_files()}
        return self._candidates() | files

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

    def owner_of_result(self) -> str:
        """Returns the user who has written the --result-file, if it is another one; "": none."""
        if self.result_file is None:
            return ""
        return trusted.other_owner(self.path(self.result_file))

    def newest_checkpoint(self, passed_over: Collection[str] = ()) -> Path | None:
        """Returns the newest checkpoint in --checkpoint-dir that this run has written, and that
        looks whole; None: there is none.

        Args:
            passed_over: checkpoints, as `in_words` names them, from which starts have failed.

        Raises:
            OSError: the folder cannot be read.
        """
        paths = self.checkpoints()
        # The time is in it: a checkpoint that is written again is tried again.
        others = [path for path in paths if in_words(path) not in passed_over]
        return checkpoints.newest_whole(others)

    def checkpoints(self) -> list[Path]:
        """Returns the checkpoints that this run has written, whole or not, newest first. Those
        that others have written, or could, are none.

        Raises:
            OSError: the folder cannot be read.
        """
        times = {}
        for path, written_ns in self._candidates().items():
            is_new = written_ns > self.since_ns
            if is_new and checkpoints.refusal(path) is None:
                times[path] = written_ns
        return checkpoints.newest_first(times)

    def refused(self, after_ns: int) -> dict[Path, str]:
        """Returns the checkpoints that are passed over as others have written them, or could, since
        a time and since the submission: path -> why, and the cure.

        Raises:
            OSError: the folder cannot be read.
        """
        if self.checkpoint_dir is None:
            return {}
        folder = self.path(self.checkpoint_dir)
        # The program may make it when it first saves.
        if not folder.is_dir():
            return {}
        reasons = {}
        entries = self._candidates() | checkpoints.foreign(folder)
        for path, written_ns in entries.items():
            if written_ns > max(self.since_ns, after_ns):
                reason = checkpoints.refusal(path)
                if reason is not None:
                    reasons[path] = reason
        return reasons

    def earlier_checkpoints(self) -> list[Path]:
        """Returns the checkpoints in --checkpoint-dir before the program has started, whichever run
        has written them; the one that counts as newest first.

        Raises:
            OSError: the folder cannot be read.
        """
        return checkpoints.likely(self._candidates())

    def _candidates(self) -> dict[Path, int]:
        """Returns the entries of --checkpoint-dir that may be checkpoints, and their times."""
        if self.checkpoint_dir is None:
            return {}
        folder = self.path(self.checkpoint_dir)
        if not folder.is_dir():
            return {}
        return checkpoints.candidates(folder, self._own_files())

    def outputs(self) -> list[Path]:
        """Returns the files and folders that it writes.

        Where --checkpoint-dir is a folder that the program itself is in, these are not the whole
        folder, but its files of weights.
        """
        paths = self._own_files()
        if self.checkpoint_dir is not None:
            folder = self.path(self.checkpoint_dir)
            if not Path(self.file).resolve().is_relative_to(folder.resolve()):
                paths.append(folder)
            # The program itself lies there: its code must not be left out of a snapshot.
            elif folder.is_dir():
                paths += checkpoints.weights(folder)
        return [path.resolve() for path in paths]

    def _own_files(self) -> list[Path]:
        """Returns the paths of its --finished-file and --result-file, which are no checkpoints."""
        names = (self.finished_file, self.result_file)
        return [self.path(name) for name in names if name]

    def _is_new(self, path: Path) -> bool:
        # What another user has written there is none of this run's.
        if trusted.other_owner(path):
            return False
        # An earlier run of the program may have left a file of that name.
        return checkpoints.changed_ns(path) > self.since_ns

    @property
    def chooses_start(self) -> bool:
        """True if its command line depends on the checkpoint that it starts from, or on how often
        memory ran out: the ranks agree on both."""
        return self.resume_args is not None or memory_failures.has_placeholder(
            self.argv
        )

    def arguments(self, latest: Path | None, failures: int = 0) -> list[str]:
        """Returns its command line; with --resume-args, if there is a checkpoint.

        Args:
            latest: the checkpoint.
            failures: how often memory ran out.
        """
        if latest is None or self.resume_args is None:
            return memory_failures.filled_in(self.argv, failures)
        # Split first: a space in the checkpoint's path must not make two arguments of it.
        template = [*self.argv, *shlex.split(self.resume_args)]
        words = memory_failures.filled_in(template, failures)
        resume_arguments = words[len(self.argv) :]
        return [
            *words[: len(self.argv)],
            *[word.replace(LATEST, str(latest)) for word in resume_arguments],
        ]


def in_words(checkpoint: Path) -> str:
    """Returns the name of a checkpoint and when it was written: a program may write the same name
    again."""
    written = datetime.fromtimestamp(checkpoints.written_ns(checkpoint) / 1e9)
    return f"{checkpoint.name} ({written.isoformat(sep=' ', timespec='seconds')})"


FLAGS = options(OwnProgram)
"""Options of `slurmft run`, besides those of the job."""

OWN_FILES = tuple(name for name, each in FLAGS.items() if each.path == "output")
"""Options that name what a program writes: every run must have its own."""


def signal_of(name: str) -> signal.Signals:
    """Returns the signal of a name with or without SIG."""
    return signal.Signals[f"SIG{name.removeprefix('SIG')}"]
