"""Records of a training run: steps, speed, metrics, its environment, its result."""

import contextlib
import dataclasses
import math
import platform
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from slurmft.core.errors import SlurmftError
from slurmft.core.files import write_json
from slurmft.core.run_records import Epoch
from slurmft.core.text import numbers
from slurmft.node import hardware
from slurmft.show.progress import describe_epoch
from slurmft.show.result_table import result_table
from slurmft.train import mix_spec
from slurmft.train.login import model_card
from slurmft.train.loop.environment import (
    describe_rank,
    import_times,
    peak_memory_bytes,
    take_common_variables,
    versions,
)
from slurmft.train.loop.learner import STEADIER, MicroBatch, Step
from slurmft.train.loop.loaded_model import LoadedModel
from slurmft.train.loop.setup import Setup
from slurmft.train.loop.state import State
from slurmft.train.loop.timers import OwnClock, PhaseClock, now, seconds_between

_RANKS_EVERY_S = 10.0
_RANKS_AT_MOST_EVERY_S = 60.0
"""A record of all ranks has some ten characters for each: 64 ranks make 1 MB a day."""


@dataclass(slots=True)
class Counts:
    """Sums over all attempts of a run."""

    samples: int = 0
    """Training samples, on all ranks."""
    tokens: int = 0
    """Training tokens on this rank; on the main one also those of all ranks before a resume."""
    padded_tokens: int = 0
    """The same with padding."""
    flops: float = 0.0
    """Operations of the model for these tokens."""
    evaluated: int = 0
    """Evaluated samples, on all ranks, with those of the test split."""
    loss: float = math.nan
    """The loss of the last step that is recorded."""
    startup_s: float = 0.0
    """Seconds from the start of the job to the first step."""


_OF_RANK = ("tokens", "padded_tokens", "flops")
"""Counts that each rank has of its own."""


class Reporter:
    """Counts what a rank does; the main rank's writes the files.

    Losses stay on the device until a window of steps is full. Then one all-reduce turns the ranks'
    shares into means that every rank knows. Nobody waits for a GPU's: they are read when they are
    there, at the latest a window later.
    """

    def __init__(
        self,
        setup: Setup,
        loaded: LoadedModel,
        imports_s: float | None,
        best_by: str | None = None,
    ) -> None:
        """
        Args:
            imports_s: seconds from the start of this rank, or of the process that it was forked
                from, until its imports were done.
            best_by: see `TrainingStart`.
        """
        self._job = setup.job
        self._run_dir = setup.run_dir
        self._setup = setup
        self._world = setup.world
        self._plan = setup.plan
        self._loaded = loaded
        self.clock = PhaseClock(setup.world.device)
        self.counts = Counts()
        self._imports_s = imports_s
        self._best_by = best_by
        self._own_clock = OwnClock(loaded.model, setup.world.device)
        self._ran_before_s = 0.0
        self._window = _Window(None)
        # Windows that have ended, until the device has summed them.
        self._full: deque[_Window] = deque()
        self._facts: dict[str, Any] = {}
        self._own_s = np.zeros(setup.world.size)
        """Seconds of every rank's own work since the last record of ranks."""
        self._own_steps = 0
        self._ranks_recorded_at = 0.0

    # --- the start --------------------------------------------------------------------------------

    def start(self) -> None:
        """Writes the environment and the first record. Called on every rank."""
        own_facts = describe_rank(self._world, self._imports_s)
        ranks = self._world.gather_objects(own_facts)
        if not self._world.is_main:
            return
        environment = {
            "versions": versions(),
            "python": platform.python_version(),
            "variables": take_common_variables(ranks),
            "ranks": ranks,
        }
        with contextlib.suppress(OSError):  # a full disk does not end a run
            write_json(self._run_dir.environment, environment)
        plan = self._plan
        vocabulary = None
        if self._loaded.vocabulary:
            vocabulary = self._loaded.vocabulary.facts()
        nodes = {rank["node"] for rank in ranks}
        self._facts = {
            "task": plan.config.task,
            "preset": plan.config.preset,
            "model": plan.config.model,
            "parameters": self._loaded.parameters,
            "trained_parameters": self._loaded.trained_parameters,
            "vocabulary": vocabulary,
            "world_size": self._world.size,
            "nodes": len(nodes),
            "precision": plan.precision,
            "backend": self._world.backend,
            "global_batch_size": plan.global_batch_size,
            "limited_from": plan.limited_from,
            "batch_size": plan.micro_batch_size if plan.is_auto else None,
            "total_steps": plan.total_steps,
            "imports_s": import_times(ranks),
            "optimizer": plan.optimizer,
            "learning_rate": plan.learning_rate,
            "optimizer_reason": plan.optimizer_reason,
            "step_samples": plan.step_samples,
            "best_by": self._best_by,
        }
        self._job.record("start", self._facts | {"data": self._data_words()})
        self._warn_of_nodes(ranks)

    def _data_words(self) -> list[str]:
        """Returns what the data has, in lines: as submission found it, where it was read there, and
        what the task has noted of it."""
        sources = [source.data for source in self._plan.config.sources()]
        data, *mixed = [Path(str(name)) for name in sources]
        lines = []
        of_mixed = []
        for path, fingerprint in self._job.config.program.inputs.items():
            # A model is an input as well, and so is the script of a metric.
            if any(Path(path).is_relative_to(folder) for folder in mixed):
                of_mixed.append(f"{path}: {fingerprint['what']}")
            elif Path(path).is_relative_to(data):
                name = Path(path).relative_to(data)
                lines.append(f"{name}: {fingerprint['what']}")
        # Data of the hub is first seen here; generated data is not worth a line.
        is_generated = not self._setup.task.facts.splits
        if not lines and not is_generated:
            lines = self._setup.data.words()
        lines += of_mixed
        if self._plan.config.mix:
            rows = self._setup.data.source_rows
            parts = mix_spec.in_words(self._plan.config.mixed, rows)
            for source, part in zip(sources, parts, strict=True):
                lines.append(f"{source!r}: {part}")
        return lines + list(self._setup.data.notes)

    def _mixture(self) -> list[dict[str, Any]]:
        """Returns how many rows each source of training data has, and an epoch of them."""
        sources = self._plan.config.sources()
        rows = self._setup.data.source_rows
        counts = self._setup.source_counts
        mixture = []
        for source, size, count in zip(sources, rows, counts, strict=True):
            facts = {"source": source.data, "rows": size, "rows_per_epoch": count}
            mixture.append(facts)
        return mixture

    def _warn_of_nodes(self, ranks: list[dict[str, Any]]) -> None:
        """Warns where ranks are not on the cores that they were to have."""
        for rank in ranks:
            # Only a rank that was to be bound can be on cores that are not its own.
            if rank["allotted_cores"] is None:
                continue
            cores = set(numbers(rank["cores"]))
            allotted_cores = set(numbers(rank["allotted_cores"]))
            stray = cores - allotted_cores
            if stray:
                self._job.warn(
                    f"rank {rank['rank']} on {rank['host']} also runs on the cores "
                    f"{hardware.as_list(stray)}, which are not its own"
                )

    # --- steps ------------------------------------------------------------------------------------

    def begin_window(self) -> None:
        """Begins what the next throughput is measured over."""
        # Once a run: later attempts have the seconds from a checkpoint.
        if not self.counts.startup_s:
            self.counts.startup_s = time.time() - self._job.began_at
        self._window = _Window(now(self._world.device))

    def step(
        self,
        number: int,
        step: Step,
        samples: int,
        batches: list[MicroBatch],
    ) -> None:
        """Notes an optimizer step.

        Args:
            number: that of the step, from 1.
            step: what it did.
            samples: samples of the global batch.
            batches: this rank's part of them.
        """
        counts = self.counts
        for each in batches:
            if each.counts:
                batch = each.batch
                counts.tokens += batch.tokens
                counts.padded_tokens += batch.padded_tokens
                counts.flops += self._loaded.flops.of_batch(batch.lengths)
        counts.samples += samples
        window = self._window
        window.samples += samples
        window.losses.append(step.loss)
        window.sizes.append(samples)
        if step.norm is not None:
            window.norms.append(step.norm)
        record = {
            "step": number,
            "epoch": number / self._plan.steps_per_epoch,
            "learning_rate": step.learning_rate,
        }
        window.steps.append(record)
        if number % self._plan.config.log_every == 0:
            self._end_window()
        # The newest window may still be on the device: to wait for it would hold up the next step.
        self._read(1)

    def flush(self) -> None:
        """Makes the noted losses known everywhere, and records them.

        Raises:
            SlurmftError: a loss, or a norm of gradients, is not finite; on every rank alike.
        """
        self._end_window()
        self._read(0)

    def _end_window(self) -> None:
        """Has the noted losses summed over ranks, and of every rank the seconds of its own work
        since the last window and its peak memory in MiB: all by one reduction."""
        window = self._window
        if not window.steps:
            return
        device = self._world.device
        on_gpu = device.type != "cpu"
        # A place for each rank: zeros elsewhere, so that the sum has the values of all.
        of_ranks = torch.zeros(
            2,
            self._world.size,
            dtype=torch.float64,
            pin_memory=on_gpu,
        )
        of_ranks[0, self._world.rank] = self._own_clock.seconds()
        of_ranks[1, self._world.rank] = peak_memory_bytes(device) >> 20
        noted = torch.stack(window.losses + window.norms).double()
        ranks_on_device = of_ranks.flatten().to(device, non_blocking=True)
        sums = torch.cat([ranks_on_device, noted])
        dist.all_reduce(sums)
        if on_gpu:
            # Only a copy to pinned memory does not wait for the device.
            pinned = torch.empty_like(sums, device="cpu", pin_memory=True)
            sums = pinned.copy_(sums, non_blocking=True)
        window.sums = sums
        window.ended = now(device)
        # Free the device's memory: the window is kept until its sums are read.
        window.losses = []
        window.norms = []
        self._full.append(window)
        self.begin_window()

    def _read(self, left: int) -> None:
        """Records the full windows that the device has done with, and waits for all but `left` of
        them. Raises what `flush` does."""
        while self._full:
            # `_record` waits for a window that the device has not done with.
            must_wait = len(self._full) > left
            if not must_wait and not self._full[0].ended.query():
                return
            self._record(self._full.popleft())

    def _record(self, window: "_Window") -> None:
        assert window.sums is not None
        size = self._world.size
        count = len(window.steps)
        last = window.steps[-1]
        seconds = seconds_between(window.began, window.ended)
        # As `_end_window` joined them; there may be no norms.
        ends = [size, 2 * size, 2 * size + count]
        # `seconds_between` waited for the window's end: the pinned copy is complete.
        own_s, memory_mib, losses, norms = np.split(window.sums.numpy(), ends)
        for record, loss in zip(window.steps, losses.tolist(), strict=True):
            record["loss"] = loss
        total = self._plan.total_steps
        steps_left = total - last["step"]
        last["samples_per_s"] = window.samples / seconds
        last["left_s"] = steps_left * seconds / count
        last["total_steps"] = total
        self._job.record("step", *window.steps)
        self._own_s += own_s
        self._own_steps += count
        self._record_ranks(last["step"], memory_mib)
        self.counts.loss = self._last_loss(window, losses)
        # After the records, so that the log shows what led to it.
        first = last["step"] - count + 1
        _check_finite("the loss is", losses, first)
        _check_finite("the gradients' norm is", norms, first)

    def _last_loss(self, window: "_Window", losses: np.ndarray) -> float:
        """Returns the loss that the run shows: that of the last step, or of the last full one where
        the texts of other rows are negatives.

        A smaller step has fewer of them, so that its loss is lower.
        """
        full = np.arange(len(losses))
        if self._setup.task.couples_rows:
            full = np.flatnonzero(np.array(window.sizes) >= self._plan.step_samples)
        if len(full):
            return float(losses[full[-1]])
        if math.isnan(self.counts.loss):
            return float(losses[-1])
        return self.counts.loss

    def _record_ranks(self, step: int, memory_mib: np.ndarray) -> None:
        """Records how the ranks differ, now and then."""
        time_s = time.time()
        # Often in a short run, seldom in a long one.
        every_s = (time_s - self._job.began_at) / 100
        every_s = min(_RANKS_AT_MOST_EVERY_S, every_s)
        every_s = max(_RANKS_EVERY_S, every_s)
        if time_s - self._ranks_recorded_at < every_s:
            return
        own_ms = 1000 * self._own_s / self._own_steps
        self._job.record(
            "ranks",
            step=step,
            own_ms=own_ms.round(2).tolist(),
            memory_mib=memory_mib.astype(int).tolist(),
        )
        self._own_s = np.zeros(self._world.size)
        self._own_steps = 0
        self._ranks_recorded_at = time_s

    def epoch(self, epoch: float, metrics: dict[str, float]) -> None:
        """Records the metrics after an epoch; every rank's log has them."""
        self.counts.evaluated += self._plan.validation_samples
        phases_s = dict(self.clock.seconds)
        facts = {"epoch": epoch, "loss": self.counts.loss, "phases_s": phases_s}
        self._job.evaluated(facts, **metrics)
        # The main rank's log has it by its record.
        if not self._world.is_main:
            line = Epoch(
                event="epoch",
                epoch=epoch,
                loss=self.counts.loss,
                metrics=dict(metrics),
            )
            self._job.say(describe_epoch(line))

    # --- its state --------------------------------------------------------------------------------

    @property
    def ran_s(self) -> float:
        """Seconds that the job of this run has run, in all attempts that led here."""
        return self._ran_before_s + time.time() - self._job.began_at

    def state(self) -> State:
        """Returns the counts of all ranks. Raises as `flush`: no checkpoint has what is not
        finite."""
        self.flush()
        # Without it, what is saved would lack the seconds of the phase under way.
        self.clock.mark()
        counts = dataclasses.asdict(self.counts)
        ranks = self._world.gather_objects(counts)
        for name in _OF_RANK:
            counts[name] = sum(rank[name] for rank in ranks)
        return State(
            {
                "counts": counts,
                "ran_s": self.ran_s,
                "ran_before_s": self._ran_before_s,
                "began_at": self._job.began_at,
                "phases_s": self.clock.seconds,
            }
        )

    def load(self, state: State) -> None:
        """Continues from the counts of a checkpoint; the main rank's goes on with those of all."""
        for name, value in state.values["counts"].items():
            if self._world.is_main or name not in _OF_RANK:
                setattr(self.counts, name, value)
        # Ranks that were restarted within a job do not count the time before twice: its clock has
        # gone on.
        is_same_job = state.values["began_at"] == self._job.began_at
        if is_same_job:
            self._ran_before_s = state.values["ran_before_s"]
        else:
            self._ran_before_s = state.values["ran_s"]
        self.clock.seconds.update(state.values["phases_s"])

    # --- the end ----------------------------------------------------------------------------------

    def result_facts(self, steps: int, sends: str) -> dict[str, Any]:
        """Returns the facts of the result, beside its metrics. Called on every rank.

        Args:
            steps: optimizer steps done.
            sends: how ranks sent each other gradients (`Strategy.sends`).
        """
        counts = self.counts
        # Every rank has counted its own: see `_OF_RANK`.
        of_rank = [counts.tokens, counts.padded_tokens, counts.flops]
        tokens, padded_tokens, flops = self._world.sum(of_rank)
        memory = self._world.all_values(peak_memory_bytes(self._world.device))
        phases_s = self.clock.seconds
        train_s = phases_s["train"]
        test = self._setup.data.test
        test_samples = 0
        if test:
            test_samples = len(test.validation)
        facts = self._facts | {
            "loss": counts.loss,
            "steps": steps,
            "epochs": self._plan.epochs(steps),
            "gradients": {"used": sends},
            "phases_s": phases_s,
            "train_samples": counts.samples,
            "train_samples_per_s": counts.samples / train_s,
            "train_tokens_per_s": tokens / train_s,
            "train_padded_tokens_per_s": padded_tokens / train_s,
            "train_model_tflop_per_s": flops / train_s / 1e12,
            "evaluate_samples": counts.evaluated,
            "test_samples": test_samples,
            "evaluate_samples_per_s": counts.evaluated / phases_s["evaluate"],
            "peak_memory_bytes": [int(value) for value in memory],
            "startup_s": counts.startup_s,
        }
        if self._plan.config.mix:
            facts["mixture"] = self._mixture()
        return facts

    def finish(self, facts: dict[str, Any], metrics: dict[str, float]) -> None:
        """Writes the result, on the main rank. OSError where there is no room."""
        result = self._job.result(facts | {"wall_s": self.ran_s}, **metrics)
        with contextlib.suppress(OSError, ValueError):  # `slurmft push` writes it, too
            model_card.write(self._run_dir, result)
        self._job.say(result_table(result))


def _check_finite(what: str, values: np.ndarray, first_step: int) -> None:
    """Raises SlurmftError where one of the values of some steps is not finite."""
    wrong = np.flatnonzero(~np.isfinite(values))
    if len(wrong):
        first = int(wrong[0])
        step = first_step + first
        raise SlurmftError(f"{what} {values[first]} at step {step}", STEADIER)


@dataclass(slots=True)
class _Window:
    """Steps that are recorded together."""

    began: Any
    steps: list[dict[str, Any]] = field(default_factory=list)
    samples: int = 0
    sizes: list[int] = field(default_factory=list)
    """Samples of each step."""
    losses: list[Any] = field(default_factory=list)
    norms: list[Any] = field(default_factory=list)
    sums: torch.Tensor | None = None
    """Over ranks: seconds and MiB of each, losses, norms of gradients; there when it has ended."""
    ended: Any = None
