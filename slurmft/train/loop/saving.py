"""The last files of a run, which wait for room where a disk is full."""

import platform
import shutil
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from slurmft.core.errors import SlurmftError
from slurmft.core.files import new_folder
from slurmft.core.run_files import Failure
from slurmft.runs.disk_space import is_full, no_room

if TYPE_CHECKING:
    from slurmft.train.loop.trainer import Training

_RETRY_S, _PATIENCE_S = 5.0, 3600.0
"""How often saving is tried, and how long a finished run's nodes wait for room."""


class Stopped(Exception):
    """The ranks agreed to stop."""


def save_patiently(
    training: "Training",
    what: str,
    size: int,
    save: Callable[[], Any],
    gather: Callable[[], None] = lambda: None,
) -> None:
    """Saves on the main rank, again and again where the disk is full; checkpoints that the run no
    longer needs give way first. Called on every rank.

    Args:
        what: is saved, in words; of `size` bytes, about.
        gather: called on every rank before the main one saves.

    Raises:
        Stopped: there is no room, and the job is to stop.
        SlurmftError: there was none for an hour.
    """
    job, run_dir = training.job, training.run_dir
    deadline, tries = time.monotonic() + _PATIENCE_S, 0
    problem: SlurmftError | None = None

    def attempt() -> bool:
        nonlocal problem
        try:
            save()
            return True
        except (OSError, SafetensorError) as error:
            if not is_full(error):
                raise
        job.remove_checkpoints(keep=1)
        if tries > 1 and problem is None:
            problem = no_room(run_dir, what, size)
            job.warn(f"{problem.message}; it is tried again: {problem.hint}")
        if problem and time.monotonic() > deadline:
            raise problem
        return False

    job.begin_phase()
    while True:
        job.alive("save")
        tries += 1
        gather()
        if training.world.on_main(attempt):
            return
        if tries == 1:  # checkpoints have given way
            continue
        if job.should_stop():
            if problem:
                run_dir.add(Failure.of(f"rank 0 on {platform.node()}", problem, retry=True))
            raise Stopped
        time.sleep(_RETRY_S)


def save_model(training: "Training") -> None:
    """Saves the model with its tokenizer. Called on every rank. Raises as `save_patiently`."""
    loaded, sharding, run_dir = training.loaded, training.sharding, training.run_dir
    aside = run_dir.checkpoints / ".whole"

    def save() -> None:
        weights = sharding.whole(aside) if sharding else None
        with new_folder(run_dir.model) as folder:
            loaded.save(folder, weights)
            # Saved before training: at its end the tokenizer's source may be gone.
            shutil.copytree(run_dir.tokens / "tokenizer", folder, dirs_exist_ok=True)

    def gather() -> None:
        if sharding:
            sharding.gather(aside)

    size = loaded.parameters * next(loaded.model.parameters()).element_size()
    save_patiently(training, "the model", size, save, gather)
