"""What two runs must not both write: the combinations of their outputs. What comes of it for
programs that run is in tests/programs/test_own_program.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurmft.cluster import shared_outputs, status
from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.errors import UsageError
from slurmft.core.program import OWN, PREDICT, Program
from slurmft.runs.rundir import RunDir


@pytest.fixture(autouse=True)
def _all_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    def statuses(runs: list[Any]) -> list[Any]:
        facts = {"is_alive": True, "is_sure": True, "job": "7", "elsewhere": ""}
        return [SimpleNamespace(run=run, state="running", **facts) for run in runs]

    monkeypatch.setattr(status, "run_statuses", statuses)


def config(folder: Path, kind: str, settings: dict[str, Any]) -> RunConfig:
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
