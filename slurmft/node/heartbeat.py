"""Heartbeats: every rank writes its progress to a memory-mapped file that its node's task reads.

A beat costs a microsecond and no system call. The file is in memory, local to the node.
"""

import mmap
import struct
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

FOLDER = "SLURMFT_NODE_FOLDER"
"""Variable with the folder of a node's heartbeats."""


UNSEALED = "unsealed"
"""File in the folder of a node's watchdog: its ranks write into their store without seals."""
STACKS = "SLURMFT_STACKS"
"""Variable with the file into which a Python writes its stacks on SIGUSR1 (slurmft/locks/shim)."""


def hardware_file(folder: Path) -> Path:
    """Returns the file by which a node's task passes the detected hardware to its ranks.

    nvidia-smi takes a second, and a rank that is bound to its cores sees no others.
    """
    return folder / "hardware.json"


def memory_kills_file(folder: Path) -> Path:
    """Returns the file with the kernel's counters that a node's ranks compare with; see
    `memory_kills`."""
    return folder / "memory_kills.json"


def note_process(folder: Path, rank: int, pid: int) -> None:
    """Notes the process of a rank in the folder of its node; those before it stay noted."""
    with open(folder / f"pid-{rank}", "a") as file:
        file.write(f"{pid}\n")


def processes(folder: Path, rank: int) -> list[int]:
    """Returns the processes that a rank has had on this node, the last one at the end."""
    text = (folder / f"pid-{rank}").read_text()
    return [int(pid) for pid in text.split()]


def note_end(folder: Path, rank: int) -> None:
    """Notes that the last process of a rank has ended without an error."""
    (folder / f"ended-{rank}").write_text(str(processes(folder, rank)[-1]))


def has_ended_well(folder: Path, rank: int) -> bool:
    """Returns whether the last process of a rank has ended without an error."""
    try:
        ended = (folder / f"ended-{rank}").read_text()
    except OSError:
        return False
    return ended == str(processes(folder, rank)[-1])


def ranks(folder: Path) -> list[int]:
    """Returns the ranks that have started on this node."""
    return sorted(int(file.name.removeprefix("pid-")) for file in folder.glob("pid-*"))


OUTPUT = "output"
"""Phase of beats that are lines of output, from a program that reports no steps."""
SILENT = "silent"
"""Phase of such a program before its first line."""
WITHOUT_STEPS = (OUTPUT, SILENT)
"""Phases of programs that do not beat themselves."""

# Phase after a step of training.
_STEP = "train"
# Number of steps from which the duration of the next one is estimated.
_LAST_STEPS = 50
# With fewer steps there is no estimate.
_FEWEST_STEPS = 10

_LAYOUT = struct.Struct("<dddq16s")
# How many times longer than a step these phases may take. A start imports, tokenizes and
# compiles; a save may be the last one. When ranks connect, all of them are there.
_PATIENCE = {"start": 6.0, "save": 6.0, "connect": 1.0, OUTPUT: 1.0, SILENT: 1.0}
START_PATIENCE = _PATIENCE["start"]


@dataclass(frozen=True, slots=True)
class Beat:
    """The last sign of life of a rank. The fields are in the order of `_LAYOUT`."""

    time: float
    """On CLOCK_MONOTONIC, which all processes of a node share."""
    slowest_s: float
    """Longest time from one beat of this rank to the next, outside of patient phases."""
    slowest_step_s: float
    """Longest of the last steps of training. 0: too few steps so far, or another phase."""
    step: int
    phase: str

    @property
    def patience(self) -> float:
        """How many times longer than a step this phase may take."""
        return _PATIENCE.get(self.phase, 1.0)


class Heart:
    """Writes the beats of a rank. Without a path it writes nothing."""

    def __init__(self, path: Path | None, phase: str = "start") -> None:
        self._map: mmap.mmap | None = None
        self._last_beat = time.monotonic()
        self.slowest_s = 0.0
        self._steps_s: deque[float] = deque(maxlen=_LAST_STEPS)
        self.phase = phase
        """What the last beat has begun."""
        if path is not None:
            with open(path, "w+b") as file:
                file.truncate(_LAYOUT.size)
                self._map = mmap.mmap(file.fileno(), _LAYOUT.size)
        self.beat(0, phase)

    def beat(self, step: int, phase: str) -> None:
        """Writes the step, and the phase that begins: start, connect, train, evaluate or save."""
        now = time.monotonic()
        pause_s = now - self._last_beat
        # A pause counts for the phase before it: a start says nothing about steps.
        if self.phase not in _PATIENCE:
            self.slowest_s = max(self.slowest_s, pause_s)
        # Between two beats of training there is one step, or several that a device has done
        # meanwhile, and nothing else.
        if phase == self.phase == _STEP:
            self._steps_s.append(pause_s)
        self._last_beat = now
        self.phase = phase
        if self._map is None:
            return
        slowest_step_s = 0.0
        if phase == _STEP and len(self._steps_s) >= _FEWEST_STEPS:
            slowest_step_s = max(self._steps_s)
        fields = (now, self.slowest_s, slowest_step_s, step, phase.encode())
        _LAYOUT.pack_into(self._map, 0, *fields)


def read(path: Path) -> Beat | None:
    """Reads the last beat from a file. None before the first one."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) < _LAYOUT.size:
        return None
    when, slowest_s, slowest_step_s, step, phase = _LAYOUT.unpack(data)
    if not when:
        return None
    # The phase is padded with zero bytes to the size of its field.
    return Beat(when, slowest_s, slowest_step_s, step, phase.rstrip(b"\0").decode())
