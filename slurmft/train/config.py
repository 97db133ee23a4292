"""What to train: the options of the built-in program."""

# No `from __future__ import annotations`: options are read from the types of their fields.

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from slurmft.core.errors import UsageError, unknown
from slurmft.core.hub import is_local
from slurmft.core.options import (
    MOST_STEPS,
    MOST_TOKENS,
    Excludes,
    Needs,
    build,
    check_credentials,
    check_options,
    flag,
    option,
    options,
)
from slurmft.core.program import Program
from slurmft.core.text import some
from slurmft.train import mix_spec, own_task
from slurmft.train.metric_spec import LOSS, MetricSpec, own_metric, parsed
from slurmft.train.mix_spec import MixSpec
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
SAVES = ("best", "last")
SAVE_DTYPES = ("auto", "fp32", "bf16", "fp16")

AUTO = "auto"
"""Value of --batch-size: the largest that memory holds."""
AT_END = "end"
"""Value of --evaluate-every: there is one evaluation, at the end."""

_REFERENCE = Needs(
    "reference_batch_size",
    why="the largest global batch for which --learning-rate is right",
)
_LORA = (Needs("lora"),)
_MOST_ROWS = 2**20
"""Rows of a process in a step, and steps of which the gradients are added up."""
_MOST_GLOBAL = 10**8
"""Rows of a step, of all processes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """What to train; see `resolve`, which fills in what the recipe has."""

    task: str = option(
        "synthetic",
        f"what to train, as in slurmft help tasks: {', '.join(TASKS)}, or a class of your own",
        affects="both",
        at="rank",
        metavar="NAME|MODULE:CLASS",
        # MODULE:CLASS is imported, at submission and on every rank.
        executes=True,
        usual=True,
        decides_tokens=True,
        per_source=True,
        # Published tables name the data set, as tasks are named after them.
        published=("dataset",),
        commands=("data",),
        elsewhere=("task_name",),
    )
    task_option: tuple[str, ...] = option(
        (),
        "an option of your own task; repeatable",
        affects="both",
        at="rank",
        metavar="NAME=VALUE",
        # A task may read it in `prepare`.
        decides_tokens=True,
        commands=("data",),
    )
    # Read at submission alone: what it fills in is recorded with the other options.
    recipe: str | None = option(
        None,
        f"a task with all its settings, most as published: {', '.join(named())}",
        affects="result",
        at="submission",
        metavar="NAME",
        usual=True,
        commands=("data",),
    )
    as_published: bool = option(
        False,
        "the recipe exactly as it was published, also where that loses accuracy",
        affects="result",
        at="submission",
    )
    preset: str | None = option(
        None,
        "variety of the task: synthetic has quick and paper, squad has v1 and v2, embeddings has "
        "pairs, triplets and scores",
        affects="both",
        at="rank",
        decides_tokens=True,
        per_source=True,
        commands=("data", "fetch"),
    )
    # It brings no code: weights are safetensors, and trust_remote_code is off.
    model: str | None = option(
        None,
        "hub id or local folder of the model",
        affects="both",
        at="rank",
        metavar="ID|DIR",
        path="input",
        usual=True,
        commands=("data",),
        elsewhere=(
            "model_name_or_path",
            "model_name",
            "pretrained",
            "base_model",
        ),
    )
    data: str | None = option(
        None,
        "hub id, or folder with train and validation: .jsonl, .csv or .parquet, also in shards, or "
        "of save_to_disk",
        affects="both",
        at="rank",
        metavar="ID|DIR",
        path="input",
        usual=True,
        elsewhere=(
            "dataset",
            "dataset_name",
            "train_file",
            "validation_file",
            "test_file",
            "data_dir",
        ),
    )
    mix: tuple[str, ...] = option(
        (),
        "a further source of training data, and its share of each epoch; repeatable",
        # The tokens of each source are the same for every share.
        affects="both",
        at="rank",
        metavar="ID|DIR:SHARE[,COLUMN=NAME,...]",
        path="input",
        predicts="reset",
        commands=("data", "fetch"),
        elsewhere=("dataset_mixer",),
    )
    validation_fraction: float | None = option(
        None,
        "part of the training data to validate on; where there is no validation split",
        affects="both",
        at="rank",
        metavar="FRACTION",
        above=0,
        below=1,
        predicts="reset",
        usual=True,
        decides_tokens=True,
        commands=("data", "fetch"),
    )
    data_seed: int = option(
        42,
        "seed of the rows that --validation-fraction and --mix draw; --seed leaves them alone",
        affects="result",
        at="rank",
        least=0,
        most=2**32 - 1,
        predicts="reset",
        decides_tokens=True,
        commands=("data", "fetch"),
    )
    text_column: str | None = option(
        None,
        "column that holds the text",
        affects="both",
        at="rank",
        metavar="NAME",
        # The file to predict may have another name for it.
        predicts="flag",
        usual=True,
        decides_tokens=True,
        per_source=True,
        commands=("data", "fetch"),
    )
    text_pair_column: str | None = option(
        None,
        "column that holds the second text of a pair; of embeddings also negatives: "
        "positive,negative",
        affects="both",
        at="rank",
        metavar="NAME",
        predicts="flag",
        decides_tokens=True,
        per_source=True,
        commands=("data", "fetch"),
    )
    label_column: str | None = option(
        None,
        "column that holds the label",
        affects="both",
        at="rank",
        metavar="NAME",
        usual=True,
        decides_tokens=True,
        per_source=True,
        commands=("data", "fetch"),
    )
    tools_column: str | None = option(
        None,
        "column that holds the tools that the assistant may call, as JSON schemas (sft)",
        affects="both",
        at="rank",
        metavar="NAME",
        decides_tokens=True,
        per_source=True,
        commands=("data", "fetch"),
    )
    max_length: int | None = option(
        None,
        "tokens kept of each text",
        affects="both",
        at="rank",
        metavar="TOKENS",
        least=1,
        most=MOST_TOKENS,
        predicts="flag",
        usual=True,
        decides_tokens=True,
        published=("max_seq_length",),
        commands=("data",),
        elsewhere=(
            "max_seq_length",
            "max_seq_len",
            "block_size",
            "max_source_length",
        ),
    )
    max_target_length: int | None = option(
        None,
        "tokens kept, and generated, of each target (seq2seq)",
        affects="both",
        at="rank",
        by_task=True,
        metavar="TOKENS",
        least=1,
        most=MOST_TOKENS,
        decides_tokens=True,
    )
    source_prefix: str | None = option(
        None,
        "words before each text, as T5 was trained with: 'summarize: '",
        affects="both",
        at="rank",
        by_task=True,
        metavar="TEXT",
        # An empty one takes the words of the recipe away.
        may_be_empty=True,
        decides_tokens=True,
        per_source=True,
        commands=("data",),
    )
    num_beams: int | None = option(
        None,
        "beams of generation; 1 is greedy (seq2seq; predictions of language models, too)",
        affects="both",
        at="rank",
        by_task=True,
        metavar="BEAMS",
        least=1,
        most=1_000,
        predicts="flag",
    )
    doc_stride: int | None = option(
        None,
        "tokens that neighbouring windows of a long text share (squad)",
        affects="both",
        at="rank",
        by_task=True,
        metavar="TOKENS",
        least=0,
        # Windows that share all their tokens would get no further in a text.
        below="max_length",
        decides_tokens=True,
    )
    epochs: int | None = option(
        None,
        "passes over the training data",
        affects="both",
        at="rank",
        least=1,
        most=1_000_000,
        predicts="reset",
        counts="work",
        usual=True,
        elsewhere=(
            "num_train_epochs",
            "num_epochs",
        ),
    )
    max_steps: int | None = option(
        None,
        "stop after this many optimizer steps",
        affects="both",
        at="rank",
        metavar="STEPS",
        least=1,
        most=MOST_STEPS,
        predicts="reset",
        counts="work",
        elsewhere=("max_train_steps",),
    )
    batch_size: int | Literal["auto"] | None = option(
        None,
        "training samples a process and micro-step; auto: as many as memory holds, tried out "
        "before the first step, where the recipe's size makes the global batch",
        affects="both",
        at="rank",
        texts=(AUTO,),
        least=1,
        most=_MOST_ROWS,
        counts="batch",
        usual=True,
        published=("batch_size_per_gpu", "batch_size_per_process"),
        elsewhere=(
            "per_device_train_batch_size",
            "per_gpu_train_batch_size",
            "train_batch_size",
            "micro_batch_size",
            "batch",
            "auto_find_batch_size",
            "bs",
        ),
    )
    eval_batch_size: int | None = option(
        None,
        "evaluation samples a process and step",
        # Metrics are of the whole validation data, however it is divided.
        affects="speed",
        at="rank",
        least=1,
        most=_MOST_ROWS,
        predicts="flag",
        counts="batch",
        elsewhere=("per_device_eval_batch_size",),
    )
    gradient_accumulation_steps: int = option(
        1,
        "micro-steps an optimizer step; global batch = processes x batch size x this",
        affects="both",
        at="rank",
        least=1,
        most=_MOST_ROWS,
        counts="batch",
        elsewhere=(
            "gradient_accumulation",
            "grad_accum",
        ),
    )
    global_batch_size: int | None = option(
        None,
        "samples of an optimizer step, on any number of processes: micro-steps of --batch-size "
        "make it up (default: processes x batch size x accumulation)",
        affects="both",
        at="rank",
        metavar="SAMPLES",
        least=1,
        most=_MOST_GLOBAL,
        excludes=(
            Excludes(
                "gradient_accumulation_steps",
                why="the number of micro-steps follows from it",
            ),
            Excludes(
                "max_global_batch_size", why="each of them sets the size of a step"
            ),
        ),
        predicts="reset",
        counts="batch",
        elsewhere=(
            "effective_batch_size",
            "total_batch_size",
            "global_train_batch_size",
        ),
    )
    optimizer: str = option(
        "adamw",
        "muon takes few steps far (AdamW for embeddings and head); auto: muon where the global "
        "batch is above --reference-batch-size, else adamw",
        affects="both",
        at="rank",
        choices=OPTIMIZERS,
        # auto compares the global batch with it.
        needs=(dataclasses.replace(_REFERENCE, when=("auto",)),),
        predicts="reset",
        elsewhere=("optim",),
    )
    learning_rate: float | None = option(
        None,
        "peak learning rate",
        affects="result",
        at="rank",
        above=0,
        most=1_000,
        usual=True,
        elsewhere=("lr",),
    )
    muon_learning_rate: float | None = option(
        None,
        "peak learning rate of Muon, and of the head beside it; embeddings, norms and biases keep "
        "--learning-rate (default: the same)",
        affects="result",
        at="rank",
        above=0,
        most=1_000,
        read_with=(Needs("optimizer", ("muon", "auto")),),
        predicts="reset",
    )
    lr_rule: str = option(
        "none",
        "growth of the learning rate with the global batch, above --reference-batch-size",
        affects="result",
        at="rank",
        choices=LR_RULES,
        needs=(_REFERENCE,),
        predicts="reset",
    )
    reference_batch_size: int | None = option(
        None,
        "largest global batch for which the learning rate and AdamW are right as they are",
        affects="result",
        at="rank",
        metavar="SAMPLES",
        least=1,
        most=_MOST_GLOBAL,
        read_with=(Needs("lr_rule"), Needs("optimizer", ("auto",))),
        predicts="reset",
    )
    max_global_batch_size: int | None = option(
        None,
        "samples of an optimizer step at most: where processes, batch size and accumulation make "
        "more, each takes fewer",
        affects="both",
        at="rank",
        metavar="SAMPLES",
        least=1,
        most=_MOST_GLOBAL,
        predicts="reset",
        counts="batch",
    )
    lr_schedule: str = option(
        "linear",
        "decay after the warm-up",
        affects="result",
        at="rank",
        choices=LR_SCHEDULES,
        elsewhere=(
            "lr_scheduler",
            "lr_scheduler_type",
            "scheduler",
        ),
    )
    warmup_steps: int | None = option(
        None,
        "warm-up in optimizer steps (overrides the ratio)",
        affects="result",
        at="rank",
        least=0,
        most=MOST_STEPS,
        elsewhere=("num_warmup_steps",),
    )
    warmup_ratio: float | None = option(
        None,
        "warm-up as a fraction of all optimizer steps",
        affects="result",
        at="rank",
        least=0,
        most=1,
        read_with=(Needs("warmup_steps", (None,)),),
    )
    weight_decay: float = option(
        0.01,
        "weight decay; biases and norms have none",
        affects="result",
        at="rank",
        least=0,
        most=1_000,
        elsewhere=("wd",),
    )
    adam_beta1: float = option(
        0.9,
        "AdamW: decay of the mean of the gradients",
        affects="result",
        at="rank",
        least=0,
        # torch's AdamW refuses 1.
        below=1,
        predicts="reset",
    )
    adam_beta2: float = option(
        0.999,
        "AdamW: decay of the mean of the squared gradients",
        affects="result",
        at="rank",
        least=0,
        below=1,
        predicts="reset",
    )
    adam_epsilon: float = option(
        1e-8,
        "AdamW: what is added to the root of that mean",
        affects="result",
        at="rank",
        # With 0, a weight that has had no gradient yet would be divided by 0.
        above=0,
        most=1,
        predicts="reset",
    )
    max_grad_norm: float = option(
        1.0,
        "clip the gradient's norm to this; 0 does not clip",
        affects="result",
        at="rank",
        least=0,
        most=10**9,
        elsewhere=(
            "clip_grad",
            "gradient_clip",
            "gradient_clip_val",
            "gradient_clipping",
        ),
    )
    precision: str = option(
        "auto",
        "what is computed in; auto: bf16 where the hardware computes it natively, else fp16 on "
        "GPUs, fp32 on CPUs",
        affects="both",
        at="rank",
        choices=PRECISIONS,
        predicts="flag",
        elsewhere=(
            "fp16",
            "bf16",
            "mixed_precision",
            "torch_dtype",
            "dtype",
        ),
    )
    tf32: bool = option(
        False,
        "on GPUs, multiply fp32 numbers as TF32: faster, with 10 of 23 bits of mantissa",
        affects="both",
        at="rank",
    )
    batching: str = option(
        "packed",
        "padding: none (packed), none with length bucketing (grouped), to the longest of the "
        "batch (dynamic), to --max-length (padded)",
        affects="both",
        at="rank",
        choices=BATCHINGS,
    )
    grad_comm: str = option(
        "auto",
        "what ranks send each other: gradients as fp32, rounded to bf16, or their averaged weights "
        "every K steps (local:K); auto: bf16 in a bf16 run, else fp32",
        affects="both",
        at="rank",
        metavar="auto|fp32|bf16|local:K",
        predicts="reset",
    )
    shard: str = option(
        "none",
        "what each process keeps of weights, gradients and optimizer state: all (none), its share "
        "among all processes (full), its share among those of its node (node); by FSDP2",
        # Ranks do the same steps: what differs is which of them has which numbers.
        affects="speed",
        at="rank",
        choices=SHARDS,
        excludes=(
            Excludes("merge"),
            Excludes("load_in_4bit"),
            # local:K averages whole weights, and each rank has a share of them.
            Excludes("grad_comm", but=GRAD_COMMS),
            # A step of Muon is one of a whole matrix, of which a rank has some rows.
            Excludes("optimizer", but=("adamw",)),
            Excludes("precision", but=("auto", "fp32", "bf16")),
        ),
        predicts="reset",
        elsewhere=(
            "fsdp",
            "strategy",
            "deepspeed",
            "use_fsdp",
            "use_deepspeed",
        ),
    )
    cpu_offload: bool = option(
        False,
        "with --shard: keep the shares in the memory of the host; AdamW computes there",
        affects="speed",
        at="rank",
        needs=(Needs("shard", ("full", "node"), why="it moves the shares"),),
        predicts="reset",
        elsewhere=("fsdp_offload_params",),
    )
    activation_checkpointing: bool = option(
        False,
        "compute layers again in the backward pass rather than keep what they computed",
        # The same numbers: the generators of dropout are set back before the second time.
        affects="speed",
        at="rank",
        predicts="reset",
        elsewhere=("gradient_checkpointing",),
    )
    ipex: bool = option(
        False,
        "on CPUs, compute with Intel's extension for PyTorch, which has ended upstream and is for "
        "torch 2.8",
        affects="both",
        at="rank",
        excludes=(Excludes("shard"), Excludes("load_in_4bit")),
        predicts="reset",
        elsewhere=("use_ipex",),
    )
    dropout: float | None = option(
        None,
        "dropout everywhere in the model (default: the model's own)",
        # Not the result alone: it takes time to draw what is dropped.
        affects="both",
        at="rank",
        least=0,
        below=1,
        predicts="reset",
    )
    freeze: str | None = option(
        None,
        "what of --model stays as it is: its embeddings, these and its first N layers, or all but "
        "the head",
        affects="both",
        at="rank",
        metavar="embeddings|layers:N|base",
        excludes=(
            Excludes("lora", why="adapters train in place of all weights but the head"),
        ),
        predicts="reset",
    )
    lora: int | None = option(
        None,
        "train adapters of this rank (PEFT) and the head, not all weights; a recipe's learning "
        "rate is multiplied by 10 then",
        affects="both",
        at="rank",
        metavar="RANK",
        least=1,
        most=65_536,
        predicts="reset",
        usual=True,
        elsewhere=(
            "lora_r",
            "lora_rank",
            "peft",
            "use_peft",
            "use_lora",
        ),
    )
    lora_alpha: int | None = option(
        None,
        "scale of adapters (default: 2 x rank)",
        affects="result",
        at="rank",
        least=1,
        most=1_000_000,
        needs=_LORA,
        predicts="reset",
    )
    lora_dropout: float = option(
        0.0,
        "dropout of the inputs of adapters",
        affects="both",
        at="rank",
        least=0,
        below=1,
        needs=_LORA,
        predicts="reset",
    )
    lora_targets: str | None = option(
        None,
        "modules that get adapters (default: all linear ones below the head)",
        affects="both",
        at="rank",
        metavar="NAMES",
        needs=_LORA,
        predicts="reset",
        elsewhere=(
            "lora_target_modules",
            "target_modules",
        ),
    )
    use_rslora: bool = option(
        False,
        "scale adapters by alpha / sqrt(rank), not alpha / rank",
        affects="result",
        at="rank",
        needs=_LORA,
        predicts="reset",
    )
    use_dora: bool = option(
        False,
        "train the magnitudes of adapted weights, too (DoRA)",
        # Each forward pass computes the norms of the adapted weights anew.
        affects="both",
        at="rank",
        needs=_LORA,
        predicts="reset",
    )
    merge: bool = option(
        False,
        "save the whole model, adapters merged into it",
        # The metrics stay; a whole model takes longer to save.
        affects="speed",
        at="rank",
        needs=_LORA,
        excludes=(
            Excludes(
                "load_in_4bit",
                why="no rank has the weights in full",
                cure="leave --merge out, and merge the saved adapters into their model by PEFT",
            ),
        ),
        predicts="reset",
    )
    load_in_4bit: bool = option(
        False,
        "frozen weights in 4 bits, by bitsandbytes; GPUs only",
        affects="both",
        at="rank",
        # Weights in 4 bits get no gradients: adapters beside them do.
        needs=_LORA,
        predicts="reset",
        elsewhere=(
            "use_4bit",
            "quantize",
        ),
    )
    seed: int = option(
        42,
        "seed of weights, dropout and data order; of predictions, of drawn tokens",
        affects="result",
        at="rank",
        predicts="flag",
        least=0,
        # numpy takes no larger seed.
        most=2**32 - 1,
        # A study repeats its cells instead: each repeat has a seed of its own.
        varies=False,
        elsewhere=(
            "seed_everything",
            "random_seed",
        ),
    )
    class_weights: str = option(
        "none",
        "balanced: in the loss rare classes count as much as others (as scikit-learn's 'balanced')",
        affects="result",
        at="rank",
        choices=CLASS_WEIGHTS,
        predicts="reset",
    )
    label_smoothing: float = option(
        0.0,
        "part of each label that the loss spreads evenly over all classes",
        affects="result",
        at="rank",
        least=0,
        below=1,
        predicts="reset",
        elsewhere=("label_smoothing_factor",),
    )
    label_all_tokens: bool = option(
        False,
        "in the training data, label all tokens of a word, not its first alone; behind B- as I- "
        "(token-classification)",
        affects="result",
        at="rank",
        predicts="reset",
        # The labels of tokens are stored with them.
        decides_tokens=True,
    )
    save: str = option(
        "best",
        "model that the run saves: that of the best evaluation by the first metric, or the last",
        affects="result",
        at="rank",
        choices=SAVES,
        predicts="reset",
        elsewhere=("load_best_model_at_end",),
    )
    save_dtype: str = option(
        "auto",
        "type of the weights of a saved model; auto: as those of --model are stored",
        # The metrics are those of the weights before they are rounded.
        affects="nothing",
        at="rank",
        choices=SAVE_DTYPES,
        predicts="reset",
    )
    evaluate_every: str = option(
        "epochs:1",
        "when the validation split is evaluated: every N epochs or N optimizer steps, and at the "
        "end; end: only then",
        affects="both",
        at="rank",
        metavar="epochs:N|steps:N|end",
        excludes=(
            Excludes(
                "early_stopping",
                when=(AT_END,),
                why="there is one evaluation, after all training",
            ),
        ),
        predicts="reset",
        elsewhere=(
            "eval_steps",
            "eval_strategy",
            "evaluation_strategy",
        ),
    )
    metric: tuple[str, ...] = option(
        (),
        "a metric of the task by its name, or loss; or one of the package evaluate, by its name on "
        "the hub or the folder of its script; repeatable, and the first decides which checkpoint "
        "is the best",
        affects="result",
        at="rank",
        metavar="NAME|DIR[:ARGUMENT=VALUE,...]",
        path="input",
        # The script of a metric is code.
        executes=True,
        predicts="reset",
        elsewhere=("metric_for_best", "metric_for_best_model"),
    )
    early_stopping: int | None = option(
        None,
        "end after this many evaluations in a row without a new best",
        affects="result",
        at="rank",
        metavar="EVALUATIONS",
        least=1,
        most=1_000_000,
        predicts="reset",
        elsewhere=(
            "early_stopping_patience",
            "patience",
        ),
    )
    log_every: int = option(
        10,
        "optimizer steps between progress records",
        # A record takes microseconds.
        affects="nothing",
        at="rank",
        metavar="STEPS",
        least=1,
        most=MOST_STEPS,
        elsewhere=("logging_steps",),
    )

    def __post_init__(self) -> None:
        # First: the checks below take it for granted that each value fits its declaration.
        check_options(self)
        check_credentials(self)
        local_steps(self.grad_comm)
        _check_task_reads(self)
        if self.freeze:
            _check_freeze(self.freeze, self.task, self.model)
        evaluation_period(self.evaluate_every)
        if self.validation_fraction is not None:
            _check_has_validation(self.task)
        if self.mix:
            _check_reads_rows("--mix", self.task)
            self.sources()  # raises for a source that cannot be
        if self.named_metrics:
            _check_predictions(parsed(self.named_metrics), self)
        if self.saves_adapter and self.model is None:
            raise UsageError(
                f"--lora needs a model, and --task {self.task} makes up its own, which is not "
                "saved",
                "add --merge: the whole model is saved then",
            )
        if self.label_all_tokens:
            _check_has_words(self.task)
        if self.class_weights != "none":
            _check_class_weights(self.task)
        if self.label_smoothing:
            _check_label_smoothing(self.task)

    @property
    def named_metrics(self) -> tuple[str, ...]:
        """The values of --metric without those that every evaluation of the task has."""
        return tuple(
            text for text in self.metric if own_metric(text, self.own_metrics) is None
        )

    @property
    def own_metrics(self) -> tuple[str, ...]:
        """Names of the metrics that the task itself computes, and of its loss."""
        return (*own_task.metrics(self.task, self.preset), LOSS)

    def step_size(self, processes: int) -> int:
        """Returns the samples of an optimizer step, where the data has as many."""
        samples = self.unlimited_step_size(processes)
        if self.max_global_batch_size is not None:
            return min(samples, self.max_global_batch_size)
        return samples

    def unlimited_step_size(self, processes: int) -> int:
        """Returns the samples of an optimizer step without --max-global-batch-size."""
        if self.global_batch_size is not None:
            return self.global_batch_size
        micro_batches = processes * self.gradient_accumulation_steps
        return micro_batches * self.usual_batch_size

    @property
    def usual_batch_size(self) -> int:
        """Samples of a process and micro-step: --batch-size, or the recipe's where it is auto."""
        if isinstance(self.batch_size, int):
            return self.batch_size
        values = {name: getattr(self, name) for name in options(TrainConfig)}
        filled = fill(values | {"batch_size": None})
        return int(filled["batch_size"])

    def check_processes(self, processes: int) -> None:
        """Raises UsageError where processes would have no sample of a step."""
        samples = self.global_batch_size
        if samples is not None and samples < processes:
            raise UsageError(
                f"--global-batch-size {samples} is fewer than the {processes} processes: each "
                "needs a sample",
                f"give {processes} or more, or fewer --nodes or --nproc-per-node",
            )

    @property
    def saves_adapter(self) -> bool:
        """The result is an adapter, not a whole model."""
        return self.lora is not None and not self.merge

    @property
    def mixed(self) -> list[MixSpec]:
        """The sources that --mix names."""
        return mix_spec.parsed(self.mix)

    def sources(self) -> "list[TrainConfig]":
        """Returns the configuration of each source of training data: that of --data, then those of
        --mix, of which each has its source as `data`.

        Raises:
            UsageError: a value of --mix cannot be right.
        """
        # Without --mix, or each of them would look at the sources of its own when it is made.
        configs = [dataclasses.replace(self, mix=())]
        for spec in self.mixed:
            values = self._values_of_source(spec)
            config = dataclasses.replace(configs[0], data=spec.name, **values)
            if config == configs[0]:
                raise UsageError(
                    f"--mix {spec.text!r} is the data of --data, of which each epoch has all rows",
                    "leave it out, or name another source",
                )
            # Validation rows are of --data alone.
            configs.append(dataclasses.replace(config, validation_fraction=None))
        return configs

    def _values_of_source(self, spec: MixSpec) -> dict[str, Any]:
        """Returns the options that a source of --mix has values of its own of."""
        names = [name for name, each in options(TrainConfig).items() if each.per_source]
        for name in spec.settings:
            if name not in names:
                raise unknown(f"option of --mix {spec.text!r}", name, names)
        task = spec.settings.get("task", self.task)
        if task != self.task:
            _check_same_samples(spec, task, self.task)
        values: dict[str, Any] = {}
        # A task and a preset have columns of their own.
        if task != self.task or "preset" in spec.settings:
            recipe = fill({"task": task, "preset": spec.settings.get("preset")})
            values = {name: recipe.get(name) for name in names}
        return values | spec.settings

    @classmethod
    def resolve(cls, **given: Any) -> "ResolvedConfig":
        """Builds a configuration of `given` options, and for others the values of the recipe."""
        own_task.use_present_folder()
        return resolved(build(cls, fill(given)))

    @classmethod
    def of(cls, program: Program) -> "TrainConfig":
        """Returns the configuration of a run of this program, with what may be open in it.

        Its task is imported from now on as the run has it: see `own_task.use_code`.
        """
        own_task.use_code(program.code)
        return build(TrainConfig, program.settings)

    def program(self) -> Program:
        """Returns the built-in program with these options, as the toolkit knows it."""
        names = [self.model, *(source.data for source in self.sources())]
        sources = [name for name in names if name is not None]
        metrics = parsed(self.named_metrics)
        # Of a folder with arguments the folder alone.
        sources += [metric.name for metric in metrics]
        local = [name for name in sources if is_local(name)]
        # JSON has no tuples.
        lists = {
            name: list(getattr(self, name))
            for name, each in options(TrainConfig).items()
            if each.is_repeatable
        }
        # Of MODULE:CLASS the class alone.
        name = self.task.rpartition(":")[2]
        return Program(
            kind="train",
            name=name,
            code=own_task.code(self.task),
            module="slurmft.train.rank",
            # What is no folder here is on the hub, or in its cache.
            needs_hub=len(local) < len(sources),
            paths=tuple(dict.fromkeys(local)),
            settings=dataclasses.asdict(self) | lists,
        )


def _required(name: str) -> Any:
    """Returns the field of an option of `TrainConfig` without its default."""
    # The metadata is all that `option` declared: flag, limits and help stay the same.
    return dataclasses.field(metadata=TrainConfig.__dataclass_fields__[name].metadata)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedConfig(TrainConfig):
    """The options of a run, where the recipe has given what nobody else has."""

    epochs: int = _required("epochs")
    batch_size: int | Literal["auto"] = _required("batch_size")
    eval_batch_size: int = _required("eval_batch_size")
    learning_rate: float = _required("learning_rate")

    @classmethod
    def of(cls, program: Program) -> "ResolvedConfig":
        """Returns the configuration of a run of this program."""
        return resolved(TrainConfig.of(program))


def resolved(config: TrainConfig) -> ResolvedConfig:
    """Returns a configuration as a run needs it.

    An option that is open in it, as a prediction leaves those of a training, is as in the recipe.
    """
    values = {name: getattr(config, name) for name in options(TrainConfig)}
    missing = [name for name in _REQUIRED if values[name] is None]
    if missing:
        filled = fill(values)
        values |= {name: filled[name] for name in missing}
    return ResolvedConfig(**values)


_REQUIRED = tuple(
    each.name
    for each in dataclasses.fields(ResolvedConfig)
    if each.default is dataclasses.MISSING
)
"""Options that every run has a value of."""


def required(train: TrainConfig, name: str) -> Any:
    """Returns the value of an option that the recipes of most tasks have.

    Raises:
        UsageError: it has none, as may be for a task of the user's own.
    """
    value = getattr(train, name)
    if value is None:
        raise UsageError(f"--task {train.task} needs {flag(name)}", "give it")
    return value


def evaluation_period(evaluate_every: str) -> tuple[int, str] | None:
    """Returns the number, and what is counted (epochs or steps), between two evaluations; None
    where there is one alone, at the end.

    Raises:
        UsageError: it is none of the forms that --evaluate-every has.
    """
    if evaluate_every == AT_END:
        return None
    match = re.fullmatch(r"(epochs|steps):([1-9][0-9]*)", evaluate_every)
    if not match:
        raise UsageError(
            f"--evaluate-every {evaluate_every} is no period",
            "give epochs:1, steps:500, numbers of your own, or end",
        )
    unit, number = match.groups()
    return int(number), unit


def early_stopping_remark(config: TrainConfig, evaluations: int) -> str | None:
    """Returns why --early-stopping cannot end a run of so many evaluations before its last one;
    None where it can, or is not given."""
    patience = config.early_stopping
    # The first one is the best until the second; the last one ends the run in any case.
    if patience is None or evaluations > patience + 1:
        return None
    return (
        f"--early-stopping {patience} has no effect: this run has at most {evaluations:,} "
        f"evaluation(s), and {patience + 2} are needed (--evaluate-every, --epochs)"
    )


def max_steps_remark(config: TrainConfig, steps: int) -> str | None:
    """Returns why --max-steps does not end a run whose epochs have so many steps in all; None where
    it does, or is not given."""
    if config.max_steps is None or config.max_steps <= steps:
        return None
    return (
        f"--max-steps {config.max_steps:,} has no effect: the run ends after --epochs "
        f"{config.epochs}, which are {steps:,} step(s) (more --epochs)"
    )


def rounding(grad_comm: str, precision: str) -> str:
    """Returns how gradients are sent, where --grad-comm may say auto: fp32 or bf16."""
    if grad_comm == "auto":
        return "bf16" if precision == "bf16" else "fp32"
    return grad_comm


def local_steps(grad_comm: str) -> int | None:
    """Returns K of local:K, the steps of each rank by itself; None where ranks send gradients.

    Raises:
        UsageError: it is none of the forms that --grad-comm has.
    """
    if grad_comm in GRAD_COMMS:
        return None
    match = re.fullmatch(r"local:(\d+)", grad_comm)
    if not match:
        raise unknown("--grad-comm", grad_comm, [*GRAD_COMMS, "local:16"])
    steps = int(match[1])
    if steps < 2:
        raise UsageError(
            f"--grad-comm {grad_comm} leaves no steps between averages",
            "give local:2 or more",
        )
    return steps


def _check_task_reads(train: TrainConfig) -> None:
    """Raises UsageError for an option that the task does not read. A task of the user's own may
    read each."""
    if train.task not in TASKS:
        return
    declared = options(TrainConfig)
    by_task = {name for name, each in declared.items() if each.by_task}
    for name in sorted(by_task.difference(TASKS[train.task].reads)):
        value = getattr(train, name)
        if not declared[name].is_set(value):
            continue
        what = f"{declared[name].flag} {value} cannot be used with --task {train.task}"
        readers = [task for task, facts in TASKS.items() if name in facts.reads]
        cure = f"leave it out; it is for {some(readers)}"
        raise UsageError(f"{what}, which does not read it", cure)


def _check_has_validation(task: str) -> None:
    """Raises UsageError where a task has no validation split that could be taken from its training
    data."""
    _check_reads_rows("--validation-fraction", task)
    what = f"--validation-fraction cannot be used with --task {task}"
    splits = own_task.facts(task).splits
    if splits != ("train", "validation"):
        problem = f"{what}: its splits are {', '.join(splits)}"
        raise UsageError(problem, "leave it out, and give a file of each")


def _check_same_samples(spec: MixSpec, task: str, main_task: str) -> None:
    """Raises UsageError where the samples of two tasks cannot train together."""
    # Language models learn the tokens that follow, whatever made the texts.
    pipelines = {own_task.facts(name).pipeline for name in (task, main_task)}
    if pipelines != {"text-generation"}:
        raise UsageError(
            f"--mix {spec.text!r}: its task does not go with --task {main_task}",
            "leave task= out; only sources of causal-lm and sft go together",
        )


def _check_reads_rows(given: str, task: str) -> None:
    """Raises UsageError where an option is about the rows of a task that reads none, or not as
    ours do."""
    what = f"{given} cannot be used with --task {task}"
    if not own_task.facts(task).splits:
        raise UsageError(f"{what}: it generates its data", "leave it out")
    # `tasks.Pretrained` reads rows; a task may read its data in a way of its own.
    if task not in TASKS and not hasattr(own_task.load(task), "rows"):
        raise UsageError(
            f"{what}, which does not read rows as slurmft.train.tasks.Pretrained does",
            "leave it out, and read the data so in prepare() of the task",
        )


def frozen_layers(freeze: str) -> int | None:
    """Returns N of layers:N; None where --freeze has another form.

    Raises:
        UsageError: it is none of the forms that --freeze has.
    """
    if freeze in ("embeddings", "base"):
        return None
    if re.fullmatch(r"layers:0+", freeze):
        raise UsageError(
            f"--freeze {freeze} freezes no layer",
            "give --freeze embeddings, or layers:1 and more",
        )
    match = re.fullmatch(r"layers:([1-9][0-9]*)", freeze)
    if not match:
        raise unknown("--freeze", freeze, ["embeddings", "layers:6", "base"])
    return int(match[1])


def _check_freeze(freeze: str, task: str, model: str | None) -> None:
    """Raises UsageError where --freeze has none of its forms, or the weights are random."""
    frozen_layers(freeze)
    if model is None:
        raise UsageError(
            f"--freeze {freeze} needs a model, and --task {task} makes up its own: its weights "
            "would stay random",
            "leave --freeze out",
        )


def _check_has_words(task: str) -> None:
    """Raises UsageError where the rows of a task are no words with labels."""
    # In tasks.toml it is the name of a format, in a task of the user's own a class.
    rows = own_task.facts(task).rows
    if getattr(rows, "__name__", rows) != "Words":
        raise UsageError(
            f"--label-all-tokens cannot be used with --task {task}: it has no labels of words",
            "leave it out",
        )


def _check_class_weights(task: str) -> None:
    """Raises UsageError where the classes of a task cannot be weighed."""
    cure = "weigh them in loss() and count() of the task"
    _check_has_classes("--class-weights balanced", task, cure)


def _check_label_smoothing(task: str) -> None:
    """Raises UsageError where the labels of a task cannot be smoothed."""
    # The tokens that a model is to write are labels as classes are.
    if task not in ("seq2seq", "causal-lm", "sft"):
        _check_has_classes(
            "--label-smoothing", task, "smooth them in loss() of the task"
        )


def _check_has_classes(given: str, task: str, cure: str) -> None:
    """Raises UsageError where the loss of a task is not the cross entropy of classes.

    Args:
        given: the option that needs it, as a user writes it.
        cure: what to do in a task of the user's own.
    """
    what = f"{given} cannot be used with --task {task}"
    facts = TASKS.get(task)
    if facts is None:
        raise UsageError(f"{what}: a task of your own has a loss of its own", cure)
    if task == "multi-label":
        problem = f"{what}: each of its classes is a decision of its own"
        raise UsageError(problem, "leave it out")
    if facts.rows not in ("Texts", "Words") or facts.labels == ():
        raise UsageError(f"{what}: it has no classes", "leave it out")


def _check_predictions(metrics: Sequence[MetricSpec], train: TrainConfig) -> None:
    """Raises UsageError where the predictions of a task are none that metrics take."""
    task = train.task
    if own_task.facts(task).predictions in ("", "vectors"):
        raise UsageError(
            f"--metric {metrics[0].text!r} cannot be used with --task {task}: its evaluation has "
            "no predictions that such a metric takes",
            f"give one of the task's own metrics: {', '.join(train.own_metrics)}",
        )
