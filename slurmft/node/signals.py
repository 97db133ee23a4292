"""Stop signals as messages: blocked in every process of a job, and taken up by one thread.

A handler may interrupt anything, and before it is installed the signal kills. A blocked signal
waits instead, and so does one for a child that is just starting: the mask is inherited by exec.
From the node's task over torchrun down to the ranks no stop signal kills, and none is lost.
"""

import functools
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable
from multiprocessing import popen_fork
from typing import Any

from slurmft.core import process

STOP = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGUSR2})
"""Preemption, scancel and time limits send SIGTERM or SIGUSR2; a terminal's Ctrl-C SIGINT."""

RELAYED = signal.SIGUSR2
"""What a process sends on to those below it."""

STOPPING = "SLURMFT_STOPPING"
"""Set for ranks that start after the signal came."""


def block() -> None:
    """Blocks the stop signals, in this thread and in all threads and processes it starts."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP)


def listen(on_signal: Callable[[int, int], None]) -> None:
    """Calls `on_signal(signal number, sender's pid)` for each stop signal, in a thread."""

    def wait() -> None:
        while True:
            info = signal.sigwaitinfo(STOP)
            on_signal(info.si_signo, info.si_pid)

    threading.Thread(target=wait, name="stop signals", daemon=True).start()


def let_children_be_terminated() -> None:
    """Makes `terminate()` end the processes that this one starts from now on, by multiprocessing or
    subprocess.

    They inherit the blocked SIGTERM, which would wait in them for ever: whoever waits for their
    end, as a pool of multiprocessing does, would hang. Those that unblock it get it.
    """
    for kind in (popen_fork.Popen, subprocess.Popen):
        terminate: Any = _terminating(kind.terminate)
        kind.terminate = terminate  # type: ignore[method-assign]


def _terminating(terminate: Callable[[Any], None]) -> Callable[[Any], None]:
    """Returns `terminate` of a process, which kills where SIGTERM is blocked."""

    @functools.wraps(terminate)
    def end(child: Any) -> None:
        if _blocks(child.pid, signal.SIGTERM):
            child.kill()
        else:
            terminate(child)

    return end


def _blocks(pid: int, signum: int) -> bool:
    """Returns whether a process blocks a signal; False: it has ended, or hides it."""
    status = process.kernel_text(pid, "status") or ""
    mask = re.search(r"^SigBlk:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return mask is not None and bool(int(mask[1], 16) >> (signum - 1) & 1)


class StopRequest:
    """The request to a rank to stop, which a signal brings."""

    def __init__(self) -> None:
        self.stop_signal = int(os.environ.get(STOPPING, "0"))
        """The first stop signal that came; 0: none."""
        self.before_exit: Callable[[], None] = lambda: None
        """Called before torchrun ends this rank."""

    def listen(self) -> None:
        """Takes up stop signals from now on."""
        listen(self._on_signal)
        # Threads from before `block` do not block the signals: one may take a signal, and the
        # process would die of it. A handler prevents that.
        if threading.current_thread() is threading.main_thread():
            for number in STOP:
                signal.signal(number, lambda signum, _: self._on_signal(signum, 0))

    def _on_signal(self, signum: int, sender: int) -> None:
        # torchrun relays a stop as SIGUSR2. Its own SIGTERM means: another rank here has failed.
        if signum == signal.SIGTERM and sender == os.getppid() and not self.stop_signal:
            self.before_exit()
            os._exit(128 + signum)
        self.stop_signal = self.stop_signal or signum
