"""The watchdog of a node: finds ranks that hang, and records their stacks.

It runs in the node's task, outside of the ranks: a process that is stopped or stuck in the kernel
cannot watch itself.
"""

import contextlib
import math
import os
import re
import signal
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from slurmft.core import ownership, process, removal
from slurmft.core.decode import read
from slurmft.core.files import open_to_append, write_json
from slurmft.core.run_files import ENDED, Calls, RankCalls, current_attempt
from slurmft.core.text import duration
from slurmft.core.trusted import temporary_place
from slurmft.node import ccl, flight_recorder, heartbeat, rank_calls
from slurmft.node.hardware import host_name
from slurmft.node.rank_calls import SilentRanks
from slurmft.runs.rundir import RunDir

# States of a process that got SIGSTOP, or that is being debugged.
_STOPPED = ("T", "t")
_OVER = ("Z", "gone")
"""States of a process that has ended."""

# How long ranks have to write their stacks, here and on other nodes.
_DUMP_S = 5.0
# How much longer they have, on a busy node, to write their collectives.
_ANSWERS_S = 5.0
# How long what the ranks have told of a hang holds, if no rank has moved: the end of the job takes
# some time.
_DUMP_HOLDS_S = 60
# A watchdog that did not check for so long was itself stopped.
_ASLEEP_S = 10

# A rank may take this many times its longest pause between beats. This holds where a rank may do
# other things than steps: an evaluation, a program of the user's.
_SLOW_BEATS = 20
# In training, a rank may take this many times the slowest of its last steps.
_SLOW_STEPS = 10
# In training, a rank may take so long at least.
_LEAST_S = 60
# In training, a rank may take this many times its slowest step, even beyond the timeout.
_SLOWER_STEPS = 3

# In a job that no hang ends, ranks may wait so long in a collective before it is told. By default
# NCCL gives up after 600 s, gloo after 1,800.
_TOLD_AFTER_S = 300

_PY_SPY_S = 20

_FOLDER = re.compile(r"slurmft-\d+-\d+-\w+")
"""Names of the folders of tasks: slurmft-NAMESPACE-PID-RANDOM."""


@dataclass(frozen=True, slots=True)
class Hang:
    """Ranks of a node that make no progress."""

    rank: int
    """The cause, as far as this node knows: the rank that is stopped, or furthest behind."""
    description: str
    certain: bool
    """True if the rank is stopped, so that no other node is the cause."""
    seconds: float
    """Since its last heartbeat."""


class Watchdog:
    """Watches the ranks of one node by their heartbeats."""

    def __init__(self, timeout_s: float, knows_steps: bool = False) -> None:
        """
        Args:
            timeout_s: how long a rank may take at most; 0 for any time: then it is only told that
                ranks wait.
            knows_steps: ranks report whatever they do besides steps, so that a step can have a
                limit of its own. A program of the user's may evaluate without a word.
        """
        self._is_patient = timeout_s == 0
        self._timeout_s = timeout_s or _TOLD_AFTER_S
        self._knows_steps = knows_steps
        self._dumped_at = -math.inf
        self._dumped_beats: dict[int, float] = {}
        """Rank -> time of its last beat, when the stacks were written."""
        self._checked_at = time.monotonic()
        self._awake_since = self._checked_at
        # In memory: heartbeats must not wait for a file system that hangs.
        place = Path("/dev/shm")
        # A container may have no such folder, or one that is closed to this user.
        if not os.access(place, os.W_OK):
            place = temporary_place()
        remove_stale(place)
        prefix = f"{_prefix()}{os.getpid()}-"
        self.folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
        self._silent = SilentRanks(self.folder)
        self._told_waits: dict[int, float] = {}
        """Rank -> since when it waits, as it was told."""

    def check(self) -> Hang | None:
        """Looks for ranks that hang. None: all make progress, or none is to be ended."""
        self._note_sleep()
        if self._is_patient:
            return None
        late = self._late_ranks()
        if not late:
            return None
        # Of ranks that wait for each other, the first without a beat is the one they wait for.
        stopped = []
        for rank in late:
            if process_state(self._pid(rank)) in _STOPPED:
                stopped.append(rank)
        suspects = stopped or list(late)
        rank = min(suspects, key=lambda rank: (late[rank].step, late[rank].time))
        beat = late[rank]
        seconds = time.monotonic() - beat.time
        description = f"no output for {duration(seconds)}"
        if beat.phase not in heartbeat.WITHOUT_STEPS:
            description = f"no step for {duration(seconds)}"
            description += f" ({beat.phase}, after step {beat.step})"
        if stopped:
            description += "; the process is stopped (SIGSTOP?)"
        return Hang(rank, description, certain=bool(stopped), seconds=seconds)

    def has_new_wait(self) -> bool:
        """Looks, in a job that no hang ends, for ranks that wait long in a collective; returns True
        once for each. No signal is sent: the program may use it for something else."""
        self._note_sleep()
        if not self._is_patient:
            return False
        is_new = False
        for rank in self._late_ranks():
            since = self._silent.sign(rank, self._timeout_s).waits_since
            is_long = time.monotonic() - since > self._timeout_s
            # The same wait, told twice, begins at the same time but for rounding.
            before = self._told_waits.get(rank, -math.inf)
            if is_long and since - before > 1:
                self._told_waits[rank] = since
                is_new = True
        return is_new

    def _note_sleep(self) -> None:
        now = time.monotonic()
        if now - self._checked_at > _ASLEEP_S:  # the whole job was suspended
            self._awake_since = now
        self._checked_at = now

    def _late_ranks(self) -> dict[int, heartbeat.Beat]:
        late: dict[int, heartbeat.Beat] = {}
        for rank in self.ranks():
            beat = heartbeat.read(self.folder / f"beat-{rank}")
            if not beat or not self._is_late(rank, beat):
                continue
            # Others may go on for as long as they like.
            if not heartbeat.has_ended_well(self.folder, rank):
                late[rank] = beat
        return late

    def dump(self, run: RunDir) -> None:
        """Writes the stacks of this node's ranks into the run directory, once for each hang."""
        if self._has_dumped():
            return
        self._dumped_beats = self._beats()
        starts = self._ask_for_stacks()
        self.keep_present_calls(run)
        for rank in self.ranks():
            text = self._stack_text(rank, starts.get(rank, 0))
            with (
                contextlib.suppress(OSError),
                open_to_append(run.stacks(rank)) as file,
            ):
                file.write(text.encode(errors="surrogateescape"))
        # This process was at work meanwhile, and not asleep.
        self._checked_at = self._dumped_at = time.monotonic()

    def _ask_for_stacks(self) -> dict[int, int]:
        """Asks the ranks for their stacks; returns where these begin in their files, in bytes."""
        starts = {}
        for rank in self.ranks():
            pid = self._pid(rank)
            stacks = self._stacks(rank)
            # 0 would be the process group of this task.
            if pid and stacks.exists():
                starts[rank] = stacks.stat().st_size
                with contextlib.suppress(ProcessLookupError):
                    # faulthandler writes them, without the GIL
                    os.kill(pid, signal.SIGUSR1)
        return starts

    def _has_dumped(self) -> bool:
        """Returns whether the stacks of the present hang are written. Ranks that were taken for
        hung, and then moved, may hang later."""
        holds = time.monotonic() - self._dumped_at < _DUMP_HOLDS_S
        return holds and self._dumped_beats == self._beats()

    def _beats(self) -> dict[int, float]:
        beats = {}
        for rank in self.ranks():
            beat = heartbeat.read(self.folder / f"beat-{rank}")
            if beat:
                beats[rank] = beat.time
        return beats

    def _await_answers(self) -> None:
        """Asks the ranks for their collectives, and waits for these and for the stacks."""
        answers = []
        for rank in self.ranks():
            answer = rank_calls.ask(self.folder, rank)
            is_stopped = process_state(self._pid(rank)) in _STOPPED
            if answer is not None and not is_stopped:
                answers.append(answer)
        time.sleep(_DUMP_S)
        rank_calls.await_answers(answers, _ANSWERS_S)

    def keep_present_calls(self, run: RunDir) -> None:
        """Asks the ranks of this node for their collectives, and writes these into the run
        directory."""
        self._await_answers()
        keep_calls(self.folder, run)
        self._checked_at = time.monotonic()

    def keep_last_calls(self, run: RunDir) -> None:
        """Writes the last collectives of ranks that have ended into the run directory. After a hang
        those of that moment stay: ranks lose others then because these are killed."""
        if not self._has_dumped():
            keep_calls(self.folder, run)

    def _stack_text(self, rank: int, start: int) -> str:
        """Reads the stacks that a rank has written, from a byte of its file on; where it wrote
        none, asks others for them."""
        pid = self._pid(rank)
        host = os.uname().nodename
        state = process_state(pid)
        text = f"--- {time.ctime()}: rank {rank} on {host}, pid {pid}, state {state}\n"
        stacks = ""
        # no Python, or one without our shim
        with contextlib.suppress(FileNotFoundError):
            written = self._stacks(rank).read_bytes()[start:]
            stacks = written.decode(errors="replace")
        if stacks:
            return text + stacks
        # if installed
        py_spy = process.output(["py-spy", "dump", "--pid", str(pid)], _PY_SPY_S)
        return f"{text}{py_spy or kernel_view(pid)}\n"

    def close(self) -> None:
        _remove(self.folder)

    def ranks(self) -> list[int]:
        """Lists the ranks of this node that have started, by number."""
        return heartbeat.ranks(self.folder)

    def _stacks(self, rank: int) -> Path:
        return self.folder / f"stacks-{rank}"

    def _pid(self, rank: int) -> int:
        return _last_process(self.folder, rank)

    def _is_late(self, rank: int, beat: heartbeat.Beat) -> bool:
        limit_s = self._limit_s(rank, beat)
        last_sign = max(beat.time, self._awake_since)
        now = time.monotonic()
        if now - last_sign <= limit_s:
            return False
        # Ranks that report each step have a limit of their own for what has collectives, too. One
        # that is stopped cannot answer.
        if self._knows_steps and not self._is_patient:
            return True
        if process_state(self._pid(rank)) in _STOPPED:
            return True
        sign = self._silent.sign(rank, limit_s)
        if sign.answer is not None:
            return False
        # No sign of any kind yet: it still starts.
        if beat.phase == heartbeat.SILENT and sign.called_at == -math.inf:
            return now - last_sign > limit_s * heartbeat.START_PATIENCE
        return now - sign.called_at > limit_s

    def _limit_s(self, rank: int, beat: heartbeat.Beat) -> float:
        """Returns how long a rank may take from this beat to the next."""
        # The last beat of a process says nothing about the start of the next one.
        if process_state(self._pid(rank)) in _OVER:
            return self._timeout_s * heartbeat.START_PATIENCE
        step_s = beat.slowest_step_s
        if self._knows_steps and step_s:
            limit_s = min(max(_SLOW_STEPS * step_s, _LEAST_S), self._timeout_s)
            return max(limit_s, _SLOWER_STEPS * step_s)
        limit_s = self._timeout_s
        # A rank that runs may wait for others. A stopped one does not.
        if process_state(self._pid(rank)) not in _STOPPED:
            limit_s = max(limit_s, _SLOW_BEATS * beat.slowest_s)
        return limit_s * beat.patience


def keep_calls(folder: Path, run: RunDir) -> None:
    """Writes what the ranks of a node have told of their collectives into the run directory.

    Args:
        folder: that of the node's watchdog.
    """
    for rank in heartbeat.ranks(folder):
        beat = heartbeat.read(folder / f"beat-{rank}")
        if beat is None:
            continue
        answer = Path(flight_recorder.answer_file(str(folder), rank))
        state = RankCalls(
            rank=rank,
            host=host_name(),
            attempt=current_attempt(),
            process=rank_state(folder, rank),
            step=beat.step,
            phase=beat.phase,
            calls=read(answer, Calls),
        )
        # A full disk does not keep a node from its end.
        with contextlib.suppress(OSError):
            write_json(run.rank_calls(rank), state)


def rank_state(folder: Path, rank: int) -> str:
    """Returns the kernel's letter for a rank's last process, or `ENDED`."""
    if heartbeat.has_ended_well(folder, rank):
        return ENDED
    return process_state(_last_process(folder, rank))


def _last_process(folder: Path, rank: int) -> int:
    pids = heartbeat.processes(folder, rank)
    if not pids:  # for a moment, while the rank writes it
        return 0
    return pids[-1]


def _prefix() -> str:
    """Begins the names of folders whose process ids mean something here.

    Containers with process ids of their own may share /dev/shm, so the namespace is in it.
    """
    return f"slurmft-{os.stat('/proc/self/ns/pid').st_ino}-"


def remove_stale(place: Path) -> None:
    """Removes the folders of this user's tasks that were killed: they occupy memory."""
    own_names = re.compile(re.escape(_prefix()) + ".*")
    for folder in removal.matching(place, own_names):
        task, _, _ = folder.name.removeprefix(_prefix()).partition("-")
        has_ended = task.isdigit() and process_state(int(task)) == "gone"
        if has_ended and _is_own(folder):
            _remove(folder)


def _is_own(path: Path) -> bool:
    """Returns whether a path is a folder of this user's.

    Everybody may make one of any name in /dev/shm. Its files would be believed, and one of them may
    be a FIFO, whose reader waits for ever.
    """
    try:
        status = ownership.status(path, follow_symlinks=False)
    except OSError:  # another task has removed it
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def _remove(folder: Path) -> None:
    """Removes the folder of a task, and the memory that its ranks have left behind."""
    # A task of the same user may remove it at the same time.
    with contextlib.suppress(OSError, ValueError):
        if (folder / ccl.MARK).exists():
            pids = []
            for rank in heartbeat.ranks(folder):
                pids += heartbeat.processes(folder, rank)
            ccl.remove_shared_memory(pids, folder.parent)
    removal.discard(folder, _FOLDER)


def process_state(pid: int) -> str:
    """Returns the kernel's letter for a process: R, S, D, T, Z; "gone" if there is none."""
    fields = process.stat(pid)
    if fields is None:
        return "gone"
    return fields[0]


def kernel_view(pid: int) -> str:
    """Describes where a process is, as the kernel sees it: it could not write its stacks."""
    lines = ["the process did not respond; the kernel reports:"]
    for name in ("wchan", "stack", "status"):
        text = process.kernel_text(pid, name)
        if text is not None:
            lines.append(f"{name}: {text.strip()}")
    return "\n".join(lines)
