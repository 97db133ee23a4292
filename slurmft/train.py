"""The training loop, as one rank runs it (started by `slurmft.rank`).

The page to read is `Training.run`. The optimizer step is the unit of everything: schedules, logs
and limits count optimizer steps, whatever the number of ranks and micro-steps.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from transformers.utils.logging import disable_progress_bar

from slurmft import dist, metrics, tasks
from slurmft.clock import PhaseClock
from slurmft.config import TrainConfig
from slurmft.data import TokenData, epoch_order, share, share_sizes
from slurmft.dist import World
from slurmft.errors import Exit, SlurmftError
from slurmft.plan import Plan
from slurmft.profiles import NodeProfile
from slurmft.reporter import Reporter
from slurmft.rundir import RunDir, write_folder

# Logs are files: transformers' bars for loading and saving weights would only litter them.
disable_progress_bar()


class Training:
    """One rank's training run, set up and ready to go."""

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self.config: TrainConfig = run_dir.load_config().train
        self.world = dist.init(self.config.backend)
        precision = choose_precision(self.config.precision, self.world)
        self.accelerator = Accelerator(
            mixed_precision="no" if precision == "fp32" else precision,
            cpu=self.world.device.type == "cpu",
        )
        self.task = tasks.get(self.config)
        self.world.on_main(self._prepare_data)
        self.data = TokenData.load(run_dir.tokens)
        self.plan = Plan(
            config=self.config,
            world_size=self.world.size,
            precision=precision,
            train_samples=len(self.data.train),
            validation_samples=len(self.data.validation),
        )
        self.clock = clock_of(self.world.device)
        self.reporter = Reporter(self.run_dir, self.world, self.plan, self.clock)

        seed_everything(self.config.seed)
        model = self.task.model(self.data)
        self.parameters = sum(p.numel() for p in model.parameters())
        # A fused optimizer skips fp16's overflowing steps by itself: the schedule would not know.
        optimizer = make_optimizer(model, self.config, fused=precision != "fp16")
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.bare_model = self.accelerator.unwrap_model(self.model)
        self.scheduler = make_scheduler(optimizer, self.config, self.plan.total_steps)
        seed_everything(self.config.seed + 1 + self.world.rank)  # dropout differs between ranks

    # --- the run ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Trains, evaluates after every epoch, saves the model and the result."""
        self.reporter.start(self.parameters)
        step = epoch = 0
        values: dict[str, float] = {}
        while step < self.plan.total_steps:
            step = self._train_epoch(epoch, step)
            epoch += 1
            values = self._evaluate()
            self.reporter.epoch(epoch, values)
        self.world.on_main(self._save_model)
        self.reporter.finish(step, values)
        dist.leave()

    def _train_epoch(self, epoch: int, step: int) -> int:
        """One pass over the data, or what is left of the step limit; returns the step reached."""
        self.model.train()
        self.reporter.begin_window()
        self.clock.restart()
        for samples in self._global_batches(epoch):
            if step == self.plan.total_steps:
                break
            learning_rate = self.scheduler.get_last_lr()[0]
            loss = self._step(samples)
            step += 1
            self.reporter.step(step, loss, learning_rate, len(samples))
        self.reporter.flush()
        self.clock.lap("train")
        return step

    def _global_batches(self, epoch: int) -> Iterator[Any]:
        """The samples of each optimizer step of an epoch: the same for every number of ranks."""
        order = epoch_order(len(self.data.train), self.config.seed, epoch)
        for start in range(0, len(order), self.plan.global_batch_size):
            yield order[start : start + self.plan.global_batch_size]

    def _step(self, samples: Any) -> Any:
        """One optimizer step on a global batch; returns this rank's share of its loss.

        The loss is the mean over the global batch, also where the last batch does not divide among
        the ranks. Summed over all ranks, the returned shares give that mean.
        """
        total = 0
        for micro_step in range(self.config.gradient_accumulation_steps):
            last = micro_step == self.config.gradient_accumulation_steps - 1
            with contextlib.nullcontext() if last else self.accelerator.no_sync(self.model):
                total = total + self._backward(samples, micro_step)
        if self.config.max_grad_norm:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        self.optimizer.step()
        if not self.accelerator.optimizer_step_was_skipped:  # fp16 skips steps that overflow
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total

    def _backward(self, samples: Any, micro_step: int) -> Any:
        """Gradients of this rank's part of a global batch; returns its share of the mean loss."""
        mine = share(samples, self.plan.parts, micro_step * self.world.size + self.world.rank)
        weight = len(mine) / len(samples)
        # A rank without a share computes any sample with weight 0: the others wait for it.
        batch = self.data.train.batch(
            mine if len(mine) else samples[:1], self.data.pad_id, self.plan.pad_multiple
        )
        if len(mine):
            self.reporter.count(batch)
        loss = self.model(**batch.to(self.world.device)).loss * weight
        # DDP divides the sum of the ranks' gradients by their number.
        self.accelerator.backward(loss * self.world.size)
        return loss.detach().float()

    def _evaluate(self) -> dict[str, float]:
        """The metrics of the validation split, equal on every rank."""
        if self.world.is_main:
            metrics.preload()
        self.clock.restart()
        sizes = share_sizes(len(self.data.validation), self.world.size)
        gathered = self.world.gather(self._predictions(sizes), sizes)
        self.clock.lap("evaluate")

        def compute() -> dict[str, float]:
            assert gathered is not None  # on the main rank, which alone computes
            return self.task.compute(gathered, self.data.validation.labels)

        return metrics.share_metrics(self.world, self.task.metric_names, compute, self.clock.lap)

    def _predictions(self, sizes: list[int]) -> Any:
        """This rank's predictions, of its consecutive part of the validation split.

        Every sample is predicted once, on one rank, however the split divides: there is nothing to
        trim, as there is after gather_for_metrics on padded batches.
        """
        assert self.config.eval_batch_size is not None
        first = sum(sizes[: self.world.rank])
        mine = np.arange(first, first + sizes[self.world.rank])
        found = [np.empty(0, dtype=np.int64)]
        self.bare_model.eval()
        with torch.inference_mode():
            for start in range(0, len(mine), self.config.eval_batch_size):
                indices = mine[start : start + self.config.eval_batch_size]
                batch = self.data.validation.batch(
                    indices, self.data.pad_id, self.plan.pad_multiple
                )
                inputs = batch.to(self.world.device)
                del inputs["labels"]
                found.append(self.task.predict(self.bare_model(**inputs).logits).cpu().numpy())
                self.reporter.evaluating(start + len(indices), len(mine))
        return np.concatenate(found)

    # --- files ------------------------------------------------------------------------------------

    def _prepare_data(self) -> None:
        if not self.run_dir.tokens.exists():
            data = self.task.prepare()

            def fill(folder: Path) -> None:
                data.save(folder)
                self.task.save_tokenizer(folder / "tokenizer")

            write_folder(self.run_dir.tokens, fill)

    def _save_model(self) -> None:
        def fill(folder: Path) -> None:
            self.bare_model.save_pretrained(folder)
            # Saved before training: at its end the tokenizer's source may be gone.
            shutil.copytree(self.run_dir.tokens / "tokenizer", folder, dirs_exist_ok=True)

        write_folder(self.run_dir.model, fill)


def choose_precision(asked: str, world: World) -> str:
    """The precision asked for, or the fastest that every rank's hardware computes natively.

    Raises:
        SlurmftError: fp16 on a CPU.
    """
    on_gpu = world.device.type == "cuda"
    if asked == "fp16" and not on_gpu:
        raise SlurmftError("--precision fp16 needs GPUs", "use --precision bf16", Exit.USAGE)
    if asked != "auto":
        return asked
    native = (
        torch.cuda.is_bf16_supported(False)
        if on_gpu
        else NodeProfile.detect(os.environ).native_bf16
    )
    if all(world.all_values(float(native))):
        return "bf16"
    return "fp16" if on_gpu else "fp32"


def clock_of(device: torch.device) -> PhaseClock:
    return PhaseClock(torch.cuda.synchronize if device.type == "cuda" else lambda: None)


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def make_optimizer(
    model: torch.nn.Module, config: TrainConfig, fused: bool
) -> torch.optim.Optimizer:
    """AdamW; biases and norms (one dimension) do not decay."""
    assert config.learning_rate is not None  # from the recipe
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, fused=fused)


def make_scheduler(optimizer: Any, config: TrainConfig, total_steps: int) -> Any:
    """Warm-up and decay in optimizer steps.

    It is not prepared by Accelerate, whose scheduler advances by one step a rank.
    """
    from transformers import get_scheduler

    warmup = config.warmup_steps
    if warmup is None:
        warmup = round((config.warmup_ratio or 0.0) * total_steps)
    name = "constant_with_warmup" if config.lr_schedule == "constant" else config.lr_schedule
    return get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=total_steps)
