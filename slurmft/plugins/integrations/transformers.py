"""transformers' Trainer, and TRL's, which derive from it: `callbacks=[SlurmftCallback()]`.

Trainer saves its checkpoints itself, into its output_dir. When all ranks have, the run directory
gets a small one, which names it. A later attempt resumes from the newest that was named: one that
was half-written when a node died never was.
"""

import functools
import shutil
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME, Trainer
from transformers.trainer_callback import TrainerCallback

from slurmft.core.decode import read
from slurmft.core.files import is_number, read_json, write_json
from slurmft.plugins.integrations.attached import add_to_all, attached

_SAVED = "trainer.json"
_OF_STEPS = ("loss", "learning_rate", "grad_norm")
_NO_METRICS = ("_runtime", "_per_second", "_preparation_time")


class SlurmftCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Stops, saves and tells progress as the job asks. Outside of a job it does nothing."""

    def __init__(self) -> None:
        self._process = attached()
        self._job = self._process.job
        self._stops = False
        """Whether the process ends after the next checkpoint."""
        self._samples = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._process.metrics = None
        self._job.alive("train")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._samples += args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        if control.should_log:
            self._job.step(self._step(state))  # its record comes with the loss
        else:
            self._record(state)
        if not float(state.epoch).is_integer():  # else the epoch's evaluation comes first
            self._ask(args, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if float(state.epoch).is_integer():
            self._ask(args, control)

    def _ask(self, args: Any, control: Any) -> None:
        """Asks the job whether to save now."""
        self._stops = self._job.should_stop()
        is_due = args.save_strategy == "no" and self._job.checkpoint_due()
        control.should_save |= self._stops or is_due
        if control.should_save:
            self._job.alive("save")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self._record(state, **{k: logs[k] for k in _OF_STEPS if k in logs})

    def _step(self, state: Any) -> int:
        """The step of the job."""
        return int(self._process.steps_before + state.global_step)

    def _record(self, state: Any, **numbers: float) -> None:
        total, samples = self._process.steps_before + state.max_steps, self._samples
        self._samples = 0
        self._job.step(self._step(state), total, samples=samples, epoch=state.epoch, **numbers)

    # --- evaluations and the end ------------------------------------------------------------------

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._job.alive("evaluate")

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
        if found := _metrics(metrics):
            self._job.evaluated({"epoch": state.epoch}, **found)
        self._job.alive("save")
        if self._process.metrics is not None:  # after the training
            self._process.metrics = _first(args, self._process.metrics | found)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A training that was stopped does not come here."""
        best = state.best_global_step if args.load_best_model_at_end else None
        logs = [log for log in state.log_history if best in (None, log["step"])]
        found = next(filter(None, map(_metrics, reversed(logs))), {})
        last = state.log_history[-1]
        found |= {"train_loss": last["train_loss"]} if "train_loss" in last else {}
        self._process.metrics = _first(args, found)
        self._process.steps_before += state.global_step
        self._job.alive("save")

    # --- checkpoints ------------------------------------------------------------------------------

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self._process.in_job:
            return
        if self._job.world_size > 1:
            self._job.join().all_objects(None)  # until every rank has written its files
        with self._job.checkpoint(self._step(state)) as folder:
            if folder:
                paths = self._note(Path(args.output_dir, f"checkpoint-{state.global_step}"))
                write_json(folder / _SAVED, self._process.saved)
        if folder and args.save_strategy == "no":
            for old in paths[: -self._job.config.job.keep_checkpoints]:
                shutil.rmtree(old, ignore_errors=True)
        if self._stops:
            self._process.stop()
        self._job.alive("train")

    def _note(self, checkpoint: Path) -> list[str]:
        """Adds a checkpoint to those of this training; what is gone, or was another's, goes."""
        now, number = str(checkpoint.absolute()), str(self._process.trainings)
        saved = {
            name: [path for path in paths if path != now and Path(path).is_dir()]
            for name, paths in self._process.saved.items()
        }
        saved.setdefault(number, []).append(now)
        self._process.saved = saved
        return saved[number]

    def begin(self, callbacks: list[Any]) -> str | None:
        """A training begins: its newest whole checkpoint, the same on all ranks."""
        self._process.trainings += 1
        if not self._process.in_job:
            return None
        # transformers' own one would end the training at SIGTERM as if it were finished.
        callbacks[:] = [c for c in callbacks if type(c).__name__ != "JITCheckpointCallback"]
        find = functools.partial(self._find, self._job.latest_checkpoint())
        path: str | None = find() if self._job.world_size == 1 else self._job.join().on_main(find)
        return path

    def _find(self, newest: Path | None) -> str | None:
        if newest and not self._process.saved:
            self._process.saved = read(newest / _SAVED, dict[str, list[str]]) or {}
        for path in reversed(self._process.saved.get(str(self._process.trainings), [])):
            if read_json(Path(path, TRAINER_STATE_NAME)):  # the last that Trainer writes
                step = self._process.steps_before + int(path.rpartition("-")[2])
                self._job.record("resume", step=step, checkpoint=path)
                return path
            self._job.warn(f"{path} is not whole any more: it is not used")
            self._job.remove_checkpoints()  # those to come have smaller numbers
        return None


def _metrics(logs: dict[str, Any]) -> dict[str, float]:
    """Those of an evaluation, without Trainer's prefix."""
    found = {k: v for k, v in logs.items() if k.startswith("eval_") and is_number(v)}
    return {k[len("eval_") :]: v for k, v in found.items() if not k.endswith(_NO_METRICS)}


def _first(args: Any, metrics: dict[str, float]) -> dict[str, float]:
    """With the primary one first: metric_for_best_model, if it is known."""
    primary = (args.metric_for_best_model or "").removeprefix("eval_")
    return dict(sorted(metrics.items(), key=lambda item: item[0] != primary))


def _resuming(train: Any) -> Any:
    @functools.wraps(train)
    def wrapped(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        callbacks = self.callback_handler.callbacks
        for each in [c for c in callbacks if isinstance(c, SlurmftCallback)][:1]:
            resume_from_checkpoint = each.begin(callbacks) or resume_from_checkpoint
        return train(self, resume_from_checkpoint, *args, **kwargs)

    return wrapped


Trainer.train = _resuming(Trainer.train)


def enable() -> None:
    """Every Trainer that is made from now on has the callback."""
    add_to_all(Trainer, SlurmftCallback, lambda trainer: trainer.callback_handler.callbacks)
