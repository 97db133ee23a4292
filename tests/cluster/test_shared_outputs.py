"""What two runs must not both write: the combinations of their outputs. What comes of it for
programs that run is in tests/programs/test_own_program.py."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurmft.cluster import shared_outputs, status
from slurmft.core import plugins
from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.errors import SlurmftWarning, UsageError
from slurmft.core.program import OWN, PREDICT, Program
from slurmft.runs.rundir import RunDir

PROGRAM = {"argv": ["/usr/bin/python3", "train.py"], "file": "train.py", "folder": "/"}
"""Settings of a program of the user's own."""


@pytest.fixture(autouse=True)
def _all_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    def statuses(runs: list[Any]) -> list[Any]:
        facts = {"is_alive": True, "is_sure": True, "job": "7", "elsewhere": ""}
        return [SimpleNamespace(run=run, state="running", **facts) for run in runs]

    monkeypatch.setattr(status, "run_statuses", statuses)


def config(folder: Path, kind: str, settings: dict[str, Any]) -> RunConfig:
    if kind == OWN:
        settings = PROGRAM | settings
    program = Program(kind=kind, name="x", module="x", settings=settings)
    return RunConfig(program=program, job=JobConfig(runs_dir=str(folder / "runs")))


@pytest.mark.parametrize(
    ("kind", "settings", "refusal"),
    [
        (PREDICT, {"output": "a.csv"}, "only one of them could write it"),
        (PREDICT, {"output": "b.csv"}, None),
        (OWN, {"result_file": "a.csv"}, "each would take the other's for its own"),
        (OWN, {"checkpoint_dir": "a.csv"}, "each would take the other's for its own"),
        (OWN, {"checkpoint_dir": ""}, None),
        ("train", {"output": "a.csv"}, None),
    ],
)
def test_output_of_a_prediction_under_way(
    tmp_path: Path, kind: str, settings: dict[str, str], refusal: str | None
) -> None:
    run = RunDir.create(config(tmp_path, PREDICT, {"output": str(tmp_path / "a.csv")}))
    run.set_state("running")
    absolute = {key: str(tmp_path / name) for key, name in settings.items() if name}
    second = config(tmp_path, kind, absolute)
    if refusal is None:
        shared_outputs.check(second)
        return
    with pytest.raises(UsageError, match=refusal) as raised:
        shared_outputs.check(second)
    assert run.path.name in raised.value.message


@pytest.mark.parametrize(
    ("first", "second", "is_refused"),
    [
        ("out", "out", True),
        ("out", "out/seed-2", True),
        ("out/seed-2", "out", True),
        ("out/seed-2", "out/seed-20", False),
        ("out", "output", False),
    ],
)
def test_folders_of_checkpoints(
    tmp_path: Path, first: str, second: str, is_refused: bool
) -> None:
    """One that lies in another one may be taken for a checkpoint."""
    settings = [{"checkpoint_dir": str(tmp_path / name)} for name in (first, second)]
    RunDir.create(config(tmp_path, OWN, settings[0])).set_state("running")
    if not is_refused:
        shared_outputs.check(config(tmp_path, OWN, settings[1]))
        return
    with pytest.raises(UsageError, match="each would take the other's for its own"):
        shared_outputs.check(config(tmp_path, OWN, settings[1]))


@pytest.mark.parametrize("launcher", plugins.entries(plugins.LAUNCHERS))
@pytest.mark.parametrize("state", ["finished", "failed", None])
def test_a_new_run_is_warned_of_earlier_checkpoints(
    tmp_path: Path, launcher: str, state: str | None
) -> None:
    """Whose they are, how new, and what to type; were they of no run that is left."""
    (tmp_path / "out/checkpoint-20").mkdir(parents=True)
    (tmp_path / "out/checkpoint-20/model.bin").write_bytes(b"weights")
    (tmp_path / "out/plots").mkdir()
    settings = {"checkpoint_dir": "out", "folder": str(tmp_path)}
    first = config(tmp_path, OWN, settings)
    if state is not None:
        earlier = RunDir.create(first)
        earlier.set_state(state)
    job = dataclasses.replace(first.job, cluster=launcher)
    with pytest.warns(
        SlurmftWarning, match="'out' holds 1 checkpoint already"
    ) as found:
        shared_outputs.check(dataclasses.replace(first, job=job))
    [text] = [str(warning.message) for warning in found]
    assert "the newest, 'checkpoint-20', was written " in text
    assert "hint: to keep them, give this run another folder" in text
    if state is not None:
        assert (
            f"the last run with this folder is {earlier.path.name!r} ({state})" in text
        )
    assert ("slurmft resume" in text) == (state == "failed")


@pytest.mark.parametrize(
    "entries", [[], ["data/train.csv"], ["plots/1.png", "log.txt"]]
)
def test_a_new_run_is_not_warned_of_what_is_no_checkpoint(
    tmp_path: Path, entries: list[str]
) -> None:
    (tmp_path / "out").mkdir()
    for entry in entries:
        path = tmp_path / "out" / entry
        path.parent.mkdir(exist_ok=True)
        path.write_text("1")
    settings = {"checkpoint_dir": "out", "folder": str(tmp_path)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shared_outputs.check(config(tmp_path, OWN, settings))
