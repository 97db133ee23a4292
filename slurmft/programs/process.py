"""One process of a user's own program: `python -m slurmft.programs.process RUN_DIR`, which torchrun
or the node's task starts as a rank.

It starts the program and stays beside it: passes a stop on as the signal that the program expects,
stamps its output, and reads its end. A program that attaches (`slurmft.attach`) does the first two
itself.
"""

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import IO, NoReturn

from slurmft.core import process
from slurmft.core.config import JobConfig
from slurmft.core.credentials import redact
from slurmft.core.errors import Exit, SlurmftError, UsageError
from slurmft.core.run_files import Failure, current_attempt
from slurmft.job.process import (
    ask_for_no_restart,
    end,
    failed_so_before,
    node_folder,
    note_stopped,
    record_failure,
    redirect_output,
)
from slurmft.node import (
    heartbeat,
    memory_kills,
    rank_calls,
    rank_deaths,
    sealed,
    signals,
)
from slurmft.node.hardware import host_name
from slurmft.node.heartbeat import OUTPUT, SILENT, WITHOUT_STEPS, Heart
from slurmft.node.memory_kills import MemoryKills, killed
from slurmft.node.peers import says_lost_peer
from slurmft.node.profiles import bind_rank
from slurmft.programs import node_environment
from slurmft.programs.description import OwnProgram, in_words, signal_of
from slurmft.programs.process_group import LOOK_EVERY_S, GroupWatch
from slurmft.programs.start_point import StartPoint
from slurmft.runs import frozen_code, log_times
from slurmft.runs.records import warn
from slurmft.runs.rundir import RunDir

_LAST_LINES = 400
"""Lines of its output that are searched for a traceback."""
_CHUNK_BYTES = 1 << 16
_BAR_EVERY_S = 10
"""How often a progress bar is in the log."""
_END_S = 4
"""How long the program has to end when another rank has failed: torchrun kills after 5 s."""
_LONGEST_LOADING_S = 600
"""A program that fails later has loaded its checkpoint."""
_LOADING = re.compile(
    r"(\b|_)load(?!er|_dataset|_metric)|serialization|safetensors|resum|restor|"
    r"from_checkpoint|pickle|corrupt|truncat|unexpected end|EOFError|zipfile|zip archive",
    re.IGNORECASE,
)
"""What a program prints that fails while it loads a checkpoint, not data; nor zip()."""
_FRAMES_OF_LOADING = 4
"""Frames of a traceback, from the last one on, in which `_LOADING` is searched for."""
_LINES_OF_LOADING = 20
"""Lines of output without a traceback in which it is searched for."""
_CALLS_S = 2.0
"""How long a program may take to write its collectives."""
_SIGNAL_LAG_S = 1.0
"""How much later than its program a process may hear of a signal to both."""


class OwnProcess:
    """The program as a child of this process."""

    def __init__(
        self, run: RunDir, program: OwnProgram, rank: int, job: JobConfig
    ) -> None:
        self._run = run
        self._program = program
        self._rank = rank
        self._child: subprocess.Popen[bytes] | None = None
        self._stop = int(os.environ.get(signals.STOPPING, "0"))
        """The stop signal that came; 0: none."""
        # A stop may come, in a thread, while the program is being started.
        self._lock = threading.Lock()
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self._memory_kills = MemoryKills.now()
        """The kernel's counters before the program runs."""
        self._heart = Heart(None)
        self._heartbeat_file: Path | None = None
        self._began_at = math.inf
        """When the program was started."""
        self._start_point: str | None = None
        """The checkpoint that the program starts from, in words; None: its beginning."""
        self._memory_failures = 0
        """How often memory ran out before this start."""
        self._adapts = False
        """Whether its command line is another one when memory runs out once more."""
        self._group: GroupWatch | None = None
        """Watches the process group of the ranks until it has formed, or was reported missing."""
        self._strict = job.strict
        # What it writes outside of the run directory is the user's. -1: as this process's.
        self._umask = -1
        if program.umask is not None and not job.share_with_group:
            self._umask = program.umask
            # A checkpoint that others may write is not resumed from.
            if program.checkpoint_dir is not None and program.resume_args is not None:
                self._umask |= 0o022
        self._problem: SlurmftError | None = None
        """Why --strict ends the program."""

    def run(self) -> int:
        """Runs the program to its end; returns the exit code of this process."""
        signals.listen(self._on_signal)
        # Signals are heeded by now: a stop is not lost while a slow file system is searched.
        start_point = StartPoint(
            self._run, self._program, self._rank, lambda: bool(self._stop)
        )
        checkpoint = start_point.choose()
        if checkpoint is not None:
            self._start_point = in_words(checkpoint)
        self._memory_failures = start_point.memory_failures
        command = self._program.arguments(checkpoint, self._memory_failures)
        self._adapts = command != self._program.arguments(
            checkpoint, self._memory_failures + 1
        )
        with self._lock:
            # A stop that came before the program began: nothing is lost.
            if self._stop:
                note_stopped()
                return Exit.OK
            self._child = self._start(command)
            self._began_at = time.monotonic()
        assert self._child.stdout is not None
        log = log_times.StampedLog(1)
        # A thread of its own reads: a full pipe would block the program, for which this one waits.
        reader = threading.Thread(
            target=self._read, args=(self._child.stdout, log), daemon=True
        )
        reader.start()
        self._watch_group()
        code = self._child.wait()
        self._kill_leftovers()
        # a process that left its session may hold the pipe open for ever
        reader.join(1)
        return self._ended(code)

    def _kill_leftovers(self) -> None:
        """Kills the processes that the program has left behind, as Slurm does at the end of a
        step."""
        assert self._child is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        command, environment = node_environment.command_in(
            self._program, command, os.environ
        )
        # Into a pipe, Python writes whole blocks: a program that prints little would look hung.
        environment["PYTHONUNBUFFERED"] = "1"
        environment[memory_kills.FAILURES] = str(self._memory_failures)
        if self._adapts:
            environment[memory_kills.TAKES_LESS] = "1"
        if self._program.open_rendezvous:
            environment.pop(sealed.SECRET, None)
        if self._program.code:
            # In front: the frozen code is imported before what is installed.
            paths = [self._program.code, environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        folder = node_folder()
        if folder is not None:
            self._heartbeat_file = folder / f"beat-{self._rank}"
            environment[heartbeat.STACKS] = str(folder / f"stacks-{self._rank}")
        child = self._start_process(command, environment)
        if folder is not None:
            self._heart = Heart(self._heartbeat_file, SILENT)
            # For the node's watchdog, which looks at the program and not at this process.
            heartbeat.note_process(folder, self._rank, child.pid)
        return child

    def _start_process(
        self, command: list[str], environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        try:
            return process.start(
                command,
                cwd=self._program.folder,
                env=environment,
                # A program that asks a question fails at once, and does not wait for an answer.
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                # A process group of its own, which `_kill_leftovers` kills as a whole.
                start_new_session=True,
                umask=self._umask,
                # This process blocks the stop signals, and children inherit that.
                unblocked=signals.STOP,
                # Where Slurm does not track processes by cgroups, a time limit sends SIGUSR2 to all
                # of a step: the program would be dead before its stop signal comes.
                ignored={signals.RELAYED} - {signal_of(self._program.stop_signal)},
            )
        except OSError as error:
            raise UsageError(
                f"{command[0]!r} cannot be started in {self._program.folder!r} on {host_name()}: "
                f"{error.strerror}: {error.filename}",
                "the program and the folder must be on a file system that all nodes see",
            ) from None

    def _read(self, output: IO[bytes], log: log_times.StampedLog) -> None:
        """Stamps the lines of the output, and takes what comes for heartbeats."""
        incomplete = b""
        last_bar_at = -math.inf
        while chunk := os.read(output.fileno(), _CHUNK_BYTES):
            if not self._has_attached():
                self._heart.beat(0, OUTPUT)
            # \r\n ends a line; \r alone redraws it, as progress bars do.
            text = (incomplete + chunk).replace(b"\r\n", b"\n")
            *lines, incomplete = re.split(rb"(?<=[\r\n])", text)
            # no text: it is not kept until a line ends
            if len(incomplete) > _CHUNK_BYTES:
                lines.append(incomplete)
                incomplete = b""
            for line in lines:
                # A progress bar begins its line anew: the log has a state of it now and then.
                if line.endswith(b"\r"):
                    if time.monotonic() - last_bar_at < _BAR_EVERY_S:
                        continue
                    last_bar_at = time.monotonic()
                self._keep(line.rstrip(b"\r\n"), log)
        if incomplete:
            self._keep(incomplete, log)

    def _keep(self, line: bytes, log: log_times.StampedLog) -> None:
        log.write(line + b"\n")
        self._last.append(line.decode(errors="replace"))

    def _has_attached(self) -> bool:
        """Returns whether the program sends heartbeats itself."""
        if self._heartbeat_file is None:
            return False
        beat = heartbeat.read(self._heartbeat_file)
        return beat is not None and beat.phase not in WITHOUT_STEPS

    def _on_signal(self, number: int, sender: int) -> None:
        with self._lock:
            # torchrun ends its ranks by SIGTERM where another one has failed.
            if number == signal.SIGTERM and sender == os.getppid() and not self._stop:
                self._end_with_others(128 + number)
            if self._stop:
                return  # it has been passed on; the sender repeats it
            self._stop = number
            if self._child is None:
                return
            if self._has_attached():
                self._send(signals.RELAYED)
                return
            name = signal.Signals(number).name
            passed = signal_of(self._program.stop_signal)
            print(f"slurmft: {name}: the program gets {passed.name}", flush=True)
            self._send(passed)

    def _send(self, number: int) -> None:
        """Sends a signal to the program.

        A Python program gets it alone: its workers would die of it. Of another program all
        processes get it: a shell waits for those that it has started.
        """
        assert self._child is not None
        with contextlib.suppress(ProcessLookupError):
            if self._program.is_python:
                os.kill(self._child.pid, number)
            else:
                os.killpg(self._child.pid, number)

    def _end_with_others(self, code: int) -> NoReturn:
        """Ends the program and this process, where another rank has failed."""
        self._keep_calls()
        if self._child is not None:
            self._end_program()
        # sys.exit would end the thread of signals alone.
        os._exit(code)

    def _keep_calls(self) -> None:
        """Has the program write its collectives for the watchdog of this node: they may show why
        the other rank has failed."""
        folder = node_folder()
        # A question would remove what a program has told that answers no more.
        if folder is None or rank_calls.has_lost_peer(folder, self._rank):
            return
        answer = rank_calls.ask(folder, self._rank)
        if answer is not None:
            rank_calls.await_answers([answer], _CALLS_S)

    def _end_program(self) -> None:
        assert self._child is not None
        self._send(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(_END_S)
        self._kill_leftovers()

    def _watch_group(self) -> None:
        """Starts to watch, in the background, whether the ranks form a process group."""
        # Processes of other kinds need not communicate.
        if self._program.per != "torchrun":
            return
        group = GroupWatch.of_rank(self._rank, os.environ)
        if group is not None:
            self._group = group
            threading.Thread(
                target=self._await_group, args=(group,), daemon=True
            ).start()

    def _await_group(self, group: GroupWatch) -> None:
        """Waits for the process group of the ranks; reports once that none has formed."""
        while self._group is not None:
            if group.look():
                self._group = None
                self._await_seal()
                return
            self._report_missing_group()
            time.sleep(LOOK_EVERY_S)

    def _await_seal(self) -> None:
        """Waits for the agent's word that the ranks do not seal their store; reports it once."""
        while not self._program.open_rendezvous and not self._report_missing_seal():
            time.sleep(LOOK_EVERY_S)

    def _report_missing_seal(self) -> bool:
        """Warns where the ranks' store has no seals; with --strict, ends the program. Returns
        whether it was reported."""
        folder = node_folder()
        if folder is None or not (folder / heartbeat.UNSEALED).exists():
            return False
        self._refuse(
            SlurmftError(
                "the store of the process group is not sealed: other users of these nodes can "
                "write into it, and so execute code as you",
                "start Python without -I and -E, and extend PYTHONPATH instead of setting it",
            )
        )
        return True

    def _refuse(self, problem: SlurmftError) -> None:
        """Warns of a problem of the process group; with --strict, ends the program."""
        if self._strict:
            self._problem = problem
            self._end_program()
            return
        warn(self._run.records, f"{problem.message} ({problem.hint})")

    def _report_missing_group(self, at_end: bool = False) -> None:
        """Warns where no process group has formed; with --strict, ends the program."""
        # Read once: the thread that waits for the group may set it to None meanwhile.
        group = self._group
        if group is None:
            return
        problem = group.problem(at_end)
        if problem is None:
            return
        self._group = None
        self._refuse(problem)

    # --- its end ----------------------------------------------------------------------------------

    def _ended(self, code: int) -> int:
        """Reads how the program has ended, as docs/your-own-program.md says; returns the exit code
        of this process."""
        if code and self._was_stopped(code):
            self._await_stop()
        if code == Exit.OK and not self._stop:
            self._report_missing_group(at_end=True)
        if self._problem is not None:
            return self._failed_alone(self._problem)
        if code == Exit.STOPPED or (self._stop and self._was_stopped(code)):
            note_stopped()
            return Exit.OK
        if code:
            return self._failed(code)
        self._note_end()
        return Exit.OK

    def _note_end(self) -> None:
        """Notes that the program has ended without an error: others may still wait for it."""
        folder = node_folder()
        if folder is not None and self._child is not None:
            # No room, or the task of the node has ended: nobody will ask.
            with contextlib.suppress(OSError):
                heartbeat.note_end(folder, self._rank)

    def _await_stop(self) -> None:
        """Waits a moment for a stop signal: Slurm sends it to every process of a step, and the
        program may have died of it before this process hears of it."""
        deadline = time.monotonic() + _SIGNAL_LAG_S
        while not self._stop and time.monotonic() < deadline:
            time.sleep(0.05)

    def _was_stopped(self, code: int) -> bool:
        """Returns whether the program ended because it was stopped, not because it was done."""
        if code == 0:
            # An attached program has said itself whether it is finished.
            is_finished = self._has_attached() or self._program.has_finished()
            return not is_finished and not self._run.result.exists()
        # The signal itself, or the exit code by which a shell reports that its child died of it.
        number = signal_of(self._program.stop_signal)
        return code in (-number, 128 + number)

    def _failed(self, code: int) -> int:
        """Records the failure, unless the program, attached, has; returns the exit code."""
        assert self._child is not None
        # The names of failures' files: the process, its id, the time.
        pattern = f"{self._where.replace(' ', '-')}-{self._child.pid}-*"
        if any(self._run.failures.glob(pattern)):
            return code
        if code < 0:
            error = killed("the program", -code, self._memory_kills, self._hint)
            if -code == signal.SIGABRT:
                error = SlurmftError(error.message + self._uncaught(), error.hint)
            failures = None
            if error.out_of_memory:
                failures = self._memory_failures
            failure = Failure.of(
                self._where, error, retry=True, memory_failures=failures
            )
            self._run.add(failure)
            return 128 - code
        # Many programs end with blank lines: the last line with words is quoted.
        output = [line for line in self._last if line.strip()]
        trace = _trace(output)
        text = "\n".join(output[-1:])
        message = f"exit code {code}; it has printed nothing"
        if text:
            message = f"exit code {code}; last line: {text.strip()!r}"
        if trace:
            text = _error_text(trace)
            # Of a message of many lines, the first says what happened; advice is at the end.
            first_line, *_ = text.splitlines()
            message = f"{first_line.strip()} (exit code {code})"
        secondary = says_lost_peer(text)
        # Where torchrun starts the ranks, its agent has opened the port before.
        is_taken = self._program.per != "torchrun" and "EADDRINUSE" in text
        hint = self._hint
        if is_taken:
            port = os.environ.get("MASTER_PORT", "")
            hint = f"another process had port {port}: a new start takes another; {hint}"
        # The next start has another secret, and other ports.
        is_foreign = sealed.ForeignWriteError.__name__ in text
        if is_foreign:
            hint = (
                f"{sealed.HINT}. A program whose store is shared with processes that slurmft does "
                f"not start: --open-rendezvous; {hint}"
            )
        error = SlurmftError(redact(message), hint, code)
        end = "\n".join(output[-_LINES_OF_LOADING:])
        if memory_kills.lost_process(code, end, self._memory_kills):
            error = memory_kills.with_cause(error)
        ran_out = error.out_of_memory or memory_kills.is_said_by(text)
        self._record(error, trace, secondary, is_taken or is_foreign, ran_out)
        return code

    def _uncaught(self) -> str:
        """Returns the exception of C++ that has ended the program, to be added to a message; "":
        none."""
        what = rank_deaths.uncaught(list(self._last))
        if not what:
            return ""
        return redact(f": {what}")

    def _failed_alone(self, error: SlurmftError) -> int:
        """Records that --strict has ended the program: another start would end in the same way."""
        self._run.add(Failure.of(self._where, error))
        ask_for_no_restart()
        return int(error.code)

    def _record(
        self,
        error: SlurmftError,
        trace: str | None,
        secondary: bool,
        retry: bool,
        ran_out: bool,
    ) -> None:
        """Records a failure, and asks for no restart where that cannot help.

        Args:
            error: what happened.
            trace: the traceback that the program printed.
            secondary: the program only lost others.
            retry: another start of the job may help.
            ran_out: memory ran out.
        """
        run = self._run
        where = self._where
        meetings = run.meetings(current_attempt())
        # Without a checkpoint, torchrun's restart would begin anew, and fail in the same way.
        can_restart = secondary
        # Memory: the program reads how often it ran out, and may take less.
        may_help = ran_out or run.newest_checkpoint() is not None
        if not secondary and may_help:
            can_restart = not failed_so_before(run, error, where, 0, meetings)
        failures = None
        if ran_out and not secondary:
            failures = self._memory_failures
            can_restart = can_restart or self._adapts
            # Without torchrun, the only start is that of the whole job.
            is_by_job = self._adapts or self._program.per != "torchrun"
            retry = retry or (can_restart and is_by_job)
        unloadable = self._unloadable(trace)
        failure = Failure.of(
            where,
            error,
            traceback=trace,
            secondary=secondary,
            meetings=meetings,
            memory_failures=failures,
            checkpoint=unloadable,
            # Another start passes it over; without torchrun, that is one of the whole job.
            retry=retry or (can_restart and unloadable is not None),
        )
        run.add(failure)
        if not can_restart:
            ask_for_no_restart()

    def _unloadable(self, trace: str | None) -> str | None:
        """Returns the checkpoint that the program could not load, as far as its output tells; None:
        it failed of something else."""
        seconds = time.monotonic() - self._began_at
        if self._start_point is None or seconds > _LONGEST_LOADING_S:
            return None
        lines = list(self._last)[-_LINES_OF_LOADING:]
        if trace is not None:
            lines = _last_frames(trace)
        name, _, _ = self._start_point.rpartition(" (")
        if is_of_loading("\n".join(lines), name):
            return self._start_point
        return None

    @property
    def _where(self) -> str:
        return f"rank {self._rank} on {host_name()}"

    @property
    def _hint(self) -> str:
        return f"log: {self._run.rank_log(self._rank)}"


def is_of_loading(text: str, checkpoint: str) -> bool:
    """Returns whether the output of a program that failed is about loading a checkpoint.

    Args:
        checkpoint: name of the checkpoint. As part of a path or a literal it is the checkpoint;
            elsewhere a name such as `10` or `last` may be anything.
    """
    mention = rf"[/'\"]{re.escape(checkpoint)}(?!\w)"
    return bool(_LOADING.search(text) or re.search(mention, text))


def _trace(lines: list[str]) -> str | None:
    """Returns the last Python traceback in a log's lines; None without one."""
    begin = None
    prefix = ""
    for index, line in enumerate(lines):
        before, sign, _ = line.partition("Traceback (most recent call")
        if sign:
            begin = index
            prefix = before
    if begin is None:
        return None
    # torch begins each line with its rank: "[rank0]: Traceback ...".
    return "".join(f"{line.removeprefix(prefix)}\n" for line in lines[begin:])


def _last_frames(trace: str) -> list[str]:
    """Returns the lines of a traceback from its last frames on; all of one without frames."""
    lines = trace.splitlines()
    frames = [n for n, line in enumerate(lines) if line.startswith("  File ")]
    if not frames:
        return lines
    first, *_ = frames[-_FRAMES_OF_LOADING:]
    return lines[first:]


def _error_text(trace: str) -> str:
    """Returns the end of a traceback: the error's type and its whole message."""
    _, *lines = trace.splitlines()
    for index, line in enumerate(lines):
        # The lines of frames are indented.
        if line == line.lstrip():
            return "\n".join(lines[index:])
    return trace.strip()


def _pass_hangup(*_: object) -> None:
    """Passes on the request of an attached program not to be started again: it asks its parent, as
    if this process were torchrun."""
    os.kill(os.getppid(), signal.SIGHUP)


def prepare() -> None:
    """Does nothing: there is nothing to import before torchrun's process forks this one (see
    slurmft.node.prefork)."""


def main(run_dir: str) -> None:
    signals.block()
    process.die_with_parent()
    signal.signal(signal.SIGHUP, _pass_hangup)
    run = RunDir.open(run_dir)
    rank = int(os.environ.get("RANK", "0"))
    try:
        # First: where others have put a run of theirs in the place of this one, nothing is written.
        config = run.join()
        frozen_code.check_owner(run, config)
        if not sys.stdout.isatty():
            redirect_output(run, rank)
        run.settle_permissions()
        bind_rank(os.environ)
        if rank == 0:
            world_size = int(os.environ.get("WORLD_SIZE", "1"))
            run.mark_started(run.meetings(current_attempt()), world_size)
        program = OwnProgram.of(config.program)
        assert program is not None
        code = OwnProcess(run, program, rank, config.job).run()
    except Exception as error:
        code = record_failure(error, run, rank, 0, run.meetings(current_attempt()))
    end(code)


if __name__ == "__main__":
    main(sys.argv[1])
