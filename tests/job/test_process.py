"""What a rank that fails records, and whether a restart can help it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from slurmft.core.errors import SlurmftError
from slurmft.core.run_files import ATTEMPT, Failure
from slurmft.job import process
from slurmft.node import heartbeat, memory_kills
from slurmft.node.hardware import host_name
from slurmft.runs.rundir import RunDir
from tests.support.made_runs import write_run

HOUR_S = 3600.0


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run in its second attempt."""
    monkeypatch.setenv(heartbeat.FOLDER, str(tmp_path))
    monkeypatch.setenv(ATTEMPT, "2")
    return write_run(tmp_path / "r", state="running")


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The signals that torchrun got: the parent of the ranks."""
    found: list[int] = []

    def kill(pid: int, number: int) -> None:
        assert pid == os.getppid()
        found.append(number)

    monkeypatch.setattr(os, "kill", kill)
    return found


def fail(
    run: RunDir, message: str = "no such label", rank: int = 3, meetings: int = 2
) -> int:
    return process.record_failure(ValueError(message), run, rank, 7, meetings)


def before(
    run: RunDir, rank: int = 3, step: int = 7, attempt: int = 2, meetings: int = 1
) -> None:
    """A failure that is on record."""
    error = SlurmftError("ValueError: no such label")
    where = f"rank {rank} on {host_name()}"
    run.add(Failure.of(where, error, step=step, attempt=attempt, meetings=meetings))


def test_failure_says_what_this_process_has_seen(run: RunDir, ended: list[int]) -> None:
    assert fail(run) == 1
    (failure,) = run.all_failures()
    assert (failure.where, failure.step) == (f"rank 3 on {host_name()}", 7)
    assert (failure.attempt, failure.meetings, failure.secondary) == (2, 2, False)
    assert failure.message == "ValueError: no such label"
    assert failure.traceback == "ValueError: no such label\n"
    assert ended == []  # a restart may help


@pytest.mark.parametrize("kills", [0, 1])
def test_process_that_the_kernel_has_killed_is_memory(
    kills: int, run: RunDir, ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a worker of a DataLoader. Somebody else may have killed it, too."""
    monkeypatch.setenv(memory_kills.FAILURES, "2")
    before = memory_kills.MemoryKills(5, 5)
    now = memory_kills.MemoryKills(5 + kills, 5 + kills)
    monkeypatch.setattr(process, "memory_kills_before", lambda: before)
    monkeypatch.setattr(memory_kills.MemoryKills, "now", lambda root=None: now)
    fail(run, "DataLoader worker (pid 7) is killed by signal: Killed.")
    (failure,) = run.all_failures()
    assert failure.out_of_memory == bool(kills)
    assert failure.memory_failures == (2 if kills else None)
    assert ("the kernel reports that memory ran out" in failure.message) == bool(kills)


@pytest.mark.parametrize("clock_s", [-HOUR_S, 0.0, HOUR_S])
@pytest.mark.parametrize(
    ("facts", "is_again"),
    [
        ({"meetings": 1}, True),
        # other ranks fail together with it, or did before
        ({"meetings": 1, "rank": 0}, True),
        # an earlier life of this rank, which never met the others
        ({"meetings": 2}, True),
        ({"meetings": 2, "rank": 0}, False),  # the same moment
        ({"attempt": 1, "meetings": 5, "rank": 0}, True),
        ({"meetings": 1, "step": 6}, False),
    ],
)
def test_failure_that_returns_ends_torchrun(
    run: RunDir,
    ended: list[int],
    monkeypatch: pytest.MonkeyPatch,
    facts: dict[str, int],
    is_again: bool,
    clock_s: float,
) -> None:
    """Whatever the clock says: it may be set between two attempts."""
    now = time.time()
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now + clock_s)
        before(run, **facts)
    fail(run)
    assert ended == [signal.SIGHUP] * is_again


def test_another_failure_is_no_return(run: RunDir, ended: list[int]) -> None:
    before(run)
    fail(run, "another")
    assert ended == []


def test_error_with_words_of_its_own_cannot_be_helped(
    run: RunDir, ended: list[int]
) -> None:
    error = SlurmftError("the loss is nan", code=3)
    assert process.record_failure(error, run, 0, 7, 1) == 3
    assert ended == [signal.SIGHUP]


def test_rank_that_was_started_by_hand_has_no_torchrun(
    run: RunDir, ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(heartbeat.FOLDER)
    process.record_failure(SlurmftError("the loss is nan"), run, 0, 7, 1)
    assert ended == []


BROKEN = [
    "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronously",
    "CUDA error: unknown error\nCUDA kernel errors might be asynchronously reported",
    "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
    "CUDA error: no CUDA-capable device is detected",
    "CUDA unknown error - this may be due to an incorrectly set up environment",
    "HIP error: unknown error",
    "GPU is lost",
    "level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)",
]
OTHERS = [
    "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported",
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.10 GiB",
    "CUDA error: an illegal memory access was encountered",
    "mat1 and mat2 shapes cannot be multiplied; unknown error",
]


@pytest.mark.parametrize("message", BROKEN)
def test_gpu_that_fails(
    message: str, run: RunDir, ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host is to blame; a restart on it would not help, and another attempt may."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setenv("LOCAL_RANK", "1")
    process.record_failure(RuntimeError(message), run, 3, 7, 2)
    (failure,) = run.all_failures()
    assert failure.message.startswith(f"GPU 6 of {host_name()} failed: {message[:9]}")
    assert "\n" not in failure.message
    assert (failure.bad_host, failure.retry) == (host_name(), True)
    assert not failure.secondary
    assert ended == [signal.SIGHUP]
    assert run.bad_hosts() == []
    run.add(Failure.of("node", SlurmftError("again"), bad_host=host_name(), attempt=1))
    assert run.bad_hosts() == [host_name()]


@pytest.mark.parametrize("message", OTHERS)
def test_errors_that_a_program_makes_on_a_gpu(
    message: str, run: RunDir, ended: list[int]
) -> None:
    process.record_failure(RuntimeError(message), run, 3, 7, 2)
    (failure,) = run.all_failures()
    assert (failure.bad_host, failure.retry, ended) == (None, False, [])


@pytest.mark.parametrize("is_bad", [True, False])
def test_host_whose_gpus_cannot_be_used(
    is_bad: bool, run: RunDir, ended: list[int]
) -> None:
    """Every rank refuses; the one there is the cause."""
    hosts = [host_name()] if is_bad else ["n2"]
    error = SlurmftError("no GPU")
    error.bad_hosts = hosts
    process.record_failure(error, run, 3, 0, 1)
    (failure,) = run.all_failures()
    assert failure.bad_host == (host_name() if is_bad else None)
    assert failure.secondary is not is_bad
    assert ended == ([signal.SIGHUP] if is_bad else [])
