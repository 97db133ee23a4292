"""What a training run records: steps, speed, metrics, its environment, its result."""

import contextlib
import math
import platform
import time
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from slurmft.core.errors import SlurmftError
from slurmft.core.files import write_json
from slurmft.job import Job
from slurmft.job.process_group import World
from slurmft.node import hardware
from slurmft.runs.progress import describe_epoch, result_table
from slurmft.runs.rundir import RunDir
from slurmft.train import model_card
from slurmft.train.data import Batch
from slurmft.train.environment import describe_rank, import_times, peak_memory_bytes, versions
from slurmft.train.model_flops import ModelFlops
from slurmft.train.step_plan import Plan
from slurmft.train.timers import OwnClock, PhaseClock, has_passed, now, seconds_between

OF_RANK = ("tokens", "padded_tokens", "flops")
"""What each rank counts for itself."""
_COUNTED = ("samples", *OF_RANK, "evaluated", "loss", "startup_s")
_EVALUATE_RECORD_EVERY_S = 1.0
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
        own_clock: OwnClock,
        imports_s: float | None,
        model_flops: ModelFlops,
    ) -> None:
        """
        Args:
            imports_s: seconds from the start of this rank, or of the process that it was forked
                from, until its imports were done.
        """
        assert job.run_dir is not None
        self.job, self.run_dir = job, RunDir(job.run_dir)
        self.world = world
        self.plan = plan
        self.clock, self.own_clock = clock, own_clock
        self._imports_s, self._model_flops = imports_s, model_flops
        self.loss = math.nan
        self.samples = self.tokens = self.padded_tokens = self.evaluated = 0
        self.flops = 0.0
        self.startup_s = 0.0
        self._ran_before_s = 0.0
        self._steps: list[dict[str, Any]] = []
        self._losses: list[Any] = []
        self._norms: list[Any] = []
        self._full: deque[_Window] = deque()
        self._window_samples = 0
        self._evaluation_recorded_at = 0.0
        self._facts: dict[str, Any] = {}
        self._own_s = [0.0] * world.size
        self._own_steps = 0
        self._ranks_recorded_at = 0.0

    def start(
        self, parameters: int, trained: int, rows: dict[str, int] | None, data: list[str]
    ) -> None:
        """Writes the environment and the first record. Called on every rank.

        Args:
            data: what it has, in lines.
            trained: parameters that train.
            rows: of the embedding table: all, and those in use; None: all are in use.
        """
        own = describe_rank(self.world) | {"imports_s": self._imports_s}
        ranks = self.world.gather_objects(own)
        if not self.world.is_main:
            return
        environment = {"versions": versions(), "python": platform.python_version()}
        with contextlib.suppress(OSError):  # a full disk does not end a run
            write_json(self.run_dir.environment, environment | {"ranks": ranks})
        self._facts = {
            "task": self.plan.config.task,
            "preset": self.plan.config.preset,
            "model": self.plan.config.model,
            "parameters": parameters,
            "trained_parameters": trained,
            "vocabulary": rows,
            "world_size": self.world.size,
            "nodes": len({r["node"] for r in ranks}),
            "precision": self.plan.precision,
            "backend": self.world.backend,
            "global_batch_size": self.plan.global_batch_size,
            "limited_from": self.plan.asked_batch_size if self.plan.is_limited else None,
            "total_steps": self.plan.total_steps,
            "imports_s": import_times(ranks),
            "optimizer": self.plan.optimizer,
            "learning_rate": self.plan.learning_rate,
        }
        self.job.record("start", self._facts | {"data": data})
        self._warn_of_nodes(ranks)

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
        self._window_began, self._window_samples = now(self.world.device), 0

    def count(self, batch: Batch) -> None:
        """Counts the tokens of a training batch, and what the model computes for them."""
        self.tokens += batch.tokens
        self.padded_tokens += batch.padded_tokens
        self.flops += self._model_flops.of_batch(batch.lengths)

    def gradients(self, norm: Any) -> None:
        """Notes the norm of a step's gradients, which is to be finite. Before `step`."""
        self._norms.append(norm)

    def step(self, step: int, loss: Any, learning_rate: float, samples: int) -> None:
        """Notes an optimizer step.

        Args:
            step: its number, from 1.
            loss: this rank's share of the mean loss over the global batch.
            learning_rate: the rate that it used.
            samples: samples of the global batch.
        """
        self.samples += samples
        self._window_samples += samples
        self._losses.append(loss)
        epoch = step / self.plan.steps_per_epoch
        self._steps.append({"step": step, "epoch": epoch, "learning_rate": learning_rate})
        if step % self.plan.config.log_every == 0:
            self._end_window()
        self._read(1)

    def counts(self) -> dict[str, Any]:
        """What a resumed run does not count from 0; tokens are those of this rank."""
        names = (*_COUNTED, "ran_s")
        job = {"began_at": self.job.began_at, "ran_before_s": self._ran_before_s}
        return {name: getattr(self, name) for name in names} | job

    def set_counts(self, counts: dict[str, Any]) -> None:
        """Continues from the counts of a checkpoint."""
        for name in _COUNTED:
            setattr(self, name, counts[name])
        same_job = counts["began_at"] == self.job.began_at  # its ranks were restarted within it
        self._ran_before_s = counts["ran_before_s" if same_job else "ran_s"]

    @property
    def ran_s(self) -> float:
        """Seconds that the job of this run has run, in all attempts that led here."""
        return self._ran_before_s + time.time() - self.job.began_at

    def flush(self) -> None:
        """Makes the noted losses known everywhere, and records them.

        Raises:
            SlurmftError: a loss is not finite. On every rank alike.
        """
        self._end_window()
        self._read(0)

    def _end_window(self) -> None:
        """Has the noted losses summed over ranks, and of every rank the seconds of its own work
        since the last window and its peak memory in MiB: all by one reduction."""
        if not self._steps:
            return
        device, size, rank = self.world.device, self.world.size, self.world.rank
        own = torch.zeros(2, size, dtype=torch.float64, pin_memory=device.type != "cpu")
        own[0, rank] = self.own_clock.seconds()
        own[1, rank] = peak_memory_bytes(device) >> 20
        noted = torch.stack(self._losses + self._norms).double()
        sums = torch.cat([own.flatten().to(device, non_blocking=True), noted])
        dist.all_reduce(sums)
        if device.type != "cpu":
            pinned = torch.empty_like(sums, device="cpu", pin_memory=True)
            sums = pinned.copy_(sums, non_blocking=True)
        began, ended = self._window_began, now(device)
        self._full.append(_Window(self._steps, self._window_samples, sums, began, ended))
        self._steps, self._losses, self._norms = [], [], []
        self.begin_window()

    def _read(self, left: int) -> None:
        """Records the full windows that the device has done with, and waits for all but `left` of
        them. Raises what `flush` does."""
        while self._full and (len(self._full) > left or has_passed(self._full[0].ended)):
            self._record(self._full.popleft())

    def _record(self, window: "_Window") -> None:
        seconds = seconds_between(window.began, window.ended)
        size, count = self.world.size, len(window.steps)
        numbers = iter(window.sums.tolist())
        own_s, memory_mib, losses = (list(islice(numbers, n)) for n in (size, size, count))
        for record, loss in zip(window.steps, losses, strict=True):
            record["loss"] = loss
        last = window.steps[-1]
        left = self.plan.total_steps - last["step"]
        last["samples_per_s"] = window.samples / seconds
        last["left_s"] = left * seconds / count
        last["total_steps"] = self.plan.total_steps
        self.job.record("step", *window.steps)
        self._record_ranks(last["step"], count, own_s, memory_mib)
        self.loss = losses[-1]
        for what, values in (("the loss is", losses), ("the gradients' norm is", list(numbers))):
            _check_finite(what, values, last["step"])

    def _record_ranks(
        self, step: int, steps: int, own_s: list[float], memory_mib: list[float]
    ) -> None:
        """Records how the ranks differ, now and then."""
        self._own_s = [a + b for a, b in zip(self._own_s, own_s, strict=True)]
        self._own_steps += steps
        now = time.time()
        every_s = max(_RANKS_EVERY_S, min(_RANKS_AT_MOST_EVERY_S, (now - self.job.began_at) / 100))
        if now - self._ranks_recorded_at < every_s:
            return
        own_ms = [round(1000 * seconds / self._own_steps, 2) for seconds in self._own_s]
        memory = [int(mib) for mib in memory_mib]
        self.job.record("ranks", step=step, own_ms=own_ms, memory_mib=memory)
        self._own_s, self._own_steps, self._ranks_recorded_at = [0.0] * self.world.size, 0, now

    def evaluating(self, done: int, total: int) -> None:
        """Notes this rank's progress in an evaluation; the main rank's stands for all."""
        now = time.perf_counter()
        if self.world.is_main and now - self._evaluation_recorded_at >= _EVALUATE_RECORD_EVERY_S:
            self._evaluation_recorded_at = now
            self.job.record("evaluate", done=done, total=total)

    def epoch(self, epoch: float, metrics: dict[str, float]) -> None:
        """Records the metrics after an epoch; every rank's log has them."""
        self.evaluated += self.plan.validation_samples
        facts = {"epoch": epoch, "loss": self.loss, "phases_s": dict(self.clock.seconds)}
        self.job.evaluated(facts, **metrics)
        if not self.world.is_main:
            self.job.say(describe_epoch(facts | {"metrics": metrics}))

    def result_facts(self, steps: int, gradients: dict[str, Any]) -> dict[str, Any]:
        """What the result has beside the metrics. Called on every rank.

        Args:
            gradients: how ranks sent them (`GradientCommunication.facts`).
        """
        tokens, padded_tokens, flops = self.world.sum([getattr(self, n) for n in OF_RANK])
        memory = [int(v) for v in self.world.all_values(peak_memory_bytes(self.world.device))]
        phases = self.clock.seconds
        return self._facts | {
            "loss": self.loss,
            "steps": steps,
            "epochs": self.plan.epochs(steps),
            "gradients": gradients,
            "phases_s": phases,
            "train_samples": self.samples,
            "train_samples_per_s": self.samples / phases["train"],
            "train_tokens_per_s": tokens / phases["train"],
            "train_padded_tokens_per_s": padded_tokens / phases["train"],
            "train_model_tflop_per_s": flops / phases["train"] / 1e12,
            "evaluate_samples": self.evaluated,
            "evaluate_samples_per_s": self.evaluated / phases["evaluate"],
            "peak_memory_bytes": memory,
            "startup_s": self.startup_s,
        }

    def finish(self, facts: dict[str, Any], metrics: dict[str, float]) -> None:
        """Writes the result, on the main rank.

        Raises:
            OSError: no room.
        """
        result = self.job.result(facts | {"wall_s": self.ran_s}, **metrics)
        with contextlib.suppress(OSError, ValueError):  # `slurmft push` writes it, too
            model_card.write(self.run_dir, result)
        self.job.say(result_table(result))


@dataclass(frozen=True, slots=True)
class _Window:
    """Steps that are recorded together."""

    steps: list[dict[str, Any]]
    samples: int
    sums: torch.Tensor
    """Over ranks: seconds and MiB of each, losses, norms of gradients; there when it has ended."""
    began: Any
    ended: Any


def _check_finite(what: str, values: list[float], last: int) -> None:
    bad = next((i for i, value in enumerate(values) if not math.isfinite(value)), None)
    if bad is not None:
        raise SlurmftError(f"{what} {values[bad]} at step {last - len(values) + 1 + bad}", STEADIER)
