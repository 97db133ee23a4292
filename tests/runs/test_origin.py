"""Runs that came from elsewhere: the mark, what they would execute, and the yes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slurmft.core.errors import UsageError
from slurmft.runs import origin
from slurmft.runs.origin import ForeignRunError, Origin
from slurmft.runs.rundir import RunDir
from tests.support.made_runs import write_run

LAB = Origin(cluster="lab", path="/runs/r", owner="eve", user="ada", time=1e9)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = write_run(tmp_path / "r", state="failed", setup=("module load a", "touch b"))
    config = made.load_config()
    job = config.job.replaced({"notify_command": "mail me"})
    made.config.write_text(replace(config, job=job).to_json())
    origin.mark(made.path, LAB)
    return made


def test_nothing_acts_on_a_run_from_elsewhere(run: RunDir) -> None:
    assert not run.is_own()
    with pytest.raises(ForeignRunError, match=r"came from elsewhere \(lab:/runs/r"):
        run.load_own_config()
    assert run.load_config().job.setup  # it is shown all the same
    (run.path / origin.NAME).write_text("{")  # damaged, it is a mark, too
    assert not run.is_own()


def test_a_run_within_one_from_elsewhere_came_with_it(run: RunDir) -> None:
    inner = write_run(run.path / "code" / "inner")
    assert not inner.is_own()
    beside = write_run(run.path.parent / "beside")
    assert beside.is_own()


def test_the_yes_names_what_is_executed(run: RunDir) -> None:
    lines = origin.executed(run.load_config())
    assert lines["setup"] == ["--setup 'module load a'", "--setup 'touch b'"]
    assert lines["notify-command"] == ["--notify-command 'mail me'"]
    assert lines["program"] == ["python -m slurmft.train.rank"]
    for names in ([], ["program"], [*lines, "env"]):
        with pytest.raises(UsageError, match="but the run executes"):
            origin.accept(run.path, lines, names)
    assert not run.is_own()
    origin.accept(run.path, lines, [*lines])
    assert run.is_own()
    assert origin.origin_of(run.path) == replace(LAB, accepted=sorted(lines))
    origin.mark(run.path, LAB)  # fetched again, it may have other files
    assert not run.is_own()
