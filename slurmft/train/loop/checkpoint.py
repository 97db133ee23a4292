"""Checkpoints of the trainer: the states of its parts, as tensors and JSON, written beside it.

Tensors are safetensors, everything else JSON: nothing is ever unpickled. The folders, their
checksums and their number are the job's (`slurmft.job.checkpoints`).
"""

import dataclasses
import json
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load, save_file

from slurmft.core import descent, filesystem
from slurmft.core.errors import UsageError
from slurmft.core.files import read_bytes, read_text
from slurmft.job import Job
from slurmft.job.checkpoints import checkpoint_name
from slurmft.job.process_group import World
from slurmft.runs.disk_space import is_full, no_room
from slurmft.runs.rundir import RunDir
from slurmft.train.loop.state import State, Tensors

_STATE = "state.json"
_STOPS = "the run stops without it; the next start has an older one, or none"
FORM = 4
"""Number of the form that checkpoints have: raised by whoever changes what a part's state holds.
Another number is another version's, and is refused before a part reads it."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of a run at one step boundary."""

    step: int
    """Optimizer steps done."""
    suffix: str
    """What was done after the step, as the checkpoint's name says it: see
    `RunDir.checkpoint_names`."""
    setup: dict[str, Any] = field(default_factory=dict)
    """What the run was set up with (`Setup.facts`)."""
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name of a part -> the values of its state."""
    tensors: dict[str, Tensors] = field(default_factory=dict)
    """File name without suffix -> name -> CPU tensor, of all parts."""
    shares: Tensors = field(default_factory=dict)
    """Tensors of which each rank has its share, before they are written."""
    best: str | None = None
    """Name of the checkpoint of the best evaluation so far."""
    path: Path | None = None
    """Where it was read from."""

    @property
    def name(self) -> str:
        return checkpoint_name(self.step, self.suffix)

    @property
    def size_bytes(self) -> int:
        """Bytes of its tensors, which are nearly all that it writes."""
        # A share has the bytes of the whole tensor.
        tensors = list(self.shares.values())
        for group in self.tensors.values():
            tensors += group.values()
        return sum(tensor.nbytes for tensor in tensors)

    def state_of(self, part: str) -> State:
        """Returns what one part gave to it."""
        return State(self.parts[part], self.tensors, checkpoint=self.path)


def write(folder: Path, checkpoint: Checkpoint) -> None:
    """Writes the files of a checkpoint. OSError or SafetensorError where it cannot."""
    for name, tensors in checkpoint.tensors.items():
        save_file(tensors, folder / f"{name}.safetensors")
    values = {
        "form": FORM,
        "step": checkpoint.step,
        "setup": checkpoint.setup,
        "parts": checkpoint.parts,
        "best": checkpoint.best,
    }
    (folder / _STATE).write_text(json.dumps(values), encoding="utf-8")


def read(path: Path) -> Checkpoint:
    """Reads a checkpoint that is whole.

    Raises:
        OSError: the file system fails.
        UsageError: another version wrote it, in another form.
    """
    text = read_text(path / _STATE, most_bytes=None)
    values = json.loads(text)
    if values.pop("form", None) != FORM:
        raise UsageError(
            f"{path.name} was written by another version of slurmft, and this one cannot resume it",
            "resume the run with the version that started it, or submit a new run",
        )
    # Not mapped into memory: a file that is open cannot be pruned on every file system.
    tensors = {}
    for file in path.glob("*.safetensors"):
        tensors[file.stem] = load(read_bytes(file, most_bytes=None))
    # A name begins with that of the step alone.
    suffix = path.name.removeprefix(checkpoint_name(values["step"]))
    return Checkpoint(**values, suffix=suffix, tensors=tensors, path=path)


def newest(job: Job, world: World) -> Checkpoint | None:
    """Returns the newest checkpoint that is whole, on every rank; None: there is none. Raises as
    `read`."""
    path = job.latest_checkpoint()
    # All ranks have the same answer: none waits in what follows for one that does not come.
    if path is None:
        return None
    return read_for_all(world, lambda: read(path))


def read_for_all(
    world: World, read: Callable[[], Checkpoint | None]
) -> Checkpoint | None:
    """Returns what `read` returns on the main rank, on every rank."""
    tensors: dict[str, Tensors] = {}

    def read_values() -> dict[str, Any] | None:
        """Returns the fields of the checkpoint, without its tensors, and the names of its files."""
        checkpoint = read()
        if checkpoint is None:
            return None
        tensors.update(checkpoint.tensors)
        no_tensors = dataclasses.replace(checkpoint, tensors={})
        values = dataclasses.asdict(no_tensors)
        return values | {"tensors": list(tensors), "path": str(checkpoint.path)}

    values = world.on_main(read_values)
    if values is None:
        return None
    # Tensors go by themselves: JSON cannot hold them.
    shared = {}
    for file in values["tensors"]:
        tensors_of_file = tensors.get(file, {})  # none, but on the main rank
        shared[file] = world.share_tensors(tensors_of_file)
    path = Path(values["path"])
    return Checkpoint(**values | {"tensors": shared, "path": path})


def copied(tensors: dict[str, Tensors]) -> dict[str, Tensors]:
    """Returns a contiguous copy in this host's memory, of tensors wherever they are."""
    copies: dict[str, Tensors] = {}
    for file, group in tensors.items():
        copies[file] = {}
        for name, tensor in group.items():
            copy = tensor.detach().to("cpu", copy=True)
            copies[file][name] = copy.contiguous()  # safetensors writes no others
    return copies


class Saver:
    """Writes checkpoints of which the main rank has all, in a thread. All ranks make the same
    calls.

    A failure becomes a warning, and a later state is saved instead: the run continues, and the
    checkpoints that are there stay.
    """

    def __init__(self, job: Job, world: World) -> None:
        self._job = job
        self._world = world
        self._thread: threading.Thread | None = None

    def start(self, checkpoint: Checkpoint, best: bool = False) -> None:
        """Writes a checkpoint in the background."""
        if not self._world.is_main:
            return
        # One save at a time: each holds a copy of all tensors in memory.
        self._join()
        folder = self._job.checkpoint(checkpoint.step, checkpoint.suffix, best)

        def write_and_warn() -> None:
            self._warn(checkpoint, self._write(checkpoint, folder))

        self._thread = threading.Thread(target=write_and_warn, name="checkpoint")
        self._thread.start()

    def save(self, checkpoint: Checkpoint, patience_s: float) -> bool:
        """Writes a checkpoint, trying again for `patience_s` seconds. Returns whether it is there
        now."""
        return bool(self._world.on_main(lambda: self._save(checkpoint, patience_s)))

    def wait(self) -> None:
        """Waits until no save is under way."""
        is_busy = self._thread is not None and self._thread.is_alive()
        if self._world.share_object(is_busy):
            # In the next step the others would wait for this rank in nccl, which gives up.
            self._world.on_main(self._join)

    def _join(self) -> None:
        """Waits until this rank's thread has written."""
        if self._thread is not None:
            self._thread.join()

    def _save(self, checkpoint: Checkpoint, patience_s: float) -> bool:
        self._join()
        deadline = time.monotonic() + patience_s
        assert self._job.run_dir is not None
        path = RunDir(self._job.run_dir).checkpoints / checkpoint.name
        if self._agreed(path.exists()):  # at the last evaluation, perhaps
            return True
        # The time between the stop signal and the kill is short, and so is the pause.
        while True:
            error = self._write(checkpoint, self._new_folder(checkpoint))
            if error is None:
                return True
            if self._agreed(time.monotonic() > deadline):
                self._warn(checkpoint, error, _STOPS)
                return False
            time.sleep(1.0)

    def _new_folder(
        self, checkpoint: Checkpoint
    ) -> AbstractContextManager[Path | None]:
        return self._job.checkpoint(checkpoint.step, checkpoint.suffix)

    def _agreed(self, value: bool) -> bool:
        """Returns the main rank's value, on every rank that saves."""
        return value

    def _write(
        self,
        checkpoint: Checkpoint,
        folder: AbstractContextManager[Path | None],
    ) -> Exception | None:
        """Returns what went wrong, whatever it is: the run continues without this checkpoint."""
        try:
            with folder as path:
                assert path is not None  # on the main rank
                write(descent.through(path), checkpoint)
        except Exception as error:
            return error
        return None

    def _warn(
        self,
        checkpoint: Checkpoint,
        error: Exception | None,
        what_follows: str = "the run continues and tries again",
    ) -> None:
        # To find out what could make room costs file operations: the others' warnings are dropped.
        if error is None or not self._world.is_main:
            return
        assert self._job.run_dir is not None
        reason = filesystem.reason(error, self._job.run_dir)
        cure = ""
        if is_full(error):
            run = RunDir(self._job.run_dir)
            problem = no_room(run, "it", error, checkpoint.size_bytes)
            reason, cure = problem.message, f": {problem.hint}"
        self._job.warn(
            f"no checkpoint of step {checkpoint.step}: {reason}; {what_follows}{cure}"
        )
