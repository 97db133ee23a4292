"""The published texts, followed to their end: the commands that the pages print, on nodes that give
a task one CPU, where it does not say how many it needs. Only the sizes are others."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from slurmft.runs.rundir import RunDir
from tests.conftest import Done
from tests.slurm.commands import assert_nodes_are_clean, slurmft
from tests.support import CHECKOUT
from tests.support.cluster import Cluster
from tests.support.models import write_emotion, write_pairs, write_squad

pytestmark = [pytest.mark.extra("sbatch"), pytest.mark.slurm]

STUDIES = CHECKOUT / "results" / "studies"
PAIRS = {
    "mrpc": ("sentence1", "sentence2"),
    "qqp": ("question1", "question2"),
}
# Nodes of the test cluster have no GPU, and CPUs of any vendor.
ABSENT = ("gpus_per_node", "profile")
MOST_NODES = 2
MOST_PROCESSES = 2


def smaller(name: str, folder: Path) -> Path:
    """A shipped study with its first and its last cell of at most two nodes."""
    with open(STUDIES / f"{name}.toml", "rb") as file:
        study = tomllib.load(file)
    study["repeats"] = 1
    study["published"] = str(STUDIES / study["published"])
    study["fixed"] = {k: v for k, v in study["fixed"].items() if k not in ABSENT}
    grid = {name: values[:MOST_NODES] for name, values in study.get("grid", {}).items()}
    if name == "lab-train":
        grid["precision"] = ["fp32"]
    cells = [_smaller_cell(cell) for cell in study.get("cells", ())]
    study["grid"] = grid
    study["cells"] = [cells[0], cells[-1]] if cells else []
    path = folder / f"{name}.toml"
    path.write_text(_toml(study))
    return path


def _smaller_cell(cell: dict[str, Any]) -> dict[str, Any]:
    nodes = min(cell["nodes"], MOST_NODES)
    return cell | {
        "nodes": nodes,
        "nproc_per_node": min(cell["nproc_per_node"], MOST_PROCESSES),
    }


def _toml(study: dict[str, Any]) -> str:
    """What the study file has, in TOML, whose plain values JSON's are."""
    tables = {"fixed": [study.pop("fixed")], "grid": [study.pop("grid")]}
    cells = study.pop("cells")
    lines = [f"{name} = {json.dumps(value)}" for name, value in study.items()]
    for name, (table,) in tables.items():
        lines += [f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in table.items())]
    for cell in cells:
        lines += ["[[cells]]", *(f"{k} = {json.dumps(v)}" for k, v in cell.items())]
    return "\n".join(lines) + "\n"


@pytest.fixture
def data(tmp_path: Path) -> dict[str, tuple[str, ...]]:
    """Study -> the options that make it small."""
    once = ("--epochs", "1")
    sizes = {"train": 40, "validation": 20}
    for task, columns in PAIRS.items():
        write_pairs(tmp_path / "glue" / task, columns, 2, sizes)
    write_emotion(tmp_path / "emotion", train=64, validation=32)
    write_squad(tmp_path / "squad", train=24, validation=8)
    lengths = ("--max-length", "24", "--doc-stride", "8")
    return {
        "lab-train": ("--max-steps", "2"),
        "mn4-emotion": (
            *once,
            "--precision",
            "fp32",
            "--data",
            str(tmp_path / "emotion"),
        ),
        "icelake-glue": (
            *once,
            "--precision",
            "fp32",
            "--data",
            str(tmp_path / "glue"),
        ),
        "spr-squad": (*once, *lengths, "--data", str(tmp_path / "squad")),
    }


@pytest.mark.parametrize(
    "name", ["lab-train", "mn4-emotion", "icelake-glue", "spr-squad"]
)
def test_text_is_followed_to_its_end(
    name: str,
    data: dict[str, tuple[str, ...]],
    idle_cluster: Cluster,
    tmp_path: Path,
    tiny_model: Path,
) -> None:
    """As docs/studies.md has it: a dry run, the runs, the status, the report beside the text.

    Of the synthetic benchmark, whose model and data have one size, the shape for two cores.
    """
    study = str(smaller(name, tmp_path))
    place = ("--studies-dir", str(tmp_path / "studies"))
    small = (*data[name], "--time", "5")
    if name != "lab-train":
        small = (*small, "--model", str(tiny_model))

    def call(*command: str) -> Done:
        done = slurmft(idle_cluster, *command)
        assert done.code == 0, done.out + done.err
        return done

    run = ("study", "run", study, *place, "--partition", "batch", *small)
    dry = call(*run, "--dry-run").out
    has_whole_nodes = name != "lab-train"
    assert ("#SBATCH --exclusive" in dry) is has_whole_nodes
    assert "because it does not say how many it needs" not in dry
    call(*run)
    idle_cluster.wait_idle(600)
    status = json.loads(call("study", "status", study, *place, "--json").out)
    assert status["totals"]["finished"] == len(status["repeats"]) >= 2, status
    for path in (tmp_path / "studies" / name / "runs").iterdir():
        ranks = RunDir(path).read_environment().ranks
        threads = [rank.threads for rank in ranks if rank.node_number == 0]
        # Not one CPU of each node.
        assert (sum(threads) > 1) is has_whole_nodes, path
    folder = str(tmp_path / "studies" / name)
    report = call("report", folder).out
    assert "published / ours" in " ".join(report.split())  # titles may be wrapped
    call("report", folder, "--output", str(tmp_path / "report"))
    assert (tmp_path / "report" / "report.html").is_file()
    assert_nodes_are_clean(idle_cluster)
