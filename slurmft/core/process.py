"""Child processes: what they print, and that they do not outlive their parent."""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(sig: int = signal.SIGKILL) -> None:
    """Asks the kernel to send this process `sig` when its parent ends, however that ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, sig)


def adopt_orphans() -> None:
    """Makes this process the parent of those below it whose own parent has ended."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def start(
    command: Sequence[str],
    death: int = signal.SIGKILL,
    unblocked: Iterable[int] = (),
    **kwargs: Any,
) -> subprocess.Popen[bytes]:
    """Starts a child that gets the signal `death` when this process ends, by SIGKILL too. Signals
    in `unblocked` are blocked here, and not there."""
    parent = os.getpid()

    def before_exec() -> None:
        die_with_parent(death)
        if os.getppid() != parent:  # the parent ended before the request
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, unblocked)

    return subprocess.Popen(command, preexec_fn=before_exec, **kwargs)


def output(command: Sequence[str], timeout_s: float) -> str | None:
    """What a command prints; None: it is not there, fails, or takes longer."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the program's name, the state first; None: no process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def age_s() -> float:
    """Seconds since this process was started, its interpreter's own start included."""
    fields = stat(os.getpid())
    assert fields is not None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def end(child: subprocess.Popen[bytes]) -> None:
    """Kills a child; the processes that it started by `start` or as ranks go with it."""
    child.kill()
    child.wait()
