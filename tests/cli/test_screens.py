"""What commands show on terminals of 80 and of 60 columns."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from slurmft.cli import clean, help_pages
from slurmft.cli import list as list_command
from slurmft.cluster import cleanup
from slurmft.core.errors import SlurmftError, UsageError
from slurmft.core.files import write_json
from slurmft.core.run_files import Failure
from slurmft.plugins.examine import checks
from slurmft.runs.rundir import RunDir
from slurmft.show.progress import metrics_words
from tests.support.made_runs import write_run
from tests.support.terminal import Terminal

pytestmark = pytest.mark.processes

HEADS = {
    60: ["run", "state", "result"],
    80: ["run", "job", "state", "data", "model", "result"],
    140: ["run", "job", "state", "data", "model", "steps", "samples/s", "result"],
}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A run of each kind; the paths in them are long."""
    found, long = tmp_path / "runs", "/gpfs/projects/a-very-long-name"
    write_run(found / "synthetic-20261120-093012-a1b2c3", task="synthetic")
    named = write_run(
        found / "bert-small-20261121-174409-9c1d80", task="text-classification", state="failed",
        data=f"{long}/tickets", model=f"{long}/distilbert", text_column="a", label_column="b",
    )  # fmt: skip
    cause = SlurmftError(f"the disk of {long}/tickets/cache is full", f"free {long}")
    named.add(Failure.of("rank 3 on n4", cause, attempt=1))
    named.state.unlink()
    named.set_state("failed", f"{cause.message} (rank 3 on n4)", 1)
    write_json(named.job, {"cluster": "slurm", "id": "8123"})
    write_run(found / "emotion-20261121-180233-77ab78", task="emotion", state="running")
    return found


@pytest.mark.parametrize("columns", HEADS)
def test_list(runs: Path, columns: int) -> None:
    screen = Terminal("list", "--runs-dir", str(runs), columns=columns, PATH="")
    head, *lines = screen.shown()
    assert (screen.code, head.split()) == (0, HEADS[columns])
    assert len(lines) == 3  # none is wider than the screen
    assert [line.split()[0] for line in lines] == [
        "synthetic-20261120-093012", "bert-small-20261121-174409", "emotion-20261121-180233",
    ]  # fmt: skip
    result = lines[1][head.index("result") :]
    assert result.startswith("the disk of")
    if columns == 140:
        assert result == "the disk of .../cache is full"
        assert "8123  failed    tickets    distilbert" in lines[1]
    assert lines[0].endswith("accuracy 0.9000")


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_metrics_of_a_list_are_whole(
    columns: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where there is room for one alone, it is the one that decides."""
    metrics = {"accuracy": 0.5, "f1_macro": 0.3333, "loss": 0.6932}
    write_run(
        tmp_path / "text-classification-20261127-021210-a88d74",
        result={"metrics": metrics, "loss": 0.7},
        data="/home/ada/bewertungen.csv",
        model="/models/distilbert-base-uncased",
    )
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("PATH", "")
    assert list_command.main(["--runs-dir", str(tmp_path)]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert len(line) <= columns
    # Dots stand for those that have no room.
    result = line[head.index("result") :].removesuffix("  ...")
    # As in `status`, `follow` and the README.
    whole = metrics_words(metrics)
    assert whole == "accuracy 0.5000  f1_macro 0.3333  loss 0.6932"
    assert result.startswith("accuracy 0.5000")
    assert whole.startswith(f"{result}  ") or whole == result


@pytest.mark.parametrize("columns", [60, 80])
def test_pages_and_doctor_fit_the_terminal(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    help_pages.show("pages")
    lines = capsys.readouterr().out.splitlines()
    text = "a fact of many words, such as the free space of a file system " * 3
    lines += checks.lines([checks.ok("site file", text), checks.ok("runs", text)])
    assert max(map(len, lines)) <= columns


@pytest.mark.parametrize("columns", [60, 80])
def test_status(runs: Path, columns: int) -> None:
    name = "bert-small"
    screen = Terminal(
        "status", name, "--runs-dir", str(runs), columns=columns, lines=80, PATH=""
    )
    lines = screen.shown()
    text = " ".join(" ".join(lines).split())
    assert screen.code == 0
    assert "state failed: the disk of .../cache is full" in text
    assert text.count("(rank 3 on n4), attempt 1") == 1
    # A path is not broken: on a narrow screen it alone may go on in the next line.
    whole = [line for line in lines if len(line) >= columns and "/" not in line]
    assert whole == []


def test_list_sorts_and_filters(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    better = runs / "synthetic-20261122-000000-000000"
    metrics = {"accuracy": 0.7, "loss": 0.2}
    write_run(better, result={"metrics": metrics, "loss": 9.0}, data="hub/other")

    def names(*arguments: str) -> list[str]:
        assert list_command.main(["--runs-dir", str(runs), "--json", *arguments]) == 0
        found = json.loads(capsys.readouterr().out)["runs"]
        return [run["name"].split("-")[0] + run["name"][-2:] for run in found]

    assert names() == ["syntheticc3", "bert80", "emotion78", "synthetic00"]
    assert names("--sort", "accuracy")[-2:] == ["synthetic00", "syntheticc3"]
    assert names("--sort", "accuracy", "--reverse")[0] == "syntheticc3"
    for key in (
        "submitted",
        "state",
        "user",
        "task",
        "data",
        "model",
        "nodes",
        "left_s",
    ):
        assert len(names("--sort", key)) == 4
    # The validation's, which the table shows.
    worse = runs / "worse-20261122-000001-000000"
    write_run(worse, result={"metrics": {"loss": 0.5}, "loss": 0.1})
    assert names("--sort", "loss")[-2:] == ["synthetic00", "worse00"]
    assert names("--sort", "train_loss")[-1] == "synthetic00"
    shutil.rmtree(worse)
    assert names("--sort", "name") == [
        "bert80",
        "emotion78",
        "syntheticc3",
        "synthetic00",
    ]
    assert (
        names("--name", "BERT")
        == names("--data", "tick")
        == names("--model", "long*distil")
        == ["bert80"]
    )
    assert names("--data", "other", "--name", "synth") == ["synthetic00"]
    assert names("--name", "synth", "--newest", "1") == ["synthetic00"]
    assert names("--state", "failed") == ["bert80"]
    assert names("--user", "nobody") == []
    with pytest.raises(UsageError, match="unknown --sort 'acuracy'") as error:
        names("--sort", "acuracy")
    assert error.value.hint == "did you mean accuracy?"


def test_epochs_of_a_run_that_ends_early(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By what it did, not by what it was asked for."""
    run = write_run(
        runs / "short-20261123-000000-000000", max_steps=5, result={"epochs": 0.2344}
    )
    assert (
        list_command.main(["--runs-dir", str(runs), "--name", "short", "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["runs"][0]["epoch"] == 0.2344
    assert RunDir(run.path).load_config().program.settings["epochs"] > 1


def test_each_folder_that_cannot_be_read_has_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "good")
    for number in range(30):
        write_run(tmp_path / f"bad-{number:02}").config.write_text("{")
    assert list_command.main(["--runs-dir", str(tmp_path)]) == 0
    *lines, last = capsys.readouterr().err.splitlines()
    for number, line in enumerate(lines):
        assert line.startswith("warning: left out: ")
        assert f"bad-{number:02}" in line
    assert len(lines) == 20
    assert last == "warning: left out: 10 more; slurmft list --json has all"
    assert list_command.main(["--runs-dir", str(tmp_path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["problems"]) == 30


@pytest.mark.parametrize("columns", ["60", "200"])
def test_what_can_be_removed(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that has no room in its row has a line of its own, in one piece."""
    monkeypatch.setenv("COLUMNS", columns)
    path = Path("/gpfs/projects/a-very-long-name/runs/emotion-20261120-093012-a1b2c3")
    item = cleanup.Item(
        path, "tokens", "the run has finished", 10, re.compile(""), None
    )
    lines = clean.table(cleanup.Plan([item], [])).splitlines()
    is_narrow = columns == "60"
    assert (f"  {path}" in lines) == is_narrow
    assert len(lines) == 3 + 2 * is_narrow
