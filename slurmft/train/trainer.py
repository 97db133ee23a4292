"""The training loop, as one rank runs it (started by `slurmft.train.rank`).

The page to read is `Training.run`. The optimizer step is the unit of everything: schedules, logs
and limits count optimizer steps, whatever the number of ranks and micro-steps.
"""

import contextlib
import dataclasses
import json
import math
import os
import platform
import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers.modeling_utils  # noqa: F401 - models need it: time it as an import
from accelerate import Accelerator
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor
from transformers.utils.logging import disable_progress_bar

from slurmft.core import fingerprint
from slurmft.core.errors import SlurmftError, UsageError, one_line
from slurmft.core.files import new_folder
from slurmft.job import Job
from slurmft.job.checkpoints import BadCheckpointError, checkpoint_name, verify
from slurmft.job.process_group import World
from slurmft.node import hardware, profiles
from slurmft.runs import token_cache
from slurmft.runs.disk_space import is_full, no_room
from slurmft.runs.rundir import RunDir
from slurmft.train import cpu, evaluation, lora, own_task, packing, tasks
from slurmft.train.checkpoint import Saver, Snapshot, copied
from slurmft.train.checkpoint import read as read_checkpoint
from slurmft.train.config import TrainConfig
from slurmft.train.cpu import Heap
from slurmft.train.data import (
    Batch,
    TokenData,
    TokenTable,
    balanced,
    bucket_by_length,
    epoch_order,
    prepared,
)
from slurmft.train.environment import peak_memory_bytes
from slurmft.train.grad_comm import GradientCommunication
from slurmft.train.model_flops import ModelFlops
from slurmft.train.optim import make_optimizer, make_scheduler, steps_taken
from slurmft.train.reporter import OF_RANK, STEADIER, Reporter
from slurmft.train.sharding import ShardedSaver, Sharding
from slurmft.train.sources import may_have_test
from slurmft.train.state import (
    Predicted,
    join_optimizer,
    rng_state,
    set_rng_state,
    split_optimizer,
)
from slurmft.train.step_plan import Plan
from slurmft.train.timers import OwnClock, PhaseClock
from slurmft.train.vocab_trim import TrimmedVocabulary

# Logs are files: transformers' bars for loading and saving weights would only litter them.
disable_progress_bar()


_ROOM_RETRY_S, _ROOM_PATIENCE_S = 5.0, 3600.0
"""A finished training waits for room on the disk: how often it tries, and how long its nodes do."""


class Stopped(Exception):
    """The ranks agreed to stop."""


@dataclass(slots=True)
class Position:
    """How far a run has come: all that decides what it does next."""

    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    """Epochs whose training is done."""
    batch: int = 0
    """Optimizer steps done in the current epoch."""
    phase: str = "train"
    """train, evaluate (after an epoch), done; test (once, after all that)."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last evaluation."""
    by_class: dict[str, Any] = field(default_factory=dict)
    """Of the same, see `Task.by_class`; on the main rank."""
    test: dict[str, float] = field(default_factory=dict)
    """Metrics of the test split, of the model that is saved."""
    best: float | None = None
    """Best value of the task's first metric."""
    best_checkpoint: str | None = None
    since_best: int = 0
    """Evaluations since that one."""


class Training:
    """One rank's training run. `run` is the page to read."""

    sharding: Sharding | None = None
    """Where each rank keeps its share of the model alone."""

    def __init__(self, job: Job, imports_s: float | None = None) -> None:
        """
        Args:
            imports_s: see `Reporter`.
        """
        assert job.run_dir is not None
        self.job, self.run_dir = job, RunDir(job.run_dir)
        own_task.use_code(job.config.program.code)
        self.config = TrainConfig.of(job.config.program)
        self.heap = Heap(os.environ)
        self.task = tasks.get(self.config)
        self.position = Position()
        self.predicted: list[Predicted] = []
        """Of the evaluation under way: from before a resume, then of every batch of this rank."""
        self._imports_s = imports_s
        self._has_checked_count = False

    # --- the run ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Does the work of a run, from its newest checkpoint on. An agreed stop ends it before its
        end; its state is saved then."""
        self.join()
        if self.world.share_object(self.run_dir.result.exists()):
            return  # an attempt that was killed at its very end had finished
        self.prepare_data()
        checkpoint = self.find_checkpoint()
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
        """What is left to do, to the end.

        Raises:
            Stopped: the ranks agreed to stop before it.
        """
        while self.position.phase not in ("done", "test"):
            if self.position.phase == "train":
                self._train_epoch()
            self._evaluate()
        self._choose_weights()
        self._test()
        self._finish()

    def join(self) -> None:
        """Joins the other ranks, and settles what all of them have to know first."""
        self.world = self.job.join()
        self.precision = choose_precision(self.config, self.world)
        if self.config.shard != "none" and self.precision == "fp16":
            self.precision = "fp32"
        self.accelerator = Accelerator(
            mixed_precision="no" if self.precision == "fp32" else self.precision,
            cpu=self.world.device.type == "cpu",
        )
        if self.config.shard != "none":
            in_fp32 = self.task.evaluates_in_fp32
            self.sharding = Sharding(self.config, self.world, self.precision, in_fp32)
            if self.world.size == 1:
                self.job.warn(f"--shard {self.config.shard}: one process has nothing to share")
        self.communication = self.sharding or GradientCommunication(
            self.config.grad_comm, self.world, self.precision
        )

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
                self._fill_test(folder)
            for text in TokenData.load(self.run_dir.tokens).warnings:
                self.job.warn(text)

    def _fill_tokens(self, folder: Path) -> None:
        """The tokens that an earlier run made of the same; else they are made, and kept."""
        sources, cache = self.task.sources(), token_cache.folder()
        key = sources and token_cache.key_of(sources)
        try:
            if key and token_cache.take(cache, key, folder):
                self.job.say(f"tokens: those of {cache / key}")
                return
        except token_cache.DamagedError as error:
            self.job.warn(f"kept tokens were damaged, and are made again: {error}")
        except SlurmftError as error:
            self.job.say(f"kept tokens are not used: {error.message}")
        self.task.prepare().save(folder)
        self.task.save_tokenizer(folder / "tokenizer")
        try:
            if key:
                token_cache.keep(cache, key, folder)
        except (OSError, SlurmftError) as error:
            self.job.say(f"the tokens cannot be kept in {cache}: {one_line(error)}")

    def _fill_test(self, folder: Path) -> None:
        """The tokens of a test split, if there is one with labels; in the folder of the others."""
        if not may_have_test(self.config):
            return
        task: Any = tasks.get(self.config)
        task.facts = dataclasses.replace(task.facts, splits=("test", "test"))
        task.known_labels = TokenData.load(folder).labels or None
        try:
            task.prepare().save(folder / "test")
        except UsageError as error:
            if "has no test" not in error.message:
                self.job.warn(f"the test split is not evaluated: {error.message}")

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
        self._fetch_model()
        self._build_model()
        rows = self.vocabulary.facts() if self.vocabulary else None
        own_clock = OwnClock(self.bare_model, self.world.device)
        self.reporter = Reporter(
            self.job, self.world, self.plan, self.clock, own_clock, self._imports_s, self.flops
        )
        self.reporter.start(self.parameters, self.trained_parameters, rows, self._data_words())

    def _data_words(self) -> list[str]:
        """What the data has, in lines: as it was found at submission, where that was read there."""
        found = self.job.config.program.inputs.items()
        read = [f"{Path(p).name}: {v['what']}" for p, v in found if p != self.config.model]
        return read or (self.data.words() if self.task.facts.splits else [])

    def _fetch_model(self) -> None:
        """Fetches the model's files from the hub: the main rank first, then one rank of every other
        node, whose cache may be its own. All load them then."""
        if self.job.config.program.needs_hub:
            first_of_node = self.world.local_rank == 0 and not self.world.is_main
            for fetches in (self.world.is_main, first_of_node):
                self.world.on_some(fetches, lambda: self.task.model(self.data))

    def _build_model(self) -> None:
        """The model as it computes here, its optimizer and its schedule."""
        if self.sharding:
            self.sharding.in_turns(self._load_model)
        else:
            self._load_model()
        model, divided = self.bare_model, self.communication.period == 1
        self.optimizer = make_optimizer(model, self.plan, divided=divided)
        self.model = self.communication.prepare(self.accelerator, model, self.optimizer)
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.scaler = self.accelerator.scaler
        self.scheduler = make_scheduler(self.optimizer, self.plan)
        seed_everything(self.config.seed + 1 + self.world.rank)  # dropout differs between ranks

    def _load_model(self) -> None:
        """The model itself; of a sharded one, this rank's share."""
        seed_everything(self.config.seed)
        model = self.task.model(self.data)
        self.bare_model: Any = model  # DDP's inner one
        self.parameters: int = sum(p.numel() for p in model.parameters())
        self.adapter = lora.Adapter(model, self.config) if self.config.lora else None
        self.trained_parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.flops = ModelFlops.of(model)
        self.packing = self._pack(model)
        self.vocabulary: TrimmedVocabulary | None = None
        if not self.sharding:
            self.vocabulary = self._trim_vocabulary(model)
        if self.config.activation_checkpointing:
            recompute_activations(model)
        if self.world.device.type == "cpu":
            cpu.replace_dropout(model)
        if self.sharding:
            self.sharding.shard(model)

    def _pack(self, model: Any) -> packing.Packing | None:
        """Makes the model compute without padding, if asked to; a warning, where it cannot."""
        if self.config.batching not in ("packed", "grouped"):
            return None
        longest = max(int(np.diff(table.offsets).max()) for table in self.data.tables)
        packed = packing.pack(model, not self.sharding, longest)
        if self.config.cuda_graphs:
            dtype = torch.bfloat16 if self.precision == "bf16" else torch.float32
            packing.use_graphs(packed, self.world.device, dtype)
        if isinstance(packed, packing.Packing):
            return packed
        self.job.warn(f"{packed}; batches are padded to their longest sample")
        return None

    def _trim_vocabulary(self, model: Any) -> TrimmedVocabulary | None:
        """Leaves the rows of a large vocabulary out that the data has no tokens for."""
        vocabulary = TrimmedVocabulary.trim(model, self.data)
        if isinstance(vocabulary, str):
            self.job.warn(f"{vocabulary}; they are trained as well")
            return None
        if vocabulary and not self.world.is_main:
            vocabulary.forget()
        return vocabulary

    # --- training ---------------------------------------------------------------------------------

    def _train_epoch(self) -> None:
        """One pass over the data, or what is left of it, or of the step limit."""
        at = self.position
        self.model.train()
        self.job.begin_phase()
        self.reporter.begin_window()
        self.clock.restart()
        steps = islice(self._global_batches(at.epoch, at.batch), self.plan.total_steps - at.step)
        for samples, parts in prepared(steps, self._parts, self.world.device):
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
        """The point between two steps where all ranks can stop, or save.

        Raises:
            Stopped: on every rank, after the same step.
        """
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

    def _parts(self, samples: Any) -> list[tuple[Batch, bool]]:
        """This rank's part of a global batch for each micro-step; and whether it counts.

        A rank without a share computes any sample with weight 0: the others wait for it.
        """
        parts = np.array_split(samples, self.plan.parts)  # the last batch of an epoch is small
        own = parts[self.world.rank :: self.world.size]
        batch = partial(self._batch, self.data.train)
        return [(batch(part if len(part) else samples[:1]), len(part) > 0) for part in own]

    def _step(self, samples: Any, parts: list[tuple[Batch, bool]] | None = None) -> Any:
        """One optimizer step on a global batch; returns this rank's share of its loss.

        The loss is the mean over the terms of the global batch, however samples and their lengths
        divide among ranks and micro-steps. Summed over all ranks, the shares give that mean.

        Args:
            parts: what `_parts` has made of the samples, if it has.
        """
        losses: list[Any] = []
        parts = parts or self._parts(samples)
        terms = self.task.count(self.data.train, samples)
        for batch, counts in parts:
            if counts:
                self.reporter.count(batch)
            # Whole gradients, not yet sent, would need the memory that sharding saves.
            now = len(losses) == len(parts) - 1 or self.sharding
            with contextlib.nullcontext() if now else self.accelerator.no_sync(self.model):
                losses.append(self._backward(batch, counts / (terms or 1)))
        self.communication.reduce()
        self._update()
        return sum(losses[1:], losses[0])

    def _backward(self, batch: Batch, weight: float) -> Any:
        """Gradients of this rank's part of a global batch; returns its share of the mean loss.

        Args:
            weight: of each term of its loss.
        """
        batch = self._sent(batch, self.data.train)
        loss, count = self.task.loss(self.model(**batch.inputs), batch)
        self._check_count(count, batch)
        loss = loss * weight
        # DDP divides the sum of the ranks' gradients by their number.
        whole = loss * self.world.size if self.world.size > 1 else loss
        (self.scaler.scale(whole) if self.scaler else whole).backward()
        self.heap.after_batch()
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
        """Of the first batch: that the loss sums as many terms as the task counts beforehand.

        Raises:
            SlurmftError: it does not.
        """
        if self._has_checked_count:
            return
        self._has_checked_count = True
        counted = self.task.count(self.data.train, batch.indices)
        if not math.isclose(float(count), counted, rel_tol=1e-6):
            raise SlurmftError(
                f"--task {self.config.task}: its loss sums {float(count):g} terms in the first "
                f"batch, its count() says {counted:g}",
                "the mean over ranks needs both alike: mend loss() or count() of the task",
            )

    def _batch(self, table: TokenTable, samples: Any) -> Batch:
        """The samples as the model takes them. Any thread may call it."""
        return self.task.batch(self._table_batch(table, samples), table)

    def _sent(self, batch: Batch, table: TokenTable) -> Batch:
        """A batch on the device, which the model gets next."""
        self._batch_tokens = batch.tokens
        if self.packing:
            lengths = torch.from_numpy(table.lengths(batch.indices))
            self.packing.expect(lengths, self.world.device)
        return batch.to(self.world.device)

    def _table_batch(self, table: TokenTable, samples: Any) -> Batch:
        if self.packing:
            return table.packed(samples)
        on_gpu = self.world.device.type != "cpu"
        multiple = 8 if on_gpu and self.precision != "fp32" else 1  # fills tensor cores
        least = 0
        if self.config.batching == "padded":
            least = self.config.max_length or int(table.lengths(np.arange(len(table))).max())
        return table.batch(samples, self.data.pad_id, multiple, least)

    def _evaluate(self) -> None:
        """The metrics of the validation split."""
        at = self.position
        at.metrics, at.by_class = self._measured()
        self.reporter.epoch(self.plan.epochs(at.step), at.metrics)
        is_best = self._note_best(at.metrics[self.task.metric_names[0]])
        if is_best:
            self._checkpoint(is_best=True)

    def _test(self) -> None:
        """The metrics of the test split, if there is one: once, of the model that is saved."""
        if self.data.test is None:
            return
        self.position.phase = "test"
        self.job.say(f"evaluating the test split: {len(self.data.test.validation):,} samples")
        self.data, whole = self.data.test, self.data
        metrics, _ = self._measured()
        self.reporter.evaluated += len(self.data.validation)
        self.data = whole
        self.position.test = {f"test_{name}": value for name, value in metrics.items()}

    def _measured(self) -> tuple[dict[str, float], dict[str, Any]]:
        """The metrics of the split that `data` has for validation, equal on every rank; and its
        classes, see `Task.by_class`, on the main rank."""
        by_class: dict[str, Any] = {}
        if self.world.is_main:
            evaluation.preload(self.task.metric_names)
        self.clock.restart()
        values = self._all_predictions()

        def compute() -> dict[str, float]:
            assert values is not None  # on the main rank, which alone computes
            metrics = self.task.compute(values, self.data)
            by_class.update(self.task.by_class(values, self.data))
            self.clock.lap("metric")
            return metrics

        metrics = self.world.on_main(compute)
        self.clock.lap("broadcast")
        self.predicted = []
        return metrics, by_class

    def _all_predictions(self) -> np.ndarray | None:
        """Those of the validation split, in its order; on the main rank. A resumed run goes on with
        the samples that are left."""
        before = Predicted.union(self.predicted)
        left = np.setdiff1d(np.arange(len(self.data.validation)), before.samples)
        parts = np.array_split(left, self.world.size)
        sizes = [len(part) for part in parts]
        predictions = self._predictions(parts[self.world.rank], most=max(sizes))
        gathered = evaluation.gather(self.world, predictions, sizes)
        self.clock.lap("evaluate")
        if gathered is None:
            return None
        return np.asarray(Predicted.union([before, Predicted(left, gathered)]).values)

    def _note_best(self, value: float) -> bool:
        """Whether an evaluation was the best so far; decides what follows it.

        The value is the same on every rank, and so is the decision.
        """
        at, patience = self.position, self.config.early_stopping
        is_best = not math.isnan(value) and (
            at.best is None or (value < at.best if self.task.lower_is_better else value > at.best)
        )
        at.best, at.since_best = (value, 0) if is_best else (at.best, at.since_best + 1)
        stops = patience is not None and at.since_best >= patience
        if stops and at.step < self.plan.total_steps:
            self.job.record(
                "early_stop",
                step=at.step,
                metric=self.task.metric_names[0],
                evaluations=at.since_best,
            )
        at.phase = "done" if stops or at.step == self.plan.total_steps else "train"
        return is_best

    def _predictions(self, part: Any, most: int) -> Any:
        """The predictions of this rank's samples, in their order. They are made in that of their
        lengths: similar lengths need little padding.

        Every sample is predicted once, on one rank, however the split divides: there is nothing to
        trim, as there is after gather_for_metrics on padded batches.

        Args:
            part: its samples.
            most: how many the rank with the most has.
        """
        size, done = self.config.eval_batch_size, 0
        assert size is not None
        by_length = np.argsort(self.data.validation.lengths(part), kind="stable")
        predictions: list[torch.Tensor] = []
        self.bare_model.eval()
        self.job.alive("evaluate")
        self.job.begin_phase()
        # As many boundaries on every rank.
        batches = (part[by_length[start : start + size]] for start in range(0, most, size))
        for indices, batch in prepared(batches, self._validation_batch, self.world.device):
            self.job.begin_step()
            if len(indices):
                predictions.append(self._predict(batch))
                self.predicted.append(Predicted(indices, predictions[-1]))
            elif self.sharding:  # the others wait for its shares
                self._predict(batch)
            done += len(indices)
            self.reporter.evaluating(done, len(part))
            self.job.alive("evaluate")
            self._stop_or_save()
        found = [np.empty((0, *self.task.prediction_shape), self.task.prediction_dtype)]
        found += [torch.cat(predictions).cpu().numpy()] if predictions else []
        return np.concatenate(found)[np.argsort(by_length)]

    def _validation_batch(self, samples: Any) -> Batch:
        return self._batch(self.data.validation, samples if len(samples) else np.zeros(1, np.int64))

    @torch.no_grad()  # not inference_mode: weights that are gathered then could not train
    def _predict(self, batch: Batch) -> Any:
        """Predictions of validation samples, on the device."""
        model = self.bare_model
        if self.task.evaluates_in_fp32:  # Accelerate's wrapper lets it compute in bf16 or fp16
            model = getattr(model, "_original_forward", model)
        return self.task.evaluate(model, self._sent(batch, self.data.validation), self.data)

    def _explain(self, error: torch.OutOfMemoryError) -> SlurmftError:
        """A device's memory was too small: what for, and what needs less."""
        config, trains = self.config, self.position.phase == "train"
        size = (config.batch_size if trains else config.eval_batch_size) or 1
        asked, rest, *_ = f"{error}. ".split(". ")
        when = "in step" if trains else "in the evaluation after step"
        used_gib = peak_memory_bytes(self.world.device) / 2**30
        message = (
            f"{asked} {when} {self.position.step + trains}, on a batch of {size} samples and "
            f"{self._batch_tokens:,} tokens, with {used_gib:.1f} GiB used. {rest}"
        )
        if not trains:
            return SlurmftError(message, f"use --eval-batch-size {max(1, size // 2)}")
        steps = 2 * config.gradient_accumulation_steps
        halves = f"--batch-size {size // 2} --gradient-accumulation-steps {steps}"
        cures = [f"{halves} (the global batch stays)"] if size > 1 else []
        cures += [] if config.activation_checkpointing else ["--activation-checkpointing"]
        cures += [] if config.shard == "full" else ["--shard full on several GPUs"]
        return SlurmftError(message, f"use {', or '.join(cures) or 'a smaller model'}")

    # --- checkpoints ------------------------------------------------------------------------------

    def _checkpoint(self, is_best: bool = False) -> None:
        """Copies the state to memory; writing it is the background's work. Called on every rank.

        The best one is that right after an evaluation.
        """
        began = time.monotonic()
        snapshot = self._snapshot(is_best)
        if snapshot is not None:
            name = checkpoint_name(self.position.step, snapshot.suffix)
            self.saver.start(snapshot, is_best)
            copy_s = time.monotonic() - began
            self.job.record("checkpoint", checkpoint=name, step=self.position.step, copy_s=copy_s)

    def _snapshot(self, is_best: bool = False) -> Snapshot | None:
        """The state of the run, in memory, on the main rank; on the others None, or their share.

        Raises:
            SlurmftError: losses, gradients or weights are not finite: no checkpoint has them.
        """
        self.job.alive("save")
        if self.world.share_object(self.saver.is_busy):  # one copy at a time
            # In the next step the others would wait for this rank in nccl, which gives up.
            self.world.on_main(self.saver.wait)
        self.reporter.flush()
        self.world.on_some(True, self._check_weights)
        self.clock.lap("train" if self.position.phase == "train" else "evaluate")
        own = {
            "rng": rng_state(self.world.device),
            "counts": self.reporter.counts(),
            "predicted": Predicted.union(self.predicted),
        }
        ranks = self.world.gather_objects(own)
        shares = self.sharding.state(self.optimizer) if self.sharding else {}
        if not self.world.is_main:
            return Snapshot("", {"step": self.position.step}, {}, shares) if shares else None
        predicted = Predicted.union([rank["predicted"] for rank in ranks])
        optimizer_tensors, optimizer_groups = split_optimizer(self.optimizer)
        done = self.position.phase == "done"  # after the evaluation of its last step
        suffix = checkpoint_suffix(len(predicted.samples), is_best or done)
        if self.position.phase == "test":  # after -evaluated
            suffix = f"-t{len(predicted.samples):08d}"
        best = self.job.best_checkpoint
        if is_best:
            self.position.best_checkpoint = checkpoint_name(self.position.step, suffix)
        else:
            self.position.best_checkpoint = best.name if best else None
        tensors = {"predicted": predicted.tensors()}
        if not self.sharding:
            tensors |= {"model": lora.trained(self.bare_model), "optimizer": optimizer_tensors}
        counts = self.reporter.counts()
        for kind in OF_RANK:
            counts[kind] = sum(rank["counts"][kind] for rank in ranks)
        state = {
            "step": self.position.step,
            "position": dataclasses.asdict(self.position),
            "world_size": self.world.size,
            "shard": self.config.shard,
            "precision": self.precision,
            "backend": self.world.backend,
            "threads": torch.get_num_threads(),
            "global_batch_size": self.plan.global_batch_size,
            "tokens_sha256": self.tokens_sha256,
            "lora": self.adapter and self.adapter.facts,
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict() if self.scaler else None,
            "optimizer": optimizer_groups,
            "rng": [rank["rng"] for rank in ranks],
            "counts": counts,
            "phases_s": self.clock.seconds,
        }
        return Snapshot(suffix, json.loads(json.dumps(state)), copied(tensors), shares)

    def _check_weights(self) -> None:
        weights = (p.detach() for p in self.weights)
        own = [p.to_local() if isinstance(p, DTensor) else p for p in weights]
        largest = torch.nn.utils.get_total_norm([p for p in own if p.numel()], torch.inf)
        if not largest.isfinite():
            raise SlurmftError(f"weights are not finite after step {self.position.step}", STEADIER)

    def find_checkpoint(self) -> Snapshot | None:
        """The newest checkpoint that is whole, read by the main rank for all."""
        path = self.job.latest_checkpoint()
        if path is None:
            return None
        checkpoint: Snapshot | None = None

        def read() -> None:
            nonlocal checkpoint
            checkpoint = read_checkpoint(path)
            before, now = checkpoint.state["shard"], self.config.shard
            if "none" in (before, now) and before != now:
                raise UsageError(
                    f"{path.name} was written with --shard {before}, and this run has {now}",
                    "put the run's config.json back as it was; or submit a new run",
                )
            if checkpoint.state.get("tokens_sha256", self.tokens_sha256) != self.tokens_sha256:
                raise UsageError(
                    f"{path.name} was trained on other tokens than {self.run_dir.tokens} has now: "
                    "a resume would mix two data sets",
                    "bring data and tokenizer back as they were when the run started, and remove "
                    "that folder; or submit a new run",
                )

        self.world.on_main(read)
        suffix, state, files = self.world.share_object(
            checkpoint and (checkpoint.suffix, checkpoint.state, list(checkpoint.tensors))
        )
        tensors = {
            file: self.world.share_tensors(checkpoint.tensors[file] if checkpoint else {})
            for file in files
        }
        return Snapshot(suffix, state, tensors)

    def restore(self, checkpoint: Snapshot) -> None:
        """Continues from a checkpoint, exactly where it was taken."""
        state = checkpoint.state
        self.position = Position(**state["position"])
        name = checkpoint_name(self.position.step, checkpoint.suffix)
        self.world.on_main(lambda: lora.check_same(name, state.get("lora"), self.adapter))
        if self.world.is_main:
            self.job.keep_as_best(self.position.best_checkpoint)
        if self.sharding:
            path = self.run_dir.checkpoints / name
            self.sharding.load(path, self.optimizer, state["optimizer"])
        else:
            weights = checkpoint.tensors["model"]
            self.bare_model.load_state_dict(weights, strict=not self.adapter)
            join_optimizer(self.optimizer, checkpoint.tensors["optimizer"], state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self._dry_run_backward()
        self.communication.restored()
        if self.scaler and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        if self.world.rank < len(state["rng"]):
            set_rng_state(state["rng"][self.world.rank], self.world.device)
        counts = state["counts"]
        if not self.world.is_main:
            counts |= dict.fromkeys(OF_RANK, 0)
        self.reporter.set_counts(counts)
        self.clock.seconds.update(state["phases_s"])
        self.predicted = [Predicted.from_tensors(checkpoint.tensors["predicted"])]
        self.job.record(
            "resume",
            checkpoint=name,
            step=self.position.step,
            changes=self._changes(state),
        )

    def _changes(self, state: dict[str, Any]) -> list[str]:
        """What has changed since the checkpoint was taken, as texts."""
        now = {
            "world_size": self.world.size,
            "precision": self.precision,
            "backend": self.world.backend,
            "threads": torch.get_num_threads(),
        }
        changes = [f"{k} {state[k]} -> {v}" for k, v in now.items() if state[k] != v]
        if state["world_size"] != self.world.size:
            changes.append(
                f"global batch stays {self.plan.global_batch_size}: {self.plan.micro_steps} "
                f"micro-step(s) on {self.world.size} process(es); dropout draws other numbers"
            )
        return changes

    def _dry_run_backward(self) -> None:
        """One backward pass that changes nothing.

        DDP lays out its buckets anew after the first one. A sum over ranks rounds by the place in
        the bucket: without this, the first step after a resume would differ in its last bits from
        the same step of a run that was never interrupted.
        """
        if not self.position.step:
            return
        self.model.train()
        samples = np.arange(min(self.plan.global_batch_size, len(self.data.train)))
        self._backward(self._parts(samples)[-1][0], 1 / len(samples))
        self.communication.forget()
        self.optimizer.zero_grad(set_to_none=True)

    # --- the end ----------------------------------------------------------------------------------

    def _save_last(self) -> None:
        """Saves the state that all ranks stopped in. Called on every rank, after the same step."""
        snapshot = self._snapshot()

        def save() -> None:
            assert snapshot is not None  # on the main rank, or on all of a sharded model
            self.saver.save(snapshot, patience_s=self.job.config.job.lead_s / 2)

        if self.sharding:
            save()
        else:
            self.world.on_main(save)

    def _choose_weights(self) -> None:
        """Those that are saved: of the best evaluation after an early stop, else the last ones."""
        if self.config.early_stopping and self.position.since_best:
            self.job.alive("save")
            self._return_to_best()

    def _finish(self) -> None:
        """Saves the model and the result; the best checkpoint stays.

        Raises:
            Stopped: there is no room for them, and the job is to stop.
            SlurmftError: there was none for an hour.
        """
        self.job.alive("save")
        self.world.on_main(self.saver.wait)
        facts = self.reporter.result_facts(self.position.step, self.communication.facts())
        if self.scaler:
            facts["skipped_steps"] = self.position.step - steps_taken(self.optimizer)
        if self.position.by_class:
            facts["classes"] = self.position.by_class
        facts["pipeline"] = self.task.facts.pipeline or self.config.preset
        size = self.parameters * next(self.bare_model.parameters()).element_size()
        self._save_patiently("the model", size, self._save_model)
        write = partial(self.reporter.finish, facts, self.position.metrics | self.position.test)
        self._save_patiently("the result", 2**14, write)
        self.world.on_main(self.job.remove_checkpoints)

    def _save_patiently(self, what: str, size: int, save: Callable[[], None]) -> None:
        """Saves on the main rank, again and again where the disk is full. Called on every rank.

        Checkpoints that the run no longer needs give way first. Raises what `_finish` does.
        """
        deadline = time.monotonic() + _ROOM_PATIENCE_S
        problem: SlurmftError | None = None

        def attempt() -> bool:
            nonlocal problem
            for _ in range(2):
                try:
                    save()
                    return True
                except (OSError, SafetensorError) as error:
                    if not is_full(error):
                        raise
                self.job.remove_checkpoints(keep=1)
            if problem is None:
                problem = no_room(self.run_dir, what, size)
                self.job.warn(f"{problem.message}; it is tried again: {problem.hint}")
            if time.monotonic() > deadline:
                raise problem
            return False

        self.job.begin_phase()
        while True:
            self.job.alive("save")
            if (self.sharding or self.world).on_main(attempt):
                return
            if self.job.should_stop():
                if problem:
                    self.run_dir.add_failure(f"rank 0 on {platform.node()}", problem, retry=True)
                raise Stopped
            time.sleep(_ROOM_RETRY_S)

    def _return_to_best(self) -> None:
        """Weights (of the main rank, which saves them, or shares) and metrics of the best
        evaluation."""

        def read() -> tuple[Path | None, dict[str, float]]:
            self.saver.wait()
            path = self.job.best_checkpoint
            try:
                if path is None:
                    raise BadCheckpointError("it could not be saved")
                verify(path)
                best = read_checkpoint(path)
            except (OSError, BadCheckpointError) as error:
                self.job.warn(f"the model is the last one, not the best: {error}")
                return None, self.position.metrics
            if not self.sharding:
                self.bare_model.load_state_dict(best.tensors["model"], strict=not self.adapter)
            self.position.by_class = best.state["position"]["by_class"]
            return path, best.state["position"]["metrics"]

        path, self.position.metrics = self.world.on_main(read)
        if self.sharding and path:
            self.sharding.load(path)

    def _save_model(self) -> None:
        weights = self.vocabulary.state_dict(self.bare_model) if self.vocabulary else None
        if self.sharding:
            weights = self.sharding.whole(self.run_dir.checkpoints / ".whole")
        with new_folder(self.run_dir.model) as folder:
            if self.adapter:
                self.adapter.save(folder, weights, self.config.merge)
            else:
                self.bare_model.save_pretrained(folder, state_dict=weights, max_shard_size="5GB")
            # Saved before training: at its end the tokenizer's source may be gone.
            shutil.copytree(self.run_dir.tokens / "tokenizer", folder, dirs_exist_ok=True)


def checkpoint_suffix(predicted: int, evaluated: bool) -> str:
    """See `RunDir.checkpoint_names`, which sorts them."""
    return f"-e{predicted:08d}" if predicted else "-evaluated" if evaluated else ""


def choose_precision(config: TrainConfig, world: World) -> str:
    """The precision asked for, or the fastest that every rank's hardware computes natively. What
    remains in fp32 is computed in TF32 from then on, if that is asked for.

    Raises:
        UsageError: fp16 or TF32 on a CPU.
    """
    asked, on_gpu = config.precision, world.device.type != "cpu"
    if not on_gpu and (asked == "fp16" or config.tf32):
        flag = "--tf32" if config.tf32 else "--precision fp16"
        raise UsageError(f"{flag} needs GPUs", "use --precision bf16")
    if config.tf32:
        torch.set_float32_matmul_precision("high")
    if asked != "auto":
        return asked
    gpu = torch.get_device_module(world.device)
    native = gpu.is_bf16_supported(False) if on_gpu else hardware.computes_bf16()
    if all(world.all_values(float(native))):
        return "bf16"
    return "fp16" if on_gpu else "fp32"


def recompute_activations(model: Any) -> None:
    """Keeps no activations of layers for the backward pass; transformers 4 has another name."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    # The other kind makes no gradients behind frozen embeddings.
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
