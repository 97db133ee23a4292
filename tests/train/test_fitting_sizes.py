"""What memory has held in earlier runs of a model: whoever submits or plans the next is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurmft.core.decode import read
from slurmft.core.files import write_json
from slurmft.core.run_files import SampleLimits
from slurmft.plugins.studies.scaling.series import series_of
from slurmft.runs.rundir import RunDir
from slurmft.runs.scan import MeasuredRun
from slurmft.train.commands import submit
from slurmft.train.login import fitting_sizes
from tests.support.made_runs import write_run

EARLIER = "earlier-20261120-120000-aaaaaa"
HELD = f"memory of {EARLIER}, a run of this model, held "


@pytest.fixture
def earlier(tmp_path: Path) -> RunDir:
    run = write_run(tmp_path / EARLIER, model="/m", batch_size=8, eval_batch_size=16)
    write_json(run.memory, {"train_samples": 2, "evaluate_samples": 4})
    return run


def notes(folder: Path, **fields: Any) -> list[str]:
    """Returns the notes on a submission to the same folder."""
    values: dict[str, Any] = {"model": "/m", "batch_size": 8, "eval_batch_size": 16}
    values |= fields
    return fitting_sizes.notes(write_run(folder / "next", **values).load_config())


@pytest.mark.parametrize(
    "fields",
    [{}, {"batch_size": 3, "eval_batch_size": 1}, {"batch_size": 1, "nodes": 4}],
)
def test_larger_batches(
    tmp_path: Path, earlier: RunDir, fields: dict[str, Any]
) -> None:
    assert notes(tmp_path, **fields) == [
        f"{HELD}2 samples at a time of --batch-size 8, 4 samples at a time of "
        "--eval-batch-size 16"
    ]


@pytest.mark.parametrize(
    "fields", [{"batch_size": 2, "eval_batch_size": 4}, {"model": "/another"}]
)
def test_what_fits_and_other_models(
    tmp_path: Path, earlier: RunDir, fields: dict[str, Any]
) -> None:
    assert notes(tmp_path, **fields) == []


def test_newest_run_and_its_other_options(tmp_path: Path, earlier: RunDir) -> None:
    """A learning rate takes no memory."""
    newer = "a-20261121-120000-aaaaaa"
    run = write_run(
        tmp_path / newer, model="/m", batch_size=32, max_length=64, learning_rate=1e-3
    )
    write_json(run.memory, {"train_samples": 1})
    (note,) = notes(tmp_path, batch_size=64, max_length=32)
    assert note == (
        f"memory of {newer}, a run of this model, held 1 sample at a time of "
        "--batch-size 32; it had other values of --max-length"
    )
    run.memory.write_text("damaged")
    assert MeasuredRun.read(run.path).held_samples == {}


def test_folder_without_runs(tmp_path: Path) -> None:
    assert notes(tmp_path) == []


def test_plan_names_runs_whose_memory_was_too_small(
    tmp_path: Path, earlier: RunDir
) -> None:
    other = write_run(tmp_path / "other", model="/m", batch_size=8, eval_batch_size=16)
    runs = [MeasuredRun.read(run.path) for run in (earlier, other)]
    (series,) = series_of(runs).values()
    assert [note for note in series.notes if "memory" in note] == [
        f"memory of {EARLIER} held 2 samples at a time of --batch-size 8, 4 samples at a time "
        "of --eval-batch-size 16"
    ]


def test_submission_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside the JSON, which stays whole."""
    run = write_run(tmp_path / EARLIER, task="synthetic", batch_size=8)
    write_json(run.memory, {"train_samples": 2})
    words = ["--runs-dir", str(tmp_path), "--batch-size", "8", "--cluster", "local"]
    assert submit.main([*words, "--dry-run", "--json"]) == 0
    printed = capsys.readouterr()
    assert f"note: {HELD}2 samples at a time of --batch-size 8" in printed.err
    assert json.loads(printed.out)["program"]


def test_a_folder_that_is_closed_is_passed_over(
    tmp_path: Path, earlier: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of others lie in the same folder."""
    closed = write_run(tmp_path / "closed-20261123-120000-aaaaaa", model="/m")
    own = RunDir.is_own
    monkeypatch.setattr(
        RunDir, "is_own", lambda run: run.path != closed.path and own(run)
    )
    exists = Path.exists

    def exists_or_denied(path: Path) -> bool:
        if path.parent == closed.path:
            raise PermissionError(13, "Permission denied", str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", exists_or_denied)
    config = earlier.load_config()
    assert fitting_sizes.remembered(config) == 2
    settings = config.program.settings | {"batch_size": 8}
    larger = replace(config, program=replace(config.program, settings=settings))
    assert len(fitting_sizes.notes(larger)) == 1


def test_size_that_auto_begins_with(tmp_path: Path, earlier: RunDir) -> None:
    """The newest finished run of the model knows it; a number in a submission is compared."""
    config = earlier.load_config()
    held = read(earlier.memory, SampleLimits)
    assert held is not None
    assert fitting_sizes.remembered(config) == held.train_samples
    settings = config.program.settings | {"model": "another"}
    other = replace(config, program=replace(config.program, settings=settings))
    assert fitting_sizes.remembered(other) is None
    asks = config.program.settings | {"batch_size": "auto", "eval_batch_size": 4}
    auto = replace(config, program=replace(config.program, settings=asks))
    assert fitting_sizes.notes(auto) == []
