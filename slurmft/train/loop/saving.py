"""The last files of a run, which wait for room where a disk is full."""

import platform
import shutil
import time
from collections.abc import Callable
from typing import Any

from safetensors import SafetensorError

from slurmft.core import descent
from slurmft.core.errors import SlurmftError
from slurmft.core.files import new_folder
from slurmft.core.run_files import Failure
from slurmft.job import Job
from slurmft.job.process_group import World
from slurmft.runs.disk_space import is_full, no_room
from slurmft.runs.rundir import COLLECTED_WEIGHTS, RunDir
from slurmft.train.loop.checkpointing import Stopped
from slurmft.train.loop.loaded_model import LoadedModel
from slurmft.train.loop.setup import Setup
from slurmft.train.parallel.strategy import Strategy

_RETRY_S = 5.0
"""How often saving is tried."""
_PATIENCE_S = 3600.0
"""How long a finished run's nodes wait for room."""


class PatientSave:
    """Saves what a run ends with, on the main rank, again and again where the disk is full;
    checkpoints that the run no longer needs give way first."""

    def __init__(self, job: Job, world: World, what: str, size_bytes: int) -> None:
        """
        Args:
            what: is saved, in words; of about so many bytes.
        """
        assert job.run_dir is not None
        self._job = job
        self._world = world
        self._run_dir = RunDir(job.run_dir)
        self._what = what
        self._size_bytes = size_bytes
        self._deadline = time.monotonic() + _PATIENCE_S
        self._tries = 0
        self._problem: SlurmftError | None = None

    def run(
        self,
        save: Callable[[], Any],
        collect: Callable[[], None] = lambda: None,
    ) -> None:
        """Saves. Called on every rank.

        Args:
            collect: called on every rank before the main one saves.

        Raises:
            Stopped: there is no room, and the job is to stop.
            SlurmftError: there was none for an hour.
        """
        self._job.begin_phase()
        while True:
            # The watchdog would take the wait for a hang.
            self._job.alive("save")
            self._tries += 1
            collect()
            if self._world.on_main(lambda: self._try(save)):
                return
            if self._tries == 1:  # checkpoints have given way
                continue
            if self._job.should_stop():
                if self._problem:
                    # The last checkpoint is there: the next attempt has this left to do, no step.
                    where = f"rank 0 on {platform.node()}"
                    self._run_dir.add(Failure.of(where, self._problem, retry=True))
                raise Stopped
            time.sleep(_RETRY_S)

    def _try(self, save: Callable[[], Any]) -> bool:
        """Returns whether there was room. On the main rank."""
        try:
            save()
            return True
        except (OSError, SafetensorError) as raised:
            if not is_full(raised):
                raise
            error = raised
        # But for the newest: an attempt that is to stop here leaves it to the next one.
        self._job.remove_checkpoints(keep=1)
        # The first failure may be cured by that; from the second on the user is told.
        if self._tries > 1 and self._problem is None:
            self._problem = no_room(self._run_dir, self._what, error, self._size_bytes)
            warning = f"{self._problem.message}; it is tried again"
            self._job.warn(f"{warning}: {self._problem.hint}")
        if self._problem and time.monotonic() > self._deadline:
            raise self._problem
        return False


def save_model(setup: Setup, loaded: LoadedModel, strategy: Strategy) -> None:
    """Saves the model with all that loads it. Called on every rank. Raises as `PatientSave.run`."""
    run_dir = setup.run_dir
    weights_folder = descent.through(run_dir.checkpoints / COLLECTED_WEIGHTS)

    def save() -> None:
        weights = strategy.collected_weights(weights_folder)
        with new_folder(run_dir.model) as named:
            folder = descent.through(named)
            loaded.save(folder, weights)
            # Saved before training: at its end the tokenizer's source may be gone.
            tokenizer = descent.through(run_dir.tokens / "tokenizer")
            shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
            setup.task.save_extras(folder, loaded.model)

    # About: the first weight stands for all. The number is for a message alone.
    bytes_per_weight = next(loaded.model.parameters()).element_size()
    size_bytes = loaded.parameters * bytes_per_weight
    patient = PatientSave(setup.job, setup.world, "the model", size_bytes)
    patient.run(save, lambda: strategy.collect_weights(weights_folder))
