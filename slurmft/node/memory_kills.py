"""Memory that ran out: processes that the kernel has killed for it, by its own counters, and the
errors that say so."""

import contextlib
import re
import signal
from dataclasses import dataclass
from pathlib import Path

from slurmft.core import decode, process
from slurmft.core.errors import SlurmftError
from slurmft.core.files import write_json
from slurmft.node.hardware import cgroups, memory_mib

LESS_OR_MORE = "use less memory (smaller batches), or ask for more: --mem"
"""The cure where memory has run out."""
FAILURES = "SLURMFT_MEMORY_FAILURES"
"""The environment variable with how often memory ran out before, for a program of the user's
own."""
TAKES_LESS = "SLURMFT_TAKES_LESS"
"""The environment variable that is there where such a program takes less the next time."""
_RAN_OUT = re.compile(
    r"out of memory|OutOfMemoryError|RESOURCE_EXHAUSTED|MemoryError\b|can't allocate memory|"
    r"cannot allocate memory|_STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)
"""The errors of torch on GPUs and CPUs, JAX, TensorFlow, Python, numpy and the kernel."""
_PROCESS_KILLED = re.compile(
    r"\bKilled\b|SIGKILL|\bsignal:? 9\b|exitcode:? -9\b|exited unexpectedly|terminated abruptly",
    re.IGNORECASE,
)
"""What a shell, torchrun, Accelerate, a DataLoader or a pool says of a process of its own that was
killed."""
_KILLED_BY_SHELL = 128 + signal.SIGKILL
"""The exit code of a shell whose last command was killed."""
_OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class MemoryKills:
    """How many processes the kernel had killed at some moment, because memory ran out."""

    in_group: int | None
    """Of the control group that this process is in; None: unknown."""
    on_machine: int | None
    """Of the whole machine; None: unknown."""

    @classmethod
    def now(cls, root: Path = Path("/")) -> "MemoryKills":
        """Reads the counters. The innermost group counts whatever limit a process exceeded: its
        own, that of a group above, or the machine's memory."""
        in_group = None
        for folder in cgroups(root, "memory")[:1]:
            version_2 = _count(folder / "memory.events")
            in_group = version_2
            if version_2 is None:
                in_group = _count(folder / "memory.oom_control")
        return cls(in_group, _count(root / "proc/vmstat"))

    def more(self, root: Path = Path("/")) -> bool | None:
        """Returns whether one has been killed since; None: that cannot be told."""
        now = MemoryKills.now(root)
        if _is_more(now.in_group, self.in_group):
            return True
        # What runs in a container, or a group of its own, is counted there, and on the machine.
        if self.on_machine is not None and not _is_more(
            now.on_machine, self.on_machine
        ):
            return False
        return None


def is_said_by(error: str) -> bool:
    """Returns whether a program's error, its last lines, says that memory ran out."""
    return _RAN_OUT.search(error) is not None


def says_killed(code: int, output: str) -> bool:
    """Returns whether a program that failed says that a process which it had started was killed.

    Args:
        code: its exit code.
        output: the end of its output.
    """
    return code == _KILLED_BY_SHELL or _PROCESS_KILLED.search(output) is not None


def lost_process(code: int, output: str, before: MemoryKills) -> bool:
    """Returns whether a program has failed because the kernel has killed a process that it had
    started, for its memory.

    Args:
        code: its exit code.
        output: the end of its output, or its error.
        before: the counters when it started.
    """
    return says_killed(code, output) and before.more() is True


def note(file: Path) -> None:
    """Writes the counters of now, for processes that start later."""
    # Memory of the node, too: where it is full, nobody compares.
    with contextlib.suppress(OSError):
        write_json(file, MemoryKills.now())


def since_note(file: Path) -> bool:
    """Returns whether the kernel has surely killed one since `note`, and notes it anew."""
    before = decode.read(file, MemoryKills)
    if before is None:
        return False
    note(file)
    return before.more() is True


def killed(
    what: str,
    signal_number: int,
    before: MemoryKills,
    hint: str,
    root: Path = Path("/"),
) -> SlurmftError:
    """Returns the error for a process that a signal has killed.

    Args:
        what: the process, in words.
        signal_number: the signal.
        before: the counters when the process started.
        hint: where more is to be read.
    """
    text = f"{what} was killed by {process.signal_name(signal_number)}"
    if signal_number != signal.SIGKILL:
        return SlurmftError(text, hint)
    ran_out = before.more(root)
    if ran_out is None:
        return SlurmftError(f"{text} (out of memory?)", hint)
    if not ran_out:
        return SlurmftError(text, hint)
    return with_cause(SlurmftError(text, hint), root)


def with_cause(error: SlurmftError, root: Path = Path("/")) -> SlurmftError:
    """Returns an error with the cause that the kernel has killed a process for its memory."""
    gib = memory_mib(root) / 1024
    caused = SlurmftError(
        f"{error.message}: the kernel reports that memory ran out (limit: {gib:.1f} GiB)",
        f"{LESS_OR_MORE}; {error.hint}",
        error.code,
    )
    caused.out_of_memory = True
    return caused


def _is_more(now: int | None, before: int | None) -> bool:
    return now is not None and before is not None and now > before


def _count(file: Path) -> int | None:
    try:
        text = file.read_text()
    except OSError:
        return None
    match = _OOM_KILLS.search(text)
    if match is None:
        return None
    return int(match[1])
