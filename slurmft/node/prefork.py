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
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from slurmft.core import process

_BIND_AT_LOAD = {
    "KMP_AFFINITY", "KMP_HW_SUBSET", "GOMP_CPU_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND",
}  # fmt: skip
"""Variables by which an OpenMP library decides, when it is loaded, where threads run: before the
rank is bound to its cores."""
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")


class Rank:
    """A forked process that waits for its environment; has what torchrun uses of a Popen."""

    def __init__(self, work: Callable[[], None], title: str) -> None:
        """Forks one that will do `work`; `ps` shows it with `title`."""
        self.returncode: int | None = None
        parent, (reader, self._writer) = os.getpid(), os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(reader)
            return
        try:
            os.setsid()  # torchrun ends process groups
            process.die_with_parent()
            if os.getppid() == parent:
                set_title(title)
                with open(reader) as pipe:
                    environment = json.loads(pipe.readline())
                os.environ.clear()
                os.environ.update(environment)
                work()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)  # a rank that succeeds ends by itself

    def begin(self, environment: dict[str, str]) -> None:
        with open(self._writer, "w") as pipe, contextlib.suppress(BrokenPipeError):
            pipe.write(json.dumps(environment) + "\n")

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a rank", timeout)
            time.sleep(0.02)
        return code


def fork_ranks(argv: Sequence[str], handler: Any) -> None:
    """Imports what the ranks need, and forks them, for torchrun to start in this process: `handler`
    is its class that starts a process and keeps it, `argv` its arguments.

    Only for the programs of this package: importing others may do more. Where forked ranks could
    not be as new ones, or an import fails, torchrun starts new ones, which then say what fails.
    """
    module, *arguments = argv[argv.index("--module") + 1 :] if "--module" in argv else [""]
    if (
        _BIND_AT_LOAD & os.environ.keys()
        or not module.startswith("slurmft.")
        or not hasattr(handler, "_popen")
    ):
        return
    try:
        program = importlib.import_module(module)
        program.prepare()
    except Exception:
        return
    if uses_device():
        return
    title = " ".join([sys.executable, "-m", module, *arguments])
    count = int(argv[argv.index("--nproc-per-node") + 1])
    waiting = [Rank(partial(program.main, *arguments), title) for _ in range(count)]
    start_new = handler._popen

    def start(self: Any, command: tuple[str, ...], environment: dict[str, str]) -> Any:
        if not waiting:
            return start_new(self, command, environment)
        rank = waiting.pop(0)
        rank.begin(environment)
        return rank

    handler._popen = start


def uses_device() -> bool:
    """Whether this process has begun to use a GPU: a forked one could not use it then."""
    for path in glob.glob("/proc/self/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(path).startswith(_DEVICES):
                return True
    return False


def set_title(title: str) -> None:
    """Overwrites the command line of this process, as far as there is room."""
    fields = process.stat(os.getpid())
    if fields and len(fields) > 46 and (room := int(fields[46]) - int(fields[45])) > 0:
        text = title.encode()[: room - 1].replace(b" ", b"\0")
        ctypes.memmove(int(fields[45]), text.ljust(room, b"\0"), room)
