"""Where the time of runs went, by the files that they have left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slurmft.cluster import status, time_use
from slurmft.core.files import write_json
from slurmft.core.run_files import Transition
from slurmft.runs.rundir import RunDir
from slurmft.runs.scan import MeasuredRun
from slurmft.show import time_use as show_time_use
from slurmft.show.time_use import LABELS
from tests.support.made_runs import write_run

T0 = 1_000_000.0


def made_run(path: Path, end: str, **values: Any) -> RunDir:
    """A run of 100 s: it trains from 20 on, and has its only checkpoint at 60."""
    run = write_run(path, state=end, **values)
    history = [
        Transition(state="submitted", time=T0),
        Transition(state="running", time=T0 + 10, attempt=1),
        Transition(state=end, time=T0 + 100, exit_code=1),
    ]
    if end == "running":
        history.pop()
    state = json.loads(run.state.read_text())
    rows = [{"state": t.state, "time": t.time, "attempt": t.attempt} for t in history]
    write_json(run.state, state | rows[-1] | {"history": rows})
    records: list[tuple[float, dict[str, Any]]] = [
        (15, {"event": "met", "attempt": 1}),
        (20, {"event": "start", "total_steps": 100}),
        (30, {"event": "step", "step": 10}),
        (60, {"event": "step", "step": 40}),
        (60, {"event": "phase", "phase": "save"}),
        (60, {"event": "checkpoint", "checkpoint": "step-00000040", "step": 40}),
        (100, {"event": "step", "step": 80}),
    ]
    lines = [json.dumps({"time": T0 + seconds} | record) for seconds, record in records]
    run.records.write_text("\n".join(lines) + "\n")
    return run


@pytest.mark.parametrize("folder", ["", "empty", "checkpoint"])
def test_steps_are_kept_by_the_newest_checkpoint(tmp_path: Path, folder: str) -> None:
    """Without the folder, as in a run that `slurmft pull` has fetched, the records say which."""
    run = made_run(tmp_path / "a", "failed")
    kept_s = 40.0
    if folder:
        run.checkpoints.mkdir()
    if folder == "checkpoint":
        (run.checkpoints / "step-00000020").mkdir()
        kept_s = 20
    if folder == "empty":
        kept_s = 0
    use = time_use.of_records(MeasuredRun.read(run.path))
    assert use["steps_s"] == pytest.approx(kept_s)
    assert use["lost_s"] == pytest.approx(80 - kept_s)


def test_a_run_that_nobody_can_be_asked_about_ends_with_its_last_record(
    tmp_path: Path,
) -> None:
    run = made_run(tmp_path / "a", "running")
    write_json(run.job, {"cluster": "elsewhere", "id": "7"})
    (run_status,) = status.run_statuses([MeasuredRun.read(run.path)])
    assert (run_status.is_alive, run_status.is_sure) == (True, False)
    use = time_use.of_status(run_status)
    assert (use["total_s"], use["steps_s"]) == (100, 80)


@pytest.mark.parametrize("begun", [True, False])
def test_a_prediction_has_no_ettr(tmp_path: Path, begun: bool) -> None:
    """What it does besides starting is its program's time, in no step that could be lost."""
    run = made_run(tmp_path / "a", "finished")
    config = json.loads(run.config.read_text())
    config["program"]["kind"] = "predict"
    write_json(run.config, config)
    if not begun:
        lines = run.records.read_text().splitlines()
        run.records.write_text(lines[0] + "\n")
    use = time_use.of_records(MeasuredRun.read(run.path))
    assert use["ettr"] is None
    assert (use["steps_s"], use["evaluations_s"]) == (0, 0)
    values: dict[str, Any] = dict(use)
    assert sum(values[key] for key in LABELS) == use["total_s"] == 100
    assert "ETTR" not in show_time_use.words(use)
