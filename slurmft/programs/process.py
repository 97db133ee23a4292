"""One process of a user's own program: `python -m slurmft.programs.process RUN_DIR`, started as a
rank by torchrun, or by the node's task.

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
from slurmft.core.credentials import redact
from slurmft.core.errors import Exit, SlurmftError, UsageError
from slurmft.core.run_files import Failure, current_attempt
from slurmft.job.process import (
    LOST_PEER,
    end,
    failed_so_before,
    node_folder,
    note_stopped,
    record_failure,
    redirect_output,
)
from slurmft.node import heartbeat, signals
from slurmft.node.hardware import host_name
from slurmft.node.heartbeat import OUTPUT, Heart
from slurmft.node.profiles import bind_rank
from slurmft.programs import node_environment
from slurmft.programs.description import OwnProgram, signal_of
from slurmft.runs import log_times
from slurmft.runs.rundir import RunDir

_LAST_LINES = 60
_CHUNK_BYTES = 1 << 16
_BAR_EVERY_S = 10
"""How often a progress bar is in the log."""
_END_S = 4
"""How long the program has to end when another rank has failed: torchrun kills after 5 s."""


class OwnProcess:
    """The program as a child of this process."""

    def __init__(self, run: RunDir, program: OwnProgram, rank: int) -> None:
        self._run, self._program, self._rank = run, program, rank
        self._child: subprocess.Popen[bytes] | None = None
        self._stop = int(os.environ.get(signals.STOPPING, "0"))
        """The stop signal that came; 0: none."""
        self._lock = threading.Lock()
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self._heart = Heart(None)
        self._beats: Path | None = None

    def run(self) -> int:
        """Runs the program to its end; returns the exit code of this process."""
        signals.listen(self._on_signal)
        command = self._program.arguments(self._program.newest_checkpoint())
        with self._lock:
            if self._stop:  # before it began: nothing is lost
                note_stopped()
                return Exit.OK
            self._child = self._start(command)
        assert self._child.stdout is not None
        log = log_times.StampedLog(1)
        reader = threading.Thread(target=self._read, args=(self._child.stdout, log), daemon=True)
        reader.start()
        code = self._child.wait()
        self._clear()
        reader.join(1)
        return self._ended(code)

    def _clear(self) -> None:
        """Ends what the program has left behind, as Slurm does at the end of a step."""
        assert self._child is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        command, environment = node_environment.command_in(self._program, command, os.environ)
        environment["PYTHONUNBUFFERED"] = "1"
        if self._program.code:
            paths = [self._program.code, environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        if folder := node_folder():
            self._beats = folder / f"beat-{self._rank}"
            environment[heartbeat.STACKS] = str(folder / f"stacks-{self._rank}")
        try:
            child = process.start(
                command, cwd=self._program.folder, env=environment, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
                unblocked=signals.STOP,
            )  # fmt: skip
        except OSError as error:
            raise UsageError(
                f"{command[0]!r} cannot be started in {self._program.folder!r} on {host_name()}: "
                f"{error.strerror}: {error.filename}",
                "the program and the folder must be on a file system that all nodes see",
            ) from None
        if folder:
            self._heart = Heart(self._beats, OUTPUT)
            (folder / f"pid-{self._rank}").write_text(str(child.pid))
        return child

    def _read(self, output: IO[bytes], log: log_times.StampedLog) -> None:
        """Stamps its lines, and counts what comes as heartbeats. Of a progress bar, which begins
        its line anew, the log has a state now and then."""
        rest, bar_at = b"", -math.inf
        while chunk := os.read(output.fileno(), _CHUNK_BYTES):
            if not self._has_attached():
                self._heart.beat(0, OUTPUT)
            text = (rest + chunk).replace(b"\r\n", b"\n")
            *whole, rest = re.split(rb"(?<=[\r\n])", text)
            if len(rest) > _CHUNK_BYTES:  # no text
                whole, rest = [*whole, rest], b""
            for line in whole:
                if line.endswith(b"\r"):
                    if time.monotonic() - bar_at < _BAR_EVERY_S:
                        continue
                    bar_at = time.monotonic()
                self._keep(line.rstrip(b"\r\n"), log)
        if rest:
            self._keep(rest, log)

    def _keep(self, line: bytes, log: log_times.StampedLog) -> None:
        log.write(line + b"\n")
        self._last.append(line.decode(errors="replace"))

    def _has_attached(self) -> bool:
        beat = heartbeat.read(self._beats) if self._beats else None
        return beat is not None and beat.phase != OUTPUT

    def _on_signal(self, number: int, sender: int) -> None:
        with self._lock:
            if number == signal.SIGTERM and sender == os.getppid() and not self._stop:
                self._end_with_others(128 + number)
            if self._stop:
                return  # it has been passed on; the sender repeats it
            self._stop = number
            if self._child is None:
                return
            if self._has_attached():
                self._send(signals.RELAYED)
            else:
                print(f"slurmft: {signal.Signals(number).name}: the program gets "
                      f"{signal_of(self._program.stop_signal).name}", flush=True)  # fmt: skip
                self._send(signal_of(self._program.stop_signal))

    def _send(self, number: int) -> None:
        """To a Python program alone: its workers would die of it. Of others, to all processes: a
        shell waits for those."""
        assert self._child is not None
        with contextlib.suppress(ProcessLookupError):
            if self._program.is_python:
                os.kill(self._child.pid, number)
            else:
                os.killpg(self._child.pid, number)

    def _end_with_others(self, code: int) -> NoReturn:
        """Another rank has failed, and torchrun ends this one."""
        if self._child is not None:
            self._send(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(_END_S)
            self._clear()
        os._exit(code)

    # --- its end ----------------------------------------------------------------------------------

    def _ended(self, code: int) -> int:
        """Reads how the program has ended, as docs/your-own-program.md says."""
        if code == Exit.STOPPED or (self._stop and self._was_stopped(code)):
            note_stopped()
            return Exit.OK
        return self._failed(code) if code else Exit.OK

    def _was_stopped(self, code: int) -> bool:
        if code == 0:
            attached = self._has_attached()  # has said itself whether it is finished
            return not (attached or self._program.has_finished() or self._run.result.exists())
        number = signal_of(self._program.stop_signal)
        return code in (-number, 128 + number)

    def _failed(self, code: int) -> int:
        """Records the failure, unless the program, attached, has; returns the exit code."""
        assert self._child is not None
        where, run = f"rank {self._rank} on {host_name()}", self._run
        if any(run.failures.glob(f"{where.replace(' ', '-')}-{self._child.pid}-*")):
            return code
        if code < 0:
            name = signal.Signals(-code).name
            oom = " (out of memory?)" if code == -signal.SIGKILL else ""
            error = SlurmftError(f"the program was killed by {name}{oom}", self._hint)
            run.add(Failure.of(where, error, retry=True))
            return 128 - code
        lines = [line for line in self._last if line.strip()]
        trace, last = _trace(lines), lines[-1].strip() if lines else ""
        message = (
            f"{last} (exit code {code})" if trace else f"exit code {code}; last line: {last!r}"
        )
        secondary = any(sign in message.lower() for sign in LOST_PEER)
        error = SlurmftError(redact(message), self._hint, code)
        meetings = run.meetings(current_attempt())
        lasting = not secondary and (
            run.newest_checkpoint() is None or failed_so_before(run, error, where, 0, meetings)
        )
        run.add(Failure.of(where, error, traceback=trace, secondary=secondary, meetings=meetings))
        if lasting and node_folder() is not None:
            os.kill(os.getppid(), signal.SIGHUP)
        return code

    @property
    def _hint(self) -> str:
        return f"log: {self._run.rank_log(self._rank)}"


def _trace(lines: list[str]) -> str | None:
    """The last Python traceback in a log's lines."""
    starts = [n for n, line in enumerate(lines) if re.search(r"Traceback \(most recent call", line)]
    return "\n".join(lines[starts[-1] :]) + "\n" if starts else None


def _pass_hangup(*_: object) -> None:
    """An attached program asks its parent, as if this were torchrun, not to be started again."""
    os.kill(os.getppid(), signal.SIGHUP)


def prepare() -> None:
    """Nothing: torchrun's process may fork this one (see slurmft.node.prefork)."""


def main(run_dir: str) -> None:
    signals.block()
    process.die_with_parent()
    signal.signal(signal.SIGHUP, _pass_hangup)
    run, rank = RunDir.open(run_dir), int(os.environ.get("RANK", "0"))
    if not sys.stdout.isatty():
        redirect_output(run, rank)
    try:
        run.settle_permissions()
        bind_rank(os.environ)
        program = OwnProgram.of(run.load_own_config().program)
        assert program is not None
        code = OwnProcess(run, program, rank).run()
    except Exception as error:
        code = record_failure(error, run, rank, 0, run.meetings(current_attempt()))
    end(code)


if __name__ == "__main__":
    main(sys.argv[1])
