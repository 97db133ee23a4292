"""Jobs that have whole nodes, and what is said of those that have a part which nobody chose."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from slurmft.cluster.slurm.sbatch_options import request
from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.options import build
from slurmft.node import granted_cpus, profiles
from slurmft.plugins.studies import spec
from slurmft.train import recipes
from slurmft.train.config import TrainConfig
from tests.conftest import records
from tests.node.test_profiles import node
from tests.slurm.commands import slurmft
from tests.slurm.conftest import fake_slurm
from tests.support import CHECKOUT
from tests.support.cluster import Cluster
from tests.support.fake_slurm.cluster import FakeSlurm
from tests.support.models import write_pairs

__all__ = ["fake_slurm"]  # a fixture

SBATCH = sorted((CHECKOUT / "sbatch").glob("*.sbatch"))
STUDIES = sorted((CHECKOUT / "results" / "studies").glob("*.toml"))
WARNING = "because it does not say how many it needs"


def request_of(**options: Any) -> dict[str, str | None]:
    return request(
        RunConfig(
            program=TrainConfig.resolve().program(), job=build(JobConfig, options)
        )
    )


@pytest.mark.parametrize("file", SBATCH, ids=lambda file: file.stem)
def test_recipe_asks_for_what_its_sbatch_file_asks_for(file: Path) -> None:
    text = file.read_text()
    recipe = re.search(r"--recipe ([\w-]+) .*\"\$@\"", text)
    if recipe is None:  # a file for any training
        return
    asked = request_of(**_of_job(recipes.fill({"recipe": recipe[1]})))
    assert "#SBATCH --exclusive\n" in text
    assert "exclusive" in asked
    assert asked["mem"] == "0"


@pytest.mark.parametrize("file", STUDIES, ids=lambda file: file.stem)
def test_study_of_a_published_table_has_whole_nodes(file: Path) -> None:
    study = spec.read_study(file)
    for cell in study.cells:
        values = recipes.fill(study.fixed | cell)
        # The small ones run beside others, on a core of each node.
        assert bool(values.get("exclusive")) is not study.name.startswith("lab-")


def _of_job(values: dict[str, Any]) -> dict[str, Any]:
    names = JobConfig().values()
    return {name: value for name, value in values.items() if name in names}


@pytest.mark.parametrize(
    ("options", "memory"),
    [
        ({"exclusive": True}, "0"),
        ({"exclusive": True, "mem": "64G"}, "64G"),
        ({"exclusive": True, "sbatch": ("mem-per-cpu=2G",)}, None),
        ({}, None),
    ],
)
def test_whole_node_has_its_memory(options: dict[str, Any], memory: str | None) -> None:
    assert request_of(**options).get("mem") == memory


@pytest.mark.processes  # nvidia-smi, for GPUs
@pytest.mark.parametrize(
    ("options", "environment", "gpus", "expected"),
    [
        ({}, {"SLURM_CPUS_ON_NODE": "2"}, 0, "2 of the 128 CPUs"),
        ({}, {"SLURM_CPUS_ON_NODE": "128"}, 0, ""),
        ({}, {}, 0, ""),
        ({"cpus_per_task": 2}, {"SLURM_CPUS_ON_NODE": "2"}, 0, ""),
        ({"sbatch": ("mincpus=2",)}, {"SLURM_CPUS_ON_NODE": "2"}, 0, ""),
        ({}, {"SLURM_CPUS_ON_NODE": "2", "SLURM_CPUS_PER_TASK": "2"}, 0, ""),
        ({}, {"SLURM_CPUS_ON_NODE": "2", "SLURMFT_LOCAL_NODE": "0"}, 0, ""),
        ({}, {"SLURM_CPUS_ON_NODE": "8"}, 4, ""),
        ({}, {"SLURM_CPUS_ON_NODE": "2"}, 4, "2 of the 128 CPUs"),
    ],
)
def test_node_tells_of_cpus_that_are_left(
    options: dict[str, Any],
    environment: dict[str, str],
    gpus: int,
    expected: str,
    tmp_path: Path,
) -> None:
    variables: dict[str, Any] = dict(environment)
    hardware = node(tmp_path, gpus=gpus, **variables)
    job = build(JobConfig, options)
    profile = profiles.choose(hardware, job)
    text = granted_cpus.warning(profile, job, environment)
    assert bool(text) == bool(expected)
    assert expected in text


@pytest.mark.processes
@pytest.mark.parametrize(
    ("options", "is_told"),
    [((), True), (("--cpus-per-task", "1"), False), (("--exclusive",), False)],
)
def test_dry_run_tells_it(
    options: tuple[str, ...], is_told: bool, fake_slurm: FakeSlurm, tmp_path: Path
) -> None:
    study = tmp_path / "s.toml"
    study.write_text('name = "s"\n[grid]\nnodes = [1, 2]\n')
    for command in (
        ("submit", "--nodes", "2"),
        ("study", "run", str(study), "--studies-dir", str(tmp_path)),
    ):
        done = slurmft(fake_slurm, *command, "--dry-run", *options)
        assert done.code == 0, done.err
        assert ("1 of the 4 CPUs of each node, " + WARNING in done.out) is is_told


@pytest.mark.extra("sbatch")
@pytest.mark.slurm
def test_published_recipes_on_nodes_that_give_a_task_one_cpu(
    idle_cluster: Cluster, tmp_path: Path, tiny_model: Path
) -> None:
    """A recipe, and a run that asks for no cores. Studies: tests/slurm/test_published_texts.py."""
    small = ("--model", str(tiny_model), "--precision", "fp32", "--time", "5")
    steps = ("--max-steps", "2", "--batch-size", "8")
    sizes = {"train": 40, "validation": 20}
    pairs = write_pairs(tmp_path / "mrpc", ("sentence1", "sentence2"), 2, sizes)
    runs = ("--runs-dir", str(tmp_path / "runs"), "--follow")
    recipe = ("--recipe", "icelake-mrpc", "--data", str(pairs), *small, *steps)
    whole = slurmft(idle_cluster, "submit", *recipe, *runs)
    part = slurmft(idle_cluster, "submit", *recipe, "--no-exclusive", *runs)
    assert whole.code == part.code == 0, whole.err + part.err
    assert WARNING not in whole.out
    assert WARNING in part.out
    assert any(WARNING in each["text"] for each in records(part.run, "warning"))
