"""Child processes: they do not outlive their parent, and what they print is read."""

import contextlib
import ctypes
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO

_BLOCK_BYTES = 2**20
_MOST_ERROR_BYTES = 2**16
_MOST_END_S = 5.0
_END_POLL_S = 0.01
_STOP_POLL_S = 0.2
# From linux/prctl.h: Python has no call for them.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# None: the C library that this Python itself is linked to.
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(sig: int = signal.SIGKILL) -> None:
    """Asks the kernel to send this process `sig` when its parent ends, however that ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, sig)


def adopt_orphans(adopts: bool = True) -> None:
    """Makes this process the parent of those below it whose own parent ends, or no longer."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, int(adopts))


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Makes this process the parent of those below it whose own parent ends meanwhile."""
    adopt_orphans()
    try:
        yield
    finally:
        adopt_orphans(False)


def start(
    command: Sequence[str],
    death: int = signal.SIGKILL,
    unblocked: Iterable[int] = (),
    ignored: Iterable[int] = (),
    **kwargs: Any,
) -> subprocess.Popen[bytes]:
    """Starts a child that gets a signal when this process ends, even if that ends by SIGKILL.

    Args:
        command: the program and its arguments.
        death: the signal.
        unblocked: signals that this process may block, and that reach the child.
        ignored: signals that the child does not die of; it gets them once it has a handler.
        kwargs: arguments of `subprocess.Popen`.
    """
    parent = os.getpid()

    def before_exec() -> None:
        die_with_parent(death)
        # If the parent has ended before the request, the kernel sends nothing any more.
        if os.getppid() != parent:
            os._exit(1)
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, unblocked)

    return subprocess.Popen(command, preexec_fn=before_exec, **kwargs)


def run(
    command: Sequence[str],
    timeout_s: float | None,
    text: str = "",
    **kwargs: Any,
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, and reads what it prints until then. What it leaves running is not
    waited for: `subprocess.run` would, also beyond its time limit.

    Args:
        command: the program and its arguments.
        timeout_s: its time limit; None: none.
        text: its standard input.
        kwargs: arguments of `subprocess.Popen`.

    Raises:
        OSError: it cannot be started.
        subprocess.TimeoutExpired: it takes longer; it was killed, with what it has started.
    """
    with (
        unnamed_file() as input_file,
        unnamed_file() as output_file,
        unnamed_file() as error_file,
    ):
        input_file.write(os.fsencode(text))
        input_file.seek(0)
        child = subprocess.Popen(
            command,
            stdin=input_file,
            stdout=output_file,
            stderr=error_file,
            start_new_session=True,
            **kwargs,
        )
        try:
            code = child.wait(timeout_s)
        except BaseException:  # Ctrl-C, too
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            raise
        outputs = []
        for file in (output_file, error_file):
            file.seek(0)
            outputs.append(os.fsdecode(file.read()))
    return subprocess.CompletedProcess(command, code, *outputs)


def unnamed_file() -> BinaryIO:
    """Opens a file in memory. In a temporary folder that others have filled, what a command prints
    would be lost, and many commands do not fail of that."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("slurmft"), "w+b")
    import tempfile  # a Python that was built with an old C library

    return tempfile.TemporaryFile()


def read_bounded(
    child: subprocess.Popen[bytes],
    most_bytes: int,
    timeout_s: float | None = None,
    is_stopping: Callable[[], bool] | None = None,
) -> tuple[bytes, bytes]:
    """Reads what a child prints until it ends, or until there is more than `most_bytes`; returns
    that, and the end of what it prints to stderr.

    Args:
        child: its stderr is a pipe, and its stdout may be one.
        timeout_s: its time limit; None: none.
        is_stopping: True where the child is not waited for any more; the caller ends it.

    Raises:
        TimeoutError: it has not ended by then.
    """
    import selectors  # not for every command

    deadline = math.inf
    if timeout_s is not None:
        deadline = time.monotonic() + timeout_s
    printed = bytearray()
    errors = bytearray()
    with selectors.DefaultSelector() as selector:
        for stream, buffer in ((child.stdout, printed), (child.stderr, errors)):
            if stream is not None:
                selector.register(stream, selectors.EVENT_READ, buffer)
        while selector.get_map() and len(printed) <= most_bytes:
            if time.monotonic() >= deadline:
                raise TimeoutError
            wait_s = _left_s(deadline)
            if is_stopping is not None:
                if is_stopping():
                    return bytes(printed), bytes(errors)
                wait_s = _STOP_POLL_S
            for key, _ in selector.select(wait_s):
                block = os.read(key.fd, _BLOCK_BYTES)
                key.data.extend(block)
                if not block:
                    selector.unregister(key.fileobj)
            # The reason of a failure stands at the end.
            del errors[:-_MOST_ERROR_BYTES]
    if len(printed) <= most_bytes:
        try:
            child.wait(_left_s(deadline))
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
    return bytes(printed), bytes(errors)


class StderrEnd:
    """The end of what a child prints to stderr, which is read while it runs: it may print without
    end, and must neither wait nor fill a disk."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        """
        Args:
            child: its stderr is a pipe.
        """
        import threading  # not for every command

        assert child.stderr is not None
        self._stream = child.stderr
        self._end = b""
        # Of what the child has left running, one may keep the pipe open for ever.
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def read(self, timeout_s: float) -> bytes:
        """Returns the end of what was printed until nobody has the pipe open, or until now."""
        self._reader.join(timeout_s)
        return self._end

    def _read(self) -> None:
        with self._stream:
            while block := os.read(self._stream.fileno(), _BLOCK_BYTES):
                self._end = (self._end + block)[-_MOST_ERROR_BYTES:]


def _left_s(deadline: float) -> float | None:
    if deadline == math.inf:
        return None
    return max(0.0, deadline - time.monotonic())


def output(command: Sequence[str], timeout_s: float, **kwargs: Any) -> str | None:
    """Returns what a command prints; None where it is absent, fails or takes longer.

    Args:
        command: the program and its arguments.
        timeout_s: its time limit.
        kwargs: arguments of `subprocess.Popen`.
    """
    try:
        done = run(command, timeout_s, **kwargs)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    return done.stdout


def kernel_text(pid: int, name: str) -> str | None:
    """Returns a file of a process in /proc; None: there is none, or it is not this user's to read.

    A process of any user may have given itself a name of any bytes.
    """
    try:
        # Without newline, "\r" in a name would begin a line.
        with open(f"/proc/{pid}/{name}", errors="replace", newline="\n") as file:
            return file.read()
    except OSError:
        return None


def stat(pid: int) -> list[str] | None:
    """Returns the fields of /proc/PID/stat after the name, the state first; None: no process."""
    text = kernel_text(pid, "stat")
    if text is None:
        return None
    # The name is in brackets, and may hold spaces and brackets itself.
    return text.rpartition(")")[2].split()


def data_bytes() -> int:
    """Returns the size of what this process has of its own in memory, as RLIMIT_DATA counts it."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")


def age_s() -> float:
    """Returns the seconds since this process was started, the start of its interpreter included."""
    fields = stat(os.getpid())
    assert fields is not None
    # "starttime", the 22nd field of proc(5): these begin with the third. Since the boot.
    started_ticks = int(fields[19])
    started_s = started_ticks / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s


def signal_name(number: int) -> str:
    """Returns the name of a signal, whatever has ended a process: real-time signals have none in
    Python."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def end(child: subprocess.Popen[bytes]) -> None:
    """Kills a child; the processes that it started by `start` or as ranks go with it."""
    child.kill()
    child.wait()


def reap_orphans(child: subprocess.Popen[bytes]) -> None:
    """Forgets the orphans of `adopt_orphans` that have ended: each keeps its number until then.

    Args:
        child: the one that this process waits for itself.
    """
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid == child.pid:
            return
        with contextlib.suppress(ChildProcessError):
            os.waitpid(ended.si_pid, 0)


def end_descendants() -> None:
    """Kills all that this process has started, and what that has started: of a process which has
    called `adopt_orphans` before."""
    # What the kernel does not end, as a process that waits for a file server, is left.
    deadline = time.monotonic() + _MOST_END_S
    while time.monotonic() < deadline:
        children = _children()
        if not children:
            return
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # Those of the killed become children of this process.
        for pid in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(_END_POLL_S)


def _children() -> list[int]:
    """Returns the numbers of the children of this process."""
    own_number = str(os.getpid())
    children = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        fields = stat(int(name))
        # The parent's number follows the state.
        if fields is not None and fields[1] == own_number:
            children.append(int(name))
    return children
