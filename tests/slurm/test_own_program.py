"""`slurmft run` on the real Slurm: scripts as users have them, under what clusters do to them."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurmft.runs.rundir import RunDir
from tests.conftest import Following, records, slurmft
from tests.support import faults, until
from tests.support.cluster import Cluster
from tests.support.own_programs import ATTACHES, GLUE, NLP, write

pytestmark = [
    pytest.mark.extra("programs"),
    pytest.mark.slurm,
    pytest.mark.timeout(900),
]

JOB = ("--nodes", "2", "--cpus-per-task", "1", "--time", "10", "--max-requeues", "20")
RESUMES = (
    *("--checkpoint-dir", "out", "--resume-args", "--resume_from_checkpoint {latest}"),
    *("--max-restarts", "20"),
)


def kill_program(cluster: Cluster, job: Following) -> None:
    """One rank's program, not slurmft's process beside it."""
    host = faults.hosts_of(cluster, job)[-1]
    found = [
        pid
        for pid, line in cluster.processes(host)
        if "python" in line and "own.py" in line
    ]
    os.kill(found[0], signal.SIGKILL)


HARMS: dict[str, Callable[[Cluster, Following], None]] = {
    "scancel --signal=TERM": faults.scancel_signal,
    "SIGKILL of a rank's program": kill_program,
    "scontrol requeue": faults.admin_requeue,
    "SIGKILL of torchrun": faults.kill_torchrun,
    "preemption": faults.preempt,
    "a node loses its power": faults.kill_host,
}
OF_TRAINER = (
    "scancel --signal=TERM",
    "SIGKILL of a rank's program",
    "preemption",
    "a node loses its power",
)
OF_ATTACHED = (
    "scancel --signal=TERM",
    "scontrol requeue",
    "SIGKILL of torchrun",
    "a node loses its power",
)
"""What each program suffers here; all of it takes too long for every day."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"  # tmp_path is the home, of which no code is copied
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


class Job(Following):
    """`slurmft run --follow`, in the background."""

    command = "run"


@pytest.fixture
def start(idle_cluster: Cluster) -> Iterator[Callable[..., Job]]:
    started = []

    def make(*arguments: str) -> Job:
        started.append(Job(*JOB, *arguments, env=idle_cluster.env))
        return started[-1]

    yield make
    for job in started:
        job.process.kill()
    idle_cluster.run(["scancel", "--user=root"])


def await_progress(run: RunDir, steps: Callable[[], int], goal: int) -> None:
    until(lambda: steps() >= goal, run.history)


def test_trainer_script(
    cluster: Cluster,
    here: Path,
    start: Callable[..., Job],
    tiny_data: Path,
    tiny_model: Path,
) -> None:
    """An unchanged script with transformers' Trainer, under one fault after the other, has the
    losses of a run that was left alone."""
    words = (
        *("--", "own.py", "--model_name_or_path", str(tiny_model)),
        *(
            "--train_file",
            str(tiny_data / "train.jsonl"),
            "--output_dir",
            "out",
        ),
        *(
            "--max_steps",
            "60",
            "--save_steps",
            "5",
            "--logging_steps",
            "1",
            "--report_to",
            "none",
        ),
        *(
            "--per_device_train_batch_size",
            "4",
            "--learning_rate",
            "1e-3",
            "--disable_tqdm",
            "1",
        ),
    )
    write(here, "own.py", GLUE)
    alone = slurmft(
        "run", "--follow", "--cluster", "local", "--nodes", "2", *words,
        env={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert alone.code == 0, alone.err
    expected = json.loads((here / "losses.json").read_text())
    (here / "out").rename(here / "before")

    def newest() -> int:
        folders = (here / "out").glob("checkpoint-*/trainer_state.json")
        return max((int(f.parent.name.split("-")[1]) for f in folders), default=0)

    job = start(*RESUMES, *words, "--pause_s", "0.2")
    for n, name in enumerate(OF_TRAINER):
        await_progress(job.run, newest, 10 * n + 5)
        before = done_twice(job.run)
        HARMS[name](cluster, job)
        await_progress(job.run, newest, min(newest() + 6, 60))
        print(f"{name}: {done_twice(job.run) - before} steps done again")
    code, text = job.end()
    assert code == 0, text
    assert json.loads((here / "losses.json").read_text()) == pytest.approx(
        expected, abs=1e-6
    )
    assert len(expected) == 60
    # one of them is survived within the job
    assert job.run.attempt_number() == len(OF_TRAINER)


def done_twice(run: RunDir) -> int:
    """Steps that rank 0 has told more than once."""
    found = re.findall(r"'loss': '?([\d.e-]+)", run.rank_log(0).read_text())
    return len(found) - len(set(found))


def test_accelerate_script(
    cluster: Cluster,
    here: Path,
    start: Callable[..., Job],
    tiny_data: Path,
    tiny_model: Path,
) -> None:
    """The same of Accelerate's manner: what is done again after a stop has equal losses."""
    write(here, "own.py", NLP)
    (here / "out").mkdir()
    job = start(
        *RESUMES,
        *(
            "--",
            "own.py",
            "--model",
            str(tiny_model),
            "--data",
            str(tiny_data / "train.jsonl"),
        ),
        *(
            "--output_dir",
            "out",
            "--checkpointing_steps",
            "5",
            "--pause_s",
            "0.2",
            "--epochs",
            "3",
        ),
    )
    await_progress(job.run, lambda: len(list((here / "out").glob("step_*"))), 2)
    faults.scancel_signal(cluster, job)
    code, text = job.end()
    assert code == 0, text
    lines = [
        json.loads(line)
        for line in (here / "out/losses.jsonl").read_text().splitlines()
    ]
    again = {step for step, _ in lines if [s for s, _ in lines].count(step) > 1}
    # the first of the two checkpoints was whole, at least
    assert min(again, default=6) > 5
    for step in again:
        first, second = (loss for s, loss in lines if s == step)
        assert first == pytest.approx(second, abs=1e-6)
    assert sorted({step for step, _ in lines}) == list(range(1, max(lines)[0] + 1))
    assert job.run.attempt_number() == 2


def test_program_that_attaches(
    cluster: Cluster, here: Path, start: Callable[..., Job]
) -> None:
    """Told before, it loses no step; else those since its last checkpoint. Losses are equal."""
    write(here, "own.py", ATTACHES)
    alone = slurmft(
        "run",
        "--follow",
        "--cluster",
        "local",
        "--nodes",
        "2",
        "--",
        "own.py",
        "130",
        "0",
    )
    assert alone.code == 0, alone.err
    job = start(
        *(
            "--checkpoint-every-steps",
            "10",
            "--max-restarts",
            "20",
            "--",
            "own.py",
            "130",
            "0.1",
        )
    )

    def last() -> int:
        return max((r["step"] for r in records(job.run, "step")), default=0)

    for n, name in enumerate(OF_ATTACHED):
        await_progress(job.run, last, 25 * n + 12)
        lost = faults.steps_lost(job.run)
        HARMS[name](cluster, job)
        attempt = job.run.attempt_number()
        await_progress(job.run, last, min(last() + 12, 130))
        print(f"{name}: {faults.steps_lost(job.run) - lost} steps done again")
        if name == "scancel --signal=TERM":
            assert job.run.attempt_number() >= attempt
            assert faults.steps_lost(job.run) == lost, name
    code, text = job.end()
    assert code == 0, text
    losses = [
        list({r["step"]: r["loss"] for r in records(run, "step")}.values())
        for run in (job.run, alone.run)
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 130
