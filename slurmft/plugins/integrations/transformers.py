"""transformers' Trainer, and TRL's, which derive from it: `callbacks=[SlurmftCallback()]`.

Trainer saves its checkpoints itself, into its output_dir. When all ranks have, the run directory
gets a small one, which names it. A later attempt resumes from the newest that was named: one that
was half-written when a node died never was. Where another run with the same output_dir has written
over it, its signature is another one.
"""

import contextlib
import functools
import hashlib
import os
import re
import secrets
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME, Trainer
from transformers.trainer_callback import TrainerCallback

from slurmft.core import descent, removal
from slurmft.core.decode import read
from slurmft.core.files import is_measurement, read_json, write_json, write_text
from slurmft.plugins.integrations.attached import add_to_all, attached
from slurmft.programs.file_ends import is_cut_off

_SAVED = "trainer.json"
"""Name of the file that names Trainer's checkpoints."""
_MARK = "slurmft-mark.txt"
"""Name of a file in each of Trainer's checkpoints, with a text that no other one has."""
_CHECKPOINT = re.compile(r"checkpoint-\d+")
"""Names of Trainer's checkpoints."""
_STEP_NUMBERS = ("loss", "learning_rate", "grad_norm")
_THEIR_STOP = "JITCheckpointCallback"
_NO_METRICS = ("_runtime", "_per_second", "_preparation_time")
"""Endings of what Trainer reports with the metrics."""

_DIVIDES_BY_STEPS_SINCE_RESUME = hasattr(Trainer, "_finalize_training")
"""Whether Trainer's train_loss is a mean of the steps since a resume, as since transformers 5; else
their sum is divided by all steps."""


class SlurmftCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Stops, saves and reports progress as the job asks. Outside of a job it does nothing."""

    def __init__(self) -> None:
        self._process = attached()
        self._job = self._process.job
        self._stops = False
        """Whether the process ends after the next checkpoint."""
        self._samples = 0
        self._first_step = 0
        """The step from which this training was resumed."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._process.check_world_size(
            args.world_size,
            "transformers",
            "on CPUs: TrainingArguments(use_cpu=True), or ACCELERATE_USE_CPU=true",
        )
        self._process.metrics = None
        self._first_step = state.global_step
        self._job.alive("train")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        samples_of_rank = args.train_batch_size * args.gradient_accumulation_steps
        self._samples += samples_of_rank * args.world_size
        if control.should_log:
            self._job.step(self._step(state))  # its record comes with the loss
        else:
            self._record(state)
        # else the epoch's evaluation comes first
        if not float(state.epoch).is_integer():
            self._ask(args, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if float(state.epoch).is_integer():
            self._ask(args, control)

    def _ask(self, args: Any, control: Any) -> None:
        """Asks the job whether to save now."""
        self._stops = self._job.should_stop()
        # With a strategy of its own, Trainer says when to save. A stop always does.
        is_due = args.save_strategy == "no" and self._job.checkpoint_due()
        control.should_save |= self._stops or is_due
        if control.should_save:
            self._job.alive("save")

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: Any = None,
        **_: Any,
    ) -> None:
        if "loss" not in logs:  # an evaluation, or the summary at the end
            return
        numbers = {}
        for name in _STEP_NUMBERS:
            if name in logs:  # no grad_norm without clipping
                numbers[name] = logs[name]
        self._record(state, **numbers)

    def _step(self, state: Any) -> int:
        """Returns the step of the job."""
        return int(self._process.steps_before + state.global_step)

    def _record(self, state: Any, **numbers: float) -> None:
        total = self._process.steps_before + state.max_steps
        step = self._step(state)
        self._job.step(step, total, samples=self._samples, epoch=state.epoch, **numbers)
        # The speed is measured over all samples since the last record.
        self._samples = 0

    # --- evaluations and the end ------------------------------------------------------------------

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._job.alive("evaluate")

    def on_evaluate(
        self,
        args: Any,
        state: Any,
        control: Any,
        metrics: Any,
        **_: Any,
    ) -> None:
        evaluated = _metrics(metrics)
        if evaluated:
            self._job.evaluated({"epoch": state.epoch}, **evaluated)
        self._job.alive("save")
        if self._process.metrics is not None:  # after the training
            all_metrics = self._process.metrics | evaluated
            self._process.metrics = _with_primary_first(args, all_metrics)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ends a training; one that was stopped does not come here."""
        logs = state.log_history
        if args.load_best_model_at_end and state.best_global_step is not None:
            # The model is that of the best step by now: its metrics are the result.
            best_step = state.best_global_step
            logs = [log for log in logs if log["step"] == best_step]
        metrics: dict[str, float] = {}
        for log in reversed(logs):  # most are of steps, and have none
            metrics = _metrics(log)
            if metrics:
                break
        train_loss = _train_loss(state, self._first_step)
        if train_loss is not None:
            metrics["train_loss"] = train_loss
        self._process.metrics = _with_primary_first(args, metrics)
        self._process.steps_before += state.global_step
        self._job.alive("save")

    # --- checkpoints ------------------------------------------------------------------------------

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self._process.in_job:
            return
        if self._job.world_size > 1:
            world = self._job.join()
            world.all_objects(None)  # waits until every rank has written its files
        with self._job.checkpoint(self._step(state)) as folder:
            # Those of a search for hyperparameters lie in folders of their trials: none is resumed.
            is_noted = folder is not None and not state.is_hyper_param_search
            if folder and is_noted:
                path = Path(args.output_dir, f"checkpoint-{state.global_step}")
                signatures = self._note(path)
                write_json(folder / _SAVED, self._process.saved)
        # With a strategy of its own, Trainer removes old ones itself (save_total_limit).
        if is_noted and args.save_strategy == "no":
            keep = self._job.config.job.keep_checkpoints
            for old, signature in list(signatures.items())[:-keep]:
                _remove(Path(old), signature)
        if self._stops:
            self._process.stop()
        self._job.alive("train")

    def _note(self, checkpoint: Path) -> dict[str, str]:
        """Adds a checkpoint to those of this training, which it returns, oldest first, with their
        signatures; and drops those that are gone, or that it has overwritten."""
        new_path = str(checkpoint.absolute())
        saved = {}
        for training, signatures in self._process.saved.items():
            kept = {}
            for path, signature in signatures.items():
                if path != new_path and Path(path).is_dir():
                    kept[path] = signature
            saved[training] = kept
        if checkpoint.is_dir():
            write_text(checkpoint / _MARK, f"{secrets.token_hex(16)}\n")
        this_training = str(self._process.trainings)  # text: a key of JSON
        signatures = saved.setdefault(this_training, {})
        signatures[new_path] = _signature(checkpoint)
        self._process.saved = saved
        return signatures

    def begin(self, callbacks: list[Any]) -> str | None:
        """Begins a training; returns its newest whole checkpoint, the same on all ranks."""
        self._process.trainings += 1
        if not self._process.in_job:
            return None
        # transformers' own one would end the training at SIGTERM as if it were finished.
        # By its name: older versions of transformers have no such class.
        for callback in list(callbacks):  # a copy: the list changes
            if type(callback).__name__ == _THEIR_STOP:
                callbacks.remove(callback)
        newest = self._job.latest_checkpoint()
        if self._job.world_size == 1:
            return self._find(newest)
        # One rank looks for all: the ranks must not resume from different steps.
        world = self._job.join()
        path: str | None = world.on_main(functools.partial(self._find, newest))
        return path

    def _find(self, newest: Path | None) -> str | None:
        """Returns the newest whole checkpoint of this training that `newest` names."""
        # Once a process: the trainings after the first one know it already.
        if newest and not self._process.saved:
            saved = read(newest / _SAVED, dict[str, dict[str, str]])
            self._process.saved = saved or {}
        this_training = str(self._process.trainings)
        signatures = self._process.saved.get(this_training, {})
        for path, signature in reversed(signatures.items()):
            problem = _problem(Path(path), signature)
            if not problem:
                _, _, number = path.rpartition("-")  # .../checkpoint-500
                step = self._process.steps_before + int(number)
                self._job.record("resume", step=step, checkpoint=path)
                return path
            self._job.warn(f"{path} {problem}: it is not used")
            self._job.remove_checkpoints()  # those to come have smaller numbers
        return None


def _problem(checkpoint: Path, signature: str) -> str:
    """Returns why a training cannot resume from a checkpoint, in words; "" where it can."""
    # the last file that Trainer writes
    state = read_json(checkpoint / TRAINER_STATE_NAME, most_bytes=None)
    # After a node has gone down, the files before it may lack their ends.
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    if not state or any(is_cut_off(path) for path in files):
        return "is not whole any more"
    if not signature or _signature(checkpoint) != signature:
        return "was written again, by another run with the same output_dir"
    return ""


def _remove(checkpoint: Path, signature: str) -> None:
    """Removes a checkpoint that this training has written, as far as that is possible."""
    # Where others can rename, another folder may take its place during the look at it: so it is
    # looked at through a descriptor.
    with contextlib.suppress(OSError), descent.opened(checkpoint) as folder:
        inode = os.fstat(folder).st_ino
        # Another run may have written one of its own there.
        if signature and _signature(Path(f"/proc/self/fd/{folder}")) == signature:
            removal.discard(checkpoint, _CHECKPOINT, inode=inode)


def _signature(checkpoint: Path) -> str:
    """Returns what is another text once another run has written into a checkpoint; "" of one that
    is absent, has no mark or cannot be read."""
    digest = hashlib.sha256()
    for name in (_MARK, TRAINER_STATE_NAME):
        try:
            digest.update((checkpoint / name).read_bytes())
        except OSError:
            return ""
    return digest.hexdigest()


def _metrics(logs: dict[str, Any]) -> dict[str, float]:
    """Returns the metrics of an evaluation, without Trainer's prefix."""
    metrics = {}
    for name, value in logs.items():
        is_of_evaluation = name.startswith("eval_") and not name.endswith(_NO_METRICS)
        if is_of_evaluation and is_measurement(value):
            metrics[name.removeprefix("eval_")] = value
    return metrics


def _train_loss(state: Any, first_step: int) -> float | None:
    """Returns the mean loss of a training, where Trainer has that of its steps since a resume;
    None: there is none.

    Of the steps before the resume, those count whose loss was logged.
    """
    loss: float | None = state.log_history[-1].get("train_loss")
    if loss is None or first_step == 0:
        return loss
    steps = state.global_step - first_step
    divisor = steps
    if not _DIVIDES_BY_STEPS_SINCE_RESUME:
        divisor = state.global_step
    total = loss * divisor
    logged_step = 0
    for log in state.log_history:
        if "loss" in log and log["step"] <= first_step:
            total += log["loss"] * (log["step"] - logged_step)
            steps += log["step"] - logged_step
            logged_step = log["step"]
    if steps == 0:
        return None
    return float(total / steps)


def _with_primary_first(args: Any, metrics: dict[str, float]) -> dict[str, float]:
    """Returns metrics with the primary one first: metric_for_best_model, if it is among them."""
    primary = (args.metric_for_best_model or "").removeprefix("eval_")
    if primary not in metrics:
        return metrics
    return {primary: metrics[primary]} | metrics


def _resuming(train: Any) -> Any:
    """Returns `Trainer.train` with our checkpoint in place of the one that the script gives."""

    @functools.wraps(train)
    def wrapped(
        self: Any,
        resume_from_checkpoint: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        callbacks = self.callback_handler.callbacks
        for ours in list(callbacks):  # a copy: `begin` changes the list
            if isinstance(ours, SlurmftCallback):
                resume_from_checkpoint = ours.begin(callbacks) or resume_from_checkpoint
                break
        return train(self, resume_from_checkpoint, *args, **kwargs)

    return wrapped


Trainer.train = _resuming(Trainer.train)


def enable() -> None:
    """Adds the callback to every Trainer that is created from now on."""
    add_to_all(
        Trainer,
        SlurmftCallback,
        lambda trainer: trainer.callback_handler.callbacks,
    )
