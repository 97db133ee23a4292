"""Configuration: values that cannot be right, and where values come from."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from slurmft.cluster import dry_run
from slurmft.cluster.slurm.sbatch_options import request
from slurmft.core import site
from slurmft.core.config import JobConfig, RunConfig, time_limit_min
from slurmft.core.errors import UsageError
from slurmft.core.options import Option, build, options
from slurmft.core.run_files import GitCommit, Submission
from slurmft.core.site import site_defaults
from slurmft.programs.description import FLAGS
from slurmft.train.config import TrainConfig
from slurmft.train.login.configure import OPTIONS, configure
from slurmft.train.loop.step_plan import Plan
from slurmft.train.predict_config import PredictConfig
from slurmft.train.recipes import RECIPES
from slurmft.train.task_facts import TASKS

TRAIN_FLAGS = """task task_option recipe as_published preset model data mix validation_fraction
data_seed text_column text_pair_column
label_column tools_column max_length max_target_length source_prefix num_beams doc_stride
epochs max_steps batch_size eval_batch_size
gradient_accumulation_steps global_batch_size optimizer learning_rate muon_learning_rate lr_rule
reference_batch_size max_global_batch_size lr_schedule warmup_steps warmup_ratio weight_decay
adam_beta1 adam_beta2 adam_epsilon max_grad_norm
precision tf32 batching grad_comm shard cpu_offload activation_checkpointing
ipex dropout freeze
lora lora_alpha lora_dropout lora_targets use_rslora use_dora merge load_in_4bit seed
class_weights label_smoothing label_all_tokens save save_dtype evaluate_every metric early_stopping
log_every"""
JOB_FLAGS = """name nodes min_nodes spare_nodes nproc_per_node profile cluster backend runs_dir
share_with_group job_name
partition account qos time gpus_per_node cpus_per_task mem max_mem constraint exclusive reservation
comment sbatch setup container container_runtime host_suffix
interface rdzv_timeout_s stop_lead_s
file_locks
after after_any requeue strict max_requeues max_restarts hang_timeout_s
checkpoint_every checkpoint_every_steps keep_checkpoints"""
PLUGIN_FLAGS = (
    "preflight hostfile dialect notify notify_command stage_env stage_dir log_with"
)


def test_flags_are_a_promise() -> None:
    """Scripts and site files name them: none may vanish or change unnoticed."""
    assert list(options(TrainConfig)) == TRAIN_FLAGS.split()
    assert list(options(JobConfig)) == [*JOB_FLAGS.split(), *PLUGIN_FLAGS.split()]
    assert list(options(PredictConfig)) == ["max_new_tokens", "generation"]


def test_the_job_has_the_name_of_the_run() -> None:
    config = RunConfig(
        program=TrainConfig.resolve().program(), job=JobConfig(name="mine")
    )
    assert (config.name, config.job.project) == ("mine", "mine")
    assert request(config)["job-name"] == "mine"
    other = dataclasses.replace(config, job=JobConfig(name="mine", job_name="theirs"))
    assert request(other)["job-name"] == "theirs"
    assert (
        request(dataclasses.replace(config, job=JobConfig()))["job-name"] == "slurmft"
    )


def test_config_survives_json() -> None:
    config = RunConfig(
        program=TrainConfig.resolve(task="emotion", data='/d/it\'s "é"\n').program(),
        job=JobConfig(
            nodes=3, setup=("module load x",), sbatch=("nice=3", "overcommit")
        ),
        submission=Submission(user="ada", git=GitCommit(commit="0a1b")),
    )
    assert RunConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"task": "emtion"}, "did you mean emotion?"),
        ({"precision": "fp8"}, "unknown --precision 'fp8'"),
        ({"epochs": 10**12}, "--epochs 1000000000000 must be between 1 and 1,000,000"),
        ({"batch_size": 99999999999}, "must be between 1 and 1,048,576"),
        ({"learning_rate": 1e30}, "--learning-rate 1e+30 must be above 0 and at most"),
        ({"epochs": 0}, "--epochs 0 must be between 1 and 1,000,000"),
        ({"learning_rate": -1.0}, "--learning-rate -1.0 must be above 0"),
        ({"warmup_ratio": 1.5}, "between 0 and 1"),
        ({"dropout": 1.0}, "below 1"),
        ({"seed": 2**32}, "between 0 and 4,294,967,295"),
        ({"class_weights": "even"}, "unknown --class-weights 'even'"),
        *(
            ({"class_weights": "balanced", "task": task}, why)
            for task, why in {
                "text-regression": "it has no classes",
                "seq2seq": "it has no classes",
                "squad": "it has no classes",
                "multi-label": "each of its classes is a decision of its own",
            }.items()
        ),
        *(
            ({"label_smoothing": 0.1, "task": task}, why)
            for task, why in {
                "text-regression": "it has no classes",
                "squad": "it has no classes",
                "multi-label": "each of its classes is a decision of its own",
            }.items()
        ),
        (
            {"label_smoothing": 1.0},
            "--label-smoothing 1.0 must be 0 or more and below 1",
        ),
        ({"adam_beta2": 1.0}, "--adam-beta2 1.0 must be 0 or more and below 1"),
        ({"adam_epsilon": 0.0}, "--adam-epsilon 0.0 must be above 0"),
        (
            {"doc_stride": 64, "max_length": 64},
            "0 or more and below --max-length 64",
        ),
    ],
)
def test_train_values_that_cannot_be_right(
    values: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError) as error:
        TrainConfig.resolve(**values)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"stop_lead_s": 600, "time": "10"},
            "--stop-lead-s 600 leaves nothing of --time 10",
        ),
        ({"nodes": 0}, "--nodes 0 must be between 1 and 65,536"),
        ({"time": "soon"}, "invalid time limit: --time 'soon'"),
        ({"time": "0:00"}, "leaves no time"),
        ({"mem": "much"}, "--mem 'much' is no amount of memory"),
        (
            {"mem": "2G", "max_mem": "2047"},
            "--max-mem 2047 is less than --mem 2G",
        ),
        ({"max_mem": "2G"}, "--max-mem 2G needs --mem"),
        (
            {"mem": "2G", "max_mem": "2 GB"},
            "--max-mem '2 GB' is no amount of memory",
        ),
        ({"checkpoint_every": "often"}, "--checkpoint-every 'often' is not a duration"),
        (
            {"checkpoint_every": "10"},
            "--checkpoint-every '10' has no unit",
        ),
        ({"comment": "two\nlines"}, "holds a line break"),
        ({"setup": ("a\nb",)}, "holds a line break"),
        ({"sbatch": ("=3",)}, "is not KEY=VALUE"),
        ({"sbatch": ("partition=x",), "partition": "y"}, "contradicts --partition"),
        ({"sbatch": ("nodes=3",)}, "contradicts --nodes"),
        ({"sbatch": ("parsable",)}, "slurmft sets parsable itself"),
        ({"sbatch": ("p=x",)}, "is not KEY=VALUE"),
        ({"sbatch": ("output=x",)}, "slurmft sets output itself"),
        ({"sbatch": ("outp=x",)}, "slurmft sets output itself"),
        ({"sbatch": ("clusters=x",)}, "relies on it"),
        ({"sbatch": ("no-kill",)}, "slurmft sets no-kill itself"),
        ({"runs_dir": "/runs/%j"}, "holds '%j', which Slurm replaces"),
        ({"runs_dir": "/runs/a\\b"}, "which Slurm replaces"),
        ({"stage_dir": "tmp"}, "--stage-dir tmp must be an absolute path"),
        ({"stage_dir": "/a\nb"}, "--stage-dir '/a\\nb' holds a line break"),
        ({"preflight": "never"}, "unknown --preflight 'never'"),
        ({"notify_command": "curl https://me:pass@host"}, "a URL with credentials"),
        ({"log_with": "wandb"}, "log_with must be a list of strings, not 'wandb'"),
    ],
)
def test_job_values_that_cannot_be_right(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        build(JobConfig, values)
    assert message in str(error.value)


@pytest.mark.parametrize("requeue", [True, False])
def test_sbatch_options_that_slurmft_sets_cannot_be_given(requeue: bool) -> None:
    config = RunConfig(
        program=TrainConfig.resolve().program(), job=JobConfig(requeue=requeue)
    )
    of_fields = {option.sbatch for option in options(JobConfig).values()}
    for name in request(config).keys() - of_fields:
        with pytest.raises(UsageError, match="itself"):
            build(JobConfig, {"sbatch": (name,)})


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("90", 90),
        ("1:30", 2),
        ("30:00", 30),
        ("1:30:00", 90),
        ("1-0", 1440),
        ("2-12:30", 3630),
    ],
)
def test_time_limits_as_slurm_reads_them(text: str, minutes: int) -> None:
    assert time_limit_min(text) == minutes


def test_recipe_fills_what_nobody_gave() -> None:
    train = TrainConfig.resolve(task="emotion", epochs=7)
    assert train.epochs == 7
    assert train.batch_size == RECIPES["emotion"]["batch_size"]
    assert TrainConfig.resolve().preset == "quick"
    assert TrainConfig.resolve(preset="paper").batch_size == 256


def test_first_recipe_of_a_task_is_its_default() -> None:
    """No task is without, and a recipe's values are fields of the configuration."""
    known = {*options(TrainConfig), *options(JobConfig)}
    for task in TASKS:
        train = TrainConfig.resolve(task=task)
        assert train.recipe == task
        assert None not in (train.epochs, train.batch_size, train.eval_batch_size)
    for name, recipe in RECIPES.items():
        assert set(recipe) <= known
        assert TrainConfig.resolve(recipe=name).task == recipe["task"]
    assert TrainConfig.resolve(task="squad", preset="v2").recipe == "squad-v2"
    assert TrainConfig.resolve(preset="paper").recipe == "mn4-benchmark"


PUBLISHED_VALUES: dict[str, dict[str, object]] = {
    "icelake-mrpc": {
        "task": "mrpc", "nproc_per_node": 1, "max_length": 128, "batch_size": 32,
        "learning_rate": 2e-5, "epochs": 3,
    },
    "icelake-qqp": {
        "task": "qqp", "nproc_per_node": 1, "max_length": 128, "batch_size": 32,
        "learning_rate": 2e-5, "epochs": 3,
    },
    "spr-squad": {
        "task": "squad", "nproc_per_node": 2, "batch_size": 32, "epochs": 1, "precision": "bf16",
        "model": "distilbert-base-uncased",
    },
    "mn4-emotion": {
        "task": "emotion", "batch_size": 256, "eval_batch_size": 256, "learning_rate": 5e-4,
        "epochs": 5, "precision": "fp16", "lr_schedule": "linear",
        "model": "distilbert-base-uncased",
    },
    "mn4-benchmark": {"task": "synthetic", "preset": "paper", "batch_size": 256},
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED_VALUES)
def test_published_recipes(name: str) -> None:
    config = configure({"recipe": name})
    found = dataclasses.asdict(config.job) | dataclasses.asdict(
        TrainConfig.of(config.program)
    )
    assert {k: found[k] for k in PUBLISHED_VALUES[name]} == PUBLISHED_VALUES[name]
    assert found["recipe"] == name


def test_published_warm_up_is_100_steps_on_one_gpu() -> None:
    plan = Plan(
        config=TrainConfig.resolve(recipe="mn4-emotion"), world_size=1, precision="fp16",
        train_samples=16_000, validation_samples=2_000,
    )  # fmt: skip
    assert plan.total_steps == 315
    assert round((plan.config.warmup_ratio or 0) * plan.total_steps) == 100


def test_flags_and_site_file_lie_over_recipes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where they give what is the default without a recipe."""
    site = tmp_path / "site.toml"
    site.write_text("nproc_per_node = 7\nepochs = 8\n")
    monkeypatch.setenv("SLURMFT_SITE", str(site))
    given = {
        "recipe": "spr-squad",
        "precision": "auto",
        "weight_decay": 0.01,
        "epochs": 9,
    }
    config = configure(given)
    assert (config.job.nproc_per_node, TrainConfig.of(config.program).epochs) == (7, 9)
    assert (
        TrainConfig.of(config.program).precision,
        TrainConfig.of(config.program).weight_decay,
    ) == ("auto", 0.01)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"recipe": "icelake-mprc"}, "did you mean icelake-mrpc?"),
        ({"recipe": "icelake-mrpc", "task": "rte"}, "has the task mrpc, not rte"),
        (
            {"recipe": "mn4-benchmark", "preset": "quick"},
            "has the preset paper, not quick",
        ),
        ({"preset": "huge"}, "known: quick, paper"),
        ({"recipe": "squat"}, "did you mean squad?"),
        ({"task": "squad", "preset": "v3"}, "unknown --preset of --task squad: 'v3'"),
        ({"task": "glue"}, "unknown --task 'glue'"),
    ],
)
def test_recipes_that_cannot_be_right(values: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as error:
        configure(values)
    assert message in str(error.value)


def test_site_file_gives_defaults_and_flags_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site.toml"
    site.write_text(
        'partition = "gpu"\nnodes = 8\nsetup = ["module load cuda"]\ntime = 30\n'
    )
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
        ('nodes = "4"', "nodes must be a whole number"),
        ("setup = 3", "must be a list of strings"),
        ("nodes = ", "cannot read the site file"),
        ("nodes = " + "[" * 5000, "cannot read the site file"),
    ],
)
def test_site_file_that_cannot_be_right(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site.toml"
    site.write_text(text)
    monkeypatch.setenv("SLURMFT_SITE", str(site))
    with pytest.raises(UsageError) as error:
        site_defaults(OPTIONS)
    assert message in str(error.value)
    assert str(site) in str(error.value)
    assert error.value.hint


@pytest.mark.parametrize("known", [OPTIONS, options(JobConfig) | FLAGS])
def test_site_file_of_several_programs(
    known: dict[str, Option], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes its options, and none stumbles over those of others."""
    site = tmp_path / "site.toml"
    site.write_text("nodes = 2\nepochs = 3\nsnapshot_limit_mb = 50\n")
    monkeypatch.setenv("SLURMFT_SITE", str(site))
    monkeypatch.setenv("SLURMFT_SITE_OPTIONS", '{"epochs": 4, "snapshot": "none"}')
    values = {"nodes": 2, "epochs": 4, "snapshot_limit_mb": 50, "snapshot": "none"}
    expected = {name: value for name, value in values.items() if name in known}
    assert site_defaults(known) == expected
    assert 1 < len(expected) < 4


def test_layers_of_site_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The centre's, the one that a module names, the user's: the later, the stronger."""
    centre = tmp_path / "etc.toml"
    centre.write_text('partition = "batch"\nnodes = 2\nsetup = ["module load slurm"]\n')
    module = tmp_path / "module.toml"
    module.write_text(
        'partition = "gpu"\naccount = "a1"\nsetup = ["module load cuda"]\n'
    )
    user = tmp_path / ".config/slurmft/site.toml"
    user.parent.mkdir(parents=True)
    user.write_text('account = "mine"\nsetup = ["ulimit -c 0"]\n')
    monkeypatch.setattr(site, "OF_CENTRE", centre)
    monkeypatch.setenv("SLURMFT_SITE", str(module))
    job = configure({}).job
    assert (job.partition, job.account, job.nodes) == ("gpu", "mine", 2)
    assert job.setup == ("module load slurm", "module load cuda", "ulimit -c 0")
    assert site.job_default("partition") == "gpu"
    text = dry_run.text(configure({}), "local")
    assert f"{centre}: partition, nodes, setup\n{module}: partition, account" in text
    assert f"{user}: account, setup" in text
    # One of them alone may be wrong: it is named.
    centre.write_text('partiton = "batch"\n')
    with pytest.raises(UsageError, match=re.escape(f"{centre}: unknown key")):
        configure({})


def test_site_file_with_a_folder_for_each_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken as it stood, all users would have got one folder, of the name "$USER"."""
    centre = tmp_path / "etc.toml"
    monkeypatch.setattr(site, "OF_CENTRE", centre)
    monkeypatch.setenv("SLURMFT_TEST_SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.setenv("SLURMFT_TEST_USER", "ada")
    centre.write_text(
        'runs_dir = "${SLURMFT_TEST_SCRATCH}/$SLURMFT_TEST_USER/runs"\n'
        'data = "$SLURMFT_TEST_SCRATCH/data"\nstage_dir = "$SLURMFT_TEST_SCRATCH"\n'
    )
    assert site.job_default("runs_dir") == f"{tmp_path}/scratch/ada/runs"
    defaults = site_defaults(OPTIONS)
    assert defaults["runs_dir"] == f"{tmp_path}/scratch/ada/runs"
    assert defaults["data"] == f"{tmp_path}/scratch/data"
    # A place on the nodes, which have variables of their own.
    assert defaults["stage_dir"] == "$SLURMFT_TEST_SCRATCH"
    monkeypatch.setenv("SLURMFT_TEST_USER", "")
    with pytest.raises(UsageError, match=r"etc.toml: runs_dir = .*USER is not set"):
        site.job_default("runs_dir")


def test_dry_run_of_a_range_of_nodes() -> None:
    text = dry_run.text(configure({"nodes": 4, "min_nodes": 2}), "local")
    assert "  where    on this machine, without Slurm: 4 simulated node(s)\n" in text


def test_site_file_that_the_variable_names_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = tmp_path / ".config/slurmft/site.toml"
    user.parent.mkdir(parents=True)
    user.write_text('setup = ["ulimit -c 0"]\n')
    monkeypatch.setenv("SLURMFT_SITE", str(user))
    assert configure({}).job.setup == ("ulimit -c 0",)


def test_site_file_named_and_absent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLURMFT_SITE", str(tmp_path / "none.toml"))
    with pytest.raises(UsageError, match="names no file"):
        site_defaults(OPTIONS)


@pytest.mark.parametrize(
    ("lead_s", "time", "found"),
    [
        (None, None, 120), (None, "60", 120), (None, "6", 120), (None, "5", 100), (None, "1", 20),
        (600, None, 600), (600, "60", 600), (600, "11", 600), (0, "5", 0), (0, None, 0),
    ],
)  # fmt: skip
def test_lead_that_is_asked_for_is_not_shortened(
    lead_s: int | None, time: str | None, found: int
) -> None:
    """As by `resume --time 11` of a run that needs ten minutes to save."""
    assert JobConfig(stop_lead_s=lead_s, time=time).lead_s == found
