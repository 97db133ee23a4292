"""`attach`, and `Job`: what a process of a job asks of it, and tells it.

    with slurmft.attach() as job:
        latest = job.latest_checkpoint()
        first = load(latest) + 1 if latest else 1
        for n in range(first, total + 1):
            loss = train_step()
            job.step(n, total=total, loss=loss)
            if job.should_stop() or job.checkpoint_due():
                with job.checkpoint(n) as folder:
                    if folder:  # on the main rank
                        save(folder, n)
            if job.should_stop():
                break
        else:
            job.result(accuracy=evaluate())

An exception that leaves the block is recorded as the failure of the run, and ends the process.
"""

import contextlib
import functools
import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from signal import Signals
from types import TracebackType
from typing import TYPE_CHECKING, Any

from slurmft import locks
from slurmft.core import hooks
from slurmft.core.files import to_json, write_json
from slurmft.core.program import OWN
from slurmft.core.run_files import current_attempt
from slurmft.core.run_records import phase_after, record_of
from slurmft.job import checkpoints, process
from slurmft.job.agreement import Boundary
from slurmft.job.checkpoints import Checkpoints
from slurmft.job.device_steps import DeviceSteps
from slurmft.node.heartbeat import Heart
from slurmft.node.profiles import BACKEND, bind_rank
from slurmft.node.rendezvous import HOSTS
from slurmft.node.signals import StopRequest
from slurmft.runs import frozen_code
from slurmft.runs.records import RecordWriter, StepWindows
from slurmft.runs.rundir import RUN_DIR, RunDir
from slurmft.show.progress import Progress

if TYPE_CHECKING:
    from slurmft.job.process_group import World

_LAST_WRITE_S = 30
"""How long a checkpoint that is being written delays the end of a rank that failed."""
_LAST_WRITE_AT_TERM_S = 4
"""How long it delays the end of a rank that torchrun ends: torchrun kills it after 5 s."""

_PHASES = ("train", "evaluate", "save")
"""Phases whose beginnings are recorded; those before the first step are not."""

_SPEED_EVERY_S = 2.0
"""The shortest window over which the speed is measured."""


def attach(run_dir: str | Path | None = None) -> "Job":
    """Attaches this process to its job: `with slurmft.attach() as job`.

    From then on stop signals are requests (`Job.should_stop`), output goes to the rank's log, and
    the process is bound to its cores. Call it once, before other imports where possible: a failure
    in them is recorded then. Outside of a job, the process stays as it is and the `Job` does
    nothing.

    Args:
        run_dir: the run directory; that of the job, if not given.
    """
    path = run_dir or os.environ.get(RUN_DIR)
    if path is None:
        _say_outside()
        return Job(None)
    # First of all: a signal that came earlier would end the process.
    stop = process.receive_signals()
    run = RunDir.open(path)
    rank = int(os.environ.get("RANK", "0"))
    heart = process.start_heartbeat(rank)
    try:
        # It names what is imported. Since the task of the node has looked, others may have put
        # another run in the place of this one: nothing is written there, either.
        config = run.join()
        frozen_code.check_owner(run, config)
        # Before the imports that follow in the program: what they print is in the log, too.
        if not sys.stdout.isatty():  # by hand, on a terminal, progress is wanted there
            process.redirect_output(run, rank)
        # A program of the user's own writes elsewhere, too, with the user's umask. Others cannot
        # enter a run directory that is not shared.
        if config.program.kind != OWN or config.job.share_with_group:
            run.settle_permissions()
        # Early: threads inherit the cores of the one that starts them.
        bind_rank(os.environ)
        job = Job(run, stop, heart)
        locks.install(config.job.file_locks)
    except Exception as error:
        meetings = run.meetings(current_attempt())
        code = process.record_failure(error, run, rank, 0, meetings)
        process.end(code)
    return job


@functools.cache  # once
def _say_outside() -> None:
    print("slurmft: not in a job: nothing is recorded or saved", file=sys.stderr)


def _text(path: Path | None) -> str | None:
    if path is None:
        return None
    return str(path)


class Job:
    """A job, as one of its processes sees it. All ranks make the same calls."""

    def __init__(
        self,
        run: RunDir | None,
        stop: StopRequest | None = None,
        heart: Heart | None = None,
    ) -> None:
        """See `attach`, which also prepares the process. Outside of a job there is no `run`."""
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.run_dir: Path | None = None
        if run is not None:
            self.run_dir = run.path
        self._run = run
        self._stop = stop or StopRequest()
        self._heart = heart or Heart(None)
        self._boundary = Boundary(self.world_size, self.join)
        self._world: World | None = None
        # Reentrant: a recorder's warning is recorded while its record holds the lock.
        self._lock = threading.RLock()
        self._step = 0
        """The last step that is done; by a device, queued."""
        self._device_steps = DeviceSteps()
        self._agreed_step = 0
        """The step after which the ranks agreed last."""
        self._has_requested = False
        """Whether this rank has sent its requests, and not read the answer."""
        self._has_agreed = False
        """Whether the ranks have agreed after this step."""
        self._save = False
        """What they agreed: whether to save a checkpoint."""
        self._steps_apart = 1
        """Steps between the last two agreements."""
        self._stopped_by = ""
        """The signal and the rank that stop the run; empty: it goes on."""
        self._speed = _Speed()
        self._has_result = False
        self._has_warned_of_lead = False
        self._phase = "train"
        """What the records say that the ranks do."""
        self._recorders: list[hooks.Recorder] = []
        if run is None:
            return
        process.memory_kills_before()
        self.config = run.load_own_config()
        self.nodes = self._nodes_of_attempt(run)
        self._meetings = run.meetings(current_attempt())
        """How often the ranks have met in this attempt, as this process knows it."""
        self.began_at = time.time()
        """When the job last began (Unix seconds, the head node's clock); now, if by hand."""
        for transition in run.history():
            if transition.state == "running":
                self.began_at = float(transition.time)
        if self.is_main:
            self._begin_records(run)
        if self.world_size == 1:  # `join`, which imports torch, is never called
            self._meet()

    def _nodes_of_attempt(self, run: RunDir) -> int:
        job = self.config.job
        # By the job itself, where it says it: a node may still read the file of the attempt before.
        if job.min_nodes is not None and HOSTS in os.environ:
            return len(os.environ[HOSTS].split(","))
        return run.attempt_nodes(job.nodes, job.min_nodes)

    def _begin_records(self, run: RunDir) -> None:
        """Prepares what the main rank alone writes."""
        job = self.config.job
        every_s = job.checkpoint_every_s
        self._checkpoints = Checkpoints(run, every_s, job.keep_checkpoints)
        self._stop.before_exit = lambda: self._checkpoints.wait(_LAST_WRITE_AT_TERM_S)
        self._records = RecordWriter(run.records)
        self._step_windows = StepWindows()
        self._progress = Progress()
        self._recorders = hooks.recorders(run)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def join(self) -> "World":
        """This process's place in the process group, which it joins at the first call.

        A group that the program has set up is used; else `--backend` sets one up.
        """
        if self._world is None:
            from slurmft.job import process_group

            assert self._run is not None
            # The task of the node may have measured which one is faster.
            backend = os.environ.get(BACKEND) or self.config.job.backend
            self._world = process_group.init(
                backend, lambda backend: self.alive("connect")
            )
            self.alive("start")
            # One process alone has met at its start.
            if self.world_size > 1:
                self._meet()
        return self._world

    def _meet(self) -> None:
        """Notes that the ranks have met."""
        assert self._run is not None
        self._meetings += 1
        if self.is_main:
            self._run.mark_started(self._meetings, self.world_size)
            self.record("met", attempt=current_attempt(), meetings=self._meetings)

    # --- between steps ----------------------------------------------------------------------------

    def begin_phase(self) -> None:
        """Says that another kind of step follows, such as evaluation, which may take longer."""
        self._boundary.begin_phase()

    def begin_step(self) -> None:
        """Sends this rank's requests to stop or save, beside the step that follows: `should_stop`
        and `checkpoint_due` need not wait then. Without it, they send them and wait."""
        self._has_agreed = False
        if self._run is None or self._stopped_by:
            return
        self._has_requested = True
        # The main rank alone knows what is due by time; the agreement tells the others.
        is_due = self.is_main and self._checkpoints.is_due()
        self._boundary.request(self._stop.stop_signal, is_due)

    def step(
        self,
        n: int,
        total: int | None = None,
        loss: float | None = None,
        samples: int | None = None,
        **numbers: float,
    ) -> None:
        """Reports that step `n` is done, by a heartbeat; and records it, where more is given.

        Args:
            n: the step, from 1.
            total: how many there will be.
            loss: of this step.
            samples: how many this step had, on all ranks.
        """
        # Steps before the first one were done by an earlier process.
        if not self._step:
            self._agreed_step = n - 1
        self._step = n
        self._has_agreed = False
        done = self._device_steps.last_done(n)
        # No sign of life where the device has not come to the end of any step since the last one.
        if done is not None:
            self._heart.beat(done, "train")
        self._record_phase("train")
        if total is None and loss is None and samples is None and not numbers:
            return
        fields: dict[str, Any] = {"step": n}
        for name, number in numbers.items():
            fields[name] = float(number)  # it may be a tensor
        if loss is not None:
            fields["loss"] = float(loss)
        if total is not None:
            fields["total_steps"] = total
        self.record("step", fields | self._speed.after_step(n, total, samples))

    def alive(self, phase: str) -> None:
        """Sends a heartbeat where no step is done.

        Args:
            phase: what follows: train, evaluate, or save, which may take longer.
        """
        self._has_agreed = False
        self._heart.beat(self._step, phase)
        self._record_phase(phase)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Says that the ranks save in the block, which may take longer than a step. Then they go on
        with what they did: a hang in the next step is found as soon as in any other."""
        before = self._heart.phase
        self.alive("save")
        yield
        # Not recorded: the record of a checkpoint ends a save.
        self._heart.beat(self._step, before)

    def _record_phase(self, phase: str) -> None:
        """Records that a phase begins, if it is another one: a step costs a comparison."""
        if phase != self._phase and phase in _PHASES:
            self._phase = phase
            self.record("phase", phase=phase)

    def should_stop(self) -> bool:
        """Returns whether to save and end, the same on every rank. All ranks ask after the same
        step, and have the same answer until the next one."""
        self._agree()
        return bool(self._stopped_by)

    def checkpoint_due(self) -> bool:
        """Returns whether to save a checkpoint, by `--checkpoint-every` and
        `--checkpoint-every-steps`; the same on every rank. All ranks ask after the same step."""
        self._agree()
        return self._save

    def _agree(self) -> None:
        """Reads what the ranks decide together, once a step."""
        if self._run is None or self._has_agreed or self._stopped_by:
            return
        if not self._has_requested:
            self.begin_step()
        decision = self._boundary.decide()
        self._has_requested = False
        self._has_agreed = True
        last_agreed_step = self._agreed_step
        self._agreed_step = self._step
        self._steps_apart = max(1, self._step - last_agreed_step)
        # Ranks count steps alike, so they need not agree on a checkpoint that steps make due.
        every = self.config.job.checkpoint_every_steps
        is_due_by_steps = False
        # A multiple of it was passed since: not every step has an agreement.
        if every:
            is_due_by_steps = self._step // every > last_agreed_step // every
        self._save = decision.save or is_due_by_steps
        if decision.signal:
            name = Signals(decision.signal).name
            self._stopped_by = f"{name} on rank {decision.rank}"
            self._heart.beat(self._step, "save")
            self.record("stopping", reason=self._stopped_by, step=self._step)

    # --- checkpoints ------------------------------------------------------------------------------

    def checkpoint(
        self, step: int, suffix: str = "", best: bool = False
    ) -> AbstractContextManager[Path | None]:
        """Opens a new checkpoint: `with job.checkpoint(n) as folder`.

        The main rank gets a folder to write into, which becomes visible whole at the end of the
        block, and is the newest then; older ones are removed (`--keep-checkpoints`). Other ranks
        get None, and do not wait. Any thread may write.

        Args:
            step: the step after which the state was this.
            suffix: of its name; sorts it among several of one step.
            best: keep it until a better one is written.

        Raises:
            OSError: at the end of the block: no room; checkpoints that are there stay.
        """
        if self._run is None or not self.is_main:
            return contextlib.nullcontext()
        # Here, not in the block: another thread may write it later.
        self._checkpoints.schedule()
        return self._write_checkpoint(step, suffix, best)

    @contextlib.contextmanager
    def _write_checkpoint(self, step: int, suffix: str, best: bool) -> Iterator[Path]:
        name = checkpoints.checkpoint_name(step, suffix)
        # The trainer records its checkpoints itself: they are written while it trains on.
        is_recorded = self.config.program.kind == OWN
        # A program that writes in another thread trains on, too.
        is_waited_for = threading.current_thread() is threading.main_thread()
        if is_recorded and is_waited_for:
            self._record_phase("save")
        with self._checkpoints.write(name, best) as folder:
            yield folder
        if is_recorded:
            self.record("checkpoint", checkpoint=name, step=step)
        if not self._stopped_by and not self._has_warned_of_lead:
            self._check_lead()

    def _check_lead(self) -> None:
        """Warns once where a stop's save may outlast the time between signal and kill."""
        # The step that is under way, and those until the ranks agree on the stop.
        steps = 1 + self._steps_apart
        lead_s = self.config.job.lead_s
        needed_s = self._checkpoints.seconds + steps * self._heart.slowest_s
        if needed_s > lead_s:
            self._has_warned_of_lead = True
            self.warn(
                f"a stop takes {needed_s:.1f} s ({steps} steps and a checkpoint), but the stop "
                f"signal comes {lead_s} s before the time limit: give --stop-lead-s "
                f"{math.ceil(2 * needed_s)}, and a --time of at least three times that"
            )

    def latest_checkpoint(self) -> Path | None:
        """Returns the newest checkpoint that is whole, the same on every rank; None: there is none.
        All ranks call it.

        Raises:
            SlurmftError: the file system cannot be read.
        """
        run = self._run
        if run is None:
            return None

        def find() -> Path | None:
            for line in checkpoints.remove_leftovers(run):
                self.warn(line)
            return checkpoints.newest(run, self.warn)

        # The main rank looks for all: file systems may show the others another newest one.
        path = None
        if self.world_size == 1:
            path = find()
        elif text := self.join().on_main(lambda: _text(find())):
            path = Path(text)
        if path is not None:
            _, step, *_ = path.name.split("-")  # see `checkpoint_name`
            self._step = int(step)
            self._agreed_step = self._step
        return path

    @property
    def best_checkpoint(self) -> Path | None:
        """The checkpoint that was written with `best`, if it is there; on the main rank."""
        assert self._run is not None
        name = self._checkpoints.best
        if not name:
            return None
        return self._run.checkpoints / name

    def keep_as_best(self, name: str | None) -> None:
        """Keeps a checkpoint of an earlier attempt as the best so far; on the main rank."""
        assert self._run is not None
        self._checkpoints.best = None
        if name in self._run.checkpoint_names():  # it may have been removed by hand
            self._checkpoints.best = name

    def remove_checkpoints(self, keep: int = 0) -> None:
        """Removes all checkpoints but the best one and the newest `keep`; on the main rank of a run
        that has finished, or needs their room for its end."""
        assert self._run is not None
        lines = checkpoints.remove_leftovers(self._run, bad=True)
        try:
            checkpoints.prune(self._run, keep, self._checkpoints.best)
        except OSError as error:  # they can be removed by hand
            lines.append(f"a checkpoint cannot be removed, and stays: {error}")
        for line in lines:
            self.warn(line)

    # --- records ----------------------------------------------------------------------------------

    def evaluated(
        self, facts: Mapping[str, Any] | None = None, /, **metrics: float
    ) -> None:
        """Records metrics of the state after this step, and what else is to be known; from the main
        rank."""
        record = {"step": self._step, "metrics": metrics}
        self.record("epoch", record | dict(facts or {}))

    def warn(self, text: str) -> None:
        """Records what the user should know, and what does not end the run; from the main rank."""
        self.record("warning", text=text)

    def record(self, event: str, *records: Mapping[str, Any], **fields: Any) -> None:
        """Appends an event to records.jsonl, or several in one write, and shows and tracks what is
        known; from the main rank. Any thread may call it."""
        if self._run is None or not self.is_main:
            return
        rows = []
        for record in records or (fields,):
            rows.append({"event": event, **record})
        with self._lock:  # a checkpoint may be written, and recorded, by another thread
            if event == "step":
                rows = self._step_windows.take(rows)
            else:  # the steps before it come first
                rows = [*self._step_windows.end(), *rows]
            self._phase = phase_after(self._phase, event)
            self._records.write(*rows)
            warnings: list[str] = []
            for row in rows:
                self._show(row)
                for recorder in self._recorders:
                    recorder.take(row)
                    warnings += recorder.messages()
            # Only now: a warning is a record, too, and goes through the same recorders.
            for text in warnings:
                self.warn(text)

    def _show(self, row: dict[str, Any]) -> None:
        # Of the steps only those that end a window are shown: the others need not be decoded.
        if row["event"] == "step" and "samples_per_s" not in row:
            return
        # As a follower reads it from the file, where numbers are those of JSON.
        record = record_of(json.loads(to_json(row)))
        if record is not None:
            self._progress.show(record)

    def say(self, text: str) -> None:
        """Prints a line into this rank's log, above a progress bar."""
        if self._run is None or not self.is_main:
            print(text, flush=True)
        else:
            self._progress.say(text)

    def result(
        self, facts: Mapping[str, Any] | None = None, /, **metrics: float
    ) -> dict[str, Any]:
        """Writes result.json, by which a run counts as finished; from the main rank.

        Args:
            facts: what else is to be known.
            metrics: the first of them is the primary one.

        Returns:
            The contents of the file.
        """
        result = {
            "metrics": metrics,
            "primary_metric": next(iter(metrics), None),
            "world_size": self.world_size,
            "steps": self._step,
            "phases_s": {},
        } | dict(facts or {})
        if self._run is not None and self.is_main:
            nodes = {"nodes": self.nodes}
            # the caller's facts count
            result = self._timing(self._run) | nodes | result
            write_json(self._run.result, result)
            self.record("result", result)
        self._has_result = True
        return result

    def _timing(self, run: RunDir) -> dict[str, Any]:
        """Returns what result.json says of the attempts of the run."""
        attempt = run.read_attempt()
        began_at = self.began_at
        # A training has the seconds of its last attempt, as its phases have.
        if self.config.program.kind == OWN:
            began_at = run.first_began_at()
        timing: dict[str, Any] = {"wall_s": time.time() - began_at, "attempts": 1}
        if attempt is None:  # by hand: no job has begun one
            return timing
        timing["attempts"] = attempt.number
        if attempt.changed:
            timing["changed_since_submission"] = attempt.changed
        return timing

    # --- the end ----------------------------------------------------------------------------------

    def __enter__(self) -> "Job":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends the job of this process: a failure is recorded, and ends the process."""
        if self._run is None:
            return
        # SystemExit and KeyboardInterrupt are no failures: they leave as a normal end does.
        is_end = isinstance(error, SystemExit | KeyboardInterrupt)
        # Not all others are of Exception: those of time limits and cancelled tasks are none.
        if error is not None and not is_end:
            code = process.record_failure(
                error, self._run, self.rank, self._step, self._meetings
            )
            if self.is_main:
                self._checkpoints.wait(_LAST_WRITE_S)
            self._close()
            process.end(code)
        if self._world is not None and self._world.owned:
            from slurmft.job import process_group

            process_group.leave()
        self._close()
        if self._stopped_by and not self._has_result:
            process.note_stopped()

    def _close(self) -> None:
        """Finishes the recorders."""
        for recorder in self._recorders:
            recorder.close()
            for text in recorder.messages():
                self.warn(text)


class _Speed:
    """Measures the speed of the steps, over windows of some seconds."""

    def __init__(self) -> None:
        self._began_at: float | None = None
        """When the window began (time.monotonic); None: no step is done."""
        self._first_step = 0
        self._samples = 0

    def after_step(
        self, n: int, total: int | None, samples: int | None
    ) -> dict[str, float]:
        """Returns samples_per_s and left_s where a window ends with step `n`; nothing elsewhere."""
        now = time.monotonic()
        if self._began_at is None:  # the first step warms up: it is in no window
            self._begin(now, n)
            return {}
        self._samples += samples or 0
        seconds = max(now - self._began_at, 1e-9)
        steps = n - self._first_step
        if steps <= 0 or (seconds < _SPEED_EVERY_S and n != total):
            return {}
        speed = {}
        if samples is not None:
            speed["samples_per_s"] = self._samples / seconds
        if total is not None:
            speed["left_s"] = (total - n) * seconds / steps
        self._begin(now, n)
        return speed

    def _begin(self, now: float, n: int) -> None:
        self._began_at = now
        self._first_step = n
        self._samples = 0
