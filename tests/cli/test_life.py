"""Living with runs: their names, how they stand, list, status, clean, and the handle of scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import slurmft
from slurmft.cli import cancel, clean, follow, logs, watch
from slurmft.cli import list as list_command
from slurmft.cli import resume as cli_resume
from slurmft.cli import status as cli_status
from slurmft.cluster import cleanup, facts, launcher, status
from slurmft.cluster import follow as cluster_follow
from slurmft.cluster.cleanup import KINDS
from slurmft.cluster.slurm import commands
from slurmft.cluster.wait import JobWatch
from slurmft.core import filesystem
from slurmft.core.errors import Exit, SlurmftError, UsageError
from slurmft.core.files import read_json, write_json
from slurmft.core.program import PREDICT
from slurmft.core.run_files import Failure
from slurmft.runs import records, resolve
from slurmft.runs.records import RecordReader
from slurmft.runs.rundir import RunDir
from slurmft.runs.scan import MeasuredRun
from slurmft.show import status_words
from slurmft.show.progress import Progress
from slurmft.train import token_cache
from slurmft.train.config import TrainConfig
from tests.cli.test_commands import HEAVY
from tests.conftest import slurmft as command
from tests.support import PATIENCE_S
from tests.support.made_runs import write_run

OLD, MIDDLE, NEW = (
    f"emotion-20261120-{clock}-{mark}"
    for clock, mark in (("093012", "a1b2"), ("093013", "c3d4"), ("235959", "e5f6"))
)
DAY_S = 86400.0


class FakeQueue:
    """What squeue and sacct print, and how often they were asked."""

    def __init__(self) -> None:
        self.squeue, self.sacct, self.calls = "", "", list[str]()

    def __call__(self, name: str, *arguments: str) -> str:
        self.calls.append(name)
        text = self.squeue if name == "squeue" else self.sacct
        if text == "down" or (name == "scontrol" and self.squeue == "down"):
            raise SlurmftError(
                f"{name} failed (exit 1): Unable to contact slurm controller"
            )
        return text


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> FakeQueue:
    made = FakeQueue()
    monkeypatch.setattr(commands, "call", made)
    return made


def on_slurm(run: RunDir, job: str) -> RunDir:
    write_json(run.job, {"cluster": "slurm", "id": job})
    return run


@pytest.fixture
def three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three runs, the newest in a folder of its own; the working directory is that of `runs`."""
    runs = tmp_path / "runs"
    for job, name in (("11", OLD), ("12", MIDDLE), ("13_4", f"more/{NEW}")):
        on_slurm(write_run(runs / name), job)
    monkeypatch.chdir(tmp_path)
    return runs


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("last", f"more/{NEW}"),
        (OLD, OLD),
        ("emotion-20261120-0930121"[:-1], OLD),
        ("12", MIDDLE),
        ("13_4", f"more/{NEW}"),
        (f"runs/{OLD}", OLD),
        ("link", OLD),
    ],
)
def test_names(three: Path, name: str, found: str) -> None:
    (three / "link").symlink_to(OLD)
    assert resolve.find(name).path.resolve() == three / found


@pytest.mark.parametrize(
    ("name", "fact", "hint"),
    [
        ("emotion-20261120-0930", "2 runs are called", f"one of: {MIDDLE}, {OLD}"),
        ("14", "no run in", f"the newest there: {NEW}, {MIDDLE}, {OLD}"),
        (OLD.replace("emotion", "emotoin"), "no run in", f"did you mean {OLD}?"),
        ("runs/", "is not a run directory", None),
        ("", "is not a run directory", None),
    ],
)
def test_names_of_no_run_or_several(
    three: Path, name: str, fact: str, hint: str | None
) -> None:
    with pytest.raises(UsageError, match=fact) as caught:
        resolve.find(name)
    assert hint is None or caught.value.hint == hint


def test_runs_dir_is_the_given_one_then_the_sites(
    three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    with pytest.raises(UsageError, match="there is no folder '/runs'") as caught:
        resolve.find("last")
    assert "--runs-dir" in str(caught.value.hint)
    assert resolve.find("last", three).path.name == NEW
    (tmp_path / "site.toml").write_text(f'runs_dir = "{three}"')
    monkeypatch.setenv("SLURMFT_SITE", str(tmp_path / "site.toml"))
    assert resolve.find("last").path.name == NEW


def test_last_is_one_of_mine(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    with pytest.raises(UsageError, match=r"none of the 3 run\(s\) .* is yours"):
        resolve.find("last")
    assert resolve.find("12").path.name == MIDDLE  # a colleague's, by its name


# --- how runs stand -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "state"),
    [("finished", "COMPLETED"), ("running", "UNKNOWN"), ("failed", "UNKNOWN")],
)
def test_to_have_finished_needs_no_answer_of_slurm(
    queue: FakeQueue, tmp_path: Path, own: str, state: str
) -> None:
    """Else follow, watch and wait would never end; a failed one may yet be requeued."""
    queue.squeue = "down"
    run = on_slurm(write_run(tmp_path / "run", state=own), "7")
    found = launcher.job_state(run, launcher.job_of(run))
    assert (found.name, found.is_over) == (state, own == "finished")


@pytest.mark.parametrize(
    ("own", "sacct", "state"),
    [
        ("finished", "FAILED|2:0", "COMPLETED"), ("finished", "COMPLETED|0:0", "COMPLETED"),
        ("finished", "RUNNING|0:0", "RUNNING"), ("failed", "TIMEOUT|0:0", "TIMEOUT"),
    ],
)  # fmt: skip
def test_finished_run_is_not_undone_by_a_job_that_came_too_late(
    queue: FakeQueue, tmp_path: Path, own: str, sacct: str, state: str
) -> None:
    queue.sacct = f"7|{sacct}"
    run = on_slurm(write_run(tmp_path / "run", state=own), "7")
    found = launcher.job_state(run, launcher.job_of(run))
    assert (found.name, found.report.exit_code) == (state, 0)


@pytest.mark.parametrize(
    ("own", "squeue", "sacct", "state", "note"),
    [
        ("submitted", "7|PENDING|2026-11-22T14:05:00|Priority", "", "pending",
         "jobs of higher priority are before it (Priority); "
         "Slurm guesses a start at 2026-11-22 14:05:00"),
        ("submitted", "7|PENDING|N/A|Dependency", "", "pending",
         "it starts after another job (Dependency)"),
        ("running", "7|RUNNING|2026-11-22T14:05:00|None", "", "running", ""),
        ("stopping", "7|RUNNING|N/A|None", "", "stopping", ""),
        ("running", "7|SUSPENDED|N/A|None", "", "running", "suspended"),
        ("requeued", "7|PENDING|N/A|BeginTime", "", "requeued",
         "it may not start before a time (BeginTime); requeued once"),
        ("running", "7|PREEMPTED|N/A|None", "", "requeued", "requeued once"),
        ("running", "", "", "vanished", "neither queue nor accounting knows its job"),
        ("running", "", "7|TIMEOUT|0:0", "failed", "timeout"),
        ("running", "", "7|CANCELLED by 1000|0:15", "cancelled", "cancelled by 1000"),
        ("failed", "7|FAILED|N/A|None", "", "failed", ""),
        ("failed", "7|PENDING|N/A|Resources", "", "requeued",
         "it is next, and waits for free nodes (Resources); requeued once"),
        ("cancelled", "", "", "cancelled", ""),
        ("finished", "", "", "finished", ""),
        ("running", "down", "", "unknown", "Slurm does not answer"),
        ("submitted", "down", "", "unknown", "Slurm does not answer"),
        ("failed", "down", "", "failed", ""),
        ("running", "", "down", "unknown", "it left the queue; accounting does not answer"),
        ("failed", "", "down", "failed", ""),
        ("running", "", "7_[0-2]|CANCELLED by 0|0:0", "vanished",
         "neither queue nor accounting knows its job"),
    ],
)  # fmt: skip
def test_runs_and_jobs_are_reconciled(
    queue: FakeQueue,
    tmp_path: Path,
    own: str,
    squeue: str,
    sacct: str,
    state: str,
    note: str,
) -> None:
    run = on_slurm(write_run(tmp_path / "r", state=own), "7")
    if own == "submitted":
        run.state.unlink()
        run.set_state("submitted")
    else:
        write_json(run.attempt, {"number": 1, "job": "7", "hosts": ["n1"], "time": 0})
    queue.squeue, queue.sacct = squeue, sacct
    found = status.run_statuses([MeasuredRun.read(run.path)])[0]
    assert found.state == state
    assert status_words.note(facts.summary(found)) == note
    assert found.is_sure == (squeue != "down" and state != "unknown")
    assert len(queue.calls) == (0 if own == "finished" else len(set(queue.calls)))


def test_requeues_are_counted_from_the_last_submission(
    queue: FakeQueue, tmp_path: Path
) -> None:
    run = on_slurm(write_run(tmp_path / "r", state="running"), "7")
    for state in (
        "requeued",
        "running",
        "cancelled",
        "submitted",
        "running",
        "requeued",
    ):
        run.set_state(state)
    run.set_state("running")
    write_json(run.attempt, {"number": 4, "job": "7", "hosts": ["n1"], "time": 0})
    queue.squeue = "7|RUNNING|N/A|None"
    assert status.run_statuses([MeasuredRun.read(run.path)])[0].requeues == 1


def test_a_run_of_pods_is_believed(queue: FakeQueue, tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", state="running")
    write_json(run.attempt, {"number": 1, "job": "pod", "hosts": ["n1"], "time": 0})
    found = status.run_statuses([MeasuredRun.read(run.path)])[0]
    assert (found.state, found.is_sure, queue.calls) == ("running", False, [])


@pytest.mark.parametrize(("result", "epoch"), [({"epochs": 0.5}, 0.5), ({}, None)])
def test_finished_run_shows_the_epochs_that_it_ran(
    tmp_path: Path, result: dict[str, Any], epoch: float | None
) -> None:
    """With --max-steps, or early stopping, they are fewer than it was to have."""
    run = write_run(tmp_path / "r", epochs=3, max_steps=20, result=result)
    assert facts.run_facts(run)["epoch"] == epoch


# --- other clusters, other hosts ------------------------------------------------------------------


@pytest.fixture
def on_a(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's commands ask the cluster "a" here."""
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "A")


def on_b(path: Path, state: str = "running", job: str = "7") -> RunDir:
    """A run of another cluster, whose job has a number that is in use here, too."""
    run = write_run(path, state="running" if state == "submitted" else state)
    if state == "submitted":
        run.state.unlink()
        run.set_state("submitted")
    else:
        write_json(run.attempt, {"number": 1, "job": job, "hosts": ["n1"], "time": 0})
    launcher.note_job(run, "slurm", job, "b")
    return run


@pytest.mark.parametrize(
    ("own", "state", "note"),
    [
        ("submitted", "pending", "on the cluster b; seen from a"),
        ("running", "running", "on the cluster b; seen from a"),
        ("stopping", "stopping", "on the cluster b; seen from a"),
        ("requeued", "requeued", "on the cluster b; seen from a; requeued once"),
        ("failed", "failed", ""),
        ("finished", "finished", ""),
    ],
)
def test_a_run_of_another_cluster_is_believed(
    on_a: None, queue: FakeQueue, tmp_path: Path, own: str, state: str, note: str
) -> None:
    run = on_b(tmp_path / "r", own)
    # a job of this cluster, which is none of its business
    queue.squeue = "7|CANCELLED|N/A|None"
    found = status.run_statuses([MeasuredRun.read(run.path)])[0]
    told = facts.summary(found)
    assert (found.state, status_words.note(told), told["where"]) == (state, note, "b")
    assert found.is_sure == (own == "finished")
    assert queue.calls == []


def test_list_asks_slurm_of_this_cluster_alone(
    on_a: None, three: Path, queue: FakeQueue, capsys: pytest.CaptureFixture[str]
) -> None:
    on_b(three / "theirs", job="21")
    ours = write_run(three / "ours", state="running")
    launcher.note_job(ours, "slurm", "21", "a")
    # of a version that noted no cluster
    on_slurm(write_run(three / "old", state="running"), "22")
    assert list_command.main(["--json"]) == 0
    found = {run["name"]: run for run in json.loads(capsys.readouterr().out)["runs"]}
    states = {name: (found[name]["state"], found[name]["where"]) for name in found}
    assert states["theirs"] == ("running", "b")
    assert states["ours"] == ("vanished", "a")
    assert states["old"] == ("vanished", None)
    assert queue.calls == ["squeue", "sacct"]
    assert cli_status.main(["theirs"]) == 0
    shown = capsys.readouterr().out
    assert "running: on the cluster b; seen from a" in shown
    assert "job 21 (slurm b)" in shown


@pytest.mark.processes
@pytest.mark.parametrize(
    "command",
    [
        follow.main, cancel.main, watch.main, cli_resume.main,
        lambda argv: logs.main([*argv, "--follow"]),
        lambda argv: slurmft.Run(argv[0]).wait(),
    ],
)  # fmt: skip
def test_commands_name_the_cluster_of_a_run(
    on_a: None, queue: FakeQueue, tmp_path: Path, command: Callable[[list[str]], Any]
) -> None:
    run = on_b(tmp_path / "r")
    words = "the job 7 of r is on the cluster b; seen from a"
    with pytest.raises(UsageError, match=words) as caught:
        command([str(run.path)])
    assert "there" in str(caught.value.hint)
    assert (queue.calls, run.get_state().state) == ([], "running")


@pytest.mark.processes
def test_an_ended_run_of_another_cluster(
    on_a: None, queue: FakeQueue, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its end can be seen and told from here; it moves only if somebody says so."""
    done, dead = (
        on_b(tmp_path / "done", "finished"),
        on_b(tmp_path / "dead", "cancelled"),
    )
    assert follow.main([str(done.path)]) == 0
    assert "accuracy" in capsys.readouterr().out
    assert slurmft.Run(dead.path).cancel() is False
    with pytest.raises(UsageError, match="has finished"):
        cli_resume.main([str(done.path)])
    with pytest.raises(UsageError) as caught:
        cli_resume.main([str(dead.path)])
    assert str(caught.value.hint).endswith("--cluster slurm")
    assert queue.calls == []


@pytest.mark.processes
def test_a_run_moves_to_this_cluster(
    on_a: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = on_b(tmp_path / "r", "failed")
    monkeypatch.setattr(launcher, "available", lambda: True)
    monkeypatch.setattr(launcher.get("slurm"), "submit", lambda config, run: "99")
    slurmft.Run(run.path).resume(cluster="slurm")
    assert read_json(run.job) == {"cluster": "slurm", "id": "99", "where": "a"}


def test_a_run_of_another_host(three: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(three / "there", state="running")
    launcher.note_job(run, "local", str(os.getpid()), "login7")
    assert list_command.main(["--state", "running"]) == 0
    words = f"on the host login7; seen from {os.uname().nodename}"
    assert words in capsys.readouterr().out
    with pytest.raises(UsageError, match=f"the job {os.getpid()} of there is {words}"):
        slurmft.Run("there").cancel()


# --- what a run said last -------------------------------------------------------------------------


def test_latest_looks_as_far_back_as_it_must(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", state="running")
    lines = run.records.read_text().splitlines()
    epoch = json.dumps({"time": 1.0, "event": "epoch", "metrics": {"accuracy": 0.5}})
    far = json.loads(lines[-1]) | {"epoch": 1.5, "step": 30}
    filler = [json.dumps({"time": 2.0, "event": "checkpoint", "text": "x" * 1000})] * 80
    evaluating = json.dumps({"time": 3.0, "event": "evaluate", "done": 4, "total": 9})
    run.records.write_text(
        "\n".join([*lines, epoch, *filler, json.dumps(far), evaluating, ""])
    )
    said = records.latest(run.path)
    assert said.metrics == {"accuracy": 0.5}
    assert (said.steps_done, said.steps_total, said.evaluating) == (30, 20, (4, 9))
    assert said.samples_per_s == 320.0


@pytest.mark.parametrize("clock_s", [5000.1, 1400.0])
def test_latest_of_a_resumed_run_and_of_none(tmp_path: Path, clock_s: float) -> None:
    """Whatever the clock of the host that resumes."""
    run = write_run(tmp_path / "r", state="running")
    start = {"time": 5000.0, "event": "start", "total_steps": 20}
    resume = {
        "time": clock_s,
        "event": "resume",
        "step": 15,
        "checkpoint": "step-00000015",
    }

    def steps() -> tuple[int | None, float | None]:
        found = records.latest(run.path)
        return found.steps_done, found.steps_total

    with open(run.records, "a") as file:
        file.write(f'{json.dumps(start)}\n{json.dumps(resume)}\n{{"event": "step", "st')
    assert steps() == (15, 20)
    with open(run.records, "a") as file:  # again, and its checkpoints are gone
        file.write(f"\n{json.dumps(start | {'time': 1300.0})}\n")
    assert steps() == (0, 20)
    run.records.unlink()
    assert records.latest(run.path) == records.Latest()


# --- list and status ------------------------------------------------------------------------------

SUMMARY = """name path user task model data nodes submitted cluster where job state reason
waiting expected_start requeues steps_done steps_total epoch samples_per_s left_s loss metrics"""
FULL = """queue cost time_use program job_options submission hosts history changed attempts
last_record disk evaluating is_own inode origin owner
checkpoints warnings failures result model_path logs"""


def test_list(
    three: Path, queue: FakeQueue, capsys: pytest.CaptureFixture[str]
) -> None:
    on_slurm(write_run(three / "mrpc-20261121-000000-abcd", state="running"), "21")
    (three / "broken").mkdir()
    (three / "broken" / "config.json").write_text("{")
    queue.squeue = "21|RUNNING|N/A|None"
    assert list_command.main([]) == 0
    shown = capsys.readouterr()
    heads, *rows = shown.out.splitlines()
    assert heads.split()[:5] == ["run", "job", "state", "data", "steps"]
    names = [
        name.rpartition("-")[0]
        for name in (OLD, MIDDLE, NEW, "mrpc-20261121-000000-abcd")
    ]
    assert [row.split()[0] for row in rows] == names
    assert rows[-1].split()[1:3] == ["21", "running"]
    assert rows[-1].split()[-3:] == ["20/20", "320", "-"]
    assert "accuracy 0.9000" in rows[0]
    assert shown.err.count("\n") == 1
    assert "broken" in shown.err
    assert queue.calls == ["squeue"]


def test_list_for_programs(
    three: Path, queue: FakeQueue, capsys: pytest.CaptureFixture[str]
) -> None:
    on_slurm(write_run(three / "gone", state="running"), "21")
    assert list_command.main(["--json", "--state", "finished", "--newest", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [run["name"] for run in found["runs"]] == [MIDDLE, NEW]
    assert (found["runs_dir"], found["problems"]) == (str(three), [])
    assert sorted(found["runs"][0]) == sorted(SUMMARY.split())
    assert queue.calls == ["squeue", "sacct"]
    with pytest.raises(UsageError, match="unknown --state 'runing'"):
        list_command.main(["--state", "runing"])


def test_list_has_every_table_that_a_flag_asks_for(
    three: Path, queue: FakeQueue, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = []
    for flags in (["--cost"], ["--ettr"], ["--cost", "--ettr"]):
        assert list_command.main(flags) == 0
        tables.append(capsys.readouterr().out)
    costs, times, both = tables
    assert both == f"{costs}\n{times}"


def test_a_full_disk_is_said_at_once(
    queue: FakeQueue,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The run can record nothing any more, and would seem to run on."""
    run = on_slurm(write_run(tmp_path / "r", state="running"), "7")
    write_json(run.attempt, {"number": 1, "job": "7", "hosts": ["n1"], "time": 0})
    queue.squeue = "7|RUNNING|N/A|None"
    assert facts.run_facts(run)["disk"] is None
    monkeypatch.setattr(filesystem, "full", lambda path: "the disk has 0 bytes free")
    assert cli_status.main([str(run.path)]) == 0
    out = capsys.readouterr().out
    assert "disk         the disk has 0 bytes free: the run can record nothing" in out
    watch = JobWatch(run)
    looks = iter([True] * 5)
    monkeypatch.setattr(watch, "looks", lambda timeout_s: looks)
    # Within a shortage the free bytes change; then there is room for a while.
    free = iter(["4 KiB free", "8 KiB free", None, "2 KiB free", "1 KiB free"])
    monkeypatch.setattr(filesystem, "full", lambda path: next(free))
    cluster_follow.follow(watch, Progress())
    out = capsys.readouterr().out
    warned = [line for line in out.splitlines() if "the run can record nothing" in line]
    assert [line.split(" free: ")[0] for line in warned] == [
        "warning: 4 KiB",
        "warning: 2 KiB",
    ]
    finished = write_run(tmp_path / "finished")
    assert facts.run_facts(finished)["disk"] is None


def test_follow_says_why_ranks_start_again(
    queue: FakeQueue,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of a rank that was killed, the screen had the traceback of another one alone."""
    run = on_slurm(write_run(tmp_path / "r", state="running"), "7")
    killed = SlurmftError("the program was killed by SIGKILL")
    for time_s, where, secondary in (
        (15.0, "rank 0 on n1", True),
        (16.0, "rank 1 on n2", False),
    ):
        run.add(Failure.of(where, killed, secondary=secondary, time=time_s))
    with open(run.records, "w") as file:
        for time_s in (10.0, 20.0, 30.0):
            record = {"event": "start", "time": time_s, "total_steps": 4}
            file.write(json.dumps(record) + "\n")
    watch = JobWatch(run)
    monkeypatch.setattr(watch, "looks", lambda timeout_s: iter([True]))
    queue.squeue = "7|RUNNING|N/A|None"
    # All starts are new to it.
    monkeypatch.setattr(RecordReader, "read_recent", lambda self, kind: [])
    cluster_follow.follow(watch, Progress())
    out = capsys.readouterr().out
    restart = "the ranks start again: the program was killed by SIGKILL (rank 1 on n2)"
    assert [line for line in out.splitlines() if "again" in line] == [restart]


def test_error_of_a_run_without_checkpoints_names_none(
    queue: FakeQueue, tmp_path: Path
) -> None:
    """After a time limit it advised "to resume from the last checkpoint"."""
    run = on_slurm(write_run(tmp_path / "r", state="running"), "7")
    run.set_state(
        "failed", "the time limit (--time) was reached; there is no checkpoint"
    )
    queue.squeue = "TIMEOUT|None"
    again = f"slurmft resume {run.path}"
    with pytest.raises(SlurmftError) as caught:
        slurmft.Run(run.path).wait()
    assert caught.value.hint == f"to start it again from its beginning: {again}"
    (run.checkpoints / "step-00000010").mkdir(parents=True)
    with pytest.raises(SlurmftError) as caught:
        slurmft.Run(run.path).wait()
    assert caught.value.hint == f"to resume from the last checkpoint: {again}"


def test_status(
    three: Path, queue: FakeQueue, capsys: pytest.CaptureFixture[str]
) -> None:
    run = on_slurm(
        write_run(three / "mrpc-20261121-000000-abcd", state="running"), "21"
    )
    write_json(run.attempt, {"number": 1, "job": "21", "hosts": ["n1"], "time": 0})
    run.set_state("requeued", "stopped; the newest checkpoint is step-00000010")
    (run.checkpoints / "step-00000010").mkdir(parents=True)
    (run.checkpoints / "step-00000010" / "model.safetensors").write_bytes(b"x" * 2048)
    with open(run.records, "a") as file:
        file.write(
            json.dumps({"time": 9.0, "event": "warning", "text": "the disk is full"})
            + "\n"
        )
    run.add(
        Failure.of(
            "rank 3 on n1", SlurmftError("the loss is nan", "lower it"), attempt=1
        )
    )
    queue.squeue = "21|PENDING|2026-11-22T14:05:00|BeginTime"
    assert cli_status.main(["last"]) == 0
    shown = capsys.readouterr().out
    for text in (
        "requeued: it may not start before a time (BeginTime); that is",
        "start        starts by itself",
        "job 21 (slurm), on n1",
        "step 20/20 (100 %), epoch 1.00, loss 0.1000",
        "step-00000010, ",
        "1 in all, 2.0 KiB",
        "the disk is full",
        "the loss is nan (rank 3 on n1), attempt 1",
        f"slurmft cancel runs/{run.path.name}",
    ):
        assert text in shown
    assert "resume" not in shown
    assert cli_status.main(["21", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sorted(found) == sorted([*SUMMARY.split(), *FULL.split()])
    assert found["checkpoints"][0]["bytes"] == 2048
    assert [h["state"] for h in found["history"]] == [
        "submitted",
        "running",
        "requeued",
    ]
    run.set_state("failed", "ValueError: no rows (exit code 3)", 3)
    assert cli_status.main(["last"]) == 0
    assert capsys.readouterr().out.count("exit code 3") == 1


def test_status_of_a_finished_run(
    three: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli_status.main([OLD]) == 0
    shown = capsys.readouterr().out
    assert "phases" in shown
    assert f"slurmft report runs/{OLD}" in shown


# --- clean ----------------------------------------------------------------------------------------


def grow_old(run: RunDir, days: float) -> None:
    """Makes nothing have happened in a run for some days."""
    then = time.time() - days * DAY_S
    told = json.loads(run.state.read_text())
    run.state.write_text(json.dumps(told | {"time": then}))
    for path in (*run.path.iterdir(), run.path):
        os.utime(path, (then, then))


@pytest.fixture
def messy(
    tmp_path: Path, queue: FakeQueue, monkeypatch: pytest.MonkeyPatch
) -> dict[str, RunDir]:
    """Runs in all states with something to remove in each of them."""
    states = ("finished", "failed", "cancelled", "running", "vanished", "recent")
    own = {"vanished": "running", "recent": "failed"}
    made = {}
    for job, name in enumerate(states):
        run = write_run(tmp_path / "runs" / name, state=own.get(name, name))
        made[name] = on_slurm(run, str(job))
        for folder in (
            run.model,
            run.tokens,
            run.checkpoints / "step-00000010",
            run.submitit,
        ):
            folder.mkdir(parents=True)
            (folder / "meta.json").write_bytes(b"x" * 100)
        (run.path / ".state.json.slurmft-123-abcd").write_bytes(b"x" * 10)
        (run.checkpoints / ".step-00000005.slurmft-123-abcd").mkdir()
        grow_old(run, 1 if name == "recent" else 40)
    queue.squeue = "3|RUNNING|N/A|None"
    monkeypatch.setattr(token_cache, "folder", lambda: tmp_path / "cache")
    return made


def planned(runs: Path, *kinds: str) -> set[str]:
    plan = cleanup.plan(runs, kinds or KINDS, 30 * DAY_S)
    return {f"{item.kind} {item.path.relative_to(runs)}" for item in plan.items}


def test_what_may_go(
    messy: dict[str, RunDir], queue: FakeQueue, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    aside = runs / ".gone.slurmft-77-0a1b"
    aside.mkdir()
    assert planned(runs) == {
        "runs failed", "runs cancelled", "runs vanished",
        "checkpoints finished/checkpoints", "tokens finished/tokens",
        "leftovers finished/.state.json.slurmft-123-abcd",
        "leftovers recent/.state.json.slurmft-123-abcd",
        "leftovers recent/checkpoints/.step-00000005.slurmft-123-abcd",
        "leftovers .gone.slurmft-77-0a1b",
    }  # fmt: skip
    assert planned(runs, "checkpoints") == {"checkpoints finished/checkpoints"}
    queue.squeue = "down"  # a failed run might be queued again
    assert planned(runs, "runs", "tokens") == {"tokens finished/tokens"}


@pytest.mark.parametrize("mode", [0o2775, 0o777])
def test_folder_that_others_make_a_run_stays(
    messy: dict[str, RunDir], tmp_path: Path, mode: int
) -> None:
    """They put the files of a finished run beside this user's checkpoints/ and tokens/."""
    messy["finished"].path.chmod(mode)
    messy["failed"].path.chmod(mode)
    plan = cleanup.plan(tmp_path / "runs", KINDS, 30 * DAY_S)
    parts = {item.path.relative_to(tmp_path / "runs").parts[0] for item in plan.items}
    assert parts == {"cancelled", "vanished", "recent"}
    assert plan.left_out == [
        "2 run(s) that others can have written: remove them yourself"
    ]


@pytest.mark.parametrize(
    ("mode", "above", "is_kept"),
    [
        (0o777, 0o755, True),
        (0o1777, 0o755, False),
        # Another folder may get the name of that of the runs.
        (0o755, 0o777, True),
        (0o755, 0o1777, False),
    ],
)
def test_leftovers_stay_where_others_rename(
    tmp_path: Path, mode: int, above: int, is_kept: bool
) -> None:
    project = tmp_path / "project"
    runs = project / "runs"
    (runs / ".thesis.slurmft-1-abcd").mkdir(parents=True)
    (runs / ".backup.2026-1126").mkdir()  # the user's own
    runs.chmod(mode)
    project.chmod(above)
    plan = cleanup.plan(runs, ["leftovers"], 0)
    names = [item.path.name for item in plan.items]
    assert names == [".thesis.slurmft-1-abcd"] * (not is_kept)
    where = f"in {str(runs)!r}, where others can rename"
    line = f"1 leftover(s) {where}: remove them yourself"
    assert plan.left_out == [line] * is_kept
    assert cleanup.plan(runs, ["runs"], 0).left_out == []


def test_what_takes_the_place_of_what_was_examined_stays(
    messy: dict[str, RunDir], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another folder has its name while the size is counted, which may take minutes."""
    tokens = messy["finished"].tokens

    def exchange(path: Path) -> int:
        tokens.rename(tmp_path / "away")
        tokens.mkdir()
        (tokens / "thesis.tex").touch()
        return 0

    monkeypatch.setattr(cleanup, "size_of", exchange)
    (item,) = cleanup.plan(tmp_path / "runs", ["tokens"], 30 * DAY_S).items
    assert "it was replaced meanwhile" in str(cleanup.remove(item))
    monkeypatch.setattr(cleanup, "size_of", lambda path: 0)
    now = cleanup.plan(tmp_path / "runs", ["tokens"], 30 * DAY_S)
    assert cleanup.remove_all(cleanup.Plan([item], []), now) == []
    assert (tokens / "thesis.tex").exists()


def test_what_others_own_stays(
    messy: dict[str, RunDir], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    plan = cleanup.plan(tmp_path / "runs", KINDS, 30 * DAY_S)
    assert (plan.items, plan.left_out) == ([], ["5 run(s) of other users"])


def test_runs_of_other_clusters_stay(
    messy: dict[str, RunDir], on_a: None, tmp_path: Path, queue: FakeQueue
) -> None:
    runs = tmp_path / "runs"
    for name in ("failed", "cancelled", "vanished", "recent"):
        job = (read_json(messy[name].job) or {})["id"]
        launcher.note_job(messy[name], "slurm", job, "b")
        grow_old(messy[name], 40)
    plan = cleanup.plan(runs, KINDS, 30 * DAY_S)
    assert {item.path.relative_to(runs).parts[0] for item in plan.items} == {"finished"}
    assert plan.left_out == ["3 run(s) of other clusters or hosts: clean them there"]


def test_kept_tokens_that_nobody_used(
    messy: dict[str, RunDir], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, into = tmp_path / "cache", tmp_path / "into"
    unused, used, new = map(token_cache.key_of, ({"a": 1}, {"a": 2}, {"a": 3}))
    half = f".{new}.slurmft-7-ab01"
    for key in (unused, used, new, half):
        token_cache.keep(cache, key, messy["finished"].tokens)
    for key in (unused, used, half):
        os.utime(cache / key, (time.time() - 40 * DAY_S,) * 2)
    into.mkdir()
    assert token_cache.take(cache, used, into)
    flags = ["--runs-dir", str(tmp_path / "runs"), "--only", "token-cache"]
    assert clean.main([*flags, "--json", "--dry-run"]) == 0
    items = json.loads(capsys.readouterr().out)["items"]
    assert [(Path(i["path"]).name, i["kind"]) for i in items] == [
        (half, "token-cache"), (unused, "token-cache"),
    ]  # fmt: skip
    assert "no run has used it for 40 days" in items[1]["why"]
    assert items[1]["bytes"] > 100
    assert clean.main([*flags, "--older-than", "50d", "--dry-run"]) == 0
    assert unused not in capsys.readouterr().out
    assert clean.main([*flags, "--yes"]) == 0
    assert {path.name for path in cache.iterdir()} == {used, new, token_cache._MARK}
    assert messy["finished"].tokens.is_dir()


def test_kept_tokens_that_are_taken_meanwhile_stay(
    messy: dict[str, RunDir], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run takes them after they were shown, before the answer."""
    cache, into = tmp_path / "cache", tmp_path / "into"
    key = token_cache.key_of({})
    token_cache.keep(cache, key, messy["finished"].tokens)
    os.utime(cache / key, (time.time() - 40 * DAY_S,) * 2)
    into.mkdir()

    def ask(prompt: str) -> str:
        assert token_cache.take(cache, key, into)
        return "y"

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", ask)
    assert (
        clean.main(["--runs-dir", str(tmp_path / "runs"), "--only", "token-cache"]) == 0
    )
    assert (cache / key).is_dir()


def test_clean(
    messy: dict[str, RunDir], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--runs-dir", str(tmp_path / "runs")]
    before = sorted((tmp_path / "runs").rglob("*"))
    assert clean.main([*flags, "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert sorted(told) == ["bytes", "items", "left_out", "removed", "runs_dir"]
    assert told["removed"] is False
    assert told["bytes"] == sum(item["bytes"] for item in told["items"]) > 1000
    with pytest.raises(UsageError, match="there is no terminal to ask"):
        clean.main(flags)
    assert sorted((tmp_path / "runs").rglob("*")) == before
    assert clean.main([*flags, "--yes"]) == 0
    assert "removed " in capsys.readouterr().out
    left = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert left == ["finished", "recent", "running"]
    assert (messy["running"].path / ".state.json.slurmft-123-abcd").exists()
    assert messy["running"].checkpoint_names() == ["step-00000010"]
    assert messy["finished"].model.is_dir()
    assert not messy["finished"].checkpoints.exists()


@pytest.mark.parametrize(("answer", "gone"), [("n", False), ("", False), ("y", True)])
def test_clean_asks(
    messy: dict[str, RunDir], monkeypatch: pytest.MonkeyPatch, answer: str, gone: bool
) -> None:
    def ask(prompt: str) -> str:
        assert prompt.startswith("remove ")
        # meanwhile, in another terminal
        messy["cancelled"].set_state("submitted", "resumed")
        on_slurm(messy["cancelled"], "3")
        return answer

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", ask)
    assert clean.main(["--runs-dir", str(messy["failed"].path.parent)]) == 0
    assert messy["failed"].path.exists() != gone
    assert messy["cancelled"].path.exists()


# --- in scripts -----------------------------------------------------------------------------------


@pytest.mark.processes
def test_public_names_are_cheap() -> None:
    code = (
        "import sys, slurmft\n"
        "assert 'argparse' not in sys.modules\n"
        # These modules must not hide the function.
        "import slurmft.train.commands.submit, slurmft.cluster.submit\n"
        "from slurmft import Run, SlurmftError, submit\n"
        "assert callable(submit) and submit.__module__ == 'slurmft.train.api'\n"
        "assert {'Run', 'submit'} <= set(dir(slurmft))\n"
        f"print([m for m in {HEAVY} if m in sys.modules])\n"
        "try: slurmft.sumbit\n"
        "except AttributeError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "[]",
        "module 'slurmft' has no attribute 'sumbit'",
    ]


@pytest.mark.processes
def test_module_submit_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "slurmft.submit", "--ndoes", "4"],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (Exit.USAGE, "")
    assert "did you mean --nodes?" in done.stderr


@pytest.mark.processes
@pytest.mark.parametrize(
    ("call", "fact", "hint"),
    [
        (lambda: slurmft.submit(ndoes=4), "'ndoes'", "did you mean nodes?"),
        (
            lambda: slurmft.submit(nodes="4"),
            "nodes must be a whole number, not '4'",
            None,
        ),
        (lambda: slurmft.submit(setup="echo"), "setup must be a list of strings", None),
        (lambda: slurmft.submit(task="emotoin"), "'emotoin'", "did you mean emotion?"),
        (lambda: slurmft.Run(OLD).resume(learning_rate=1.0), "'learning_rate'", None),
        (lambda: slurmft.Run(OLD).resume(nodes=2), "has finished", None),
    ],
)
def test_calls_that_cannot_be_right(
    three: Path, call: Callable[[], Any], fact: str, hint: str | None
) -> None:
    with pytest.raises(UsageError) as caught:
        call()
    assert fact in caught.value.message
    assert hint in (None, caught.value.hint)


def test_a_finished_run_in_a_script(three: Path) -> None:
    run = slurmft.Run("last")
    assert (run.name, run.job, run.state) == (NEW, "13_4", "finished")
    assert repr(run) == f"Run({str(run.path)!r})"
    assert run.result is not None
    assert run.metrics == run.result["metrics"] == {"accuracy": 0.9}
    assert TrainConfig.of(run.config.program).task == "synthetic"
    assert [r["step"] for r in run.records("step")] == list(range(1, 21))
    assert run.status()["result"] == run.result
    assert run.logs() == ""
    assert slurmft.Run(Path("runs") / OLD).name == OLD


def test_a_second_run_is_no_folder_of_runs(three: Path) -> None:
    """`slurmft status runs/*` advised to give a run as --runs-dir."""
    with pytest.raises(UsageError, match="unexpected argument") as caught:
        cli_status.main([f"runs/{OLD}", f"runs/{MIDDLE}"])
    assert (
        caught.value.hint == "slurmft status takes one run; slurmft list shows several"
    )


def test_model_of_the_last_run_which_may_be_a_prediction(tmp_path: Path) -> None:
    """`Run("last")`, after `predict last`, had no model."""
    training = write_run(tmp_path / "a")
    with pytest.raises(UsageError, match="has no model: it is finished"):
        _ = slurmft.Run(training.path).model
    training.model.mkdir()
    assert slurmft.Run(training.path).model == training.model
    prediction = write_run(tmp_path / "b")
    config = prediction.load_config()
    settings = config.program.settings | {"model": str(training.model)}
    program = replace(config.program, kind=PREDICT, settings=settings)
    prediction.config.write_text(replace(config, program=program).to_json())
    assert slurmft.Run(prediction.path).model == training.model


def test_cancel_and_wait(
    three: Path, queue: FakeQueue, capsys: pytest.CaptureFixture[str]
) -> None:
    files = on_slurm(write_run(three / "alive", state="running"), "21")
    queue.squeue = "RUNNING|None"
    run = slurmft.Run("alive")
    with pytest.raises(TimeoutError, match="the job 21 has not ended after 0 s"):
        run.wait(timeout_s=0)
    assert run.cancel() is True
    assert queue.calls[-1] == "scancel"
    assert files.get_state().state == "cancelled"
    queue.squeue = ""
    with pytest.raises(SlurmftError, match="the job 21 was cancelled") as caught:
        run.wait()
    assert caught.value.code == Exit.CANCELLED
    assert (run.cancel(), run.state) == (False, "cancelled")
    assert cancel.main(["21", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "run": str(run.path), "job": "21", "cancelled": False, "state": "cancelled",
    }  # fmt: skip


def test_failed_run_in_a_script(three: Path, queue: FakeQueue) -> None:
    """The error is the rank's, and its traceback a note of it."""
    run = on_slurm(write_run(three / "bad", state="failed"), "21")
    write_json(
        run.attempt,
        {"number": 1, "job": "21", "hosts": ["n1"], "time": time.time() + 1},
    )
    error = SlurmftError("the loss is nan", "lower --learning-rate")
    run.add(Failure.of("rank 3 on n1", error, traceback="Traceback: here", attempt=1))
    with pytest.raises(
        SlurmftError, match=r"the loss is nan \(rank 3 on n1\)"
    ) as caught:
        slurmft.Run("bad").wait()
    assert (caught.value.hint, caught.value.__notes__) == (
        error.hint,
        ["Traceback: here"],
    )


@pytest.mark.processes
def test_submit_wait_resume(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tiny_data: Path,
    tiny_model: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On this machine: a setup line fails, the run goes on without it, and finishes."""
    monkeypatch.chdir(tmp_path)
    what: dict[str, Any] = {"task": "emotion", "data": tiny_data, "model": tiny_model}
    what |= {"max_steps": 2, "batch_size": 4, "nproc_per_node": 1, "preset": None}
    run = slurmft.submit(cluster="local", setup=("echo no module >&2; exit 7",), **what)
    with pytest.raises(SlurmftError) as caught:
        run.wait()
    assert "no module" in "\n".join(caught.value.__notes__)
    assert run.state == "failed"
    assert run.resume(setup=[]) is run
    assert slurmft.Run(run.job).path == slurmft.Run().path == run.path
    capsys.readouterr()
    result = run.wait(bar=True)
    shown = capsys.readouterr()
    assert (shown.out, "| 0/2 [" in shown.err, "steps" in shown.err) == (
        "",
        True,
        False,
    )
    assert run.follow(timeout_s=PATIENCE_S) == result
    shown = capsys.readouterr()
    assert "after step 2 (epoch 0.04): train loss" in shown.out
    assert (result["steps"], run.state, run.result) == (2, "finished", result)
    # 2 steps of 51, not 3 epochs
    assert result["epochs"] == run.status()["epoch"] == 0.0392
    assert [r["epoch"] for r in run.records("epoch")] == [0.0392]
    assert "accuracy" in run.logs()
    told = run.config.submission
    assert told.command.startswith(
        "slurmft.submit(cluster='local', setup=('echo no module"
    )
    assert told.resumed[0].command == "slurmft.Run.resume(setup=[])"
    assert (read_json(run.path / "job.json") or {})["where"] == os.uname().nodename
    done = command("cancel", "last")
    assert "has already ended (completed)" in done.out
