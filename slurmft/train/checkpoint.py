"""Checkpoints: atomic, verified, written beside the training.

A checkpoint is a folder that appears whole, by a rename, with a manifest of sizes and checksums.
Tensors are safetensors, everything else JSON: nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from slurmft.core.errors import SlurmftError
from slurmft.core.files import fingerprint, write_folder
from slurmft.runs.rundir import RunDir

Tensors = dict[str, torch.Tensor]

_STATE, _MANIFEST = "state.json", "manifest.json"
_RETRY_S = 30
"""Pause after a save that failed."""


class BadCheckpointError(Exception):
    """A checkpoint is not what was written."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a run at one step boundary."""

    name: str
    """Sorts by progress (see `RunDir.checkpoint_names`)."""
    state: dict[str, Any]
    """What JSON can hold."""
    tensors: dict[str, Tensors]
    """File name without suffix -> name -> CPU tensor."""


def write(run: RunDir, snapshot: Snapshot, attempt: int) -> None:
    """Writes a checkpoint; it exists whole, or not at all.

    Raises:
        OSError: no room, or no file system.
        SafetensorError: the same, from the library.
    """

    def fill(folder: Path) -> None:
        for name, tensors in snapshot.tensors.items():
            save_file(tensors, folder / f"{name}.safetensors")
        (folder / _STATE).write_text(json.dumps(snapshot.state), encoding="utf-8")
        files = {p.name: fingerprint(p) for p in sorted(folder.iterdir())}
        (folder / _MANIFEST).write_text(json.dumps({"files": files}, indent=1), encoding="utf-8")
        if run.is_superseded(attempt):
            raise OSError("a later attempt of this run has begun")

    write_folder(run.checkpoints / snapshot.name, fill)


def read(path: Path) -> Snapshot:
    """Reads and verifies a checkpoint.

    Raises:
        BadCheckpointError: a file is absent, has another size or another checksum.
        OSError: the file system fails; the checkpoint may be good.
    """
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        # Not mapped into memory: a file that is open cannot be pruned on every file system.
        data = {name: _verified(path / name, sums) for name, sums in manifest["files"].items()}
        state = json.loads(data[_STATE])
        tensors = {
            Path(name).stem: load(content)
            for name, content in data.items()
            if name.endswith(".safetensors")
        }
    except (FileNotFoundError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise BadCheckpointError(f"{type(error).__name__}: {error}") from error
    return Snapshot(path.name, state, tensors)


def _verified(path: Path, expected: dict[str, Any]) -> bytes:
    data = path.read_bytes()
    if len(data) != expected["bytes"]:
        raise BadCheckpointError(f"{path.name} has lost or gained bytes")
    if hashlib.sha256(data).hexdigest() != expected["sha256"]:
        raise BadCheckpointError(f"{path.name} has another checksum than when it was written")
    return data


def read_newest(run: RunDir, warn: Callable[[str], None]) -> Snapshot | None:
    """The newest checkpoint that is whole; bad ones are put aside, with a warning.

    Raises:
        SlurmftError: the file system cannot be read: no reason to start from the beginning.
    """
    for name in reversed(run.checkpoint_names()):
        path = run.checkpoints / name
        try:
            return _read_patiently(path, run.path)
        except BadCheckpointError as error:
            aside = path.with_name(f"bad-{name}-{time.time_ns()}")
            path.rename(aside)
            warn(f"the checkpoint {name} is damaged ({error}); put aside as {aside.name}")
    return None


def _read_patiently(path: Path, run: Path, tries: int = 5) -> Snapshot:
    for pause_s in range(1, tries):
        try:
            return read(path)
        except OSError:  # a hiccup of a shared file system
            time.sleep(pause_s)
    try:
        return read(path)
    except OSError as error:
        raise SlurmftError(
            f"cannot read the checkpoint {str(path)!r}: {error.strerror or error}",
            f"when the file system is well again: slurmft resume {shlex.quote(str(run))}",
        ) from error


def prune(run: RunDir, keep: int, best: str | None) -> None:
    """Removes all checkpoints but the newest `keep` and the best one."""
    names = run.checkpoint_names()
    for name in names[: max(0, len(names) - keep)]:
        if name != best:
            aside = run.checkpoints / f".old-{name}"
            (run.checkpoints / name).rename(aside)  # a reader never sees half a checkpoint
            shutil.rmtree(aside)


def remove_leftovers(run: RunDir, bad: bool = False) -> None:
    """Removes what a kill during a save left behind, and `bad` checkpoints if asked to."""
    for path in (*run.checkpoints.glob(".*"), *(run.checkpoints.glob("bad-*") if bad else ())):
        shutil.rmtree(path, ignore_errors=True)


class Buffers:
    """One copy of the state in this host's memory, made anew in the same place every time."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], torch.Tensor] = {}

    def copy(self, tensors: dict[str, Tensors]) -> dict[str, Tensors]:
        """Copies tensors from wherever they are; valid until the next call."""
        copied = {
            file: {name: self._copy(file, name, t) for name, t in group.items()}
            for file, group in tensors.items()
        }
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copied

    def _copy(self, file: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
        held = self._held.get((file, name))
        if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._held[file, name] = held
        return held.copy_(tensor.detach(), non_blocking=True)


class Saver:
    """Writes snapshots in a thread; on the main rank alone.

    A save that fails is told, and tried again with a later state: the run goes on, and the
    checkpoints that are there stay.
    """

    def __init__(self, run: RunDir, attempt: int, every_s: float, keep: int) -> None:
        self.run = run
        self.best: str | None = None
        """The best checkpoint that is written."""
        self.buffers = Buffers()
        self.seconds = 0.0
        """What the last successful save took, from the copy to the rename."""
        self._attempt, self._every_s, self._keep = attempt, every_s, keep
        self._thread: threading.Thread | None = None
        self._messages: list[str] = []
        self._due_at = self._next()
        self._failed = False

    def is_due(self) -> bool:
        """Whether the time of the next checkpoint has come, and the last one is out of the way."""
        return time.monotonic() >= self._due_at and not self.busy

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, snapshot: Snapshot, began: float, is_best: bool = False) -> None:
        """Writes a snapshot in the background; `began` (monotonic) is when it was begun."""
        self.wait()
        self._due_at = self._next()
        self._thread = threading.Thread(
            target=self._save, args=(snapshot, began, is_best), name="checkpoint"
        )
        self._thread.start()

    def save(self, snapshot: Snapshot, began: float, patience_s: float) -> bool:
        """Writes a snapshot, trying again for `patience_s` seconds; whether it is there now."""
        while True:
            self.start(snapshot, began)
            self.wait()
            if not self._failed or time.monotonic() - began > patience_s:
                return not self._failed
            self._messages.pop()  # said when it is given up
            time.sleep(1.0)

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits for the save under way."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def messages(self) -> Iterator[str]:
        """Warnings since the last call."""
        while self._messages:
            yield self._messages.pop(0)

    def _next(self) -> float:
        return time.monotonic() + self._every_s if self._every_s else float("inf")

    def _save(self, snapshot: Snapshot, began: float, is_best: bool) -> None:
        self._failed = True
        try:
            self.run.checkpoints.mkdir(exist_ok=True)
            write(self.run, snapshot, self._attempt)
            self.seconds, self._failed = time.monotonic() - began, False
            self.best = snapshot.name if is_best else self.best
            with contextlib.suppress(OSError):  # what stays is pruned with the next
                prune(self.run, self._keep, self.best)
        except Exception as error:  # whatever it is: the run goes on without this checkpoint
            self._due_at = time.monotonic() + _RETRY_S
            words = getattr(error, "strerror", None) or str(error)
            self._messages.append(
                f"no checkpoint of step {snapshot.state['step']}: {words}; the run goes on, the "
                f"next try follows (make room on the file system of {self.run.path})"
            )
