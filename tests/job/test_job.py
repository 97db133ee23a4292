"""The door: a plain script of a few lines steps, saves, stops and resumes as the trainer does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import slurmft
from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.errors import Exit
from slurmft.core.program import Program
from slurmft.job import Job
from slurmft.node import heartbeat
from slurmft.runs.records import RecordReader
from slurmft.runs.rundir import RUN_DIR, RunDir
from tests.support import CHECKOUT, PATIENCE_S, until

SCRIPT = """
import sys, time, slurmft
with slurmft.attach() as job:
    latest = job.latest_checkpoint()
    first = int((latest / "step").read_text()) + 1 if latest else 1
    for n in range(first, int(sys.argv[1]) + 1):
        time.sleep(0.01 * (1 + job.rank))
        job.step(n, total=int(sys.argv[1]), loss=1 / n, samples=4)
        if job.should_stop() or job.checkpoint_due():
            with job.checkpoint(n) as folder:
                if folder:
                    (folder / "step").write_text(str(n))
        print("done", n, flush=True)
        if job.should_stop():
            break
    else:
        job.result(accuracy=0.5, loss=0.1)
"""


def make_run(folder: Path, **job: Any) -> RunDir:
    program = Program(kind="script", name="plain", module="plain")
    config = JobConfig(runs_dir=str(folder / "runs"), backend="gloo", **job)
    return RunDir.create(RunConfig(program=program, job=config))


def start(
    run: RunDir, script: str, ranks: int, *arguments: str
) -> subprocess.Popen[bytes]:
    """Two ranks under our torchrun, as a node's task starts them; or one process."""
    path = run.path.parent / "script.py"
    path.write_text(script)
    node = run.path.parent / "node"
    node.mkdir(exist_ok=True)
    (node / "stopped").unlink(missing_ok=True)
    environment = os.environ | {RUN_DIR: str(run.path), heartbeat.FOLDER: str(node)}
    environment |= {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable]
    if ranks > 1:
        command += [
            "-m",
            "slurmft.node.torchrun",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
        ]
    return subprocess.Popen(
        [*command, str(path), *arguments], env=environment, stdin=subprocess.DEVNULL
    )


def events(run: RunDir, event: str) -> list[dict[str, Any]]:
    return list(RecordReader(run.records).read_values(event))


def await_steps(process: subprocess.Popen[bytes], run: RunDir, count: int) -> None:
    until(
        lambda: process.poll() is not None or len(events(run, "step")) >= count,
        every_s=0.05,
    )
    assert process.poll() is None


def last_steps(run: RunDir, ranks: int) -> list[str]:
    return [
        run.rank_log(r).read_text().splitlines()[-1].split()[-1] for r in range(ranks)
    ]


@pytest.mark.processes
def test_two_ranks_stop_after_the_same_step_and_resume(tmp_path: Path) -> None:
    run = make_run(tmp_path, checkpoint_every_steps=10, keep_checkpoints=2)
    torchrun = start(run, SCRIPT, 2, "100000")
    await_steps(torchrun, run, 25)
    torchrun.send_signal(signal.SIGTERM)
    assert torchrun.wait(PATIENCE_S) == Exit.OK
    assert (tmp_path / "runs" / "node" / "stopped").exists()
    (stopping,) = events(run, "stopping")
    assert last_steps(run, 2) == [str(stopping["step"])] * 2
    names = run.checkpoint_names()
    assert names[-1] == f"step-{stopping['step']:08d}"
    assert len(names) == 2

    total = stopping["step"] + 5
    assert start(run, SCRIPT, 2, str(total)).wait(PATIENCE_S) == Exit.OK
    assert [step["step"] for step in events(run, "step")] == list(range(1, total + 1))
    assert not (tmp_path / "runs" / "node" / "stopped").exists()
    result = json.loads(run.result.read_text())
    assert result["metrics"] == {"accuracy": 0.5, "loss": 0.1}
    assert result["primary_metric"] == "accuracy"
    assert (result["steps"], result["world_size"]) == (total, 2)
    last = events(run, "step")[-1]
    assert last["samples_per_s"] > 0
    assert last["total_steps"] == total
    assert last["left_s"] == 0


@pytest.mark.processes
def test_one_process_needs_no_torch(tmp_path: Path) -> None:
    run = make_run(tmp_path, checkpoint_every_steps=4)
    script = SCRIPT + "assert 'torch' not in sys.modules\n"
    assert start(run, script, 1, "9").wait(PATIENCE_S) == Exit.OK
    assert run.checkpoint_names() == ["step-00000004", "step-00000008"]
    beat = heartbeat.read(tmp_path / "runs" / "node" / "beat-0")
    assert beat is not None
    assert beat.step == 9


@pytest.mark.processes
def test_one_process_meets_once(tmp_path: Path) -> None:
    """Also where it joins a process group of its own, as the trainer does."""
    run = make_run(tmp_path)
    script = """
import os, slurmft
os.environ |= {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
with slurmft.attach() as job:
    job.join()
"""
    assert start(run, script, 1).wait(PATIENCE_S) == 0
    (met,) = events(run, "met")
    assert met["meetings"] == run.meetings(met["attempt"]) == 1


@pytest.mark.processes
@pytest.mark.parametrize(
    ("base", "ranks"),
    [("ValueError", 1), ("BaseException", 1), ("slurmft.SlurmftError", 2)],
)
def test_failure_is_recorded_with_its_step(
    base: str, ranks: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also one that is not of Exception, as those of time limits: a peer was lost, no more.

    torchrun ends without a traceback of its own, which would bury that of the rank."""
    run = make_run(tmp_path)
    script = f"""
import slurmft
class WrongError({base}):
    pass
with slurmft.attach() as job:
    job.step(3)
    raise WrongError("no such column")
"""
    process = start(run, script, ranks)
    assert process.wait(PATIENCE_S) == Exit.FAILED
    assert "SignalException" not in capfd.readouterr().err
    failure, *others = run.all_failures()
    assert len(others) < ranks
    name = "" if base.startswith("slurmft") else "WrongError: "
    assert failure.message == f"{name}no such column"
    assert failure.step == 3
    # The rank that fails first ends the other one.
    rank = int(failure.where.split()[1])
    assert "no such column" in run.rank_log(rank).read_text()


def test_outside_of_a_job_it_says_so_once_and_does_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(RUN_DIR, raising=False)
    for _ in range(2):
        with slurmft.attach() as job:
            assert (job.rank, job.world_size, job.run_dir) == (0, 1, None)
            assert job.latest_checkpoint() is None
            job.step(1, total=2, loss=0.5)
            assert not job.should_stop()
            assert not job.checkpoint_due()
            with job.checkpoint(1) as folder:
                assert folder is None
            job.evaluated(accuracy=0.5)
            job.warn("nobody reads it")
            job.result(accuracy=0.5)
    assert capsys.readouterr().err.count("\n") == 1


def test_answers_stay_until_the_next_step(tmp_path: Path) -> None:
    job = Job(make_run(tmp_path, checkpoint_every_steps=3, checkpoint_every="0"))
    due = []
    for n in range(1, 8):
        job.step(n)
        due += [n] * job.checkpoint_due()
        assert job.checkpoint_due() == (n in due)
    assert due == [3, 6]


def test_steps_count_from_the_latest_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path, checkpoint_every_steps=5, checkpoint_every="0")
    with Job(run).checkpoint(7) as folder:
        assert folder is not None
    job = Job(run)
    assert job.latest_checkpoint() == run.checkpoints / "step-00000007"
    due = []
    for n in range(8, 16):
        job.step(n)
        due += [n] * job.checkpoint_due()
    assert due == [10, 15]


def test_short_lead_is_told_once(tmp_path: Path) -> None:
    run = make_run(tmp_path, stop_lead_s=0)
    job = Job(run)
    for n in (1, 2):
        job.step(n)
        with job.checkpoint(n):
            pass
    (warning,) = events(run, "warning")
    assert "give --stop-lead-s" in warning["text"]


def test_phases_are_recorded_where_they_change(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    job = Job(run)
    for n in range(1, 40):
        job.alive("start")  # no phase of its own
        job.step(n)
    for _ in range(3):
        job.alive("evaluate")
    job.evaluated(accuracy=0.5)
    # After an evaluation they train: no record says so again.
    job.step(40)
    with job.checkpoint(40):
        pass
    job.alive("save")
    job.step(41)
    kinds = ("met", "phase", "epoch", "checkpoint")
    rows = [r for r in RecordReader(run.records).read_values() if r["event"] in kinds]
    found = [row.get("phase", row["event"]) for row in rows]
    # The trainer records its checkpoints by itself.
    assert found == ["met", "evaluate", "epoch", "save", "train"]
    # An evaluation that is recorded while they save ends no save.
    job.alive("save")
    job.evaluated(accuracy=0.5)
    job.step(42)
    phases = [row["phase"] for row in RecordReader(run.records).read_values("phase")]
    assert phases[-2:] == ["save", "train"]


def test_records_of_many_steps_are_few(tmp_path: Path) -> None:
    """After 10,000 steps a record stands for several; nothing is lost when the loop ends."""
    run = make_run(tmp_path)
    job = Job(run)
    job.evaluated(accuracy=0.1)
    for n in range(9_990, 10_351):
        job.step(n, loss=float(n))
    job.evaluated(accuracy=0.5)
    steps = events(run, "step")
    assert [s["step"] for s in steps if s["step"] <= 10_000] == list(
        range(9_990, 10_001)
    )
    assert sum(s.get("steps", 1) for s in steps) == 361
    assert 14 <= len(steps) <= 20
    assert steps[-1]["step"] == 10_350
    total = sum(s["loss"] * s.get("steps", 1) for s in steps)
    assert total == pytest.approx(sum(range(9_990, 10_351)))
    assert [r["event"] for r in RecordReader(run.records).read_values()][-2:] == [
        "step",
        "epoch",
    ]
