"""What a run tells about itself: records, progress, the environment, the result."""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
import platform
import resource
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import slurmft
from slurmft.data import Batch
from slurmft.errors import SlurmftError
from slurmft.progress import Progress, describe_epoch, result_table
from slurmft.rundir import RecordWriter, write_json

if TYPE_CHECKING:
    from slurmft.train import Training

_PACKAGES = (
    "torch", "transformers", "accelerate", "datasets", "evaluate", "tokenizers", "numpy",
    "scikit-learn", "submitit", "filelock", "oneccl-bind-pt", "intel-extension-for-pytorch",
)  # fmt: skip

_EVALUATE_RECORD_EVERY_S = 1.0


class Reporter:
    """Counts what a rank does; the main rank's writes the files.

    Losses stay on the device until a record is due. Then one all-reduce turns the ranks' shares
    into means that every rank knows.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        self.world = training.world
        self.run_dir = training.run_dir
        self.progress = Progress()
        self.records = RecordWriter(self.run_dir.records) if self.world.is_main else None
        self.loss = math.nan
        self.samples = self.tokens = self.padded_tokens = self.evaluated = 0
        self.startup_s = 0.0
        self._began_at = began_at(self.run_dir.get_state())
        self._steps: list[dict[str, Any]] = []
        self._losses: list[Any] = []
        self._window_start = self._window_samples = 0.0
        self._evaluate_told_at = 0.0

    def start(self) -> None:
        """Writes the environment and the first record. Called on every rank."""
        ranks: list[Any] = [None] * self.world.size
        dist.all_gather_object(ranks, describe_rank(self.world))
        if self.world.is_main:
            environment = {"versions": versions(), "python": platform.python_version()}
            write_json(self.run_dir.environment, environment | {"ranks": ranks})
        t = self.training
        self._nodes = len({r["node"] for r in ranks})
        self._tell(
            {
                "event": "start",
                "task": t.config.task,
                "world_size": self.world.size,
                "nodes": self._nodes,
                "precision": t.precision,
                "backend": self.world.backend,
                "global_batch_size": t.global_batch_size,
                "total_steps": t.total_steps,
                "parameters": t.parameters,
            }
        )

    def begin_epoch(self) -> None:
        self._window_start, self._window_samples = time.perf_counter(), 0

    def count(self, batch: Batch) -> None:
        """Counts the tokens of a training batch."""
        self.tokens += batch.tokens
        self.padded_tokens += batch.padded_tokens

    def step(self, step: int, loss: Any, learning_rate: float, samples: int) -> None:
        """Notes an optimizer step.

        Args:
            step: its number, from 1.
            loss: this rank's share of the mean loss over the global batch.
            learning_rate: the rate that it used.
            samples: samples of the global batch.
        """
        if not self.samples:
            self.startup_s = time.time() - self._began_at
        self.samples += samples
        self._window_samples += samples
        self._losses.append(loss)
        epoch = step / self.training.steps_per_epoch
        self._steps.append(
            {"event": "step", "step": step, "epoch": epoch, "learning_rate": learning_rate}
        )
        if step % self.training.config.log_every == 0:
            self.flush()

    def flush(self) -> None:
        """Makes the noted losses known everywhere, and records them.

        Raises:
            SlurmftError: a loss is not finite. On every rank alike.
        """
        if not self._steps:
            return
        losses = self.world.sum(torch.stack(self._losses))
        for record, loss in zip(self._steps, losses, strict=True):
            record["loss"] = loss
        last = self._steps[-1]
        seconds = time.perf_counter() - self._window_start
        left = self.training.total_steps - last["step"]
        last["samples_per_s"] = self._window_samples / seconds
        last["left_s"] = left * seconds / len(losses)
        last["total_steps"] = self.training.total_steps
        self._tell(*self._steps)
        self.loss, self._steps, self._losses = losses[-1], [], []
        self.begin_epoch()
        self._check_finite(losses, last["step"])

    def _check_finite(self, losses: list[float], step: int) -> None:
        bad = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), None)
        if bad is not None:
            raise SlurmftError(
                f"the loss is {losses[bad]} at step {step - len(losses) + 1 + bad}",
                "lower --learning-rate, lengthen --warmup-ratio, or use --precision bf16 or fp32",
            )

    def evaluating(self, done: int, total: int) -> None:
        """Notes this rank's progress in an evaluation; the main rank's stands for all."""
        now = time.perf_counter()
        if self.records and now - self._evaluate_told_at >= _EVALUATE_RECORD_EVERY_S:
            self._evaluate_told_at = now
            self._tell({"event": "evaluate", "done": done, "total": total})

    def epoch(self, epoch: int, metrics: dict[str, float]) -> None:
        """Records the metrics after an epoch; every rank's log has them."""
        self.evaluated += len(self.training.data.validation)
        phases = dict(self.training.clock.seconds)
        record = {"event": "epoch", "epoch": epoch, "loss": self.loss, "metrics": metrics}
        self._tell(record | {"phases_s": phases})
        if not self.world.is_main:
            self.progress.say(describe_epoch(record))

    def finish(self, steps: int, metrics: dict[str, float]) -> None:
        """Writes the result. Called on every rank."""
        tokens, padded_tokens = self.world.sum([self.tokens, self.padded_tokens])
        memory = [int(v) for v in self.world.all_values(peak_memory_bytes(self.world.device))]
        if not self.world.is_main:
            return
        phases = self.training.clock.seconds
        t = self.training
        result = {
            "task": t.config.task,
            "preset": t.config.preset,
            "model": t.config.model,
            "parameters": t.parameters,
            "metrics": metrics,
            "loss": self.loss,
            "steps": steps,
            "world_size": self.world.size,
            "nodes": self._nodes,
            "global_batch_size": t.global_batch_size,
            "precision": t.precision,
            "backend": self.world.backend,
            "phases_s": phases,
            "train_samples": self.samples,
            "train_samples_per_s": self.samples / phases["train"],
            "train_tokens_per_s": tokens / phases["train"],
            "train_padded_tokens_per_s": padded_tokens / phases["train"],
            "evaluate_samples": self.evaluated,
            "evaluate_samples_per_s": self.evaluated / phases["evaluate"],
            "peak_memory_bytes": memory,
            "startup_s": self.startup_s,
            "wall_s": time.time() - self._began_at,
        }
        write_json(self.run_dir.result, result)
        self._tell({"event": "result"} | result)
        self.progress.say(result_table(result))

    def close(self) -> None:
        self.progress.close()

    def _tell(self, *records: dict[str, Any]) -> None:
        """Writes and shows records, on the main rank."""
        if self.records:
            self.records.write(*records)
            for record in records:
                self.progress.show(record)


def began_at(state: dict[str, Any]) -> float:
    """When the job of a run began (Unix seconds, the head's clock); now, if run by hand."""
    times = [s["time"] for s in state.get("history", []) if s["state"] == "running"]
    return float(times[-1]) if times else time.time()


def describe_rank(world: Any) -> dict[str, Any]:
    """What a rank runs on."""
    gpu = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else None
    return {
        "rank": world.rank,
        "node": os.environ.get("GROUP_RANK", "0"),
        "host": platform.node(),
        "device": gpu or cpu_model(),
        "threads": torch.get_num_threads(),
        "cores": sorted(os.sched_getaffinity(0)),
        "kernel": platform.release(),
    }


def cpu_model() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def versions() -> dict[str, str]:
    """Versions of the installed packages that a result depends on."""
    found = {"slurmft": slurmft.__version__}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory that this rank ever held: of its GPU, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
