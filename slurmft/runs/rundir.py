"""The run directory: every path and file name of a run, and the only ways to write them.

A reader never sees half a file: whole files are written aside, synced and renamed; records are
whole lines, appended in one write each.

What is only told (states, attempts, failures) never stops what must happen, a requeue or a save:
where it cannot be written, stderr has it. Only a new submission must be recorded.
"""

import contextlib
import os
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurmft.core import permissions
from slurmft.core.config import RunConfig
from slurmft.core.credentials import redact
from slurmft.core.errors import SlurmftError, UsageError, one_line
from slurmft.core.files import read_json, write_json, write_text
from slurmft.core.filesystem import absolute
from slurmft.programs.description import OwnProgram, in_words
from slurmft.runs import shapes

FINAL_STATES = ("finished", "failed", "cancelled")

ATTEMPT = "SLURMFT_ATTEMPT"
"""Variable with the number of the attempt, from 1, in every process of a job."""
RUN_DIR = "SLURMFT_RUN_DIR"
"""Variable with the run directory, in every process that a job's program starts."""


class _Below:
    """A path below that of a run. Made when it is asked for: paths are slow to make, runs many."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: "RunDir", owner: "type[RunDir]") -> Path:
        return run.path / self._name


class RunDir:
    """The files of one run, below `path`."""

    config = _Below("config.json")
    environment = _Below("environment.json")
    records = _Below("records.jsonl")
    result = _Below("result.json")
    state = _Below("state.json")
    job = _Below("job.json")
    model = _Below("model")
    tokens = _Below("tokens")
    tracking = _Below("tracking")
    logs = _Below("logs")
    failures = _Below("failures")
    checkpoints = _Below("checkpoints")
    attempt = _Below("attempt.json")
    claims = _Below("submissions")
    notifications = _Below("notifications")
    packages = _Below("packages.json")
    started = _Below("started.json")
    rendezvous = _Below("meeting.json")
    submitit = _Below("submitit")
    script = _Below("submitit/job.sh")
    code = _Below("code")
    code_diff = _Below("code.diff")

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, config: RunConfig, mark: str = "") -> "RunDir":
        """Makes the directory of a new run and writes its configuration.

        It is its user's alone, or its group's to read (`--share-with-group`), as is all that this
        process writes from then on. Its name is task, time, a mark if there is one, and a random
        part, a request's own: runs-dir/emotion-20261120-093012-a1b2c3. --name takes the place of
        the task.

        Raises:
            UsageError: the folder cannot be made or written to.
            NotOwnError: everybody can rename what lies in a folder above it.
        """
        start = "-".join([config.name, time.strftime("%Y%m%d-%H%M%S"), *filter(None, [mark])])
        top, part = Path(config.job.runs_dir), config.submission.get("request", "")[:6]
        run = cls(top / f"{start}-{part or _random_part()}")
        try:
            while not run.make(config):
                run = cls(top / f"{start}-{_random_part()}")
            try:
                with permissions.own_folder(run.path):  # the job would refuse others' writing
                    write_text(run.config, config.to_json())
                run.set_state("submitted")
            except BaseException:
                run.discard()
                raise
        except OSError as error:
            raise UsageError(
                f"cannot write the run directory {str(run.path)!r}: {error.strerror or error}",
                "give a folder that you can write, on a file system that the nodes see: --runs-dir",
            ) from None
        return run

    def make(self, config: RunConfig) -> bool:
        """Makes the folders of a new run; False where another has the name.

        Raises:
            OSError: they cannot be made; nothing is left of them.
        """
        share = config.job.share_with_group
        try:
            permissions.make_folder(self.path, share)
        except FileExistsError:
            if self.path.exists():
                return False
            raise  # a folder above is a file
        permissions.settle(share)
        try:
            for folder in (self.logs, self.failures, self.submitit):
                folder.mkdir()
        except OSError:
            self.discard()
            raise
        return True

    def settle_permissions(self) -> None:
        """Lets those read who may read the run what this process writes from now on."""
        permissions.settle(self.load_config().job.share_with_group)

    @classmethod
    def open(cls, path: str | Path) -> "RunDir":
        """An existing run."""
        run = cls(absolute(path))
        if not run.exists():
            raise UsageError(f"{str(path)!r} is not a run directory: it has no {run.config.name}")
        return run

    def exists(self) -> bool:
        """Whether the folder holds a run."""
        try:
            return self.config.is_file()
        except PermissionError:
            raise UsageError(
                f"{str(self.path)!r} cannot be read: Permission denied", "its owner can open it"
            ) from None

    @classmethod
    def of_job(cls, runs_dir: str, mark: str, where: str = "") -> "RunDir | None":
        """The newest run of this user that was created with its job's id as its mark; None: there
        is none. `where`: its Slurm cluster: another may have the same folder, and a job of that
        number."""
        runs = [
            run
            for run in map(cls, Path(runs_dir).glob(f"*-{mark}-*"))
            if (job := run.read_job()).get("id") == mark
            and (not where or job.get("where", "") in ("", where))  # where it is not known: ""
            and run.is_own()
        ]
        return max(runs, key=lambda run: run.job.stat().st_mtime, default=None)

    def load_config(self, read: Callable[[Path], bytes] = Path.read_bytes) -> RunConfig:
        """The configuration that the login node wrote."""
        try:
            return RunConfig.from_json(read(self.config).decode("utf-8"))
        except (OSError, ValueError, LookupError, TypeError, RecursionError, UsageError) as error:
            raise SlurmftError(f"cannot read {str(self.config)!r}: {one_line(error)}") from None

    def load_own_config(self) -> RunConfig:
        """The same, for whoever does what a run says: submits, executes, cancels, uploads it.

        Raises:
            NotOwnError: the run is another user's, or others can write it.
        """
        return self.load_config(permissions.read_own)

    def is_own(self) -> bool:
        """Whether nobody else can have written the configuration."""
        try:
            return bool(permissions.read_own(self.config))
        except (permissions.NotOwnError, OSError):
            return False

    def discard(self) -> None:
        """Removes the run: its job never came to be."""
        shutil.rmtree(self.path, ignore_errors=True)

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank:03d}.log"

    def stacks(self, rank: int) -> Path:
        """Where the threads of a rank that hung were."""
        return self.logs / f"stacks-rank-{rank:03d}.txt"

    def set_state(
        self, state: str, reason: str = "", exit_code: int | None = None, **extra: Any
    ) -> None:
        """Records what the run is doing, with the time; see `tell`.

        A final state is only left by submitting the run again, and "failed" by a job that starts
        all the same. One process writes at a time: the login node's until the job starts and after
        it ended, the head node's in between.

        Raises:
            OSError: "submitted" cannot be recorded.
        """
        past = self.history()
        last = past[-1]["state"] if past else ""
        goes_on = state == "submitted" or (last == "failed" and state == "running")
        if last in FINAL_STATES and not goes_on:
            return
        now = {"state": state, "time": time.time(), "reason": redact(reason)}
        now |= {"exit_code": exit_code} | extra
        found = now | {"history": [*past, now]}
        if state == "submitted":
            write_json(self.state, found)
        else:
            self.tell(self.state, found, f"{state}: {reason}")

    def tell(self, path: Path, value: Any, words: str) -> None:
        """Writes what is only told; where that fails, stderr has the words: no full disk, no folder
        that is gone or closed keeps a job from a save, a requeue or its exit code."""
        try:
            write_json(path, value)
        except (OSError, ValueError) as error:  # ValueError: no UTF-8, in the name of a file
            why = getattr(error, "strerror", None) or str(error)
            with contextlib.suppress(OSError):  # it may be a file of the same disk
                line = f"slurmft: {path} cannot be written ({why}): {redact(words)}"
                print(line, file=sys.stderr, flush=True)

    def history(self) -> list[dict[str, Any]]:
        """All recorded states, oldest first."""
        found: list[dict[str, Any]] = self.get_state()["history"]
        return found

    def get_state(self) -> dict[str, Any]:
        """The last recorded state: state, time (Unix seconds), reason, exit_code, history."""
        if found := read_json(self.state, shapes.STATE):
            return found
        reason = f"{self.state.name} is damaged" if os.path.exists(self.state) else ""
        return {"state": "unknown", "time": 0.0, "reason": reason, "exit_code": None, "history": []}

    def read_job(self) -> dict[str, Any]:
        """Its job: cluster, id, and where, if that is known; empty before it is submitted."""
        return read_json(self.job, shapes.JOB) or {}

    def job_id(self) -> str:
        """The id of its job; "" for one whose submission was interrupted."""
        return str(self.read_job().get("id") or (self.read_attempt() or {}).get("job", ""))

    def read_result(self) -> dict[str, Any] | None:
        """The result of a finished run."""
        return read_json(self.result, shapes.RESULT)

    def read_environment(self) -> dict[str, Any]:
        """What its ranks ran on: versions, python, ranks."""
        found = read_json(self.environment, shapes.ENVIRONMENT) or {}
        return {"versions": {}, "ranks": []} | found

    # --- attempts: from the start of a job to its end or requeue ----------------------------------

    def attempt_number(self) -> int:
        """How often the job of this run has started; 0: not yet."""
        return int((self.read_attempt() or {}).get("number", 0))

    def read_attempt(self) -> dict[str, Any] | None:
        """The last attempt that has begun: number, job, hosts, time."""
        return read_json(self.attempt, shapes.ATTEMPT)

    def is_superseded(self, attempt: int) -> bool:
        """Whether a later attempt has begun: this one lives on a node that Slurm gave up."""
        return self.attempt_number() > attempt > 0

    def submissions(self) -> int:
        """How often the run was submitted."""
        return [h["state"] for h in self.history()].count("submitted")

    def awaits_begin(self) -> bool:
        """Whether no attempt has begun since the run was last submitted."""
        last, submissions = self.read_attempt() or {"submission": 0}, self.submissions()
        return int(last.get("submission", submissions)) < submissions

    def meetings(self, attempt: int) -> int:
        """How often the ranks of an attempt have met; 0 of all but the last."""
        started = read_json(self.started, shapes.STARTED) or {}
        return int(started.get("meetings", 0)) if started.get("attempt") == attempt else 0

    def mark_started(self, meetings: int) -> None:
        """Notes that the ranks have met, for so many times in this attempt: what failed before this
        is overcome."""
        now = {"attempt": current_attempt(), "meetings": meetings}
        self.tell(self.started, now, "the ranks have met")

    def checkpoint_names(self) -> list[str]:
        """The checkpoints, oldest first: step-00000120; with -e00000512, within the evaluation
        after that step; with -evaluated; with -t00000512, within that of the test split.

        Raises:
            OSError: the file system fails; there may be some.
        """
        try:  # later versions of Python hide from glob() that a file system fails
            names = os.listdir(self.checkpoints)
        except (FileNotFoundError, PermissionError):
            return []
        return sorted(name for name in names if name.startswith("step-"))

    def newest_checkpoint(self) -> str | None:
        """What a resume starts from, by name: of the run's own checkpoints, or of those that a
        program writes into its --checkpoint-dir; None: nothing."""
        with contextlib.suppress(OSError, SlurmftError):  # the folder, or the whole run, is gone
            own = OwnProgram.of(self.load_config().program)
            if own and (found := own.newest_checkpoint()):
                return in_words(found)
        return next(reversed(self.checkpoint_names()), None)

    # --- failures ---------------------------------------------------------------------------------

    def add_failure(
        self,
        where: str,
        error: SlurmftError,
        trace: str | None = None,
        *,
        secondary: bool = False,
        step: int = 0,
        retry: bool = False,
        bad_host: str | None = None,
        attempt: int | None = None,
        meetings: int | None = None,
        exclude: bool = False,
    ) -> dict[str, Any]:
        """Keeps what went wrong in one process; returns it as it is kept; see `tell`.

        Args:
            where: the process, in words: "rank 3 on n1".
            trace: the traceback, of an error that nobody foresaw.
            secondary: it only says that another process failed.
            step: the optimizer step at which it happened.
            retry: a requeue may help: it was not an error of the run itself.
            bad_host: the host that may be to blame, by Slurm's name.
            attempt: the attempt that failed; the current one, if not given.
            meetings: how many meetings of the ranks this one has seen; None: it is no rank's own.
            exclude: the host is bad for sure, and not to be used again.
        """
        failure = {
            "where": where,
            "message": redact(error.message),
            "hint": error.hint and redact(error.hint),
            "code": int(error.code),
            "traceback": trace and redact(trace),
            "secondary": secondary,
            "step": step,
            "retry": retry or bad_host is not None,
            "bad_host": bad_host,
            "exclude": exclude,
            "attempt": current_attempt() if attempt is None else attempt,
            "meetings": meetings,
            "time": time.time(),
        }
        name = f"{where.replace(' ', '-')}-{os.getpid()}-{time.time_ns()}.json"
        self.tell(self.failures / name, failure, f"{where}: {error.message}")
        return failure

    def all_failures(self, names: str = "*") -> list[dict[str, Any]]:
        """Every failure of the run, by attempts, and within them by the hosts' clocks; of files of
        some `names`: "*-on-n1-*" are those of one host's ranks."""
        found = list[dict[str, Any]]()
        with contextlib.suppress(OSError):  # while a server restarts, none is known
            paths = list(self.failures.glob(f"{names}.json"))
            found = [f for p in paths if (f := read_json(p, shapes.FAILURE))]
        return sorted(found, key=lambda f: (f["attempt"], float(f["time"])))

    def failures_of(self, attempt: int, names: str = "*") -> list[dict[str, Any]]:
        """The failures that ended an attempt: first those that are not secondary.

        What happened to ranks before they last met was overcome. Clocks only tell which of several
        causes is named first: those of two hosts may differ by an hour.
        """
        found = [f for f in self.all_failures(names) if f["attempt"] == attempt]
        seen = [f["meetings"] for f in found if f.get("meetings") is not None]
        met = max([self.meetings(attempt), *seen])
        found = [f for f in found if f.get("meetings") in (None, met)]
        return sorted(found, key=lambda f: bool(f["secondary"]))

    def root_failure(self, attempt: int = 0, names: str = "*") -> dict[str, Any] | None:
        """The failure that ended an attempt, or the last one: the first that is not secondary; of
        some files only, where a thousand tasks ask.

        When one rank dies, its neighbours see their connections close; those failures are
        secondary.
        """
        number = attempt or self.attempt_number()
        if number and not attempt and self.awaits_begin():
            return None  # the job of a resume, whose attempt has not begun
        return next(iter(self.failures_of(number, names)), None)

    def bad_hosts(self) -> list[str]:
        """Hosts that were to blame in two attempts or more, or are bad for sure."""
        failures = [f for f in self.all_failures() if f["bad_host"] and not f["secondary"]]
        blamed = {(f["bad_host"], f["attempt"]) for f in failures}
        counts = Counter(host for host, _ in blamed)
        sure = {f["bad_host"] for f in failures if f.get("exclude")}
        return sorted(host for host, count in counts.items() if count >= 2 or host in sure)


def failure_words(failure: dict[str, Any]) -> str:
    """The cause of a failure, and then where it was."""
    return f"{failure['message']} ({failure['where']})"


def _random_part() -> str:
    """Of a run's name; where two draw the same, the later draws again."""
    return os.urandom(3).hex()


def current_attempt() -> int:
    """The attempt that this process belongs to; 0: none, it was started by hand."""
    return int(os.environ.get(ATTEMPT, "0"))


def log_head(what: str, host: str) -> str:
    """The first line of a process in its log, which later ones of the same rank continue."""
    return f"{what} on {host}, attempt {current_attempt()}, pid {os.getpid()}"


_LOG_HEAD = re.compile(r"(?:rank|node) \d+ on (\S+), attempt (\d+), pid \d+")


def read_log_head(line: str) -> tuple[str, int] | None:
    """Host and attempt, from a line that `log_head` made; None for another line."""
    found = _LOG_HEAD.fullmatch(line)
    return (found[1], int(found[2])) if found else None
