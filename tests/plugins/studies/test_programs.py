"""Studies of programs of the user's own: placeholders, arrays, reports; no Slurm."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from slurmft.cluster.job_state import Report
from slurmft.core.errors import UsageError
from slurmft.core.files import write_json
from slurmft.plugins.studies import runner, spec
from slurmft.plugins.studies.commands import report
from slurmft.programs.description import OwnProgram
from tests.conftest import slurmft
from tests.plugins.studies.test_study import FakeSlurm, fake, run, runs_of
from tests.support.made_runs import write_run

__all__ = ["fake"]

FIT = """\
import argparse, json, os, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--seed", type=int)
parser.add_argument("--out", type=pathlib.Path)
asked = parser.parse_args()
asked.out.parent.mkdir(exist_ok=True)
score = 10 * asked.lr + asked.seed / 1000
asked.out.write_text(json.dumps({"score": score, "error": asked.lr / 1000, "name": "x"}))
"""
"""Writes its result to a file; knows nothing of slurmft."""

FILE = """\
name = "fits"
repeats = 2
[program]
command = "fit.py --lr {lr} --seed {seed} --out 'out/{lr}-{seed}.json'"
per = "node"
result_file = "out/{lr}-{seed}.json"
[grid]
lr = [0.1, 0.01]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one of the program, where the study is run from."""
    folder = tmp_path / "work"  # a home is not copied
    folder.mkdir()
    (folder / "fit.py").write_text(FIT)
    (folder / "fits.toml").write_text(FILE)
    monkeypatch.chdir(folder)
    return folder


def read(folder: Path, text: str) -> spec.Study:
    return spec.parse_study(text, folder / "s.toml")


def settings_of(folder: Path, text: str) -> list[dict[str, Any]]:
    """Of the programs, in the order of the rounds."""
    found = runner.configurations(read(folder, text), folder / "s")
    return [config.program.settings for config in found.values()]


def test_every_run_has_its_placeholders_filled_in(folder: Path) -> None:
    found = settings_of(folder, FILE)
    assert [list(s["argv"][2:]) for s in found] == [
        ["--lr", lr, "--seed", seed, "--out", f"out/{lr}-{seed}.json"]
        for seed in ("42", "43")
        for lr in ("0.1", "0.01")
    ]
    assert [s["result_file"] for s in found][:2] == [
        "out/0.1-42.json",
        "out/0.01-42.json",
    ]
    assert {(s["per"], s["folder"]) for s in found} == {("node", str(folder))}


def test_words_stay_words_and_braces_may_be_meant(folder: Path) -> None:
    text = """name = "s"
repeats = 1
[program]
command = ["fit.py", "{text}", "{{{n:03d}}}", "{repeat}", 7]
checkpoint_dir = "out"
resume_args = "--from {latest} --n {n}"
[fixed]
nodes = 2
[[cells]]
text = "two words; $HOME"
n = 5
"""
    (found,) = settings_of(folder, text)
    assert list(found["argv"][2:]) == ["two words; $HOME", "{005}", "1", "7"]
    assert found["resume_args"] == "--from {latest} --n 5"


def test_options_of_the_job_stay_options(folder: Path) -> None:
    text = FILE.replace("[grid]", "[fixed]\ntime = 9\n[grid]\nnodes = [1, 2]")
    text = text.replace("--out 'out/{lr}-{seed}.json'", "--nodes {nodes}").replace(
        "{lr}-{seed}.json", "{lr}-{nodes}-{seed}.json"
    )
    found = runner.configurations(read(folder, text), folder / "s")
    jobs = [config.job for config in found.values()][:4]
    assert [job.nodes for job in jobs] == [1, 1, 2, 2]
    assert {(job.time, job.job_name) for job in jobs} == {("9", "fits")}
    words = [config.program.settings["argv"][-1] for config in found.values()]
    assert words[:4] == ["1", "1", "2", "2"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("--lr {lr}", "--lr {rate}", ["has {rate}", "what varies is lr", "add rate = [...]"]),
        ("--lr {lr}", "--lr {", ["'{'", "write {{ and }}"]),
        ("--lr {lr}", "--lr {lr:99999999}", ["wider than 1000", "fewer digits"]),
        ("--lr {lr}", "--lr {}", ["has {}", "{{ for a {"]),
        ("[grid]", "[grid]\nnode = [1]", ["node varies", "no {node}", "did you mean nodes?"]),
        ("[grid]", "[grid]\nx9y = [1]", ["x9y varies", "write {x9y} into command"]),
        ("[grid]", "[grid]\nper = ['node']", ["[grid] varies per, but [program] has per"]),
        ("[grid]", "[grid]\nseed = [1]", ["varies seed", "seeds of their own"]),
        ("[grid]", "[grid]\nrepeat = [1]", ["varies repeat", "1 to repeats"]),
        ("[grid]", "[fixed]\nepochs = 2\n[grid]", ["epochs = 2", "no training", "in command"]),
        ("[grid]", "[fixed]\nx = 2\n[grid]", ["unknown key 'x'"]),
        ("[grid]", "[fixed]\nruns_dir = 'x'\n[grid]", ["unknown key 'runs_dir'"]),
        ("lr = [0.1, 0.01]", "lr = [[1], [2]]", ["lr: [1] is no text, number"]),
        ('per = "node"', 'pre = "node"', ["unknown key 'pre'", "did you mean per?"]),
        ('command = "', 'command = "\'', ["No closing quotation"]),
        ('command = "fit.py', "command = []  # ", ["command must be words"]),
        ('command = "fit.py', 'x = "fit.py', ["command must be words, or one text, not None"]),
        ('per = "node"', 'per = "{lr}"', ["the cell 'lr=0.1'", "unknown --per '0.1'"]),
        ("fit.py", "gone.py", ["the cell 'lr=0.1'", "no such program: 'gone.py'"]),
        ("{lr}-{seed}.json\"", 'all.json"', ["would share result_file", 'out/{lr}-{seed}"']),
        ("--lr {lr}", "--lr {lr:d}", ["cannot be filled", "'d'"]),
    ],
)  # fmt: skip
def test_mistakes_submit_nothing(
    old: str, new: str, words: list[str], fake: FakeSlurm, folder: Path
) -> None:
    assert old in FILE
    (folder / "s.toml").write_text(FILE.replace(old, new))
    with pytest.raises(UsageError) as caught:
        run()
    assert [w for w in words if w not in str(caught.value)] == [], str(caught.value)
    assert len(str(caught.value).splitlines()) <= 2
    assert fake.submitted == []
    assert not (folder / "studies").exists()


def test_flags_of_trainings_are_refused(fake: FakeSlurm, folder: Path) -> None:
    with pytest.raises(UsageError, match=r"epochs = 3, but \[program\] is no training"):
        run("--epochs", "3", file="fits.toml")


@pytest.mark.processes
def test_a_round_is_an_array(fake: FakeSlurm, folder: Path) -> None:
    assert run("--partition", "batch", file="fits.toml") == 0
    assert fake.option("array") == ["0-1%1", "0-1%1"]
    assert fake.option("dependency") == [None, "afterany:10"]
    assert fake.option("partition") == ["batch"] * 2
    runs = runs_of(Path("studies/fits"))
    assert set(runs) == {"10_0", "10_1", "20_0", "20_1"}
    config = runs["20_1"].load_config()
    assert config.submission.study == {
        "name": "fits",
        "cell": {"lr": 0.01},
        "repeat": 2,
    }
    assert config.program.settings["argv"][3:6] == ["0.01", "--seed", "43"]
    assert run("--partition", "batch", file="fits.toml") == 0
    assert len(fake.submitted) == 2


@pytest.mark.processes
def test_a_study_after_a_run(fake: FakeSlurm, folder: Path) -> None:
    """All its arrays wait for it; again, when that has ended: the same settings."""
    before = write_run(Path("runs/prepare"), state="running")
    write_json(before.job, {"cluster": "slurm", "id": "5"})
    assert run("--after", "last", file="fits.toml") == 0
    assert fake.option("dependency") == ["afterok:5", "afterok:5,afterany:10"]
    assert fake.option("kill-on-invalid-dep") == ["yes"] * 2
    before.set_state("failed", "boom", 1)
    fake.states["5"] = Report(name="FAILED", exit_code=1)
    with pytest.raises(UsageError, match="--after prepare: that run is failed: boom"):
        run("--after", "last", file="fits.toml")
    assert run(file="fits.toml") == 0
    assert len(fake.submitted) == 2


@pytest.mark.extra("studies")
def test_here_from_start_to_report(folder: Path) -> None:
    """Really run; again: nothing; its metrics in status, report and a comparison."""
    done = slurmft("study", "run", "fits.toml", "--cluster", "local")
    assert done.code == 0, done.err
    assert "0.42" not in done.err
    again = slurmft("study", "run", "fits.toml", "--cluster", "local")
    assert (again.code, "begins" in again.out) == (0, False), again.err
    status = slurmft("study", "status", "fits.toml").out
    line = next(line.split() for line in status.splitlines() if line.startswith("0.01"))
    assert line[1] == "2"
    assert line[-2:] == ["0.1425", "1e-05"]
    facts = json.loads(slurmft("study", "status", "fits.toml", "--json").out)
    assert facts["repeats"][0]["metrics"] == {"score": 1.042, "error": 0.0001}
    text = slurmft("report", "studies/fits", "--output", "r", "--format", "text").out
    assert "samples" not in text
    assert "phases" not in text
    first = text.partition("\n- ")[0]  # the second table is of what the runs cost
    rows = [
        line.split() for line in first.splitlines() if line.startswith(("0.01", "0.1"))
    ]
    assert [(r[0], r[2], r[5], r[7]) for r in rows] == [
        ("0.01", "2", "0.1425", "0.00001000"),
        ("0.1", "2", "1.0425", "0.00010000"),
    ]
    assert {"fits-metric-score.svg", "fits-wall-s.svg"} <= {
        p.name for p in (folder / "r").iterdir()
    }
    assert "score over lr" in (folder / "r" / "fits-metric-score.svg").read_text()
    by_cell: dict[str, list[str]] = {}
    for path in sorted((folder / "studies" / "fits" / "runs").glob("[!.]*")):
        by_cell.setdefault(path.name.split("-")[3], []).append(str(path))
    done = slurmft("report", by_cell["c1"][0], by_cell["c2"][0], "--compare")
    assert done.code == 0, done.err
    assert "lr  0.1  ->  0.01" in done.out
    assert "A 1.0420; B 0.1420" in done.out


def write_own(
    path: Path, *words: str, score: float = 0.5, result_file: str = ""
) -> None:
    """A finished run of a program of the user's own."""
    run = write_run(path)
    config = run.load_config()
    argv = ("/venv/bin/python3", "/x/fit.py", *words)
    own = OwnProgram(
        argv=argv, file=argv[1], folder="/x", result_file=result_file or None
    )
    run.config.write_text(
        dataclasses.replace(config, program=own.program("fit")).to_json()
    )
    result = {"metrics": {"score": score}, "primary_metric": "score", "phases_s": {}}
    write_json(
        run.result,
        result | {"world_size": 2, "nodes": 1, "steps": None, "wall_s": 60.0},
    )


def test_runs_of_no_study_are_told_apart_by_their_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Repeats have other seeds and result files; a training is in a table of its own."""
    for lr, score in (("0.1", 0.5), ("0.2", 0.75)):
        for seed in ("1", "2", "3"):
            words = (
                "data.csv",
                "--lr",
                lr,
                f"--seed={seed}",
                "--fast",
                "--out",
                f"{lr}-{seed}",
            )
            noisy = score + int(seed) / 1000
            write_own(
                tmp_path / lr / seed, *words, score=noisy, result_file=f"{lr}-{seed}"
            )
    write_run(tmp_path / "training")
    assert report.main([str(tmp_path), "--format", "csv"]) == 0
    own, training = capsys.readouterr().out.split("# ")[1:]
    rows = list(csv.DictReader(own.splitlines()[1:]))
    assert [(r["--lr"], r["n"], r["metric_score"]) for r in rows] == [
        ("0.1", "3", "0.502"),
        ("0.2", "3", "0.752"),
    ]
    assert not {"--seed", "--out", "--fast", "command"} & rows[0].keys()
    assert "train_samples_per_s" in training
    assert (
        report.main(
            [str(tmp_path / "0.1"), str(tmp_path / "0.2"), "--compare", "--json"]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["differences"] == [{"name": "--lr", "a": "0.1", "b": "0.2"}]
    time, score = found["findings"]
    assert time["verdict"].startswith("no difference beyond noise")
    assert score["verdict"].startswith("B is higher by 0.2500")
