"""What a training run records: steps, speed, metrics, its environment, its result."""

import contextlib
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
from slurmft.job import Job
from slurmft.job.process_group import World
from slurmft.node import hardware
from slurmft.runs.progress import describe_epoch, result_table
from slurmft.runs.rundir import RunDir
from slurmft.train import own_task
from slurmft.train.data.tables import Batch
from slurmft.train.data.token_data import TokenData
from slurmft.train.login import model_card
from slurmft.train.loop.environment import describe_rank, import_times, peak_memory_bytes, versions
from slurmft.train.loop.loaded_model import LoadedModel
from slurmft.train.loop.step_plan import Plan
from slurmft.train.loop.timers import OwnClock, PhaseClock, now, seconds_between

OF_RANK = ("tokens", "padded_tokens", "flops")
"""What each rank counts for itself."""
_COUNTED = ("samples", *OF_RANK, "evaluated", "loss", "startup_s")
STEADIER = "lower --learning-rate, lengthen --warmup-ratio, or use --precision bf16 or fp32"
"""What to do where numbers are no longer finite."""

_RANKS_EVERY_S = 10.0
_RANKS_AT_MOST_EVERY_S = 60.0
"""A record of all ranks has some ten characters for each: 64 ranks make 1 MB a day."""


class Reporter:
    """Counts what a rank does; the main rank's writes the files.

    Losses stay on the device until a window of steps is full. Then one all-reduce turns the ranks'
    shares into means that every rank knows. Nobody waits for a GPU's: they are read when they are
    there, at the latest a window later.
    """

    def __init__(
        self,
        job: Job,
        world: World,
        plan: Plan,
        clock: PhaseClock,
        loaded: LoadedModel,
        imports_s: float | None,
    ) -> None:
        """
        Args:
            imports_s: seconds from the start of this rank, or of the process that it was forked
                from, until its imports were done.
        """
        assert job.run_dir is not None
        self.job, self.run_dir = job, RunDir(job.run_dir)
        self.world, self.plan, self.clock = world, plan, clock
        self._loaded, self._imports_s = loaded, imports_s
        self._own_clock = OwnClock(loaded.model, world.device)
        self.loss = math.nan
        self.samples = self.tokens = self.padded_tokens = self.evaluated = 0
        self.flops = self.startup_s = self._ran_before_s = 0.0
        self._window = _Window(None)
        self._full: deque[_Window] = deque()
        self._facts: dict[str, Any] = {}
        self._own_s, self._own_steps = np.zeros(world.size), 0
        """Of every rank since the last record of ranks."""
        self._ranks_recorded_at = 0.0

    def start(self, data: TokenData) -> None:
        """Writes the environment and the first record. Called on every rank."""
        ranks = self.world.gather_objects(describe_rank(self.world, self._imports_s))
        if not self.world.is_main:
            return
        environment = {"versions": versions(), "python": platform.python_version()}
        with contextlib.suppress(OSError):  # a full disk does not end a run
            write_json(self.run_dir.environment, environment | {"ranks": ranks})
        plan, vocabulary = self.plan, self._loaded.vocabulary
        self._facts = {
            "task": plan.config.task,
            "preset": plan.config.preset,
            "model": plan.config.model,
            "parameters": self._loaded.parameters,
            "trained_parameters": self._loaded.trained_parameters,
            "vocabulary": vocabulary.facts() if vocabulary else None,
            "world_size": self.world.size,
            "nodes": len({r["node"] for r in ranks}),
            "precision": plan.precision,
            "backend": self.world.backend,
            "global_batch_size": plan.global_batch_size,
            "limited_from": plan.asked_batch_size if plan.is_limited else None,
            "total_steps": plan.total_steps,
            "imports_s": import_times(ranks),
            "optimizer": plan.optimizer,
            "learning_rate": plan.learning_rate,
        }
        self.job.record("start", self._facts | {"data": self._data_words(data)})
        self._warn_of_nodes(ranks)

    def _data_words(self, data: TokenData) -> list[str]:
        """What the data has, in lines: as it was found at submission, where that was read there."""
        config, inputs = self.plan.config, self.job.config.program.inputs
        read = [f"{Path(p).name}: {v['what']}" for p, v in inputs.items() if p != config.model]
        return read or (data.words() if own_task.facts(config.task).splits else [])

    def _warn_of_nodes(self, ranks: list[dict[str, Any]]) -> None:
        """Where ranks are not on the cores, or of the environment, that they were to have."""
        shared = sorted({rank["host"] for rank in ranks if not rank["is_staged"]})
        if shared and self.job.config.job.stage_env:
            self.job.warn(
                f"--stage-env: {', '.join(shared)} imported from the shared environment; why: "
                f"{self.run_dir.submitit}"
            )
        for rank in ranks:
            cores, asked = rank["cores"], rank["cores_asked"]
            if stray := {*hardware.numbers(cores)} - {*hardware.numbers(asked or cores)}:
                self.job.warn(
                    f"rank {rank['rank']} on {rank['host']} also runs on the cores "
                    f"{hardware.as_list(stray)}, which are not its own"
                )

    def begin_window(self) -> None:
        """Begins what the next throughput is measured over."""
        if not self.startup_s:
            self.startup_s = time.time() - self.job.began_at
        self._window = _Window(now(self.world.device))

    def count(self, batch: Batch) -> None:
        """Counts the tokens of a training batch, and what the model computes for them."""
        self.tokens += batch.tokens
        self.padded_tokens += batch.padded_tokens
        self.flops += self._loaded.flops.of_batch(batch.lengths)

    def gradients(self, norm: Any) -> None:
        """Notes the norm of a step's gradients, which is to be finite. Before `step`."""
        self._window.norms.append(norm)

    def step(self, step: int, loss: Any, learning_rate: float, samples: int) -> None:
        """Notes an optimizer step.

        Args:
            step: its number, from 1.
            loss: this rank's share of the mean loss over the global batch.
            learning_rate: the rate that it used.
            samples: samples of the global batch.
        """
        self.samples += samples
        self._window.samples += samples
        self._window.losses.append(loss)
        epoch = step / self.plan.steps_per_epoch
        self._window.steps.append({"step": step, "epoch": epoch, "learning_rate": learning_rate})
        if step % self.plan.config.log_every == 0:
            self._end_window()
        self._read(1)

    def counts(self) -> dict[str, Any]:
        """What a resumed run does not count from 0; tokens are those of this rank."""
        job = {"began_at": self.job.began_at, "ran_before_s": self._ran_before_s}
        return {name: getattr(self, name) for name in (*_COUNTED, "ran_s")} | job

    def set_counts(self, counts: dict[str, Any]) -> None:
        """Continues from the counts of a checkpoint; the main rank's goes on with those of all."""
        for name in _COUNTED:
            if self.world.is_main or name not in OF_RANK:
                setattr(self, name, counts[name])
        same_job = counts["began_at"] == self.job.began_at  # its ranks were restarted within it
        self._ran_before_s = counts["ran_before_s" if same_job else "ran_s"]

    @property
    def ran_s(self) -> float:
        """Seconds that the job of this run has run, in all attempts that led here."""
        return self._ran_before_s + time.time() - self.job.began_at

    def flush(self) -> None:
        """Makes the noted losses known everywhere, and records them. SlurmftError where one is not
        finite, on every rank alike."""
        self._end_window()
        self._read(0)

    def _end_window(self) -> None:
        """Has the noted losses summed over ranks, and of every rank the seconds of its own work
        since the last window and its peak memory in MiB: all by one reduction."""
        window = self._window
        if not window.steps:
            return
        device, size, rank = self.world.device, self.world.size, self.world.rank
        own = torch.zeros(2, size, dtype=torch.float64, pin_memory=device.type != "cpu")
        own[0, rank] = self._own_clock.seconds()
        own[1, rank] = peak_memory_bytes(device) >> 20
        noted = torch.stack(window.losses + window.norms).double()
        sums = torch.cat([own.flatten().to(device, non_blocking=True), noted])
        dist.all_reduce(sums)
        if device.type != "cpu":
            pinned = torch.empty_like(sums, device="cpu", pin_memory=True)
            sums = pinned.copy_(sums, non_blocking=True)
        window.sums, window.ended = sums, now(device)
        window.losses, window.norms = [], []
        self._full.append(window)
        self.begin_window()

    def _read(self, left: int) -> None:
        """Records the full windows that the device has done with, and waits for all but `left` of
        them. Raises what `flush` does."""
        while self._full and (len(self._full) > left or self._full[0].ended.query()):
            self._record(self._full.popleft())

    def _record(self, window: "_Window") -> None:
        assert window.sums is not None
        seconds = seconds_between(window.began, window.ended)
        size, count, last = self.world.size, len(window.steps), window.steps[-1]
        own_s, memory_mib, losses, norms = np.split(
            window.sums.numpy(), [size, 2 * size, 2 * size + count]
        )
        for record, loss in zip(window.steps, losses.tolist(), strict=True):
            record["loss"] = loss
        last["samples_per_s"] = window.samples / seconds
        last["left_s"] = (self.plan.total_steps - last["step"]) * seconds / count
        last["total_steps"] = self.plan.total_steps
        self.job.record("step", *window.steps)
        self._own_s += own_s
        self._own_steps += count
        self._record_ranks(last["step"], memory_mib)
        self.loss = last["loss"]
        for what, values in (("the loss is", losses), ("the gradients' norm is", norms)):
            if bad := np.flatnonzero(~np.isfinite(values)).tolist():
                step = last["step"] - len(values) + 1 + bad[0]
                raise SlurmftError(f"{what} {values[bad[0]]} at step {step}", STEADIER)

    def _record_ranks(self, step: int, memory_mib: np.ndarray) -> None:
        """Records how the ranks differ, now and then."""
        now = time.time()
        every_s = max(_RANKS_EVERY_S, min(_RANKS_AT_MOST_EVERY_S, (now - self.job.began_at) / 100))
        if now - self._ranks_recorded_at < every_s:
            return
        own_ms = (1000 * self._own_s / self._own_steps).round(2).tolist()
        memory = memory_mib.astype(int).tolist()
        self.job.record("ranks", step=step, own_ms=own_ms, memory_mib=memory)
        self._own_s, self._own_steps = np.zeros(self.world.size), 0
        self._ranks_recorded_at = now

    def epoch(self, epoch: float, metrics: dict[str, float]) -> None:
        """Records the metrics after an epoch; every rank's log has them."""
        self.evaluated += self.plan.validation_samples
        facts = {"epoch": epoch, "loss": self.loss, "phases_s": dict(self.clock.seconds)}
        self.job.evaluated(facts, **metrics)
        if not self.world.is_main:
            self.job.say(describe_epoch(facts | {"metrics": metrics}))

    def result_facts(self, steps: int, gradients: dict[str, Any]) -> dict[str, Any]:
        """What the result has beside the metrics. Called on every rank. `gradients` says how ranks
        sent them (`GradientCommunication.facts`)."""
        tokens, padded_tokens, flops = self.world.sum([getattr(self, n) for n in OF_RANK])
        memory = [int(v) for v in self.world.all_values(peak_memory_bytes(self.world.device))]
        phases = self.clock.seconds
        train_s = phases["train"]
        return self._facts | {
            "loss": self.loss,
            "steps": steps,
            "epochs": self.plan.epochs(steps),
            "gradients": gradients,
            "phases_s": phases,
            "train_samples": self.samples,
            "train_samples_per_s": self.samples / train_s,
            "train_tokens_per_s": tokens / train_s,
            "train_padded_tokens_per_s": padded_tokens / train_s,
            "train_model_tflop_per_s": flops / train_s / 1e12,
            "evaluate_samples": self.evaluated,
            "evaluate_samples_per_s": self.evaluated / phases["evaluate"],
            "peak_memory_bytes": memory,
            "startup_s": self.startup_s,
        }

    def finish(self, facts: dict[str, Any], metrics: dict[str, float]) -> None:
        """Writes the result, on the main rank. OSError where there is no room."""
        result = self.job.result(facts | {"wall_s": self.ran_s}, **metrics)
        with contextlib.suppress(OSError, ValueError):  # `slurmft push` writes it, too
            model_card.write(self.run_dir, result)
        self.job.say(result_table(result))


@dataclass(slots=True)
class _Window:
    """Steps that are recorded together."""

    began: Any
    steps: list[dict[str, Any]] = field(default_factory=list)
    samples: int = 0
    losses: list[Any] = field(default_factory=list)
    norms: list[Any] = field(default_factory=list)
    sums: torch.Tensor | None = None
    """Over ranks: seconds and MiB of each, losses, norms of gradients; there when it has ended."""
    ended: Any = None
