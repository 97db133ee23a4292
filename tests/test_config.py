"""Configuration: values that cannot be right, and where values come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmft.config import (
    JobConfig,
    RunConfig,
    TrainConfig,
    options,
    time_limit_min,
)
from slurmft.errors import UsageError
from slurmft.recipes import RECIPES
from slurmft.site import site_defaults
from slurmft.submit import configure

TRAIN_FLAGS = """task recipe preset model data text_column text_pair_column label_column max_length
epochs max_steps
batch_size eval_batch_size gradient_accumulation_steps learning_rate lr_schedule warmup_steps
warmup_ratio weight_decay max_grad_norm precision backend ipex dropout seed checkpoint_every
checkpoint_every_steps keep_checkpoints early_stopping metric_gather log_every"""
JOB_FLAGS = """nodes nproc_per_node profile comm_cores cluster runs_dir job_name partition account
qos time gpus_per_node cpus_per_task mem constraint exclusive reservation comment sbatch setup
host_suffix interface rdzv_timeout_s stop_lead_s file_locks requeue max_requeues max_restarts
hang_timeout_s"""


def test_flags_are_a_promise() -> None:
    """Scripts and site files name them: none may vanish or change unnoticed."""
    assert list(options(TrainConfig)) == TRAIN_FLAGS.split()
    assert list(options(JobConfig)) == JOB_FLAGS.split()


def test_config_survives_json() -> None:
    config = RunConfig(
        train=TrainConfig.resolve(task="emotion", data='/d/it\'s "é"\n'),
        job=JobConfig(nodes=3, setup=("module load x",), sbatch=("nice=3", "overcommit")),
        submission={"git": None},
    )
    assert RunConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"task": "emtion"}, "did you mean emotion?"),
        ({"precision": "fp8"}, "unknown --precision 'fp8'"),
        ({"preset": "huge"}, "known: quick, paper"),
        ({"epochs": 0}, "--epochs 0 must be at least 1"),
        ({"learning_rate": -1.0}, "--learning-rate -1.0 must be above 0"),
        ({"warmup_ratio": 1.5}, "between 0 and 1"),
        ({"dropout": 1.0}, "below 1"),
        ({"seed": 2**32}, "below 2^32"),
    ],
)
def test_train_values_that_cannot_be_right(values: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as error:
        TrainConfig(**values)  # type: ignore[arg-type]
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nodes": 0}, "--nodes 0 must be at least 1"),
        ({"time": "soon"}, "--time 'soon' is no time limit"),
        ({"time": "0:00"}, "leaves no time"),
        ({"comment": "two\nlines"}, "holds a line break"),
        ({"setup": ("a\nb",)}, "holds a line break"),
        ({"sbatch": ("=3",)}, "is no KEY=VALUE"),
        ({"sbatch": ("partition=x",), "partition": "y"}, "contradicts --partition"),
        ({"sbatch": ("nodes=3",)}, "contradicts --nodes"),
        ({"sbatch": ("parsable",)}, "slurmft sets parsable itself"),
        ({"sbatch": ("p=x",)}, "is no KEY=VALUE"),
        ({"sbatch": ("output=x",)}, "slurmft sets output itself"),
        ({"runs_dir": "/runs/%j"}, "holds '%j', which Slurm replaces"),
        ({"runs_dir": "/runs/a\\b"}, "which Slurm replaces"),
        ({"cluster": "slrm"}, "did you mean slurm?"),
    ],
)
def test_job_values_that_cannot_be_right(values: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as error:
        JobConfig(**values)  # type: ignore[arg-type]
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("90", 90), ("1:30", 2), ("30:00", 30), ("1:30:00", 90), ("1-0", 1440), ("2-12:30", 3630)],
)
def test_time_limits_as_slurm_reads_them(text: str, minutes: int) -> None:
    assert time_limit_min(text) == minutes


def test_recipe_fills_what_nobody_gave() -> None:
    train = TrainConfig.resolve(task="emotion", epochs=7)
    assert train.epochs == 7
    assert train.batch_size == RECIPES["emotion"]["batch_size"]
    assert TrainConfig.resolve().preset == "quick"
    assert TrainConfig.resolve(preset="paper").batch_size == 256


def test_site_file_gives_defaults_and_flags_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site.toml"
    site.write_text('partition = "gpu"\nnodes = 8\nsetup = ["module load cuda"]\ntime = 30\n')
    monkeypatch.setenv("SLURMFT_SITE", str(site))
    job = configure({"nodes": 2}).job
    assert (job.nodes, job.partition, job.setup, job.time) == (
        2,
        "gpu",
        ("module load cuda",),
        "30",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('partiton = "gpu"', "did you mean partition?"),
        ('nodes = "4"', "nodes must be a int"),
        ("setup = 3", "must be a list of strings"),
        ("nodes = ", "cannot read the site file"),
    ],
)
def test_site_file_that_cannot_be_right(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site.toml"
    site.write_text(text)
    monkeypatch.setenv("SLURMFT_SITE", str(site))
    with pytest.raises(UsageError) as error:
        site_defaults()
    assert message in str(error.value)
    assert str(site) in str(error.value)


def test_site_file_named_and_absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLURMFT_SITE", str(tmp_path / "none.toml"))
    with pytest.raises(UsageError, match="names no file"):
        site_defaults()
