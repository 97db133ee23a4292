"""Reading runs back from their directories."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from slurmft.core import terminal
from slurmft.core.errors import UsageError
from slurmft.core.files import write_json
from slurmft.core.run_files import Rank, StudyEntry
from slurmft.core.run_records import Step
from slurmft.runs import scan
from slurmft.runs.scan import MeasuredRun, find
from tests.support.made_runs import write_run


def test_runs_are_found_at_any_depth_oldest_first(tmp_path: Path) -> None:
    write_run(
        tmp_path / "b" / "deep" / "new",
        submission={"time": "2026-11-21T11:00:00+00:00"},
    )
    write_run(tmp_path / "a" / "old", submission={"time": "2026-11-21T09:00:00+00:00"})
    (tmp_path / "notes").mkdir()
    runs, problems = find([tmp_path, tmp_path / "a" / "old"])
    assert [run.name for run in runs] == ["old", "new"]
    assert problems == []


def test_folders_within_folders_and_links_that_lead_nowhere(tmp_path: Path) -> None:
    """A thousand folders in each other would take minutes."""
    write_run(tmp_path / "a" / "good")
    for name in ("absent", "config.json"):  # it leads nowhere, or to itself
        odd = tmp_path / "b" / f"to {name}"
        odd.mkdir(parents=True)
        (odd / "config.json").symlink_to(name)
    (tmp_path / "/".join(["deep"] * 100)).mkdir(parents=True)
    runs, problems = find([tmp_path])
    assert [run.name for run in runs] == ["good"]
    assert len(problems) == 3
    assert sum("config.json' cannot be read: " in problem for problem in problems) == 2
    assert sum("it is 32 folders down" in problem for problem in problems) == 1


def test_a_long_search_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(terminal, "_PROGRESS_EVERY_S", -1.0)
    monkeypatch.setattr(terminal, "overwritten", lines.append)
    write_run(tmp_path / "a" / "run")
    find([tmp_path])
    assert lines == [
        f"searching {str(tmp_path)!r} for runs: 1 folders",
        f"searching {str(tmp_path)!r} for runs: 2 folders",
        f"searching {str(tmp_path)!r} for runs: 3 folders",
        "",
        "reading runs: 1",
        "",
    ]


def test_what_a_run_says_of_itself(tmp_path: Path) -> None:
    study: dict[str, Any] = {"name": "lab", "cell": {"nodes": 2}, "repeat": 1}
    write_run(tmp_path / "r", nodes=2, nproc_per_node=2, submission={"study": study})
    run = MeasuredRun.read(tmp_path / "r")
    assert (run.is_finished, run.has_ended, run.study) == (
        True,
        True,
        StudyEntry(**study),
    )
    assert (run.value("nodes"), run.value("task"), run.value("no_such")) == (
        2,
        "synthetic",
        None,
    )
    assert run.hosts == ["n1", "n2"]
    assert run.code == "0.1 0123456789"
    assert [step.step for step in run.records(Step)] == list(range(1, 21))


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", '{"train": {'),
        ("config.json", '{"architectures": ["BertModel"]}'),
        ("result.json", '{"metrics": {"accu'),
        ("result.json", '{"accuracy": 1}'),
    ],
)
def test_half_written_and_foreign_files_are_named(
    tmp_path: Path, file: str, text: str
) -> None:
    write_run(tmp_path / "good")
    bad = write_run(tmp_path / "bad")
    (bad.path / file).write_text(text)
    runs, problems = find([tmp_path])
    assert [run.name for run in runs] == ["good"]
    assert len(problems) == 1
    assert f"bad/{file}" in problems[0]


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_a_folder_without_runs_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=name):
        find([tmp_path / name])


def test_links_make_no_repeats(tmp_path: Path) -> None:
    """A link to the newest run, links in a circle, one folder given by two names."""
    write_run(tmp_path / "r")
    (tmp_path / "latest").symlink_to("r")
    (tmp_path / "circle").symlink_to(".")
    (tmp_path / "itself").symlink_to("itself")
    runs, problems = find([tmp_path, tmp_path / "r" / "..", tmp_path / "latest"])
    assert [run.name for run in runs] == ["r"]
    assert problems == []


def test_closed_folders_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "good")
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def scan(path: Path) -> Any:
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan)
    runs, problems = find([tmp_path])
    assert [run.name for run in runs] == ["good"]
    assert problems == [f"'{tmp_path / 'closed'}' cannot be read: Permission denied"]


def test_damaged_files_count_as_absent(tmp_path: Path) -> None:
    odd = write_run(tmp_path / "odd", submission={"git": None})
    odd.state.write_text('{"reason": "no state"}')
    odd.environment.write_text('{"ranks": [1, {"rank": 0}], "versions": []}')
    rank = Rank(rank=0, host="n1", node="the first")
    assert rank.node_number == 0
    ((run,), _) = find([tmp_path])
    reason = "state.json is damaged: history, state, time missing"
    assert (run.state.state, run.state.reason) == ("unknown", reason)
    assert (run.study, run.hosts, run.code) == (None, [], "0.1")


def test_runs_that_one_waits_for_are_names(tmp_path: Path) -> None:
    write_run(tmp_path / "good")
    odd = write_run(tmp_path / "odd")
    config = json.loads(odd.config.read_text())
    config["job"]["after"] = 5
    write_json(odd.config, config)
    runs, (problem,) = find([tmp_path])
    assert [run.name for run in runs] == ["good"]
    assert problem.endswith(
        "is not the configuration of a run: job: after: 5 is no list"
    )


def test_run_without_a_configuration_is_named(tmp_path: Path) -> None:
    write_run(tmp_path / "good")
    odd = write_run(tmp_path / "odd", submission={"time": 5, "git": "abc"})
    runs, problems = find([tmp_path])
    assert [run.name for run in runs] == ["good"]
    assert problems == [
        f"{str(odd.config)!r} is not the configuration of a run: submission: time: 5 is no str"
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a link away")
def test_links_of_others_are_searched_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "_MOST_FOLDERS_OF_OTHERS", 3)
    for number in range(9):
        (tmp_path / "disk" / str(number)).mkdir(parents=True)
    for number in range(9):  # folders with runs do not count
        write_run(tmp_path / "old" / f"run-{number}")
    top = tmp_path / "runs"
    write_run(top / "mine")
    for name in ("disk", "old"):
        (top / name).symlink_to(tmp_path / name)
        os.chown(top / name, 1001, 1001, follow_symlinks=False)
    runs, problems = find([top])
    assert len(runs) == 10
    (problem,) = problems
    assert f"{str(top / 'disk')!r}, which another user has made, is not" in problem
    os.chown(top / "disk", 0, 0, follow_symlinks=False)
    assert find([top])[1] == []
