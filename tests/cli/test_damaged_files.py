"""Every file that a command reads, damaged: words and an exit code, and never a traceback."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from slurmft.__main__ import main
from slurmft.cluster import wait
from slurmft.cluster.slurm import commands
from slurmft.core.errors import Exit, SlurmftError, run_main
from slurmft.core.files import write_json
from slurmft.core.run_files import Failure
from tests.support.damage import damaged, damages
from tests.support.made_runs import write_run

FINISHED, FAILED = (
    "runs/emotion-20261120-093012-a1b2",
    "runs/emotion-20261121-093012-c3d4",
)

READING = (
    ["status", FAILED],
    ["status", FAILED, "--json"],
    ["status", FINISHED],
    ["list"],
    ["list", "--json"],
    ["logs", FAILED],
    ["logs", FAILED, "--json", "--attempt", "1"],
    ["clean", "--dry-run"],
    ["report", "runs"],
    ["report", "runs", "--format", "csv"],
    ["report", FAILED, FINISHED, "--compare"],
    ["plan", "runs"],
    ["follow", FINISHED],
    ["follow", FAILED],
    ["watch", FAILED],
    ["study", "status", "studies/small"],
    ["cancel", FAILED],
)  # fmt: skip
"""Commands that change nothing here."""

OF_A_RUN = (
    "config.json", "state.json", "records.jsonl", "job.json", "attempt.json", "started.json",
    "environment.json", "failures/rank-0.json", "logs/rank-000.log", "logs/node-000.log",
)  # fmt: skip
FILES = (
    *(f"{FAILED}/{name}" for name in OF_A_RUN),
    f"{FINISHED}/result.json",
    f"{FINISHED}/state.json",
    f"{FINISHED}/records.jsonl",
    f"{FINISHED}/config.json",
    "studies/small/study.toml",
    "site.toml",
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two runs, one of which failed, a study, a site file; the working directory is theirs."""
    top = tmp_path_factory.mktemp("world")
    _write_world(top)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(top)
        patch.setenv("SLURMFT_SITE", str(top / "site.toml"))
        patch.setattr(commands, "call", _call)
        patch.setattr(wait, "_FILE_LAG_S", 0.1)
        yield top


def _call(name: str, *arguments: str) -> str:
    """Slurm, whose accounting knows that both jobs have ended."""
    if name == "sacct":
        each = "JobID," if "--format=JobID,State,ExitCode" in arguments else ""
        return "11|COMPLETED|0:0\n12|FAILED|1:0\n" if each else "FAILED|1:0\n"
    raise SlurmftError(f"{name}: Invalid job id specified")


def _write_world(top: Path) -> None:
    finished = write_run(top / FINISHED)
    write_json(finished.job, {"cluster": "slurm", "id": "11"})
    failed = write_run(top / FAILED, state="failed", nodes=2)
    write_json(failed.job, {"cluster": "slurm", "id": "12"})
    write_json(
        failed.attempt,
        {"number": 1, "job": "12", "hosts": ["n1", "n2"], "time": 1000.0},
    )
    write_json(failed.started, {"attempt": 1, "meetings": 1})
    error = SlurmftError("the disk is full", "free some")
    failed.add(Failure.of("rank 0 on n1", error, traceback="Traceback", attempt=1))
    next(failed.failures.iterdir()).rename(failed.failures / "rank-0.json")
    with open(failed.records, "a", encoding="utf-8") as file:
        for record in (
            {
                "event": "resume",
                "step": 5,
                "checkpoint": "step-00000005",
                "changes": ["x"],
            },
            {
                "event": "epoch",
                "epoch": 1,
                "step": 10,
                "loss": 0.2,
                "metrics": {"accuracy": 0.5},
            },
            {"event": "evaluate", "done": 5, "total": 10},
            {"event": "warning", "text": "slow"},
            {
                "event": "ranks",
                "step": 10,
                "own_ms": [1.5, 2.0],
                "memory_mib": [100, 200],
            },
            {"event": "stopping", "step": 20, "reason": "SIGTERM"},
        ):
            file.write(json.dumps({"time": 1002.0} | record) + "\n")
    for name in ("rank-000.log", "node-000.log"):
        lines = [
            "2026-11-21T10:00:00.000000 rank 0 on n1, attempt 1, pid 7",
            "one",
            "two",
        ]
        (failed.logs / name).write_text("\n".join(lines) + "\n")
    study = top / "studies" / "small"
    (study / "runs").mkdir(parents=True)
    (study / "study.toml").write_text(
        'name = "small"\nrepeats = 2\n\n[base]\ntask = "emotion"\n\n[grid]\nnodes = [1, 2]\n'
    )
    (top / "site.toml").write_text(
        'runs_dir = "runs"\npartition = "gpu"\nsetup = ["true"]\n'
    )


@pytest.mark.parametrize("name", FILES)
def test_no_traceback(world: Path, name: str) -> None:
    whole = (world / name).read_bytes()

    @damages
    @given(text=damaged(name, whole), command=st.sampled_from(READING))
    def check(text: bytes, command: list[str]) -> None:
        (world / name).write_bytes(text)
        code, out, err = _run(command)
        note(f"{code}\n{out}\n{err}")
        assert code in set(Exit), (code, err)
        assert "Traceback (most recent" not in out + err
        if code:
            assert err

    try:
        check()
    finally:
        (world / name).write_bytes(whole)


@pytest.mark.timeout(100)
@pytest.mark.parametrize("name", FILES)
def test_fifo_keeps_no_reader(world: Path, name: str) -> None:
    """Another account may put one into a folder of runs that is shared."""
    aside = world / "aside"
    (world / name).rename(aside)
    os.mkfifo(world / name)
    try:
        for command in READING:
            code, out, err = _run(command)
            assert code in set(Exit), (command, code, err)
            assert "Traceback (most recent" not in out + err
    finally:
        aside.replace(world / name)


def _run(command: list[str]) -> tuple[int, str, str]:
    """A command within this process: exit code, stdout, stderr."""
    with _Stream() as out, _Stream() as err:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run_main(lambda: main(list(command)))
        return code, out.text(), err.text()


class _Stream(io.TextIOWrapper):
    """A stream as sys.stdout is one, in memory."""

    def __init__(self) -> None:
        self._bytes = io.BytesIO()
        super().__init__(self._bytes, encoding="utf-8")

    def text(self) -> str:
        self.flush()
        return self._bytes.getvalue().decode()
