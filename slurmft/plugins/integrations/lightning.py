"""Lightning's Trainer (`lightning.pytorch`): `callbacks=[SlurmftCallback()]`.

Checkpoints are Lightning's own, in the run directory; a later attempt resumes from the newest.
"""

import math
import os
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.trainer import Trainer

from slurmft.plugins.integrations.attached import add_to_all, attached


class SlurmftCallback(Callback):  # type: ignore[misc, unused-ignore]
    """Stops, saves and reports progress as the job asks. Outside of a job it does nothing."""

    def __init__(self) -> None:
        self._process = attached()
        if self._process.in_job:
            # A callback is made before the Trainer that takes it.
            _set_defaults_of_trainers()
        self._job = self._process.job
        self._step = 0
        """Optimizer steps of this fit."""

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        if not self._process.in_job:
            return
        arguments = " and ".join(f"{k}={v}" for k, v in _processes_of_job().items())
        self._process.check_world_size(
            trainer.world_size,
            "Lightning",
            f"give Trainer {arguments}, as the job has, or neither",
        )
        # Lightning would take the signals itself, and on Slurm requeue the job a second time.
        trainer._signal_connector.register_signal_handlers = lambda: None
        if stage == "fit":
            # The last one: its checkpoints have what the others did after the same step.
            others = [each for each in trainer.callbacks if each is not self]
            trainer.callbacks = [*others, self]
            self._process.trainings += 1
            self._resume(trainer._checkpoint_connector)

    @property
    def _file(self) -> str:
        """The name of the checkpoints of this fit: a script may have several fits."""
        return f"fit-{self._process.trainings}.ckpt"

    def _resume(self, connector: Any) -> None:
        """Makes Lightning load the newest checkpoint of this fit, not the one that it is given."""
        latest = self._job.latest_checkpoint()
        if latest is None or not (latest / self._file).exists():
            return
        path = latest / self._file
        resume_start = connector.resume_start

        def resume_from_ours(_: Any = None, *more: Any, **options: Any) -> Any:
            return resume_start(path, *more, **options)

        connector.resume_start = resume_from_ours
        _, step, *_ = latest.name.split("-")  # step-00000120
        self._job.record("resume", step=int(step), checkpoint=latest.name)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._process.metrics = None
        self._step = trainer.global_step
        self._job.alive("train")

    def on_train_batch_end(
        self,
        trainer: Any,
        module: Any,
        outputs: Any,
        batch: Any,
        index: int,
    ) -> None:
        self._job.alive("train")
        is_step_done = trainer.global_step != self._step  # else gradients accumulate
        if not self._process.in_job or not is_step_done:
            return
        self._step = trainer.global_step
        step = self._process.steps_before + self._step
        share_of_epoch = (index + 1) / trainer.num_training_batches
        numbers = {"epoch": trainer.current_epoch + share_of_epoch}
        # With manual optimization, a module returns what it likes.
        loss = (outputs or {}).get("loss")
        if self._step % trainer.log_every_n_steps == 0 and loss is not None:
            numbers["loss"] = loss
        # Unknown with max_epochs=-1: it trains until it is stopped. Each of several optimizers has
        # steps of its own.
        total = None
        steps_of_fit = trainer.estimated_stepping_batches
        if not math.isinf(steps_of_fit) and len(trainer.optimizers) == 1:
            total = self._process.steps_before + steps_of_fit
        self._job.step(step, total, **numbers)
        if (
            not trainer.is_last_batch
        ):  # after that, the validation of the epoch comes first
            self._save_or_stop(trainer)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        # Where steps alone limit the fit, Lightning resumes what was saved here with one batch more
        # of the same epoch: the next step is a better place.
        counts_steps = trainer.max_epochs == -1 and trainer.num_training_batches > 1
        if counts_steps or not self._process.in_job:
            return
        # A fit that is over goes on to its result: Lightning would not resume it.
        epochs = trainer.fit_loop.epoch_progress.current.processed
        is_last_step = self._step == trainer.max_steps
        is_last_epoch = epochs == trainer.max_epochs
        if not (is_last_step or is_last_epoch or trainer.should_stop):
            self._save_or_stop(trainer)

    def _save_or_stop(self, trainer: Any) -> None:
        """Saves where that is due, and ends the process where it is to stop."""
        if self._job.should_stop() or self._job.checkpoint_due():
            step = self._process.steps_before + self._step
            with self._job.checkpoint(step) as folder:
                # All ranks save: a sharded model is spread over them.
                shared_folder = trainer.strategy.broadcast(str(folder))
                trainer.save_checkpoint(Path(shared_folder, self._file))
        if self._job.should_stop():
            self._process.stop()

    def on_validation_batch_end(self, *_: Any) -> None:
        self._job.alive("evaluate")

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        # Before the training, Lightning tries the validation on a few batches.
        if not trainer.sanity_checking:
            metrics = _numbers(trainer)
            if metrics:
                facts = {"epoch": float(trainer.current_epoch)}
                self._job.evaluated(facts, **metrics)
        self._job.alive("save")

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Ends a fit; one that was stopped does not come here."""
        self._process.metrics = _numbers(trainer)
        self._process.steps_before += trainer.global_step
        self._job.alive("save")


def _numbers(trainer: Any) -> dict[str, float]:
    numbers = {}
    for name, value in trainer.callback_metrics.items():
        numbers[name] = float(value)  # a tensor, which may be on a GPU
    return numbers


def _processes_of_job() -> dict[str, int]:
    """Returns the arguments of Trainer by which it has all processes of the job."""
    # torchrun sets them, as do jobs without it; a process alone has neither.
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    return {"devices": devices, "num_nodes": world_size // devices}


def _set_defaults_of_trainers() -> None:
    """Makes every Trainer whose script gives no `devices` or `num_nodes` take those of the job.

    Lightning would take one node, and on CPUs one process.
    """
    for argument, number in _processes_of_job().items():
        # Lightning reads its defaults here.
        os.environ.setdefault(f"PL_TRAINER_{argument.upper()}", str(number))


def enable() -> None:
    """Adds the callback to every Trainer that is created from now on."""
    _set_defaults_of_trainers()
    add_to_all(Trainer, SlurmftCallback, lambda trainer: trainer.callbacks)
