"""What to train: the options of the built-in program."""

# No `from __future__ import annotations`: options are read from the types of their fields.

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from slurmft.core.config import (
    build,
    check_choices,
    check_credentials,
    check_value,
    flag,
    option,
    options,
)
from slurmft.core.errors import UsageError, unknown
from slurmft.core.hub import is_local
from slurmft.core.program import Program
from slurmft.train import own_task
from slurmft.train.recipes import fill, named
from slurmft.train.task_facts import TASKS

PRECISIONS = ("auto", "fp32", "bf16", "fp16")
BATCHINGS = ("packed", "grouped", "dynamic", "padded")
GRAD_COMMS = ("auto", "fp32", "bf16")
"""Besides local:K."""
SHARDS = ("none", "full", "node")
OPTIMIZERS = ("adamw", "muon", "auto")
LR_RULES = ("none", "sqrt", "linear")
CLASS_WEIGHTS = ("none", "balanced")
LR_SCHEDULES = ("linear", "cosine", "constant")
_AT_LEAST_1 = (
    "epochs", "max_steps", "batch_size", "eval_batch_size", "max_length", "reference_batch_size",
    "max_global_batch_size", "gradient_accumulation_steps", "log_every", "early_stopping",
    "max_target_length", "num_beams", "lora", "lora_alpha",
)  # fmt: skip
_OF_LORA = (
    "lora_alpha", "lora_dropout", "lora_targets", "use_rslora", "use_dora", "merge", "load_in_4bit",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """What to train; see `resolve`, which fills in what the recipe has."""

    task: str = option(
        "synthetic",
        f"what to train: {', '.join(TASKS)}, or a class of your own",
        metavar="NAME|MODULE:CLASS",
    )
    task_option: tuple[str, ...] = option(
        (), "an option of your own task; repeatable", metavar="NAME=VALUE"
    )
    recipe: str | None = option(
        None,
        f"a task with all its settings, most as published: {', '.join(named())}",
        metavar="NAME",
    )
    as_published: bool = option(
        False, "the recipe exactly as it was published, also where that loses accuracy"
    )
    preset: str | None = option(
        None, "variety of the task: synthetic has quick and paper, squad has v1 and v2"
    )
    model: str | None = option(None, "hub id or local folder of the model", metavar="ID|DIR")
    data: str | None = option(
        None,
        "hub id, or folder with train and validation as .jsonl, .csv or .parquet",
        metavar="ID|DIR",
    )
    text_column: str | None = option(None, "column that holds the text", metavar="NAME")
    text_pair_column: str | None = option(
        None, "column that holds the second text of a pair", metavar="NAME"
    )
    label_column: str | None = option(None, "column that holds the label", metavar="NAME")
    max_length: int | None = option(None, "tokens kept of each text", metavar="TOKENS")
    max_target_length: int | None = option(
        None, "tokens kept, and generated, of each target (seq2seq)", metavar="TOKENS"
    )
    source_prefix: str | None = option(
        None, "words before each source, as T5 knows them: 'summarize: ' (seq2seq)", metavar="TEXT"
    )
    num_beams: int | None = option(
        None, "beams of generation; 1 is greedy (seq2seq)", metavar="BEAMS"
    )
    doc_stride: int | None = option(
        None, "tokens that neighbouring windows of a long text share (squad)", metavar="TOKENS"
    )
    epochs: int | None = option(None, "passes over the training data")
    max_steps: int | None = option(None, "stop after this many optimizer steps", metavar="STEPS")
    batch_size: int | None = option(None, "training samples a process and micro-step")
    eval_batch_size: int | None = option(None, "evaluation samples a process and step")
    gradient_accumulation_steps: int = option(
        1, "micro-steps an optimizer step; global batch = processes x batch size x this"
    )
    optimizer: str = option(
        "adamw",
        "muon takes few steps far (AdamW for embeddings and head); auto: muon where the global "
        "batch is above --reference-batch-size, else adamw",
        choices=OPTIMIZERS,
    )
    learning_rate: float | None = option(None, "peak learning rate")
    muon_learning_rate: float | None = option(
        None,
        "peak learning rate of Muon, and of the head beside it; embeddings, norms and biases keep "
        "--learning-rate (default: the same)",
    )
    lr_rule: str = option(
        "none",
        "growth of the learning rate with the global batch, above --reference-batch-size",
        choices=LR_RULES,
    )
    reference_batch_size: int | None = option(
        None,
        "largest global batch for which the learning rate and AdamW are right as they are",
        metavar="SAMPLES",
    )
    max_global_batch_size: int | None = option(
        None,
        "samples of an optimizer step at most: where processes, batch size and accumulation make "
        "more, each takes fewer",
        metavar="SAMPLES",
    )
    lr_schedule: str = option("linear", "decay after the warm-up", choices=LR_SCHEDULES)
    warmup_steps: int | None = option(None, "warm-up in optimizer steps (overrides the ratio)")
    warmup_ratio: float | None = option(None, "warm-up as a fraction of all optimizer steps")
    weight_decay: float = option(0.01, "weight decay; biases and norms have none")
    max_grad_norm: float = option(1.0, "clip the gradient's norm to this; 0 does not clip")
    precision: str = option(
        "auto",
        "auto: bf16 where the hardware computes it natively, else fp16 on GPUs, fp32 on CPUs",
        choices=PRECISIONS,
    )
    tf32: bool = option(
        False, "on GPUs, multiply what is in fp32 as TF32: faster, with 10 of 23 bits of mantissa"
    )
    batching: str = option(
        "packed",
        "padding: none (packed), none with length bucketing (grouped), to the longest of the "
        "batch (dynamic), to --max-length (padded)",
        choices=BATCHINGS,
    )
    grad_comm: str = option(
        "auto",
        "what ranks send each other: gradients as fp32, rounded to bf16, or their averaged weights "
        "every K steps (local:K); auto: bf16 in a bf16 run, else fp32",
        metavar="auto|fp32|bf16|local:K",
    )
    shard: str = option(
        "none",
        "what each process keeps of weights, gradients and optimizer state: all (none), its share "
        "among all processes (full), its share among those of its node (node); by FSDP2",
        choices=SHARDS,
    )
    cpu_offload: bool = option(
        False, "with --shard: keep the shares in the memory of the host; AdamW computes there"
    )
    activation_checkpointing: bool = option(
        False, "compute layers again in the backward pass rather than keep what they computed"
    )
    dropout: float | None = option(
        None, "dropout everywhere in the model (default: the model's own)"
    )
    lora: int | None = option(
        None,
        "train adapters of this rank (PEFT) and the head, not all weights; a recipe's learning "
        "rate is multiplied by 10 then",
        metavar="RANK",
    )
    lora_alpha: int | None = option(None, "scale of adapters (default: 2 x rank)")
    lora_dropout: float = option(0.0, "dropout of what adapters get")
    lora_targets: str | None = option(
        None, "modules that get adapters (default: all linear ones below the head)", metavar="NAMES"
    )
    use_rslora: bool = option(False, "scale adapters by alpha / sqrt(rank), not alpha / rank")
    use_dora: bool = option(False, "train the magnitudes of adapted weights, too (DoRA)")
    merge: bool = option(False, "save the whole model, adapters merged into it")
    load_in_4bit: bool = option(False, "frozen weights in 4 bits, by bitsandbytes; GPUs only")
    seed: int = option(42, "seed of weights, dropout and data order")
    class_weights: str = option(
        "none",
        "balanced: in the loss rare classes count as much as others (as scikit-learn's 'balanced')",
        choices=CLASS_WEIGHTS,
    )
    early_stopping: int | None = option(
        None,
        "end after this many evaluations in a row without a new best",
        metavar="EVALUATIONS",
    )
    log_every: int = option(10, "optimizer steps between progress records", metavar="STEPS")

    def __post_init__(self) -> None:
        check_choices(self)
        check_credentials(self)
        for name in _AT_LEAST_1:
            check_value(self, name, lambda v: v >= 1, "at least 1")
        _check_optimizer(self)
        _check_excluded(self)
        check_value(
            self, "doc_stride", lambda v: v < (self.max_length or v + 1), "below --max-length"
        )
        local_steps(self.grad_comm)
        for name in ("doc_stride", "warmup_steps", "weight_decay", "max_grad_norm", "seed"):
            check_value(self, name, lambda v: v >= 0, "0 or more")
        check_value(self, "seed", lambda v: v < 2**32, "below 2^32")
        for name in ("learning_rate", "muon_learning_rate"):
            check_value(self, name, lambda v: v > 0, "above 0")
        check_value(self, "warmup_ratio", lambda v: 0 <= v <= 1, "between 0 and 1")
        for name in ("dropout", "lora_dropout"):
            check_value(self, name, lambda v: 0 <= v < 1, "0 or more and below 1")
        _check_lora(self)
        if self.class_weights != "none":
            _check_class_weights(self.task)

    @property
    def saves_adapter(self) -> bool:
        """Whether the result is an adapter, not a whole model."""
        return self.lora is not None and not self.merge

    @classmethod
    def resolve(cls, **given: Any) -> "TrainConfig":
        """The values that are given, over those of the recipe that they name or imply."""
        return build(cls, fill(given))

    @classmethod
    def of(cls, program: Program) -> "TrainConfig":
        """The configuration of a run of this program."""
        known = options(cls)  # that of a prediction has others, too
        return build(cls, {k: v for k, v in program.settings.items() if k in known})

    def program(self) -> Program:
        """The built-in program with these options, as the toolkit knows it."""
        sources = [name for name in (self.model, self.data) if name is not None]
        local = [name for name in sources if is_local(name)]
        return Program(
            kind="train",
            name=self.task.rpartition(":")[2],
            code=own_task.code(self.task),
            module="slurmft.train.rank",
            needs_hub=len(local) < len(sources),
            paths=tuple(local),
            settings=dataclasses.asdict(self) | {"task_option": list(self.task_option)},
        )


def local_steps(grad_comm: str) -> int | None:
    """K of local:K: steps of each rank by itself; None where ranks send gradients. UsageError where
    it is none of the forms that --grad-comm has."""
    if grad_comm in GRAD_COMMS:
        return None
    match = re.fullmatch(r"local:(\d+)", grad_comm)
    if not match:
        raise unknown("--grad-comm", grad_comm, [*GRAD_COMMS, "local:16"])
    if int(match[1]) < 2:
        raise UsageError(
            f"--grad-comm {grad_comm} leaves no steps between averages", "give local:2 or more"
        )
    return int(match[1])


def _check_optimizer(train: TrainConfig) -> None:
    """Options that need, or rule out, each other."""
    for name, plain in (("optimizer", ("adamw", "muon")), ("lr_rule", ("none",))):
        value = getattr(train, name)
        if value not in plain and train.reference_batch_size is None:
            raise UsageError(
                f"{flag(name)} {value} needs the global batch that --learning-rate is right for",
                "add --reference-batch-size",
            )


def _check_excluded(train: TrainConfig) -> None:
    """Raises UsageError for what --shard rules out."""
    if train.cpu_offload and train.shard == "none":
        raise UsageError("--cpu-offload moves shares, and there are none", "add --shard full")
    off: dict[str, tuple[Any, ...]] = dict.fromkeys(("merge", "load_in_4bit"), (False,))
    works = {"grad_comm": GRAD_COMMS, "optimizer": OPTIMIZERS[:1], "precision": PRECISIONS[:3]}
    if train.shard != "none":
        _exclude(train, f"--shard {train.shard}", works | off)


def _exclude(train: TrainConfig, owner: str, works: dict[str, tuple[Any, ...]]) -> None:
    """Raises UsageError where an option has none of the values that another one works with."""
    for name, values in works.items():
        given = getattr(train, name)
        if given not in values:
            value = "" if given is True else f" {given}"
            other = f"use {values[0]}" if values[0] else "leave it"
            raise UsageError(
                f"{owner} cannot be used with {flag(name)}{value}",
                f"{other}, or leave {owner.split()[0]} out",
            )


def _check_class_weights(task: str) -> None:
    """Raises UsageError where the loss of a task is not one of classes."""
    if task not in TASKS:
        why = "a task of your own has a loss of its own"
    elif task == "multi-label":
        why = "each of its classes is a decision of its own"
    elif TASKS[task].rows not in ("Texts", "Words") or TASKS[task].labels == ():
        why = "it has no classes"
    else:
        return
    raise UsageError(
        f"--class-weights balanced cannot be used with --task {task}: {why}",
        "leave it out" if task in TASKS else "weigh them in loss() and count() of the task",
    )


def _check_lora(train: TrainConfig) -> None:
    """What --lora goes with."""
    given = [flag(name) for name in _OF_LORA if getattr(train, name)]
    if given and train.lora is None:
        raise UsageError(f"{given[0]} is an option of LoRA", "add --lora RANK, or leave it out")
    if train.load_in_4bit and train.merge:
        raise UsageError(
            "--merge cannot be used with --load-in-4bit: no rank has the weights in full",
            "leave --merge out, and merge the saved adapters into their model by PEFT",
        )
    if train.saves_adapter and train.model is None:
        raise UsageError(
            f"--lora needs a model, and --task {train.task} makes up its own, which is not saved",
            "add --merge: the whole model is saved then",
        )
