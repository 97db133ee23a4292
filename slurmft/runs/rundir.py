"""The run directory: every path and file name of a run, and the only ways to write them.

A reader never sees half a file: whole files are written aside, synced and renamed; records are
whole lines, appended in one write each.

What is only told (states, attempts, failures) never stops what must happen, a requeue or a save:
where it cannot be written, stderr has it. Only a new submission must be recorded.
"""

import contextlib
import dataclasses
import errno
import heapq
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import slurmft
from slurmft.core import descent, filesystem, hooks, permissions, removal, trusted
from slurmft.core.below import Below
from slurmft.core.config import RunConfig
from slurmft.core.credentials import redact
from slurmft.core.decode import decode_leniently, load, read
from slurmft.core.errors import SlurmftError, UsageError, one_line
from slurmft.core.files import (
    MOST_FILES,
    check_size,
    other_kind,
    read_bytes,
    read_json,
    write_json,
    write_text,
)
from slurmft.core.filesystem import absolute
from slurmft.core.program import kind_of
from slurmft.core.run_files import (
    FINAL_STATES,
    RESULT_KEYS,
    UNKNOWN,
    Attempt,
    Environment,
    Failure,
    Job,
    RankCalls,
    Started,
    State,
    Submission,
    Transition,
    current_attempt,
)
from slurmft.core.text import shown
from slurmft.runs import origin

RUN_DIR = "SLURMFT_RUN_DIR"
"""Variable with the run directory, in every process that a job's program starts."""

RUN = re.compile(r"[^./][^/]*")
"""Names of run directories, which users may rename."""
CHECKPOINT = re.compile(r"step-\d+(-\w+)?")
"""Names of checkpoints: see `RunDir.checkpoint_names`."""
COLLECTED_WEIGHTS = ".weights"
"""Name, among the checkpoints, of the weights that a sharded run collects for its model."""
HALF_CHECKPOINT = re.compile(
    rf"\.(bad-)?step-[\w-]+{removal.ASIDE_ENDING}|{re.escape(COLLECTED_WEIGHTS)}"
)
"""Names of what is being written or removed among the checkpoints."""
BAD_CHECKPOINT = re.compile(r"bad-step-[\w-]+")
"""Names of damaged checkpoints, which were put aside."""


class _Below:
    """A path below that of a run. Made when it is asked for: paths are slow to make, runs many."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: "RunDir", owner: "type[RunDir]") -> Path:
        return run.path / self._name


CONFIG = trusted.Door(
    "the configuration of a run",
    "`RUN/config.json`",
    "`setup` lines, program and options of its job; which run is resumed, cancelled or pushed",
    cure="use a run of your own; slurmft status, logs and follow show those of others, too",
)
_UNREADABLE = (
    OSError,
    # It is no JSON, or no UTF-8, or nested too deeply.
    ValueError,
    # It is JSON of something else, or of a version with other options.
    LookupError,
    TypeError,
    UsageError,
)
"""The errors of reading a configuration."""


_of_process = contextlib.ExitStack()
"""Holds the run that this process belongs to."""


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
    ended = _Below("ended.json")
    claims = _Below("submissions")
    notifications = _Below("notifications")
    packages = _Below("packages.json")
    started = _Below("started.json")
    rendezvous = _Below("meeting.json")
    collectives = _Below("collectives.json")
    memory = _Below("memory.json")
    submitit = _Below("submitit")
    script = _Below("submitit/job.sh")
    code = _Below("code")
    code_sums = _Below("code.sums")
    code_diff = _Below("code.diff")

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode: int | None = None
        """Of the folder that `make` has made."""
        self._made_above: list[Path] = []
        """Folders above it that `make` has made, the nearest first."""

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
        parts = [config.name, time.strftime("%Y%m%d-%H%M%S")]
        if mark:
            parts.append(mark)
        start = "-".join(parts)
        top = Path(config.job.runs_dir)
        content = config.to_json()  # where that fails, no folder is left
        # The first letters of a request: `request.run_of` finds the run by them.
        random_part = config.submission.request[:6] or _random_part()
        run = cls(top / f"{start}-{random_part}")
        try:
            while not run.make(config):
                made_above = run._made_above
                run = cls(top / f"{start}-{_random_part()}")
                run._made_above = made_above
            try:
                # the job would refuse others' writing
                with run._held():
                    write_text(run.config, content)
                    run.set_state("submitted")
            except BaseException:
                run.discard()
                raise
        except OSError as error:
            raise run.unwritable(error) from None
        return run

    def unwritable(self, error: OSError) -> UsageError:
        """Returns the error for a run directory that cannot be made or written to."""
        hint = "give a folder that you can write, on a file system that the nodes see: --runs-dir"
        if isinstance(error, PermissionError):
            hint += (
                '; for several users, runs_dir = "/FOLDER/$USER/runs" in the site file'
            )
        disk = filesystem.why_not(error, self.path)
        if disk is not None:
            _, cure = disk
            hint = f"{cure}: --runs-dir"
        problem = filesystem.reason(error, self.path)
        return UsageError(
            f"cannot write the run directory {str(self.path)!r}: {problem}", hint
        )

    def make(self, config: RunConfig) -> bool:
        """Makes the folders of a new run; False where another has the name.

        Raises:
            OSError: they cannot be made; nothing is left of them.
        """
        share = config.job.share_with_group
        self._made_above += permissions.make_above(self.path)
        try:
            permissions.make_folder(self.path, share)
        except OSError as error:
            # Otherwise a folder above is a file.
            if isinstance(error, FileExistsError) and self.path.exists():
                return False
            self._discard_above()
            raise
        place = Path(os.path.realpath(self.path.parent), self.path.name)
        with Below(place) as new:
            new.check_new()
            self._inode = new.inode()
            permissions.settle(share)
            try:
                for folder in self._job_folders():
                    new.make_folder(folder.name)
            except OSError:
                self.discard()
                raise
        return True

    def make_folders(self) -> None:
        """Makes the folders that a job writes into, where they are missing: a run that was pulled
        has not all of them.

        Raises:
            OSError: one cannot be made.
        """
        for folder in self._job_folders():
            descent.through(folder).mkdir(exist_ok=True)

    def _job_folders(self) -> tuple[Path, ...]:
        return (self.logs, self.failures, self.submitit)

    def settle_permissions(self) -> None:
        """Lets those read who may read the run what this process writes from now on."""
        permissions.settle(self.load_config().job.share_with_group)

    @classmethod
    def open(cls, path: str | Path) -> "RunDir":
        """An existing run."""
        run = cls(descent.pinned(absolute(path)))
        if not run.exists():
            problem = f"it has no {run.config.name}"
            kind = other_kind(run.config)
            if kind is not None:
                problem = f"its {run.config.name} is {kind}"
            raise UsageError(f"{str(path)!r} is not a run directory: {problem}")
        return run

    def exists(self) -> bool:
        """Returns whether the folder holds a run."""
        try:
            return self.config.is_file()
        except PermissionError:
            raise UsageError(
                f"{str(self.path)!r} cannot be read: Permission denied",
                "its owner can open it",
            ) from None
        except OSError as error:
            # A name that no file system takes is no run's.
            if error.errno == errno.ENAMETOOLONG:
                return False
            raise

    @classmethod
    def of_job(cls, runs_dir: str, mark: str, where: str = "") -> "RunDir | None":
        """The newest run of this user that was created with its job's id as its mark; None: there
        is none. `where`: its Slurm cluster: another may have the same folder, and a job of that
        number."""
        runs = []
        # The name is a first choice: --name may hold digits, too. The job's record decides.
        for path in Path(runs_dir).glob(f"*-{mark}-*"):
            run = cls(path)
            job = run.read_job()
            if job is None or job.id != mark:
                continue
            is_of_cluster = not where or job.where in ("", where)
            if is_of_cluster and run.is_own():
                runs.append(run)
        # Ids come again: Slurm goes on at FirstJobId after MaxJobId.
        return max(runs, key=lambda run: run.job.stat().st_mtime, default=None)

    def load_config(self, read: Callable[[Path], bytes] = read_bytes) -> RunConfig:
        """Returns the configuration that the login node wrote."""
        try:
            # A `Door` reads whatever is there, however large it is.
            check_size(self.config)
            return RunConfig.from_json(read(self.config).decode("utf-8"))
        except _UNREADABLE as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: Exception) -> SlurmftError:
        reason = f"cannot read {str(self.config)!r}: {one_line(error)}"
        return SlurmftError(reason, self._hint_of_version())

    def read_submission(self) -> Submission:
        """Returns what a configuration of any version says of its submission. What is absent or
        damaged has the defaults."""
        config = read_json(self.config) or {}
        return decode_leniently(config.get("submission"), Submission)

    def _hint_of_version(self) -> str | None:
        """Returns what to do with a run of another version of slurmft; None for one of this."""
        version = self.read_submission().slurmft
        if version in ("", slurmft.__version__):
            return None
        return (
            f"slurmft {version} has submitted it, and this is {slurmft.__version__}: submit it "
            "anew; slurmft list, status and report read it"
        )

    def load_own_config(self, is_agreed: bool = False) -> RunConfig:
        """Returns the configuration for whoever acts on it: submits, executes, cancels, uploads.

        Args:
            is_agreed: the user agrees to what it executes without a record of that: a dry run.

        Raises:
            NotOwnError: the run is another user's, or others can write it.
            ForeignRunError: it came from elsewhere, and its user has not agreed to execute it.
        """
        if not is_agreed:
            origin.check(self.path)
        return self.load_config(CONFIG.read)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Holds the folder of the run for the block, for whoever acts on it: others may put another
        in the place of its name (`descent.held`).

        Raises:
            NotOwnError, ForeignRunError: as of `load_own_config`.
            OSError: it cannot be opened.
        """
        with self._held() as folder:
            os.close(CONFIG.open(self.config, folder))
            origin.check(self.path, descent.through(self.path))
            yield

    @contextlib.contextmanager
    def _held(self) -> Iterator[int]:
        with CONFIG.folder(self.path) as folder:
            if self._inode not in (None, os.fstat(folder).st_ino):
                reason = f"it was replaced meanwhile{descent.OR_INODE}"
                raise FileExistsError(errno.EEXIST, reason, str(self.path))
            with descent.held(self.path, folder):
                yield folder

    def join(self) -> RunConfig:
        """Returns the configuration for a process of the job, which holds the folder of the run
        from then on: where it writes is what it has examined. Raises as `load_own_config`."""
        try:
            _of_process.enter_context(self.held())
        except OSError as error:
            raise self._unreadable(error) from None
        return self.load_own_config()

    def is_own(self) -> bool:
        """Returns whether nobody else can have written the configuration, here or elsewhere."""
        try:
            origin.check(self.path)
            check_size(self.config)
            return bool(CONFIG.read(self.config))
        except (trusted.NotOwnError, origin.ForeignRunError, OSError):
            return False

    def discard(self) -> None:
        """Removes the run, and the folders above it that were made for it alone: its job never came
        to be. Another folder that has its name by now stays."""
        # The error that led here is the one to report.
        with contextlib.suppress(trusted.NotOwnError, OSError):
            inode = self._inode or self.inode_of_own()
            removal.remove(self.path, RUN, at_once=True, inode=inode)
        self._discard_above()

    def _discard_above(self) -> None:
        for folder in self._made_above:
            # Whoever has put something into it meanwhile keeps it.
            removal.discard_empty(folder)

    def inode_of_own(self) -> int:
        """Returns the inode of the folder, if it holds a configuration that nobody else can have
        written.

        Raises:
            NotOwnError, OSError: it does not.
        """
        with CONFIG.folder(self.path) as folder:
            os.close(CONFIG.open(self.config, folder))
            return os.fstat(folder).st_ino

    def ended_well(self, attempt: int, task: int) -> Path:
        """The mark of a task of Slurm's that has ended well, although a process of it may have been
        killed for its memory."""
        return (
            descent.through(self.submitit) / f"attempt_{attempt}_task_{task}_ended_well"
        )

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank:03d}.log"

    def stacks(self, rank: int) -> Path:
        """Returns the file with the stacks of the threads of a rank that hung."""
        return self.logs / f"stacks-rank-{rank:03d}.txt"

    def rank_calls(self, rank: int) -> Path:
        """Returns the file with the last collectives of a rank that hung, or lost another one."""
        return self.logs / f"collectives-rank-{rank:03d}.json"

    def all_rank_calls(self, attempt: int) -> list[RankCalls]:
        """Returns what the ranks of an attempt were doing at its end, in the order of the ranks."""
        found = []
        for path in sorted(self.logs.glob("collectives-rank-*.json"))[:MOST_FILES]:
            of_rank = read(path, RankCalls)
            if of_rank is not None and of_rank.attempt == attempt:
                found.append(of_rank)
        return sorted(found, key=lambda each: each.rank)

    def set_state(
        self,
        state: str,
        reason: str = "",
        exit_code: int | None = None,
        *,
        attempt: int | None = None,
        checkpoint: str | None = None,
        avoided: bool = False,
        in_allocation: bool = False,
        raised_mem_mib: int | None = None,
    ) -> Callable[[], None]:
        """Records what the run is doing, with the time; see `Transition` and `tell`.

        Plug-ins hear of an end or a requeue here, whoever records it: they notify the user. A
        final state is only left by submitting the run again, and "failed" by a job that starts
        all the same. One process writes at a time: the login node's until the job starts and after
        it ended, the head node's in between.

        Returns:
            A function that waits for the plug-ins. It need not be called where this process goes on
            living.

        Raises:
            OSError: "submitted" cannot be recorded.
        """
        last_recorded = self.get_state()
        history = last_recorded.history
        last = last_recorded.state
        is_started_again = last == "failed" and state == "running"
        goes_on = state == "submitted" or is_started_again
        # The job of a cancelled run may still end in its own way, and record that.
        if last in FINAL_STATES and not goes_on:
            return _nothing
        if exit_code is not None:
            exit_code = int(exit_code)
        transition = Transition(
            state=state,
            time=time.time(),
            reason=redact(reason),
            exit_code=exit_code,
            attempt=attempt,
            checkpoint=checkpoint,
            avoided=avoided,
            in_allocation=in_allocation,
            raised_mem_mib=raised_mem_mib,
        )
        # The last transition is at the top of the file, too: most readers want no more.
        facts = dataclasses.asdict(transition)
        recorded = State(**facts, history=[*history, transition])
        if state == "submitted":
            write_json(self.state, recorded)
        else:
            self.tell(self.state, recorded, f"{state}: {reason}")
        if state in (*FINAL_STATES, "requeued"):
            return hooks.state_changed(self)
        return _nothing

    def tell(self, path: Path, value: Any, words: str) -> None:
        """Writes a file that informs readers; where that fails, prints `words` to stderr instead.

        No full disk, and no folder that is gone or closed, keeps a job from a save, a requeue or
        its exit code.
        """
        try:
            write_json(path, value)
        # ValueError: no UTF-8, in the name of a file
        except (OSError, ValueError) as error:
            why = filesystem.reason(error, path)
            text = redact(words)
            with contextlib.suppress(OSError):  # stderr may be a file of the same disk
                line = f"slurmft: {path} cannot be written ({why}): {text}"
                print(line, file=sys.stderr, flush=True)

    def history(self) -> list[Transition]:
        """Returns all recorded states, oldest first."""
        return self.get_state().history

    def get_state(self) -> State:
        """Returns the last recorded state; "unknown" where the file is absent or damaged."""
        try:
            return load(self.state, State)
        except FileNotFoundError:
            reason = ""
        except (OSError, ValueError) as error:
            reason = unreadable(self.state.name, error)
        return State(state=UNKNOWN, time=0.0, reason=reason, history=[])

    def read_job(self) -> Job | None:
        """Returns the job that was submitted last; None before the run is submitted."""
        return read(self.job, Job)

    def job_id(self) -> str:
        """Returns the id of the job; "" where none was submitted, or started."""
        job = self.read_job()
        if job is not None:
            return job.id
        # the job knows its id where the submission was interrupted
        attempt = self.read_attempt()
        if attempt is None:
            return ""
        return attempt.job

    def read_result(self) -> dict[str, Any] | None:
        """Returns the result of a finished run."""
        result = read_json(self.result)
        # Readers take these keys for granted.
        if result is None or not result.keys() >= set(RESULT_KEYS):
            return None
        return result

    def read_environment(self) -> Environment:
        """Returns what the ranks ran on; nothing of it before they have met."""
        return read(self.environment, Environment) or Environment()

    # --- attempts: from the start of a job to its end or requeue ----------------------------------

    def attempt_number(self) -> int:
        """Returns how often the job of this run has started; 0: not yet."""
        attempt = self.read_attempt()
        if attempt is None:
            return 0
        return attempt.number

    def attempt_nodes(self, most: int, least: int | None) -> int:
        """Returns the number of nodes of the last attempt; before one has begun, the most.

        Args:
            most: --nodes.
            least: --min-nodes; None: the number does not change.
        """
        attempt = self.read_attempt()
        # Pods that join record no host.
        if attempt is None or least is None:
            return most
        return len(attempt.hosts)

    def read_attempt(self) -> Attempt | None:
        """Returns the last attempt that has begun."""
        return read(self.attempt, Attempt)

    def is_superseded(self, attempt: int) -> bool:
        """Returns whether a later attempt has begun: this one is on a node that Slurm gave up."""
        # 0: a process that was started by hand belongs to no attempt.
        return self.attempt_number() > attempt > 0

    def submissions(self) -> int:
        """Returns how often the run was submitted."""
        states = [transition.state for transition in self.history()]
        return states.count("submitted")

    def awaits_begin(self) -> bool:
        """Returns whether no attempt has begun since the run was last submitted."""
        submissions = self.submissions()
        attempt = self.read_attempt()
        if attempt is None:
            return submissions > 0
        return attempt.submission is not None and attempt.submission < submissions

    def meetings(self, attempt: int) -> int:
        """Returns how often the ranks of an attempt have met; 0 of all but the last."""
        started = read(self.started, Started)
        if started is None or started.attempt != attempt:
            return 0
        return started.meetings

    def world_size(self) -> int | None:
        """Returns how many ranks the last attempt had; None: it has not come so far."""
        started = read(self.started, Started)
        if started is None or started.attempt != self.attempt_number():
            return None
        return started.world_size

    def mark_started(self, meetings: int, world_size: int) -> None:
        """Records that the ranks have met, for so many times in this attempt: what failed before
        this is overcome."""
        started = Started(
            attempt=current_attempt(), meetings=meetings, world_size=world_size
        )
        self.tell(self.started, started, "the ranks have met")

    def checkpoint_names(self) -> list[str]:
        """The checkpoints, oldest first: step-00000120; with -e00000512, within the evaluation
        after that step; with -evaluated; with -t00000512, within that of the test split.

        Raises:
            OSError: the file system fails; there may be some.
        """
        try:  # later versions of Python hide from glob() that a file system fails
            names = os.listdir(descent.through(self.checkpoints))
        except (FileNotFoundError, PermissionError):
            return []
        return sorted(filter(CHECKPOINT.fullmatch, names))

    def first_began_at(self) -> float:
        """Returns when the first attempt began (Unix seconds, the head node's clock); now, where no
        start is recorded."""
        for transition in self.history():
            if transition.state == "running":
                return float(transition.time)
        return time.time()

    def newest_checkpoint(self) -> str | None:
        """Returns the name of the checkpoint that a resume starts from: of the run's own, or of
        those that a program writes into its --checkpoint-dir; None: nothing."""
        # the folder, or the whole run, is gone
        with contextlib.suppress(OSError, SlurmftError):
            checkpoint = kind_of(self.load_config().program).newest_checkpoint()
            if checkpoint is not None:
                return checkpoint
        names = self.checkpoint_names()
        if not names:
            return None
        return names[-1]

    # --- failures ---------------------------------------------------------------------------------

    def add(self, failure: Failure) -> Failure:
        """Records what went wrong in one process, without credentials; returns it as recorded. See
        `tell`."""
        texts: dict[str, Any] = {"message": redact(failure.message)}
        if failure.hint:
            texts["hint"] = redact(failure.hint)
        if failure.traceback:
            texts["traceback"] = redact(failure.traceback)
        failure = dataclasses.replace(failure, **texts)
        # The host is in it: `all_failures` chooses files by their names, without opening them.
        place = failure.where.replace(" ", "-")
        # A process may fail in several attempts, and its pid may come again: each has its own file.
        unique_part = f"{os.getpid()}-{time.time_ns()}"
        path = self.failures / f"{place}-{unique_part}.json"
        summary = f"{failure.where}: {failure.message}"
        self.tell(path, failure, summary)
        return failure

    def all_failures(self, names: str = "*") -> list[Failure]:
        """Returns every failure of the run, by attempts, and within them by the hosts' clocks.
        `names` chooses files: "*-on-n1-*" are those of one host's ranks."""
        failures: list[Failure] = []
        with contextlib.suppress(OSError):  # while a server restarts, none is known
            paths = self.failures.glob(f"{names}.json")
            # Of very many, the newest: their names end with the time.
            for path in heapq.nlargest(MOST_FILES, paths, key=_time_in_name):
                failure = read(path, Failure)
                if failure is not None:
                    failures.append(failure)
        return sorted(failures, key=lambda failure: (failure.attempt, failure.time))

    def failures_of(self, attempt: int, names: str = "*") -> list[Failure]:
        """Returns the failures that ended an attempt: first those that are not secondary.

        What happened to ranks before they last met was overcome. Clocks only tell which of several
        causes is named first: those of two hosts may differ by an hour.
        """
        failures = []
        for failure in self.all_failures(names):
            if failure.attempt == attempt:
                failures.append(failure)
        # `mark_started` may be late on a shared file system, or a full disk may not have taken it:
        # failures bear witness of a meeting, too.
        last_meeting = self.meetings(attempt)
        for each in failures:
            if each.meetings is not None:
                last_meeting = max(last_meeting, each.meetings)
        # Those that are not of ranks have seen none.
        meetings = (None, last_meeting)
        failures = [each for each in failures if each.meetings in meetings]
        # The sort is stable: those of one kind stay in the order of the clocks.
        return sorted(failures, key=lambda failure: failure.secondary)

    def root_failure(self, attempt: int = 0, names: str = "*") -> Failure | None:
        """Returns the failure that ended an attempt, or the last one: the first that is not
        secondary. `names` chooses files, where a thousand tasks ask.

        When one rank dies, its neighbours see their connections close; those failures are
        secondary.
        """
        number = attempt or self.attempt_number()
        if number and not attempt and self.awaits_begin():
            return None  # the job of a resume, whose attempt has not begun
        failures = self.failures_of(number, names)
        return next(iter(failures), None)

    def blamed_hosts(self, attempt: int) -> set[str]:
        """Returns the hosts that were to blame in an attempt."""
        blamed = set()
        for failure in self.all_failures():
            is_cause = failure.attempt == attempt and not failure.secondary
            if is_cause and failure.bad_host:
                blamed.add(failure.bad_host)
        return blamed

    def bad_hosts(self) -> list[str]:
        """Returns the hosts that were to blame in two attempts or more, or are bad for sure."""
        blamed: set[tuple[str, int]] = set()
        excluded: set[str] = set()
        for failure in self.all_failures():
            if failure.bad_host and not failure.secondary:
                blamed.add((failure.bad_host, failure.attempt))
                if failure.exclude:
                    excluded.add(failure.bad_host)
        # One attempt may fail on a good host. Its ranks count once, however many blame the host.
        hosts = [host for host, _ in blamed]
        attempts_by_host = Counter(hosts)
        bad = []
        for host, attempts in attempts_by_host.items():
            if attempts >= 2 or host in excluded:
                bad.append(host)
        return sorted(bad)


def _nothing() -> None:
    """Waits for no plug-in: none was started."""


def _time_in_name(path: Path) -> str:
    """Returns a text that sorts the files of failures by the times in their names: see `add`."""
    return path.stem.rpartition("-")[2]


def unreadable(name: str, error: OSError | ValueError) -> str:
    """Returns in words why a file of a run, which is there, tells nothing."""
    if isinstance(error, OSError):
        return f"{name} cannot be read: {one_line(error)}"
    # What does not fit may be long.
    return f"{name} is damaged: {shown(str(error))}"


def _random_part() -> str:
    """Returns the random part of a run's name; where two draw the same, the later draws again."""
    return os.urandom(3).hex()


def log_head(what: str, host: str) -> str:
    """Returns the first line of a process in its log, which later processes of the same rank
    continue."""
    attempt = current_attempt()
    return f"{what} on {host}, attempt {attempt}, pid {os.getpid()}"


_LOG_HEAD = re.compile(r"(?:rank|node) \d+ on (\S+), attempt (\d+), pid \d+")


def read_log_head(line: str) -> tuple[str, int] | None:
    """Host and attempt, from a line that `log_head` made; None for another line."""
    match = _LOG_HEAD.fullmatch(line)
    if match is None:
        return None
    host, attempt = match.groups()
    return host, int(attempt)
