"""Checkpoints of the trainer: its state as tensors and JSON, written beside the training.

Tensors are safetensors, everything else JSON: nothing is ever unpickled. The folders, their
checksums and their number are the job's (`slurmft.job.checkpoints`).
"""

import json
import threading
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save_file

from slurmft.job import Job
from slurmft.job.checkpoints import checkpoint_name
from slurmft.runs.disk_space import is_full
from slurmft.runs.rundir import RunDir

Tensors = dict[str, torch.Tensor]

_STATE = "state.json"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a run at one step boundary."""

    suffix: str
    """Of the checkpoint's name: what was done after the step (see `RunDir.checkpoint_names`)."""
    state: dict[str, Any]
    """What JSON can hold."""
    tensors: dict[str, Tensors]
    """File name without suffix -> name -> CPU tensor."""
    sharded: Tensors = field(default_factory=dict)
    """Tensors of which each rank has its share (`slurmft.train.parallel.sharding`)."""


def write(folder: Path, snapshot: Snapshot) -> None:
    """Writes the files of a checkpoint. OSError or SafetensorError where it cannot."""
    for name, tensors in snapshot.tensors.items():
        save_file(tensors, folder / f"{name}.safetensors")
    (folder / _STATE).write_text(json.dumps(snapshot.state), encoding="utf-8")


def read(path: Path) -> Snapshot:
    """Reads a checkpoint that is whole. OSError where the file system fails."""
    state = json.loads((path / _STATE).read_text(encoding="utf-8"))
    # Not mapped into memory: a file that is open cannot be pruned on every file system.
    tensors = {file.stem: load(file.read_bytes()) for file in path.glob("*.safetensors")}
    return Snapshot(path.name.removeprefix(f"step-{state['step']:08d}"), state, tensors)


def copied(tensors: dict[str, Tensors]) -> dict[str, Tensors]:
    """A contiguous copy in this host's memory, of tensors wherever they are."""
    return {
        file: {name: t.detach().to("cpu", copy=True).contiguous() for name, t in group.items()}
        for file, group in tensors.items()
    }


class Saver:
    """Writes snapshots in a thread; on the main rank alone.

    A failure becomes a warning, and a later state is saved instead: the run continues, and the
    checkpoints that are there stay.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._thread: threading.Thread | None = None

    def start(self, snapshot: Snapshot, best: bool = False) -> None:
        """Writes a snapshot in the background."""
        self.wait()
        checkpoint = self._job.checkpoint(snapshot.state["step"], snapshot.suffix, best)

        def write() -> None:
            self._warn(snapshot, self._write(snapshot, checkpoint))

        self._thread = threading.Thread(target=write, name="checkpoint")
        self._thread.start()

    def save(self, snapshot: Snapshot, patience_s: float) -> bool:
        """Writes a snapshot, trying again for `patience_s` seconds; whether it is there now."""
        self.wait()
        step, deadline = snapshot.state["step"], time.monotonic() + patience_s
        assert self._job.run_dir is not None
        path = RunDir(self._job.run_dir).checkpoints / checkpoint_name(step, snapshot.suffix)
        if self._agreed(path.exists()):  # at the last evaluation, perhaps
            return True
        while error := self._write(snapshot, self._job.checkpoint(step, snapshot.suffix)):
            if self._agreed(time.monotonic() > deadline):
                self._warn(snapshot, error)
                return False
            time.sleep(1.0)
        return True

    def _agreed(self, value: bool) -> bool:
        """The main rank's value, on every rank that saves."""
        return value

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Waits for the save under way."""
        if self._thread is not None:
            self._thread.join()

    def _write(
        self, snapshot: Snapshot, checkpoint: AbstractContextManager[Path | None]
    ) -> Exception | None:
        """Returns what went wrong, whatever it is: the run continues without this checkpoint."""
        try:
            with checkpoint as folder:
                assert folder is not None  # on the main rank
                write(folder, snapshot)
        except Exception as error:
            return error
        return None

    def _warn(self, snapshot: Snapshot, error: Exception | None) -> None:
        if error is None:
            return
        reason = getattr(error, "strerror", None) or str(error)
        room = f" (make room on the file system of {self._job.run_dir})" if is_full(error) else ""
        self._job.warn(
            f"no checkpoint of step {snapshot.state['step']}: {reason}; the run continues and "
            f"tries again{room}"
        )
