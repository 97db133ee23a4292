"""Ranks that are forked from torchrun's process before the nodes meet: a node imports torch and
transformers once, for all its ranks.

By itself torchrun starts each rank as a new interpreter, when the nodes have met. Ranks that are
restarted are still started so.
"""

import contextlib
import ctypes
import glob
import importlib
import json
import os
import subprocess
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from slurmft.core import interpreter, process

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

# Fields of /proc/PID/stat, counted from the state on: where the command line is in memory.
_ARG_START = 45
_ARG_END = 46


class Rank:
    """A forked process that waits for its environment.

    It has the methods and attributes of a Popen that torchrun uses.
    """

    def __init__(self, work: Callable[[], None], title: str) -> None:
        """Forks a process that will do `work`; `ps` shows it with `title`."""
        self.returncode: int | None = None
        parent = os.getpid()
        reader, self._writer = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(reader)
            return
        try:
            os.setsid()  # torchrun ends process groups
            process.die_with_parent()
            if os.getppid() == parent:  # else it ended before the line above
                set_title(title)
                with open(reader) as pipe:
                    environment = json.loads(pipe.readline())
                # torchrun gives each rank its whole environment: what this copy has besides is not
                # the rank's.
                os.environ.clear()
                os.environ.update(environment)
                work()
        # SystemExit, too: this process is a copy of torchrun's. Any exception that left here would
        # go on through torchrun's own code, which must not run twice.
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)  # a rank that succeeds ends by itself

    def begin(self, environment: dict[str, str]) -> None:
        """Lets the process do its work in this environment."""
        # A rank may have died while it waited. torchrun learns that by `poll`, as of any rank.
        with open(self._writer, "w") as pipe, contextlib.suppress(BrokenPipeError):
            pipe.write(json.dumps(environment) + "\n")

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


def fork_ranks(argv: Sequence[str], handler: Any) -> None:
    """Imports what the ranks need, and forks them, for torchrun to start in this process.

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
    count = int(argv[argv.index("--nproc-per-node") + 1])
    work = partial(program.main, *arguments)
    waiting = [Rank(work, title) for _ in range(count)]
    start_new = handler._popen

    def start(self: Any, command: tuple[str, ...], environment: dict[str, str]) -> Any:
        if not waiting:  # all have been used: this is a restart
            return start_new(self, command, environment)
        rank = waiting.pop(0)
        rank.begin(environment)
        return rank

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
