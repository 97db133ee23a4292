"""Sends a run's numbers to trackers, such as TensorBoard and Weights & Biases.

They get copies of what `records.jsonl` has. Each tracker works in a thread of its own: one that
raises, or hangs, costs a warning, never the run or a step of it.
"""

import contextlib
import importlib.util
import math
import queue
import shlex
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from slurmft.core import interpreter
from slurmft.core.config import JobConfig
from slurmft.core.decode import read
from slurmft.core.errors import UsageError
from slurmft.core.files import write_json
from slurmft.plugins.trackers import adapters
from slurmft.plugins.trackers.adapters import Target
from slurmft.plugins.trackers.options import TrackerOptions
from slurmft.runs.rundir import RunDir

_START_S = 60
"""How long a tracker may take to start before the run continues without it."""
_MOST_WAITING = 1000
"""Logs that may wait for a tracker; more are dropped."""
CLOSE_S = 20
"""How long the rank waits for its trackers to finish."""

_Log = tuple[dict[str, float], int]
"""Numbers, and the step that they are of."""

# Of steps, what is worth a curve; the others are in records.jsonl.
_TRAIN_NUMBERS = ("loss", "learning_rate", "samples_per_s", "epoch")


def check(job: JobConfig) -> None:
    """Checks that the packages of all trackers are installed.

    A container may have its own; nothing is checked for one.

    Raises:
        UsageError: a package is missing.
    """
    if job.container is not None:
        return
    for name in job.options_of(TrackerOptions).names:
        if importlib.util.find_spec(name) is None:
            raise UsageError(
                f"--log-with {name}: the Python package {name} is not installed in {sys.prefix}",
                f"{shlex.quote(interpreter.PYTHON)} -m pip install {name}",
            )


def next_commands(run: RunDir) -> list[str]:
    """Returns the commands that show or upload what the trackers of a run have."""
    job = run.load_config().job
    target = Target(run.path.name, job.project, run.tracking)
    names = job.options_of(TrackerOptions).names
    commands = []
    for name in names:
        command = adapters.shell_command(name, target)
        if command is not None:
            commands.append(command)
    return commands


class Tracking:
    """All trackers of a run, on its main rank."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._names = run.load_config().job.options_of(TrackerOptions).names
        self._trackers: list[_TrackerThread] = []
        self._facts: dict[str, Any] = {}
        self._step = 0

    def take(self, record: dict[str, Any]) -> None:
        """Hands a record of the run on.

        The trackers start with the first record that they can use: by then it is known where the
        run resumes.
        """
        match record["event"]:
            case "start":
                self._facts = dict(record)
                # Of the record itself, not of the run.
                for key in ("event", "time"):
                    self._facts.pop(key, None)
            case "resume":
                self._step = record["step"]
            case "step" if "samples_per_s" in record:
                values = {}
                for key in _TRAIN_NUMBERS:
                    if key in record:
                        values[f"train/{key}"] = record[key]
                self._log(values, record["step"])
            case "epoch":
                values = {}
                for key, value in record["metrics"].items():
                    values[f"eval/{key}"] = value
                self._log(values, self._step)

    def _log(self, values: dict[str, float], step: int) -> None:
        # Not before: imports of trackers take seconds, and `take` must not wait.
        if not self._trackers:
            for name in self._names:
                tracker = _TrackerThread(name, self._run, self._facts, self._step)
                self._trackers.append(tracker)
        self._step = step
        for tracker in self._trackers:
            tracker.put((values, step))

    def messages(self) -> Iterator[str]:
        """Yields the warnings since the last call."""
        for tracker in self._trackers:
            while tracker.messages:
                yield tracker.messages.pop(0)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Lets the trackers write the rest, for so long; no process of theirs stays."""
        deadline = time.monotonic() + timeout_s
        # All are told before one is waited for: they finish side by side.
        for tracker in self._trackers:
            tracker.put(None)
        for tracker in self._trackers:
            tracker.join(max(0.0, deadline - time.monotonic()))
            if tracker.is_alive():
                tracker.give_up("does not finish")


class _TrackerThread(threading.Thread):
    """One tracker, and the logs that wait for it."""

    def __init__(
        self,
        name: str,
        run: RunDir,
        facts: dict[str, Any],
        after_step: int,
    ) -> None:
        # Daemon: one that hangs does not keep the rank from ending.
        super().__init__(name=name, daemon=True)
        self.messages: list[str] = []
        self._run = run
        self._facts = facts
        self._after_step = after_step
        self._queue: queue.Queue[_Log | None] = queue.Queue(_MOST_WAITING)
        # Checked by `put`, in the rank's thread: this one may hang in an import.
        self._start_by = time.monotonic() + _START_S
        self._is_given_up = False
        self.start()

    def put(self, values: _Log | None) -> None:
        """Queues values and their step to be logged; None lets the tracker finish."""
        if time.monotonic() > self._start_by:
            self.give_up(f"does not start within {_START_S} s")
        # A tracker that is too slow for the run loses some logs: a step must not wait for it.
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(values)

    def give_up(self, reason: str) -> None:
        """Notes a warning, once: the run continues without this tracker."""
        if not self._is_given_up:
            consequence = "the run continues without it"
            self.messages.append(f"--log-with {self.name}: it {reason}; {consequence}")
        self._is_given_up = True

    def run(self) -> None:
        try:
            tracker = self._create()
            self._start_by = math.inf  # it has started
            while True:
                item = self._queue.get()
                if item is None:
                    break
                values, step = item
                tracker.log(values, step=step)
            # Writes what the library has not written yet, or sends it.
            tracker.finish()
            if self.name == "wandb":
                sys.modules["wandb"].teardown()  # its service process
        # trackers end programs, too: wandb by SystemExit
        except BaseException as error:
            message = str(error).strip().partition("\n")[0]
            self.give_up(f"failed ({type(error).__name__}: {message})")

    def _create(self) -> Any:
        """Starts the tracker; for a run that resumes, with the data that it already has."""
        config = self._run.load_config()
        self._run.tracking.mkdir(exist_ok=True)
        # An earlier attempt has written its id: the tracker goes on with the same run of its own.
        id_file = self._run.tracking / f"{self.name}.json"
        record = read(id_file, dict[str, str]) or {}
        run_id = record.get("id")
        target = Target(
            title=self._run.path.name,
            project=config.job.project,
            folder=self._run.tracking,
            run_id=run_id,
            after_step=self._after_step,
        )
        tracker = adapters.create(self.name, target)
        if run_id is None:
            settings = config.program.settings | self._facts
            tracker.store_init_configuration(_plain(settings))
        write_json(id_file, {"id": adapters.run_id_of(self.name, tracker)})
        return tracker


def _plain(settings: dict[str, Any]) -> dict[str, int | float | str]:
    """Returns settings with values that all trackers take, without those that are None."""
    plain: dict[str, int | float | str] = {}
    for name, value in settings.items():
        if isinstance(value, (int, float, str)):
            plain[name] = value
        elif value is not None:
            plain[name] = str(value)
    return plain
