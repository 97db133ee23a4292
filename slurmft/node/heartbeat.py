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


STACKS = "SLURMFT_STACKS"
"""Variable with the file into which a Python writes its stacks on SIGUSR1 (slurmft/locks/shim)."""


def hardware_file(folder: Path) -> Path:
    """The file by which a node's task passes the detected hardware to its ranks: nvidia-smi takes a
    second, and a rank that is bound to its cores sees no others."""
    return folder / "hardware.json"


OUTPUT = "output"
"""The phase of beats that are lines of output: those of a program that tells no steps."""

_STEP, _LAST_STEPS = "train", 50
"""The phase after a step of training; and how many steps tell how long the next one takes."""

_LAYOUT = struct.Struct("<dddq16s")
_PATIENCE = {"start": 6.0, "save": 6.0, OUTPUT: 1.0}
"""How many times longer than a step these phases may take: imports, tokenizing and compilation;
the last save."""


@dataclass(frozen=True, slots=True)
class Beat:
    """What a rank was doing last."""

    time: float
    """On CLOCK_MONOTONIC, which all processes of a node share."""
    slowest_s: float
    """The longest time from one beat of this rank to the next, outside of patient phases."""
    slowest_step_s: float
    """That of the last steps of training; 0: too few are known, or something else is under way."""
    step: int
    phase: str

    @property
    def patience(self) -> float:
        """How many times longer than a step this phase may take."""
        return _PATIENCE.get(self.phase, 1.0)


class Heart:
    """Writes the beats of a rank; without a path, nothing."""

    def __init__(self, path: Path | None, phase: str = "start") -> None:
        self._map: mmap.mmap | None = None
        self._last, self.slowest_s = time.monotonic(), 0.0
        self._steps_s: deque[float] = deque(maxlen=_LAST_STEPS)
        self._phase = phase
        if path is not None:
            with open(path, "w+b") as file:
                file.truncate(_LAYOUT.size)
                self._map = mmap.mmap(file.fileno(), _LAYOUT.size)
        self.beat(0, phase)

    def beat(self, step: int, phase: str) -> None:
        """Writes the step and the phase that begins: start, train, evaluate, save."""
        now = time.monotonic()
        if self._phase not in _PATIENCE:
            self.slowest_s = max(self.slowest_s, now - self._last)
        if phase == self._phase == _STEP:
            self._steps_s.append(now - self._last)
        self._last, self._phase = now, phase
        if self._map is not None:
            known = phase == _STEP and len(self._steps_s) >= _LAST_STEPS / 5
            step_s = max(self._steps_s) if known else 0.0
            _LAYOUT.pack_into(self._map, 0, now, self.slowest_s, step_s, step, phase.encode())


def read(path: Path) -> Beat | None:
    """The last beat in a file; None before the first."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) < _LAYOUT.size:
        return None
    when, slowest_s, slowest_step_s, step, phase = _LAYOUT.unpack(data)
    text = phase.rstrip(b"\0").decode()
    return Beat(when, slowest_s, slowest_step_s, step, text) if when else None
