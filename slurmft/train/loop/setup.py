"""The setup of a run, and what a resume may find changed in it."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slurmft.core import descent, fingerprint
from slurmft.core.errors import UsageError
from slurmft.core.files import new_folder
from slurmft.core.run_files import current_attempt
from slurmft.core.text import counted
from slurmft.job import Job, process
from slurmft.job.process_group import World
from slurmft.node import hardware, profiles
from slurmft.runs.disk_space import is_full, no_room
from slurmft.runs.rundir import RunDir
from slurmft.train import mix_spec, tasks
from slurmft.train.config import (
    ResolvedConfig,
    TrainConfig,
    early_stopping_remark,
    max_steps_remark,
)
from slurmft.train.data.token_data import TokenData, balanced
from slurmft.train.login.formats import check_step, left_out
from slurmft.train.login.sources import check_hub_names
from slurmft.train.loop import memory_limits, token_files
from slurmft.train.loop.checkpoint import Checkpoint
from slurmft.train.loop.memory_limits import NO_LIMITS, MemoryLimits
from slurmft.train.loop.step_plan import Plan, limited
from slurmft.train.parallel import choice

FillTokens = Callable[[Path, tasks.Task, Job], None]
"""Writes the tokens of a run into a folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """Everything that is settled before the first step, and stays. The same on every rank, but for
    its place in the world."""

    job: Job
    run_dir: RunDir
    config: ResolvedConfig
    task: tasks.Task
    world: World
    precision: str
    """fp32, bf16 or fp16: what was chosen, where the configuration says auto."""
    data: TokenData
    tokens_sha256: str | None
    """The checksum of the training tokens, on the main rank."""
    plan: Plan
    memory_limits: MemoryLimits = NO_LIMITS

    @classmethod
    def prepare(
        cls,
        job: Job,
        checkpoint: Checkpoint | None,
        fill: FillTokens = token_files.fill,
    ) -> "Setup":
        """Settles what a run needs; the main rank makes its tokens, all ranks load them.

        Args:
            checkpoint: where the run continues, with the global batch that it had.
            fill: writes the tokens, where no earlier attempt has.

        Raises:
            UsageError: options do not go together here, or the checkpoint is of another run.
        """
        assert job.run_dir is not None
        world = job.join()
        run_dir = RunDir(job.run_dir)
        # A task of the user's own is imported from the copy that submission made from here on.
        config = ResolvedConfig.of(job.config.program)
        check_hub_names(config)
        task = tasks.get(config)
        precision = choose_precision(config, world)
        choice.check(config, world, precision)
        data = _load_tokens(run_dir.tokens, task, job, fill)
        limits = MemoryLimits.shared(run_dir, world)
        plan = Plan(
            config=config,
            world_size=world.size,
            precision=precision,
            train_samples=sum(_source_counts(config, data)),
            validation_samples=data.rows(data.validation),
            least_rows=task.least_step_rows,
            resumed_batch_size=_batch_size_of(checkpoint),
            resumed_parts=checkpoint.setup.get("parts") if checkpoint else None,
            memory_limit=limits.train_samples,
            absent_ranks=world.size // job.nodes * (job.config.job.nodes - job.nodes),
        )
        if _memory_ran_out(run_dir, world):
            limits = _halved(limits, plan)
            world.on_main(partial(memory_limits.note, run_dir, limits))
            plan = replace(plan, memory_limit=limits.train_samples)
        setup = cls(
            job=job,
            run_dir=run_dir,
            config=config,
            task=task,
            world=world,
            precision=precision,
            data=data,
            tokens_sha256=_tokens_sha256(run_dir) if world.is_main else None,
            plan=plan,
            memory_limits=limits,
        )
        setup.check_and_tell(checkpoint)
        return setup

    @property
    def eval_batch_size(self) -> int:
        """The most samples of a rank's batch of an evaluation."""
        requested = self.config.eval_batch_size
        return limited(requested, self.memory_limits.evaluate_samples)

    def check_and_tell(self, checkpoint: Checkpoint | None) -> None:
        """Raises UsageError where the run cannot begin, or go on from a checkpoint; says what its
        user should know before the first step."""
        self.tell_limits()
        self.tell_of_one_process()
        self.say_notes()
        if checkpoint:
            self.world.on_main(lambda: self.check_same_run(checkpoint))
            return
        # A run that continues keeps its batch on more processes, too, and was told before.
        self.config.check_processes(self.world.size)
        self.tell_of_no_effect()

    def tell_limits(self) -> None:
        """Records that memory was too small for what was asked for, and what is done instead."""
        plan = self.plan
        if plan.micro_batch_size < plan.batch_size and not plan.is_auto:
            self.job.warn(
                f"memory was too small for --batch-size {self.config.batch_size}: "
                f"{counted(plan.micro_batch_size, 'sample')} at a time and "
                f"{plan.micro_steps} micro-steps make the same global batch of "
                f"{plan.global_batch_size}"
            )
        if self.eval_batch_size < self.config.eval_batch_size:
            self.job.warn(
                f"memory was too small for --eval-batch-size {self.config.eval_batch_size}: "
                f"evaluations take {counted(self.eval_batch_size, 'sample')} at a time"
            )

    def tell_of_no_effect(self) -> None:
        """Warns where --early-stopping or --max-steps cannot end the run early."""
        plan = self.plan
        remarks = [
            early_stopping_remark(self.config, plan.evaluations),
            max_steps_remark(self.config, plan.steps_of_epochs),
        ]
        for remark in filter(None, remarks):
            self.job.warn(remark)

    def tell_of_one_process(self) -> None:
        """Warns where --shard has nothing to share."""
        if self.config.shard != "none" and self.world.size == 1:
            self.job.warn(
                f"--shard {self.config.shard}: one process has nothing to share"
            )

    def say_notes(self) -> None:
        """Says what the task has noted of its data; on the main rank, once for all."""
        if self.world.is_main:
            for note in self.data.notes:
                self.job.say(note)

    def check_steps(self) -> None:
        """Raises UsageError where optimizer steps have fewer samples than teach something; says how
        many are left out at the end of an epoch."""
        plan = self.plan
        check_step(self.config, plan.step_samples, plan.least_rows)
        if plan.left_out:
            self.job.say(left_out(plan.left_out))

    @property
    def source_counts(self) -> list[int]:
        """Rows of each source of the training data that an epoch has."""
        return _source_counts(self.config, self.data)

    def facts(self) -> dict[str, Any]:
        """Returns what a checkpoint says of the run that wrote it."""
        return self._may_change() | {
            "shard": self.config.shard,
            "global_batch_size": self.plan.global_batch_size,
            "parts": self.plan.parts,
            "tokens_sha256": self.tokens_sha256,
        }

    def _may_change(self) -> dict[str, Any]:
        """Returns the facts that a resume may change; users are told."""
        return {
            "world_size": self.world.size,
            # With another of these, steps round otherwise.
            "precision": self.precision,
            "backend": self.world.backend,
            "threads": torch.get_num_threads(),
        }

    def changes(self, checkpoint: Checkpoint) -> list[str]:
        """Returns, in words, what is not as it was when a checkpoint was written."""
        before = checkpoint.setup
        changes = []
        for name, value in self._may_change().items():
            if before[name] != value:
                changes.append(f"{name} {before[name]} -> {value}")
        if before["world_size"] != self.world.size:
            changes.append(
                f"global batch stays {self.plan.global_batch_size}: {self.plan.micro_steps} "
                f"micro-step(s) on {self.world.size} process(es); dropout draws other numbers"
            )
        return changes

    def check_same_run(self, checkpoint: Checkpoint) -> None:
        """Raises UsageError where the run cannot go on from a checkpoint; on the main rank."""
        before = checkpoint.setup["shard"]
        now = self.config.shard
        # Full and node have the same files, from which each rank reads its share.
        if before != now and "none" in (before, now):
            raise UsageError(
                f"{checkpoint.name} was written with --shard {before}, and this run has {now}",
                "put the run's config.json back as it was; or submit a new run",
            )
        if checkpoint.setup["tokens_sha256"] != self.tokens_sha256:
            raise UsageError(
                f"{checkpoint.name} was trained on other tokens than {self.run_dir.tokens} has "
                "now: a resume would mix two data sets",
                "bring data and tokenizer back as they were when the run started, and remove "
                "that folder; or submit a new run",
            )


def _memory_ran_out(run: RunDir, world: World) -> bool:
    """Returns whether this start must take less, because the kernel or Slurm has killed ranks for
    their memory since the last one; the same on every rank."""
    if any(world.all_values(float(process.memory_ran_out()))):
        return True

    def ended_attempt_before() -> bool:
        attempt = current_attempt()
        # Later starts of this attempt have compared the counters themselves.
        if attempt < 2 or run.meetings(attempt) > 1:
            return False
        # With more memory all samples may fit.
        if run.get_state().raised_mem_mib_since(attempt - 1):
            return False
        failure = run.root_failure(attempt - 1)
        return failure is not None and failure.out_of_memory

    return bool(world.on_main(ended_attempt_before))


def has_finished(job: Job) -> bool:
    """Returns whether the run has its result: an attempt that was killed at its very end had
    finished. The same on every rank."""
    assert job.run_dir is not None
    return bool(job.join().share_object(RunDir(job.run_dir).result.exists()))


def choose_precision(config: ResolvedConfig, world: World) -> str:
    """Returns the precision asked for, or the fastest that every rank's hardware computes natively.
    What remains in fp32 is computed in TF32 from then on, if that is asked for.

    Raises:
        UsageError: fp16 or TF32 on a CPU.
    """
    on_gpu = world.device.type != "cpu"
    if not on_gpu and (config.precision == "fp16" or config.tf32):
        flag = "--tf32" if config.tf32 else "--precision fp16"
        raise UsageError(f"{flag} needs GPUs", "use --precision bf16")
    if config.tf32:
        torch.set_float32_matmul_precision("high")
    if on_gpu:  # by default torch computes convolutions in TF32
        torch.backends.cudnn.allow_tf32 = config.tf32
    if config.precision != "auto":
        return config.precision
    if on_gpu:
        # False: without those that only emulate it.
        is_native = torch.get_device_module(world.device).is_bf16_supported(False)
    else:
        is_native = hardware.computes_bf16()
    # Nodes may differ: what one of them lacks, none uses.
    if all(world.all_values(float(is_native))):
        return "bf16"
    # fp16 needs a scaler, which --shard excludes.
    if on_gpu and config.shard == "none":
        return "fp16"
    return "fp32"


def _tokens_sha256(run_dir: RunDir) -> str:
    """Returns the checksum of the training tokens."""
    return str(fingerprint.of(run_dir.tokens / "train")["sha256"])


def _halved(limits: MemoryLimits, plan: Plan) -> MemoryLimits:
    """Returns limits of half the samples that a rank had at once."""
    # --batch-size auto was trying, before any evaluation, or had not begun: it begins again then.
    if plan.is_auto and limits.train_samples is None:
        if limits.tried_samples is None:
            return limits
        return replace(limits, train_samples=max(1, limits.tried_samples // 2))
    evaluated = limited(plan.config.eval_batch_size, limits.evaluate_samples)
    return MemoryLimits(
        train_samples=max(1, plan.largest_part // 2),
        evaluate_samples=max(1, evaluated // 2),
    )


def _batch_size_of(checkpoint: Checkpoint | None) -> int | None:
    """Returns the global batch size of a run that continues; None for one that starts."""
    if checkpoint is None:
        return None
    # Position and schedule count steps of this size: of another, they would be other samples.
    size: int = checkpoint.setup["global_batch_size"]
    return size


def _load_tokens(
    folder: Path, task: tasks.Task, job: Job, fill: FillTokens
) -> TokenData:
    """Returns the tokens of a run, which the main rank makes; the task gets the weights of its
    classes."""
    # The others wait; where it fails, all of them fail with its message.
    job.join().on_main(lambda: _make_tokens(folder, task, job, fill))
    data = TokenData.load(descent.through(folder))
    # Known only with the data: how often each class occurs.
    if task.config.class_weights == "balanced":
        weights = None
        if data.source_sizes:
            counts = np.array(_source_counts(task.config, data))
            # How often an epoch has each sample of a source, on average.
            weights = np.repeat(counts / data.source_rows, data.source_sizes)
        task.class_weights = balanced(data.train, len(data.labels), weights)
    return data


def _source_counts(config: TrainConfig, data: TokenData) -> list[int]:
    """Returns how many rows of each source of the training data an epoch has."""
    first_rows, *_ = data.source_rows
    return [first_rows, *mix_spec.draws(first_rows, config.mixed)]


def _make_tokens(folder: Path, task: tasks.Task, job: Job, fill: FillTokens) -> None:
    """Makes the tokens of a run, where no earlier attempt has; on the main rank."""
    if folder.exists():
        return
    try:
        _write_tokens(folder, task, job, fill)
    except OSError as error:
        if not is_full(error):
            raise
        # No restart helps, and the message of numpy would name neither disk nor cure.
        raise no_room(RunDir(folder.parent), "the tokens", error) from None
    data = TokenData.load(folder)
    repeated = mix_spec.repeated(task.config.mixed, data.source_rows)
    for text in (*data.warnings, *repeated):
        job.warn(text)


def _write_tokens(folder: Path, task: tasks.Task, job: Job, fill: FillTokens) -> None:
    # All cores: the other ranks wait. The folder gets its name when it is whole, so that an attempt
    # that is killed here leaves nothing that the next one would take.
    with profiles.all_cores(os.environ), new_folder(folder) as named:
        unfinished = descent.through(named)
        fill(unfinished, task, job)
        _check_sources(TokenData.load(unfinished), task.config)


def _check_sources(data: TokenData, config: TrainConfig) -> None:
    """Raises UsageError where a task of the user's own has not read the sources of --mix."""
    if len(data.source_rows) != 1 + len(config.mix):
        raise UsageError(
            f"prepare() of --task {config.task} does not read the sources of --mix",
            "leave --mix out, or let it read them as slurmft.train.tasks.Pretrained does",
        )
