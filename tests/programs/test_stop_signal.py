"""A program that dies of its stop signal: stopped if the signal was the job's, else failed."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from slurmft.core.config import JobConfig
from slurmft.core.errors import Exit
from slurmft.core.files import write_json
from slurmft.core.run_files import ATTEMPT
from slurmft.node import flight_recorder, heartbeat
from slurmft.programs import process
from slurmft.programs.description import OwnProgram
from slurmft.programs.process import OwnProcess
from tests.support.made_runs import calls_of_rank, write_run

DIED_OF_TERM = -int(signal.SIGTERM)


@pytest.fixture
def own_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OwnProcess:
    """The process of rank 0, whose program has died."""
    monkeypatch.setenv(ATTEMPT, "1")
    run = write_run(tmp_path / "run", state="running")
    program = OwnProgram(argv=("sleep",), file="sleep", folder=str(tmp_path))
    beside = OwnProcess(run, program, 0, JobConfig())
    beside._child = cast(Any, SimpleNamespace(pid=4711))
    return beside


def test_signal_that_the_program_heard_first(
    own_process: OwnProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm signals every process of a step; the program's death may be noticed before the signal
    to the process beside it."""
    # the program is gone
    monkeypatch.setattr(own_process, "_send", lambda number: None)
    pauses = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        own_process._on_signal(signal.SIGTERM, sender=os.getpid())

    monkeypatch.setattr(time, "sleep", sleep)
    assert own_process._ended(DIED_OF_TERM) == Exit.OK
    assert len(pauses) == 1
    assert own_process._run.root_failure(1) is None


@pytest.mark.parametrize("code", [DIED_OF_TERM, 128 + signal.SIGTERM])
def test_death_without_a_stop_is_a_failure(
    own_process: OwnProcess, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_SIGNAL_LAG_S", 0.01)
    monkeypatch.setattr(process, "ask_for_no_restart", lambda: None)
    assert own_process._ended(code) == 128 + signal.SIGTERM
    assert own_process._run.root_failure(1) is not None


_SAVES = """\
import os, signal, sys, time

def save(number, frame):
    print("saves at", signal.Signals(number).name, flush=True)
    sys.exit(75)

signal.signal(signal.{}, save)
os.write(1, b"begins\\n")  # a signal within print could not print
time.sleep(60)
"""


@pytest.mark.processes
@pytest.mark.parametrize("stop_signal", ["TERM", "USR2"])
def test_relayed_signal_of_slurm_does_not_end_the_program(
    tmp_path: Path, stop_signal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time limit may send SIGUSR2 to all processes of a step: the program saves all the same when
    its own stop signal comes."""
    monkeypatch.setenv(ATTEMPT, "1")
    script = tmp_path / "save.py"
    script.write_text(_SAVES.format(f"SIG{stop_signal}"))
    program = OwnProgram(
        argv=(sys.executable, str(script)),
        file=sys.executable,
        folder=str(tmp_path),
        stop_signal=stop_signal,
    )
    own = OwnProcess(write_run(tmp_path / "run"), program, 0, JobConfig())
    child = own._start_process(list(program.argv), dict(os.environ))
    assert child.stdout is not None
    assert child.stdout.readline() == b"begins\n"
    child.send_signal(signal.SIGUSR2)
    if stop_signal == "TERM":
        child.send_signal(signal.SIGTERM)
    assert child.stdout.readline() == f"saves at SIG{stop_signal}\n".encode()
    assert child.wait(60) == Exit.STOPPED


def test_other_ends_do_not_wait(
    own_process: OwnProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep(seconds: float) -> None:
        raise AssertionError("it waits for a stop")

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(process, "ask_for_no_restart", lambda: None)
    assert own_process._ended(0) == Exit.OK
    assert own_process._ended(3) == 3


def test_a_program_that_has_lost_a_peer_is_not_asked(
    own_process: OwnProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers no more, and what it has told would be lost."""
    told = Path(flight_recorder.answer_file(str(tmp_path), 0))
    monkeypatch.setenv(heartbeat.FOLDER, str(tmp_path))
    monkeypatch.setattr(flight_recorder, "ask", lambda folder, rank: False)
    write_json(told, asdict(replace(calls_of_rank(), lost_peer=True)))
    own_process._keep_calls()
    assert told.exists()
    write_json(told, asdict(calls_of_rank()))
    own_process._keep_calls()
    assert not told.exists()
