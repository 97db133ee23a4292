"""The training loop, as one rank runs it (started by `slurmft.train.rank`).

The page to read is `Training.run`. The optimizer step is the unit of everything: schedules, logs
and limits count optimizer steps, whatever the number of ranks and micro-steps.
"""

import contextlib
import math
import os
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers.modeling_utils  # noqa: F401 - models need it: time it as an import
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers.utils.logging import disable_progress_bar

from slurmft.core import fingerprint
from slurmft.core.errors import SlurmftError
from slurmft.core.files import new_folder
from slurmft.job import Job
from slurmft.job.checkpoints import checkpoint_name
from slurmft.node import profiles
from slurmft.runs.rundir import RunDir
from slurmft.train import own_task, tasks
from slurmft.train.config import TrainConfig
from slurmft.train.data.stream import bucket_by_length, epoch_order, prepared
from slurmft.train.data.tables import Batch
from slurmft.train.data.token_data import TokenData, balanced
from slurmft.train.engine.cpu import Heap
from slurmft.train.loop import evaluation, resume, token_files
from slurmft.train.loop.checkpoint import Saver, Snapshot
from slurmft.train.loop.environment import peak_memory_bytes
from slurmft.train.loop.loaded_model import LoadedModel, choose_precision
from slurmft.train.loop.reporter import Reporter
from slurmft.train.loop.saving import Stopped, save_model, save_patiently
from slurmft.train.loop.state import Position, Predicted
from slurmft.train.loop.step_plan import Plan
from slurmft.train.loop.timers import PhaseClock
from slurmft.train.parallel.grad_comm import GradientCommunication
from slurmft.train.parallel.optim import make_optimizer, make_scheduler, steps_taken
from slurmft.train.parallel.sharding import ShardedSaver, Sharding

# Logs are files: transformers' bars for loading and saving weights would only litter them.
disable_progress_bar()

_EVALUATE_RECORD_EVERY_S = 1.0


class Training:
    """One rank's training run. `run` is the page to read."""

    def __init__(self, job: Job, imports_s: float | None = None) -> None:
        """See `Reporter` for `imports_s`."""
        assert job.run_dir is not None
        self.job, self.run_dir = job, RunDir(job.run_dir)
        own_task.use_code(job.config.program.code)
        self.config = TrainConfig.of(job.config.program)
        self.task = tasks.get(self.config)
        self.position = Position()
        self.predicted: list[Predicted] = []
        """Of the evaluation under way: from before a resume, then of every batch of this rank."""
        self._imports_s, self._heap = imports_s, Heap(os.environ)
        self._has_checked_count = False
        self._evaluation_recorded_at = 0.0

    # --- the run ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Does the work of a run, from its newest checkpoint on. An agreed stop ends it before its
        end; its state is saved then."""
        self.join()
        if self.world.share_object(self.run_dir.result.exists()):
            return  # an attempt that was killed at its very end had finished
        self.prepare_data()
        checkpoint = resume.find_checkpoint(self)
        self.build(checkpoint)
        if checkpoint:
            self.restore(checkpoint)
        try:
            self.work()
        except Stopped:
            self._save_last()
        except torch.OutOfMemoryError as error:
            raise self._explain(error) from error

    def work(self) -> None:
        """What is left to do, to the end; `Stopped` if the ranks agree to stop before it."""
        while self.position.phase not in ("done", "test"):
            if self.position.phase == "train":
                self._train_epoch()
            self._evaluate()
        if self.config.early_stopping and self.position.since_best:
            self.job.alive("save")
            resume.return_to_best(self)
        self._test()
        self._finish()

    def join(self) -> None:
        """Joins the other ranks, and settles what all of them have to know first."""
        config = self.config
        self.world = self.job.join()
        self.precision = choose_precision(config, self.world)
        self.accelerator = Accelerator(
            mixed_precision="no" if self.precision == "fp32" else self.precision,
            cpu=self.world.device.type == "cpu",
        )
        self.sharding: Sharding | None = None
        self.communication = GradientCommunication(config.grad_comm, self.world, self.precision)
        if config.shard != "none":
            in_fp32 = self.task.evaluates_in_fp32
            self.sharding = Sharding(config, self.world, self.precision, in_fp32)
            self.communication = self.sharding
            if self.world.size == 1:
                self.job.warn(f"--shard {config.shard}: one process has nothing to share")

    def prepare_data(self) -> None:
        """Tokens: the main rank makes them, all ranks load them."""
        self.world.on_main(self._prepare_tokens)
        self.data = TokenData.load(self.run_dir.tokens)
        if self.config.class_weights == "balanced":
            self.task.class_weights = balanced(self.data.train, len(self.data.labels))
        if self.world.is_main:
            self.tokens_sha256 = fingerprint.of(self.run_dir.tokens / "train")["sha256"]
            for note in self.data.notes:
                self.job.say(note)

    def _prepare_tokens(self) -> None:
        if not self.run_dir.tokens.exists():
            # All cores: the other ranks wait.
            with profiles.all_cores(os.environ), new_folder(self.run_dir.tokens) as folder:
                self._fill_tokens(folder)
            for text in TokenData.load(self.run_dir.tokens).warnings:
                self.job.warn(text)

    def _fill_tokens(self, folder: Path) -> None:
        token_files.fill(folder, self.task, self.job)

    def build(self, checkpoint: Snapshot | None) -> None:
        """Everything that a step needs, as at the start of a run."""
        self.plan = Plan(
            config=self.config,
            world_size=self.world.size,
            precision=self.precision,
            train_samples=len(self.data.train),
            validation_samples=len(self.data.validation),
            resumed_batch_size=checkpoint.state["global_batch_size"] if checkpoint else None,
        )
        self.clock = PhaseClock(self.world.device)
        self.saver = ShardedSaver(self.job, self.world) if self.sharding else Saver(self.job)
        if self.job.config.program.needs_hub:
            # The main rank fetches, then one rank of every other node: its cache may be its own.
            first_of_node = self.world.local_rank == 0 and not self.world.is_main
            for fetches in (self.world.is_main, first_of_node):
                self.world.on_some(fetches, lambda: self.task.model(self.data))
        self._build_model()
        self.reporter = Reporter(
            self.job, self.world, self.plan, self.clock, self.loaded, self._imports_s
        )
        self.reporter.start(self.data)

    def _build_model(self) -> None:
        """The model as it computes here, its optimizer and its schedule."""
        if self.sharding:
            self.sharding.in_turns(self._load_model)
        else:
            self._load_model()
        model, divided = self.loaded.model, self.communication.period == 1
        self.optimizer = make_optimizer(model, self.plan, divided=divided)
        self.model = self.communication.prepare(self.accelerator, model, self.optimizer)
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.scaler = self.accelerator.scaler
        self.scheduler = make_scheduler(self.optimizer, self.plan)
        set_seed((self.config.seed + 1 + self.world.rank) % 2**32)  # dropout differs between ranks

    def _load_model(self) -> None:
        self.loaded = LoadedModel(self, trims=not self.sharding)

    def restore(self, checkpoint: Snapshot) -> None:
        """Continues from a checkpoint, exactly where it was taken."""
        resume.restore(self, checkpoint)

    # --- training ---------------------------------------------------------------------------------

    def _train_epoch(self) -> None:
        """One pass over the data, or what is left of it, or of the step limit."""
        at = self.position
        self.model.train()
        self.job.begin_phase()
        self.reporter.begin_window()
        self.clock.restart()
        steps = islice(self._global_batches(at.epoch, at.batch), self.plan.total_steps - at.step)
        for samples, parts in prepared(steps, self.parts, self.world.device):
            # Only where all ranks have the same weights.
            can_save = self.communication.is_synchronized_after(at.step + 1)
            if can_save:
                self.job.begin_step()
            learning_rate = self.scheduler.get_last_lr()[0]
            loss = self._step(samples, parts)
            at.step += 1
            at.batch += 1
            self.reporter.step(at.step, loss, learning_rate, len(samples))
            self.communication.end_step(at.step)
            self.job.step(at.step)
            if can_save:
                self._stop_or_save()
        self.communication.average()
        self.reporter.flush()
        self.clock.lap("train")
        at.epoch, at.batch, at.phase = at.epoch + 1, 0, "evaluate"

    def _stop_or_save(self) -> None:
        """The point between two steps where all ranks can stop, or save."""
        if self.job.should_stop():
            raise Stopped
        if self.job.checkpoint_due():
            self._checkpoint()

    def _global_batches(self, epoch: int, done: int) -> Iterator[Any]:
        """The samples of each optimizer step of an epoch: the same for every number of ranks.

        Args:
            epoch: its number, from 0.
            done: steps of it to leave out.
        """
        table, size = self.data.train, self.plan.global_batch_size
        order = epoch_order(len(table), self.config.seed, epoch)
        if self.config.batching == "grouped":
            lengths = table.lengths(np.arange(len(table)))
            order = bucket_by_length(order, lengths, size, self.config.seed, epoch)
        for start in range(done * size, len(order), size):
            yield order[start : start + size]

    def parts(self, samples: Any) -> list[tuple[Batch, bool]]:
        """This rank's part of a global batch for each micro-step; and whether it counts.

        A rank without a share computes any sample with weight 0: the others wait for it.
        """
        parts = np.array_split(samples, self.plan.parts)  # the last batch of an epoch is small
        own = parts[self.world.rank :: self.world.size]
        batch = partial(self.loaded.batch, self.data.train)
        return [(batch(part if len(part) else samples[:1]), len(part) > 0) for part in own]

    def _step(self, samples: Any, parts: list[tuple[Batch, bool]] | None = None) -> Any:
        """One optimizer step on a global batch; returns this rank's share of its loss.

        The loss is the mean over the terms of the global batch, however samples and their lengths
        divide among ranks and micro-steps. Summed over all ranks, the shares give that mean.

        Args:
            parts: what `parts` has made of the samples, if it has.
        """
        losses: list[Any] = []
        parts = parts or self.parts(samples)
        terms = self.task.count(self.data.train, samples)
        for batch, counts in parts:
            if counts:
                self.reporter.count(batch)
            # Whole gradients, not yet sent, would need the memory that sharding saves.
            now = len(losses) == len(parts) - 1 or self.sharding
            with contextlib.nullcontext() if now else self.accelerator.no_sync(self.model):
                losses.append(self.backward(batch, counts / (terms or 1)))
        self._update()
        return sum(losses[1:], losses[0])

    def backward(self, batch: Batch, weight: float) -> Any:
        """Gradients of this rank's part of a global batch; returns its share of the mean loss.

        Args:
            weight: of each term of its loss.
        """
        batch = self.loaded.sent(batch, self.data.train)
        loss, count = self.task.loss(self.model(**batch.inputs), batch)
        if not self._has_checked_count:
            self._check_count(count, batch)
        loss = loss * weight
        # DDP divides the sum of the ranks' gradients by their number.
        whole = loss * self.world.size if self.world.size > 1 else loss
        (self.scaler.scale(whole) if self.scaler else whole).backward()
        self._heap.after_batch()
        return loss.detach().float()

    def _update(self) -> None:
        """Clips the gradients, and moves the weights.

        fp16's scaler skips a step that overflows. The schedule goes on: it belongs to the steps, as
        the data does, and to skip with it would need to wait for the device in every step.
        """
        if self.config.max_grad_norm:
            if self.scaler:
                self.scaler.unscale_(self.optimizer)
            norm = self.communication.clip_grad_norm_(self.weights, self.config.max_grad_norm)
            if not self.scaler:
                self.reporter.gradients(norm)
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _check_count(self, count: Any, batch: Batch) -> None:
        """Raises SlurmftError where the loss sums other terms than the task counts beforehand."""
        self._has_checked_count = True
        counted = self.task.count(self.data.train, batch.indices)
        if not math.isclose(float(count), counted, rel_tol=1e-6):
            raise SlurmftError(
                f"--task {self.config.task}: its loss sums {float(count):g} terms in the first "
                f"batch, its count() says {counted:g}",
                "the mean over ranks needs both alike: mend loss() or count() of the task",
            )

    # --- evaluation -------------------------------------------------------------------------------

    def _evaluate(self) -> None:
        """The metrics of the validation split."""
        at = self.position
        at.metrics, at.by_class = self._measured(self.data)
        self.reporter.epoch(self.plan.epochs(at.step), at.metrics)
        if self._note_best(at.metrics[self.task.metric_names[0]]):
            self._checkpoint(is_best=True)

    def _test(self) -> None:
        """The metrics of the test split, if there is one: once, of the model that is saved."""
        if self.data.test is None:
            return
        self.position.phase = "test"
        samples = len(self.data.test.validation)
        self.job.say(f"evaluating the test split: {samples:,} samples")
        metrics, _ = self._measured(self.data.test)
        self.reporter.evaluated += samples
        self.position.test = {f"test_{name}": value for name, value in metrics.items()}

    def _measured(self, data: TokenData) -> tuple[dict[str, float], dict[str, Any]]:
        """The metrics of a split, equal on every rank; and its classes, see `Task.by_class`."""
        if self.world.is_main:
            evaluation.preload(self.task.metric_names)
        self.clock.restart()
        values = self._all_predictions(data)

        def compute() -> tuple[dict[str, float], dict[str, Any]]:
            assert values is not None  # on the main rank, which alone computes
            metrics, by_class = self.task.compute(values, data), self.task.by_class(values, data)
            self.clock.lap("metric")
            return metrics, by_class

        metrics, by_class = self.world.on_main(compute)
        self.clock.lap("broadcast")
        self.predicted = []
        return metrics, by_class

    def _all_predictions(self, data: TokenData) -> np.ndarray | None:
        """Those of a split, in its order; on the main rank. A resumed run goes on with the samples
        that are left."""
        before = Predicted.union(self.predicted)
        left = np.setdiff1d(np.arange(len(data.validation)), before.samples)
        parts = np.array_split(left, self.world.size)
        sizes = [len(part) for part in parts]
        predictions = self._predictions(data, parts[self.world.rank], most=max(sizes))
        gathered = evaluation.gather(self.world, predictions, sizes)
        self.clock.lap("evaluate")
        if gathered is None:
            return None
        return np.asarray(Predicted.union([before, Predicted(left, gathered)]).values)

    def _predictions(self, data: TokenData, part: Any, most: int) -> Any:
        """The predictions of this rank's samples, in their order. They are made in that of their
        lengths: similar lengths need little padding.

        Every sample is predicted once, on one rank, however the split divides: there is nothing to
        trim, as there is after gather_for_metrics on padded batches.

        Args:
            part: its samples.
            most: how many the rank with the most has.
        """
        size, done, table = self.config.eval_batch_size, 0, data.validation
        assert size is not None
        by_length = np.argsort(table.lengths(part), kind="stable")
        predictions: list[torch.Tensor] = []
        self.loaded.model.eval()
        self.job.alive("evaluate")
        self.job.begin_phase()

        def batch(samples: Any) -> Batch:
            return self.loaded.batch(table, samples if len(samples) else np.zeros(1, np.int64))

        # As many boundaries on every rank.
        batches = (part[by_length[start : start + size]] for start in range(0, most, size))
        for indices, made in prepared(batches, batch, self.world.device):
            self.job.begin_step()
            if len(indices):
                predictions.append(self._predict(data, made))
                self.predicted.append(Predicted(indices, predictions[-1]))
            elif self.sharding:  # the others wait for its shares
                self._predict(data, made)
            done += len(indices)
            self._note_progress(done, len(part))
            self.job.alive("evaluate")
            self._stop_or_save()
        found = [np.empty((0, *self.task.prediction_shape), self.task.prediction_dtype)]
        found += [torch.cat(predictions).cpu().numpy()] if predictions else []
        return np.concatenate(found)[np.argsort(by_length)]

    @torch.no_grad()  # not inference_mode: weights that are gathered then could not train
    def _predict(self, data: TokenData, batch: Batch) -> Any:
        """Predictions of samples, on the device."""
        model = self.loaded.model
        if self.task.evaluates_in_fp32:  # Accelerate's wrapper lets it compute in bf16 or fp16
            model = getattr(model, "_original_forward", model)
        return self.task.evaluate(model, self.loaded.sent(batch, data.validation), data)

    def _note_progress(self, done: int, total: int) -> None:
        """Records this rank's progress in an evaluation, now and then; the main one's for all."""
        now = time.perf_counter()
        if now - self._evaluation_recorded_at >= _EVALUATE_RECORD_EVERY_S:
            self._evaluation_recorded_at = now
            self.job.record("evaluate", done=done, total=total)

    def _note_best(self, value: float) -> bool:
        """Whether an evaluation was the best so far; decides what follows it. The value is the same
        on every rank, and so is the decision."""
        at, patience = self.position, self.config.early_stopping
        is_best = not math.isnan(value) and (
            at.best is None or (value < at.best if self.task.lower_is_better else value > at.best)
        )
        at.best, at.since_best = (value, 0) if is_best else (at.best, at.since_best + 1)
        stops = patience is not None and at.since_best >= patience
        if stops and at.step < self.plan.total_steps:
            metric = self.task.metric_names[0]
            self.job.record("early_stop", step=at.step, metric=metric, evaluations=at.since_best)
        at.phase = "done" if stops or at.step == self.plan.total_steps else "train"
        return is_best

    # --- checkpoints and the end ------------------------------------------------------------------

    def _checkpoint(self, is_best: bool = False) -> None:
        """Copies the state to memory; writing it is the background's work. Called on every rank."""
        began = time.monotonic()
        snapshot = self._snapshot(is_best)
        if snapshot is not None:
            name = checkpoint_name(self.position.step, snapshot.suffix)
            self.saver.start(snapshot, is_best)
            copy_s = time.monotonic() - began
            self.job.record("checkpoint", checkpoint=name, step=self.position.step, copy_s=copy_s)

    def _snapshot(self, is_best: bool = False) -> Snapshot | None:
        """See `resume.take_snapshot`."""
        self.job.alive("save")
        if self.world.share_object(self.saver.is_busy):  # one copy at a time
            # In the next step the others would wait for this rank in nccl, which gives up.
            self.world.on_main(self.saver.wait)
        return resume.take_snapshot(self, is_best)

    def _save_last(self) -> None:
        """Saves the state that all ranks stopped in. Called on every rank, after the same step."""
        snapshot = self._snapshot()

        def save() -> None:
            assert snapshot is not None  # on the main rank, or on all of a sharded model
            self.saver.save(snapshot, patience_s=self.job.config.job.lead_s / 2)

        save() if self.sharding else self.world.on_main(save)

    def _finish(self) -> None:
        """Saves the model and the result; the best checkpoint stays. Raises as `save_patiently`."""
        self.job.alive("save")
        self.world.on_main(self.saver.wait)
        facts = self.reporter.result_facts(self.position.step, self.communication.facts())
        if self.scaler:
            facts["skipped_steps"] = self.position.step - steps_taken(self.optimizer)
        if self.position.by_class:
            facts["classes"] = self.position.by_class
        facts["pipeline"] = self.task.facts.pipeline or self.config.preset
        save_model(self)
        write = partial(self.reporter.finish, facts, self.position.metrics | self.position.test)
        save_patiently(self, "the result", 2**14, write)
        self.world.on_main(self.job.remove_checkpoints)

    def _explain(self, error: torch.OutOfMemoryError) -> SlurmftError:
        """A device's memory was too small: what for, and what needs less."""
        config, trains = self.config, self.position.phase == "train"
        size = (config.batch_size if trains else config.eval_batch_size) or 1
        asked, rest, *_ = f"{error}. ".split(". ")
        when = "in step" if trains else "in the evaluation after step"
        used_gib = peak_memory_bytes(self.world.device) / 2**30
        message = (
            f"{asked} {when} {self.position.step + trains}, on a batch of {size} samples and "
            f"{self.loaded.batch_tokens:,} tokens, with {used_gib:.1f} GiB used. {rest}"
        )
        if not trains:
            return SlurmftError(message, f"use --eval-batch-size {max(1, size // 2)}")
        steps = 2 * config.gradient_accumulation_steps
        halves = f"--batch-size {size // 2} --gradient-accumulation-steps {steps}"
        cures = [f"{halves} (the global batch stays)"] if size > 1 else []
        cures += [] if config.activation_checkpointing else ["--activation-checkpointing"]
        cures += [] if config.shard == "full" else ["--shard full on several GPUs"]
        return SlurmftError(message, f"use {', or '.join(cures) or 'a smaller model'}")
