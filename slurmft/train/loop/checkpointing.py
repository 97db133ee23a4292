"""When a run saves, stops and resumes: checkpoints of all its parts.

A checkpoint is the states of the parts: each gives its own by `state()`, and takes it back by
`load()`. Nothing here knows what is in them, but for the position's step and phase and the number
of the evaluator's predictions, which make up the checkpoint's name.
"""

import json
import time

from slurmft.job.checkpoints import BadCheckpointError, checkpoint_name, verify
from slurmft.train.loop import checkpoint as checkpoints
from slurmft.train.loop.checkpoint import Checkpoint, Saver, copied
from slurmft.train.loop.learner import Learner
from slurmft.train.loop.position import Position
from slurmft.train.loop.setup import Setup
from slurmft.train.loop.state import Part, Tensors


class Stopped(Exception):
    """The ranks agreed to stop."""


class Checkpointing:
    """Saves the parts of a run, and restores them. All ranks make the same calls."""

    def __init__(self, setup: Setup, saver: Saver, parts: dict[str, Part]) -> None:
        """
        Args:
            parts: in the order in which they are saved and restored; among them `position` and
                `evaluator`.
        """
        self._setup = setup
        self._job = setup.job
        self._world = setup.world
        self._saver = saver
        self._parts = parts

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continues from a checkpoint, exactly where it was taken."""
        for name, part in self._parts.items():
            part.load(checkpoint.state_of(name))
        # A new attempt knows from the checkpoint alone which one it must not remove.
        if self._world.is_main:
            self._job.keep_as_best(checkpoint.best)

    def stop_or_save(self) -> None:
        """The point between two steps where all ranks can stop, or save.

        Raises:
            Stopped: the ranks agreed to stop.
        """
        if self._job.should_stop():
            raise Stopped
        if self._job.checkpoint_due():
            self.save()

    def save(self, is_best: bool = False) -> None:
        """Copies the state to memory; writing it is the background's work."""
        with self._job.saving():
            began = time.monotonic()
            checkpoint = self._take(is_best)
            self._saver.start(checkpoint, is_best)
            copy_s = time.monotonic() - began
            self._record(checkpoint, copy_s=copy_s)

    def _record(self, checkpoint: Checkpoint, **seconds: float) -> None:
        name = checkpoint.name
        step = checkpoint.step
        self._job.record("checkpoint", checkpoint=name, step=step, **seconds)

    def save_last(self) -> None:
        """Saves the state that all ranks stopped in, after the same step."""
        # The kill may come lead_s after the signal: half of that is left for the steps before.
        patience_s = self._job.config.job.lead_s / 2
        self._job.alive("save")
        checkpoint = self._take()
        if self._saver.save(checkpoint, patience_s):
            self._record(checkpoint)

    def wait(self) -> None:
        """Waits until no save is under way."""
        self._saver.wait()

    def return_to_best(self, learner: Learner, position: Position) -> int | None:
        """Takes weights and metrics of the best evaluation from its checkpoint. Returns its
        optimizer step; None: it cannot be read, and they stay, with a warning."""
        self._saver.wait()  # the best one may be under way
        best = checkpoints.read_for_all(self._world, self._read_best)
        if best is None:
            return None
        learner.load_weights(best.state_of("learner"))
        before = position_of(best)
        position.metrics = before.metrics
        position.by_class = before.by_class
        return before.step

    def _read_best(self) -> Checkpoint | None:
        path = self._job.best_checkpoint
        try:
            if path is None:
                raise BadCheckpointError("it could not be saved")
            verify(path)
            return checkpoints.read(path)
        except (OSError, BadCheckpointError) as error:
            self._job.warn(f"the model is the last one, not the best: {error}")
            return None

    def _take(self, is_best: bool = False) -> Checkpoint:
        """Returns the state of all parts, in memory: on the main rank; on others their shares."""
        self._saver.wait()  # one copy in memory at a time
        states = {name: part.state() for name, part in self._parts.items()}
        position = states["position"].values
        shares: Tensors = {}
        tensors: dict[str, Tensors] = {}
        for state in states.values():
            shares |= state.shares
            tensors |= state.tensors
        if not self._world.is_main:
            return Checkpoint(position["step"], "", shares=shares)
        # The name sorts the checkpoints of one step by how far they are.
        predicted = states["evaluator"].values["samples"]
        suffix = checkpoint_suffix(position["phase"], predicted, is_best)
        values = {part: state.values for part, state in states.items()}
        name = checkpoint_name(position["step"], suffix)
        return Checkpoint(
            step=position["step"],
            suffix=suffix,
            setup=self._setup.facts(),
            # Copies: training goes on while they are written. Through JSON, as a file would give
            # them back.
            parts=json.loads(json.dumps(values)),
            tensors=copied(tensors),
            shares=shares,
            best=self._name_of_best(name, is_best),
        )

    def _name_of_best(self, name: str, is_best: bool) -> str | None:
        """Returns the name of the best checkpoint, where the next one is called `name`."""
        if is_best:
            return name
        path = self._job.best_checkpoint
        if path is None:
            return None
        return path.name


def checkpoint_suffix(phase: str, predicted: int, is_best: bool = False) -> str:
    """Returns the end of a checkpoint's name, by which `RunDir.checkpoint_names` sorts those of one
    step.

    Args:
        predicted: samples that the evaluation under way has predicted.
    """
    if phase == "test":
        return f"-t{predicted:08d}"
    # An evaluation under way: it follows the training of the step.
    if predicted:
        return f"-e{predicted:08d}"
    if is_best or phase == "done":
        return "-evaluated"
    return ""


def position_of(checkpoint: Checkpoint) -> Position:
    """Returns how far the run had come."""
    return Position(**checkpoint.parts["position"])
