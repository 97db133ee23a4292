"""Ranks that are forked, at each of their starts: a node imports torch and transformers once.

By itself torchrun starts each rank as a new interpreter, when the nodes have met. Its own process
has threads by then, and a fork copies the locks that they hold. So it forks the template of all
ranks before.
"""

import contextlib
import ctypes
import glob
import importlib
import io
import json
import os
import select
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from slurmft.core import interpreter, process
from slurmft.node import signals

# Variables by which an OpenMP library decides, when it is loaded, where threads run: before the
# rank is bound to its cores.
_BIND_AT_LOAD = {
    "KMP_AFFINITY",
    "KMP_HW_SUBSET",
    "GOMP_CPU_AFFINITY",
    "OMP_PLACES",
    "OMP_PROC_BIND",
}
# Device files of GPUs.
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
_POLL_S = 0.02
_ADOPTION_POLL_S = 0.001
_SIGNAL_POLL_S = 1

# Fields of /proc/PID/stat, counted from the state on: where the command line is in memory.
_ARG_START = 45
_ARG_END = 46


class Rank:
    """A forked process, with the methods and attributes of a Popen that torchrun uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:  # 0: it still runs
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a rank", timeout)
            time.sleep(_POLL_S)
        return code


class Template:
    """A forked process that has imported what the ranks need, and forks one at each request."""

    def __init__(self, work: Callable[[], None], title: str) -> None:
        """Forks the template.

        Args:
            work: done by each rank; `ps` shows it with `title`.
        """
        self._work = work
        self._title = title
        self._torchrun = os.getpid()
        requests, requests_end = os.pipe()
        answers, answers_end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self._serve(requests, requests_end, answers, answers_end)
        os.close(requests)
        os.close(answers_end)
        self._requests = open(requests_end, "w")  # noqa: SIM115 (as long as torchrun lives)
        self._answers = open(answers)  # noqa: SIM115

    def start(self, environment: dict[str, str]) -> Rank:
        """Starts a rank in this environment, as a child of this process.

        Raises:
            OSError: the template has ended.
        """
        # The rank's own parent ends at once.
        with process.adopting_orphans():
            self._requests.write(json.dumps(environment) + "\n")
            self._requests.flush()
            pid = self._answers.readline()
        if not pid.endswith("\n"):
            raise OSError("the template of the ranks has ended")
        return Rank(int(pid))

    def _serve(
        self, requests: int, requests_end: int, answers: int, answers_end: int
    ) -> NoReturn:
        """Forks a rank for each line of requests, an environment; answers with its pid."""
        try:
            process.die_with_parent()
            if os.getppid() == self._torchrun:  # else it ended before the line above
                os.close(requests_end)
                os.close(answers)
                set_title("slurmft: template of the ranks")
                # Unbuffered: what is read ahead would be in each rank.
                with open(requests, "rb", buffering=0) as lines:
                    while line := self._next(lines):
                        self._fork(line, answers_end)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _next(self, lines: io.FileIO) -> bytes:
        """Waits for a request. A stop signal, which others may send to any process of a job, is
        passed on to torchrun meanwhile."""
        while not select.select([lines], [], [], _SIGNAL_POLL_S)[0]:
            info = signal.sigtimedwait(signals.STOP, 0)
            # torchrun sends its own to all its children.
            if info is not None and info.si_pid != self._torchrun:
                os.kill(self._torchrun, signals.RELAYED)
        return lines.readline()

    def _fork(self, request: bytes, answers: int) -> None:
        """Forks a rank through a process that ends at once: so the rank becomes torchrun's."""
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            os.write(answers, b"\n")  # after the rank's pid
            return
        # Any exception that left here would go on through the template's own code.
        try:
            own_pid = os.getpid()
            rank = os.fork()
            if rank:
                os.write(answers, str(rank).encode())
                os._exit(0)
            os.close(answers)
            while os.getppid() == own_pid:
                time.sleep(_ADOPTION_POLL_S)
            self._be_rank(json.loads(request))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)  # a rank that succeeds ends by itself

    def _be_rank(self, environment: dict[str, str]) -> None:
        os.setsid()  # torchrun ends process groups
        process.die_with_parent()
        if os.getppid() != self._torchrun:  # it ended before the line above
            return
        set_title(self._title)
        # torchrun gives each rank its whole environment: what this copy has besides is not the
        # rank's.
        os.environ.clear()
        os.environ.update(environment)
        self._work()


def fork_ranks(argv: Sequence[str], handler: Any) -> None:
    """Imports what the ranks need, and makes torchrun fork them in place of starting them.

    Only the programs of this package are forked: importing others may do more. Where a forked rank
    could not be as a new one, or an import fails, torchrun starts new ones; these say what fails.

    Args:
        argv: the arguments of torchrun.
        handler: torchrun's class that starts a process and keeps it.
    """
    if "--module" not in argv:
        return
    begin = argv.index("--module") + 1  # the last flag: what follows is the program's
    module, *arguments = argv[begin:]
    is_ours = module.startswith("slurmft.")
    binds_at_load = bool(_BIND_AT_LOAD & os.environ.keys())
    # The name is torch's own: another version may have none such.
    can_be_replaced = hasattr(handler, "_popen")
    if not is_ours or binds_at_load or not can_be_replaced:
        return
    try:
        program = importlib.import_module(module)
        program.prepare()
    except Exception:
        return
    if uses_device():
        return
    title = " ".join(interpreter.module(module, *arguments, unbuffered=True))
    template = Template(partial(program.main, *arguments), title)
    start_new = handler._popen

    def start(self: Any, command: tuple[str, ...], environment: dict[str, str]) -> Any:
        try:
            return template.start(environment)
        # Somebody, or the kernel for its memory, has killed the template.
        except OSError:
            return start_new(self, command, environment)

    handler._popen = start


def uses_device() -> bool:
    """Tells if this process has begun to use a GPU: a forked one could not use it then."""
    for path in glob.glob("/proc/self/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(path).startswith(_DEVICES):
                return True
    return False


def set_title(title: str) -> None:
    """Overwrites the command line of this process, as far as there is room."""
    fields = process.stat(os.getpid())
    if fields is None or len(fields) <= _ARG_END:  # an old kernel
        return
    start = int(fields[_ARG_START])
    room = int(fields[_ARG_END]) - start
    if room > 0:
        text = title.encode()[: room - 1].replace(b" ", b"\0")
        ctypes.memmove(start, text.ljust(room, b"\0"), room)
