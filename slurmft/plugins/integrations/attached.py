"""Attaches a script to its job through its training library, which knows no `with` block."""

import atexit
import functools
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from slurmft.core.errors import Exit, SlurmftError
from slurmft.job import attach


class Attached:
    """The job of this process, up to the process's end, and the state that its trainers share."""

    def __init__(self) -> None:
        self.job = attach()
        self.in_job = self.job.run_dir is not None
        self.trainings = 0
        """Trainings that have begun: a script may train several models."""
        self.steps_before = 0
        """Steps of the trainings that have ended: those of the job go on from there."""
        self.saved: dict[str, dict[str, str]] = {}
        """Number of a training -> its checkpoints, oldest first, and their signatures; on the main
        rank."""
        self.metrics: dict[str, float] | None = None
        """The result, if the process comes to its end: of a training that has."""
        # Neither library has a hook for the end of a script, or for an error before the training.
        atexit.register(self._end)
        self._excepthook = sys.excepthook
        sys.excepthook = self._fail

    def check_world_size(self, world_size: int, library: str, hint: str) -> None:
        """Refuses to train where the library does not see the processes of the job.

        The process group does not show it: the job forms one for its stops.

        Raises:
            SlurmftError: the library sees more processes, or fewer; `hint` is what to do.
        """
        if self.in_job and world_size != self.job.world_size:
            raise SlurmftError(
                f"the job has {self.job.world_size} processes, and the Trainer of {library} has "
                f"{world_size}: each would train alone",
                hint,
            )

    def stop(self) -> None:
        """Ends the process as stopped."""
        self.metrics = None
        # No failure: the job's end, which comes next, tells the node's task that it has stopped.
        raise SystemExit(Exit.OK)

    def _end(self) -> None:
        # only now: a script may evaluate after the training
        if self.metrics is not None:
            self.job.result(**self.metrics)
        self.job.__exit__(None, None, None)

    def _fail(
        self,
        kind: Any,
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception):
            self.job.__exit__(kind, error, trace)  # in a job, it ends the process
        self._excepthook(kind, error, trace)


@functools.cache
def attached() -> Attached:
    """Attaches this process to its job at the first call."""
    return Attached()


def add_to_all(
    trainer: Any,
    callback: Any,
    callbacks_of: Callable[[Any], list[Any]],
) -> None:
    """Adds a callback to every trainer that is created from now on, unless it has one.

    Args:
        trainer: the class of the trainers.
        callback: the class of the callback.
        callbacks_of: returns the callbacks of a trainer.
    """
    init = trainer.__init__

    @functools.wraps(init)
    def init_with_callback(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        callbacks = callbacks_of(self)
        if not any(isinstance(each, callback) for each in callbacks):
            callbacks.append(callback())

    trainer.__init__ = init_with_callback
