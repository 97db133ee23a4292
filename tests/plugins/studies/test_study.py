"""`slurmft study`: what it submits, what it leaves alone, what it refuses; without a Slurm."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurmft.cluster import job_state, launcher
from slurmft.cluster.job_state import Report
from slurmft.cluster.slurm import commands
from slurmft.core.errors import Exit, SlurmftError, UsageError
from slurmft.core.files import read_json, write_json
from slurmft.plugins.studies import spec
from slurmft.plugins.studies.commands import study
from slurmft.plugins.studies.folder import study_status
from slurmft.runs.rundir import RunDir
from slurmft.train.config import TrainConfig
from tests.conftest import slurmft
from tests.support import PATIENCE_S, until
from tests.support.models import write_emotion

pytestmark = pytest.mark.processes

FILE = """\
name = "s"
title = "Two shapes"
scaling = "weak"
repeats = 2
retries = 1
[fixed]
batch_size = 8
max_steps = 2
precision = "fp32"
[grid]
nodes = [1, 2]
"""


class FakeSlurm:
    """Takes arrays; tells of their tasks what a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.submitted: list[list[str]] = []
        self.scripts: list[str] = []
        self.cancelled: list[str] = []
        self.states: dict[str, Report] = {}
        self.refuse_from, self.never = 99, ""
        self.largest = 1001
        monkeypatch.setattr(launcher, "available", lambda: True)
        monkeypatch.setattr(commands, "sbatch", self.sbatch)
        monkeypatch.setattr(commands, "job_states", self.job_states)
        monkeypatch.setattr(commands, "never_starts", lambda job: self.never)
        monkeypatch.setattr(commands, "offers", lambda: "partitions here: none")
        monkeypatch.setattr(commands, "max_array_size", lambda: self.largest)
        monkeypatch.setattr(
            commands, "cancel", lambda *jobs: self.cancelled.extend(jobs)
        )

    def sbatch(self, arguments: Sequence[str], script: str) -> str:
        if len(self.submitted) >= self.refuse_from:
            raise commands.refusal("sbatch: error: QOSMaxSubmitJobPerUserLimit", 1)
        self.submitted.append(list(arguments))
        self.scripts.append(Path(script).read_text())
        return str(10 * len(self.submitted))

    def job_states(
        self, jobs: Sequence[str], only_queued: Sequence[str] = ()
    ) -> dict[str, Report]:
        default = Report(name="PENDING", reason="Dependency")
        return {j: s for j in jobs if (s := self.states.get(j, default)).name != "GONE"}

    def option(self, name: str) -> list[str | None]:
        """The values of an sbatch option, one for each array."""
        found = []
        for arguments in self.submitted:
            values = [
                a.partition("=")[2] for a in arguments if a.startswith(f"--{name}=")
            ]
            found.append(values[0] if values else None)
        return found


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeSlurm:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "a")
    (tmp_path / "s.toml").write_text(FILE)
    return FakeSlurm(monkeypatch)


def run(*arguments: str, file: str = "s.toml") -> int:
    return study.main(["run", file, *arguments])


def runs_of(folder: Path = Path("studies/s")) -> dict[str, RunDir]:
    """Job id -> run."""
    found = [RunDir(path) for path in (folder / "runs").glob("[!.]*")]
    return {(read_json(r.job) or {"id": r.path.name})["id"]: r for r in found}


def finish(run: RunDir) -> None:
    result = {
        "metrics": {},
        "phases_s": {},
        "world_size": 1,
        "nodes": 1,
        "steps": 2,
        "wall_s": 1,
    }
    write_json(run.result, result)
    run.set_state("running")
    run.set_state("finished", "", 0)


def fail(run: RunDir, reason: str = "rank 0 on n1: boom") -> None:
    run.set_state("running")
    write_json(run.attempt, {"number": 1, "job": "x", "hosts": [], "time": 0.0})
    run.set_state("failed", reason, 1)


def test_rounds_are_arrays_that_wait_for_each_other(
    fake: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--partition", "batch", "--setup", "true") == 0
    assert fake.option("array") == ["0-0%1"] * 4  # shapes differ in their request
    assert fake.option("nodes") == ["1", "2", "1", "2"]
    assert fake.option("dependency") == [None, *(f"afterany:{j}" for j in (10, 20, 30))]
    assert fake.option("partition") == ["batch"] * 4
    assert fake.option("job-name") == ["s"] * 4
    runs = runs_of()
    assert set(runs) == {"10_0", "20_0", "30_0", "40_0"}
    config = runs["40_0"].load_config()
    assert config.submission.study == {"name": "s", "cell": {"nodes": 2}, "repeat": 2}
    assert (TrainConfig.of(config.program).seed, config.job.cluster) == (43, "slurm")
    script = runs["40_0"].script.read_text()
    assert "submitit.core" not in script
    assert "/%A_%a_%t_log.out" in script
    assert str(runs["40_0"].submitit) in fake.scripts[3]
    assert Path("studies/s/study.toml").read_text() == FILE
    out = capsys.readouterr().out
    assert "2 submitted (10_0, 30_0)" in out
    assert "slurmft study status" in out


def test_cells_with_one_request_are_one_array(fake: FakeSlurm, tmp_path: Path) -> None:
    text = FILE.replace("nodes = [1, 2]", "learning_rate = [1e-3, 1e-4, 1e-5]")
    (tmp_path / "s.toml").write_text(text.replace("retries", "at_most = 2\nretries"))
    fake.largest = 2
    assert run() == 0
    assert fake.option("array") == ["0-1%2", "0-0%2"] * 2
    assert fake.option("dependency")[1:] == [
        "afterany:10",
        "afterany:20",
        "afterany:30",
    ]


def test_again_submits_nothing_then_what_failed(fake: FakeSlurm) -> None:
    assert run() == 0
    runs = runs_of()
    finish(runs["10_0"])
    assert run() == 0
    assert len(fake.submitted) == 4
    fail(runs["20_0"])
    fake.states["20_0"] = Report(name="FAILED", exit_code=1)
    assert run() == 0
    assert len(fake.submitted) == 5
    assert fake.option("dependency")[-1] == "afterany:30:40"  # those that still wait
    fail(runs_of()["50_0"])
    fake.states["50_0"] = Report(name="FAILED", exit_code=1)
    assert run() == Exit.FAILED  # retries = 1: two runs, no more
    assert len(fake.submitted) == 5
    assert runs["20_0"].path.exists()


@pytest.mark.parametrize(
    ("state", "word", "reason"),
    [
        ("GONE", "failed", "vanished"),
        ("UNKNOWN", "running", "Slurm does not answer"),
        ("TIMEOUT", "failed", "timeout"),
        ("NODE_FAIL", "pending", ""),
        ("RUNNING", "running", ""),
        ("COMPLETING", "running", ""),
        ("PENDING", "pending", ""),
    ],
)
def test_how_a_run_stands(state: str, word: str, reason: str, fake: FakeSlurm) -> None:
    run()
    for each in runs_of().values():
        each.set_state("running")
    answer = job_state.NO_ANSWER if state == "UNKNOWN" else Report(name=state)
    fake.states = dict.fromkeys(runs_of(), answer)
    found = study_status(spec.read_study("s.toml"), Path("studies/s"))
    assert {t.outcome for t in found.tries()} == {word}
    assert reason in found.tries()[0].reason


def test_a_run_that_ends_while_slurm_is_asked(
    fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    run()

    def states(jobs: Sequence[str], only_queued: Sequence[str]) -> dict[str, Report]:
        for each in runs_of().values():
            finish(each)
        return {job: Report(name="COMPLETED") for job in jobs}

    monkeypatch.setattr(commands, "job_states", states)
    assert (
        study_status(spec.read_study("s.toml"), Path("studies/s")).count("finished")
        == 4
    )


def test_cancelled_before_its_start_is_no_try(
    fake: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(4):
        assert run() == 0
        assert study.main(["cancel", "s.toml"]) == 0
        fake.states |= {job: Report(name="CANCELLED") for job in runs_of()}
    assert fake.cancelled[:4] == ["40", "30", "20", "10"]  # those that wait first
    assert "4 run(s) of s are being cancelled" in capsys.readouterr().out
    assert len(fake.submitted) == 16
    assert study.main(["status", "studies/s"]) == 0
    assert "4 runs: 4 failed" in capsys.readouterr().out


def test_refused_in_the_middle(fake: FakeSlurm) -> None:
    fake.refuse_from = 2
    with pytest.raises(
        SlurmftError, match=r"QOSMaxSubmitJob.*; 2 run\(s\) were submitted"
    ) as e:
        run()
    assert e.value.code == Exit.SUBMIT
    assert set(runs_of()) == {"10_0", "20_0"}
    fake.refuse_from = 99
    assert run() == 0
    assert set(runs_of()) == {"10_0", "20_0", "30_0", "40_0"}
    assert fake.option("dependency")[2] == "afterany:10:20"


def test_array_that_would_never_start(fake: FakeSlurm) -> None:
    fake.never = "it asks for 9 nodes"
    with pytest.raises(SlurmftError, match="never start the job: it asks for 9 nodes"):
        run()
    assert fake.cancelled == ["10"]
    assert runs_of() == {}


def test_submission_that_was_killed(fake: FakeSlurm) -> None:
    """Between the run directory and its job: it is made anew."""
    run()
    cut = runs_of()["40_0"]
    cut.job.unlink()
    assert (
        study_status(spec.read_study("s.toml"), Path("studies/s")).count("pending") == 4
    )
    assert run() == 0
    assert not cut.path.exists()
    assert set(runs_of()) == {"10_0", "20_0", "30_0", "50_0"}


def test_results_of_other_settings_are_never_mixed(
    fake: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    run("--time", "5")
    assert run("--time", "10") == 0  # no other measurement
    with pytest.raises(
        UsageError, match=r"4 run.*learning_rate was 0.001, is 0.1"
    ) as caught:
        run("--learning-rate", "0.1")
    assert "--yes" in str(caught.value)
    assert run("--learning-rate", "0.1", "--yes") == 0
    assert "warning: 4 run(s)" in capsys.readouterr().err
    assert len(fake.submitted) == 4


def test_results_of_other_data_are_never_mixed(
    fake: FakeSlurm, tiny_model: Path
) -> None:
    """Every cell is checked as a single submission is."""
    data = write_emotion(Path("data"), 40, 10)
    flags = ("--task", "emotion", "--data", str(data), "--model", str(tiny_model))
    run(*flags)
    os.utime(data / "train.jsonl", (1, 1))
    assert run(*flags) == 0  # the same content
    with open(data / "train.jsonl", "a") as file:
        file.write('{"text": "joy", "label": 1}\n')
    with pytest.raises(UsageError, match=r"4 run.*train.jsonl has changed"):
        run(*flags)
    with open(data / "train.jsonl", "a") as file:
        file.write('{"text": "joy"}\n')
    with pytest.raises(
        UsageError, match=r"the cell 'nodes=1' .* 1 of 42 rows have no label: row 42"
    ):
        run(*flags)


def test_failed_runs_of_other_settings_are_no_tries(fake: FakeSlurm) -> None:
    run()
    for each in runs_of().values():
        fail(each, "no such module")
    fake.states = {job: Report(name="FAILED", exit_code=1) for job in runs_of()}
    assert run("--setup", "module load cuda") == 0
    assert len(fake.submitted) == 8


def test_cells_that_the_file_no_longer_has(
    fake: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run()
    (tmp_path / "s.toml").write_text(FILE.replace("[1, 2]", "[1, 4]"))
    assert run() == 0
    shown = capsys.readouterr()
    assert "1 run(s) that the study does not have (nodes=2, repeat 1)" in shown.err
    assert len(fake.submitted) == 6
    # they run, too: at_most
    assert fake.option("dependency")[4] == "afterany:10:20:30:40"


def test_strange_things_in_the_folder(
    fake: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    run()
    first, second, *_ = runs_of().values()
    first.config.write_text('{"train": {')
    text = second.config.read_text().replace('"name": "s"', '"name": "else"')
    second.config.write_text(text)
    (Path("studies/s/runs") / "empty").mkdir()
    assert study.main(["status", "s.toml"]) == 0
    shown = capsys.readouterr()
    assert "is not the configuration of a run: " in shown.err
    assert "left out" in shown.err
    assert "that the study does not have" in shown.err
    assert "4 runs: 2 pending, 2 missing" in shown.out


def test_what_is_no_cut_off_submission_is_kept(fake: FakeSlurm) -> None:
    """A result without a state; a run that waits for a job that somebody else submits."""
    run()
    done, foreign, *_ = runs_of().values()
    finish(done)
    for file in (done.state, done.job, foreign.job):
        file.unlink()
    raw = json.loads(foreign.config.read_text())
    del raw["submission"]["study"]
    foreign.config.write_text(json.dumps(raw))
    run()
    assert done.result.exists()
    assert foreign.config.exists()


def test_cancel_says_what_it_cannot_read(
    fake: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    run()
    runs_of()["10_0"].config.write_text("{")
    assert study.main(["cancel", "s.toml"]) == 0
    shown = capsys.readouterr()
    assert "is not the configuration of a run" in shown.err
    assert "its job, if it has one, is not cancelled" in shown.err
    assert "3 run(s) of s are being cancelled" in shown.out


def test_runs_of_another_cluster(
    fake: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    """They count, nothing here waits for them, and they are cancelled where they are."""
    run()
    runs = runs_of()
    assert {(read_json(r.job) or {})["where"] for r in runs.values()} == {"a"}
    launcher.note_job(runs["10_0"], "slurm", "10_0", "b")
    runs["10_0"].set_state("running")
    fail(runs["40_0"])
    fake.states["40_0"] = Report(name="FAILED", exit_code=1)
    assert run() == 0
    assert fake.option("dependency")[4:] == ["afterany:20:30"]
    capsys.readouterr()
    with pytest.raises(
        UsageError, match=r"1 run\(s\) of s are on the cluster b; seen from a"
    ):
        study.main(["cancel", "s.toml"])
    assert fake.cancelled == ["50", "30", "20"]
    assert "3 run(s) of s are being cancelled" in capsys.readouterr().out
    assert runs["10_0"].get_state().state == "running"


def test_folder_of_another_study(fake: FakeSlurm) -> None:
    Path("studies/s").mkdir(parents=True)
    Path("studies/s/study.toml").write_text('name = "t"')
    with pytest.raises(UsageError, match="is the folder of the study 't', not 's'"):
        run()


@contextlib.contextmanager
def another_at_work() -> Iterator[None]:
    """Another process holds the study's folder."""
    Path("studies/s").mkdir(parents=True, exist_ok=True)
    code = (
        "import fcntl, sys, time\n"
        "file = open('studies/s/.lock', 'w')\n"
        "fcntl.lockf(file, fcntl.LOCK_EX)\n"
        "file.write('process 7 on login2'); file.flush()\n"
        "print('locked', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        yield
    finally:
        holder.kill()
        holder.wait()


def test_two_at_once(fake: FakeSlurm) -> None:
    words = r"another .* is at work in .*: process 7 on login2"
    with another_at_work(), pytest.raises(UsageError, match=words):
        run()
    assert fake.submitted == []
    assert run() == 0  # the lock ends with its process
    with another_at_work(), pytest.raises(UsageError, match=words):
        study.main(["cancel", "s.toml"])
    assert fake.cancelled == []
    assert study.main(["cancel", "s.toml"]) == 0
    assert fake.cancelled == ["40", "30", "20", "10"]


def test_cancel_of_a_study_on_this_machine(
    fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`study run` holds the folder all the while: it ends with its run."""
    cancelled: list[str] = []
    run()
    for job, each in runs_of().items():
        finish(each) if job != "10_0" else launcher.note_job(each, "local", "77", "")
    local = launcher.get("local")
    monkeypatch.setattr(local, "job_state", lambda job, run: Report(name="RUNNING"))
    monkeypatch.setattr(local, "cancel", lambda job, run: cancelled.append(job))
    with another_at_work():
        assert study.main(["cancel", "s.toml"]) == 0
    assert cancelled == ["77"]
    assert "1 run(s) of s are being cancelled" in capsys.readouterr().out


def test_cancel_of_a_study_that_never_ran(fake: FakeSlurm) -> None:
    assert study.main(["cancel", "s.toml"]) == 0
    assert not Path("studies").exists()


def test_dry_run_submits_nothing(
    fake: FakeSlurm, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run("--dry-run", "--cluster", "slurm") == 0
    out = capsys.readouterr().out
    for text in (
        "2 to submit",
        "# array 4: repeat 2",
        "#SBATCH --array=0-0%1",
        "srun",
        "dry run",
    ):
        assert text in out
    assert fake.submitted == []
    assert not (tmp_path / "studies").exists()


def test_dry_run_names_each_run_as_a_submission_would(
    fake: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    two_sizes = FILE.replace("batch_size = 8\n", "")
    sizes = "[grid]\nbatch_size = [8, 16]"
    Path("s.toml").write_text(two_sizes.replace("[grid]", sizes))
    assert run("--dry-run", "--cluster", "slurm") == 0
    first_array = capsys.readouterr().out.partition("runs=(")[2].partition(")")[0]
    assert run("--cluster", "slurm") == 0
    runs = fake.scripts[0].partition("runs=(")[2].partition(")")[0]
    mark = re.compile(r"-(c\d-r\d)-")
    assert mark.findall(first_array) == mark.findall(runs) == ["c1-r1", "c3-r1"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nodes", "4"], "--nodes: the study s varies nodes"),
        (["--ndoes", "4"], "did you mean --nodes?"),
        (["--runs-dir", "x"], "unknown flag '--runs-dir'"),
        (["--cluster", "local", "--container", "x.sif"], "works under Slurm"),
        (["--data", "/none", "--task", "emotion"], "no such folder"),
    ],
)
def test_bad_flags(arguments: list[str], words: str, fake: FakeSlurm) -> None:
    with pytest.raises(UsageError) as caught:
        run(*arguments)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 2


def test_very_many_runs_are_asked_for(fake: FakeSlurm, tmp_path: Path) -> None:
    sizes = list(range(1, 1002))
    text = FILE.replace("repeats = 2", "repeats = 1").replace("batch_size = 8\n", "")
    (tmp_path / "s.toml").write_text(
        text.replace("nodes = [1, 2]", f"batch_size = {sizes}")
    )
    with pytest.raises(UsageError, match=r"no terminal to ask: submit 1,001 runs\?"):
        run()
    assert fake.submitted == []


def test_no_answer_is_no(fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    def end_of_file(prompt: str) -> str:
        raise EOFError

    monkeypatch.setattr(study, "ASK_ABOVE", 1)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", end_of_file)
    assert run() == 0
    assert fake.submitted == []


def test_status_as_json(fake: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    run()
    each = runs_of()["10_0"]
    fake.states["10_0"] = Report(name="RUNNING")
    each.set_state("running")
    records = [{"event": "start", "total_steps": 9}]
    records += [
        {"event": "step", "step": 4, "total_steps": 9},
        {"event": "step", "step": 5},
    ]
    each.records.write_text(
        "".join(json.dumps(r) + "\n" for r in records) + '{"event": "st'
    )
    capsys.readouterr()
    assert study.main(["status", "studies/s", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["totals"]["pending"] == 3
    first = found["repeats"][0]
    assert (first["cell"], first["state"], first["job"]) == (
        {"nodes": 1},
        "running",
        "10_0",
    )
    assert first["steps"] == {"done": 4, "total": 9}
    for source in ("s.toml", "s"):
        assert study.main(["status", source]) == 0
        assert "step 4/9" in capsys.readouterr().out


def test_begun_study_goes_before_the_one_that_comes_along(
    fake: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    """A copy of a shipped study with one repeat is not read as the shipped one, of two."""
    Path("s.toml").write_text(FILE.replace('name = "s"', 'name = "lab-train"'))
    run()
    capsys.readouterr()
    assert study.main(["status", "lab-train"]) == 0
    out = capsys.readouterr().out
    assert "Two shapes" in out
    assert "missing" not in out.splitlines()[-2]


def test_what_to_type_next(
    fake: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report is named as soon as there is something to show."""
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "slurmft"])

    def status() -> str:
        capsys.readouterr()
        assert study.main(["status", "s.toml"]) == 0
        return capsys.readouterr().out

    look = "slurmft report studies/s --output studies/s/report"
    run()
    assert look not in status()
    runs = list(runs_of().values())
    finish(runs[0])
    assert re.search(
        rf"Next: wait.*\n  so far: .*{re.escape(look)}$", status().rstrip()
    )
    run()
    assert look in capsys.readouterr().out
    for each in runs[1:]:
        finish(each)
    assert status().endswith(f"all runs have finished\nNext: python -m {look}\n")
    run()
    out = capsys.readouterr().out
    assert out.rstrip().splitlines()[-2] == "Next:"
    assert look in out


def test_mistakes_end_in_two_lines(tmp_path: Path) -> None:
    for arguments, words in (
        (["study"], "which command"),
        (["study", "stats"], "did you mean status?"),
        (["study", "run"], "the following arguments are required"),
        (["study", "run", str(tmp_path / "no.toml")], "no such file"),
    ):
        done = slurmft(*arguments)
        assert done.code == 2
        assert words in done.err
        assert len(done.err.splitlines()) <= 2
        assert done.out == ""


def test_status_imports_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(FILE)
    code = (
        "import sys\nfrom slurmft.plugins.studies.commands.study import main\n"
        "main(['status', 's.toml'])\n"
        "print([m for m in ('torch', 'numpy', 'submitit', 'tqdm') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[]"


# --- on this machine ------------------------------------------------------------------------------


@pytest.mark.extra("studies")
@pytest.mark.timeout(600)
def test_on_this_machine(tmp_path: Path, tiny_model: Path, tiny_data: Path) -> None:
    """Two cells, then only the one that is missing; interrupted, nothing half is left."""
    (tmp_path / "s.toml").write_text(FILE.replace("repeats = 2", "repeats = 1"))
    source = ["--task", "emotion", "--data", str(tiny_data), "--model", str(tiny_model)]
    command = ["study", "run", str(tmp_path / "s.toml"), "--studies-dir", str(tmp_path)]
    command += ["--cluster", "local", *source]
    done = slurmft(*command, imported=True)
    assert done.code == 0, done.err
    assert "1/2 nodes=1, repeat 1: finished in" in done.out
    runs = runs_of(tmp_path / "s").values()
    assert sorted(r.load_config().job.nodes for r in runs) == [1, 2]
    assert all(r.get_state().state == "finished" for r in runs)
    two = next(r for r in runs if r.load_config().job.nodes == 2)
    two.discard()
    going = subprocess.Popen(
        [sys.executable, "-m", "slurmft", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    until(lambda: len(list((tmp_path / "s" / "runs").glob("*/job.json"))) == 2)
    os.kill(going.pid, signal.SIGINT)
    out, _ = going.communicate(timeout=PATIENCE_S)
    assert going.returncode == 130
    assert "To continue: " in out
    assert len(list((tmp_path / "s" / "runs").iterdir())) == 1
    shown = slurmft("study", "status", str(tmp_path / "s"))
    assert "2 runs: 1 finished, 1 missing" in shown.out
    assert f"Next: slurmft {' '.join(command[:3])}" in shown.out
    # A signal that is not Ctrl-C's, to the whole group as `timeout` sends it: the run goes on.
    going = subprocess.Popen(
        [sys.executable, "-m", "slurmft", *command],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    until(lambda: len(list((tmp_path / "s" / "runs").glob("*/job.json"))) == 2)
    os.killpg(going.pid, signal.SIGTERM)
    out, _ = going.communicate(timeout=PATIENCE_S)
    assert going.returncode == 128 + signal.SIGTERM
    assert "goes on (SIGTERM is not meant for it)" in out
    two = next(
        r for r in runs_of(tmp_path / "s").values() if r.load_config().job.nodes == 2
    )
    until(lambda: two.get_state().state == "finished")
