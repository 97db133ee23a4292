"""Which runs are repeats of one measurement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurmft.plugins.studies.cells import COST_FIELDS, cells, varied
from slurmft.plugins.studies.runner import _difference
from slurmft.runs.scan import MeasuredRun, find
from tests.support.made_runs import write_run

CHANGES_NOTHING: list[dict[str, Any]] = [
    {"notify_command": "mail me"},
    {"notify": ("file:/tmp/urls",)},
    {"time": "2:00:00"},
    {"preflight": "off"},
    {"checkpoint_every": "1h"},
    {"strict": True},
    {"requeue": False},
    {"keep_checkpoints": 5},
    {"log_every": 3},
]
CHANGES_MEASUREMENT: list[dict[str, Any]] = [
    {"nodes": 2},
    {"batch_size": 7},
    {"partition": "gpu"},
    {"shard": "full"},
    {"lora": 4},
    {"setup": ("module load cuda",)},
]


def test_repeats_are_one_cell(tmp_path: Path) -> None:
    for nodes in (1, 2):
        for seed in (1, 2):
            write_run(tmp_path / f"{nodes}-{seed}", nodes=nodes, seed=seed)
    runs, _ = find([tmp_path])
    assert varied(runs) == ["nodes"]
    assert [[run.name for run in cell] for cell in cells(runs)] == [
        ["1-1", "1-2"],
        ["2-1", "2-2"],
    ]


@pytest.mark.processes  # runs that have ended tell --notify
@pytest.mark.parametrize("options", CHANGES_NOTHING)
def test_runs_that_differ_in_what_affects_nothing_are_repeats(
    options: dict[str, Any], tmp_path: Path
) -> None:
    write_run(tmp_path / "a", model="/m", merge=True, lora=8)
    write_run(tmp_path / "b", model="/m", merge=True, lora=8, **options)
    runs, _ = find([tmp_path])
    assert varied(runs) == []
    assert len(cells(runs)) == 1


@pytest.mark.parametrize("options", CHANGES_MEASUREMENT)
def test_runs_that_differ_in_a_measurement_are_cells(
    options: dict[str, Any], tmp_path: Path
) -> None:
    write_run(tmp_path / "a", model="/m")
    write_run(tmp_path / "b", model="/m", **options)
    runs, _ = find([tmp_path])
    assert set(varied(runs)) >= set(options)
    assert len(cells(runs)) == 2


@pytest.mark.processes  # runs that have ended tell --notify
@pytest.mark.parametrize("options", [*CHANGES_NOTHING, *CHANGES_MEASUREMENT])
def test_a_study_has_other_settings_after_what_changes_its_measurement(
    options: dict[str, Any], tmp_path: Path
) -> None:
    before = write_run(tmp_path / "before", model="/m")
    now = write_run(tmp_path / "now", model="/m", **options)
    words = _difference(MeasuredRun.read(before.path), now.load_config())
    if options in CHANGES_NOTHING:
        assert words == ""
    else:
        assert next(iter(options)) in words


def test_costs_depend_on_what_changes_the_speed() -> None:
    """But for the sizes that a plan computes with."""
    assert {"model", "precision", "partition", "shard", "lora"} <= set(COST_FIELDS)
    sizes = {"nodes", "nproc_per_node", "batch_size", "epochs", "max_steps"}
    assert not sizes & set(COST_FIELDS)
    assert not {"learning_rate", "seed", "time", "notify"} & set(COST_FIELDS)


def test_sizes_that_memory_has_decided_are_cells(tmp_path: Path) -> None:
    for number, size in enumerate((8, 8, 4)):
        path = tmp_path / str(number)
        write_run(path, batch_size="auto", result={"batch_size": size})
    runs, _ = find([tmp_path])
    assert varied(runs) == ["batch_size"]
    assert [len(cell) for cell in cells(runs)] == [2, 1]
