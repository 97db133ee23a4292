"""Programs of users' own that run out of memory: what they get to take less the next time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from slurmft.core.errors import SlurmftError, UsageError
from slurmft.core.run_files import Failure
from slurmft.node import memory_kills
from slurmft.programs import memory_failures
from slurmft.programs.description import OwnProgram
from tests.conftest import slurmft
from tests.support.control_group import limited
from tests.support.made_runs import write_run
from tests.support.own_programs import write

NEEDS_MEMORY = """\
import os, sys
batch_size, steps = int(sys.argv[1]), int(sys.argv[2])
failures = os.environ["SLURMFT_MEMORY_FAILURES"]
print("batch", batch_size, "steps", steps, "failures", failures, flush=True)
if batch_size > 2:
    raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")
"""
"""Two samples fit."""

TAKES_MEMORY = """\
import os, sys
held = bytearray(int(sys.argv[1]) << 30)
for start in range(0, len(held), 4096):
    held[start] = 1
print("fits", flush=True)
"""


@pytest.mark.parametrize(
    ("failures", "values"),
    [(0, "0 12 1"), (1, "1 6 2"), (2, "2 3 4"), (3, "3 3 4")],
)
def test_placeholders(failures: int, values: str) -> None:
    """The product of halved and doubled sizes stays: 12 * 1 = 6 * 2 = 3 * 4."""
    words = ["x", "--n={memory_failures}", "{halved:12}", "--s={doubled:1}", "{latest}"]
    number, halved, doubled = values.split()
    assert memory_failures.filled_in(words, failures) == [
        "x", f"--n={number}", halved, f"--s={doubled}", "{latest}",
    ]  # fmt: skip


def test_sizes_of_both_parts_of_a_command(tmp_path: Path) -> None:
    program = OwnProgram(
        argv=("x", "{halved:6}"), folder=str(tmp_path), file="x", checkpoint_dir="out",
        resume_args="--from {latest} --steps {doubled:4}",
    )  # fmt: skip
    assert program.arguments(None, 5) == ["x", "3"]
    # A path is no template.
    checkpoint = tmp_path / "{memory_failures}"
    words = ["x", "3", "--from", str(checkpoint), "--steps", "8"]
    assert program.arguments(checkpoint, 5) == words


@pytest.mark.parametrize("word", ["{halved:}", "--b={doubled:0}", "{halved:many}"])
def test_placeholder_without_a_size(word: str) -> None:
    for fields in (
        {"argv": ("x", word)},
        {"argv": ("x",), "checkpoint_dir": "out", "resume_args": word},
    ):
        with pytest.raises(UsageError, match="has no size to begin with"):
            OwnProgram(folder="/", file="x", **fields)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", True),
        ("jaxlib.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory", True),
        ("MemoryError", True),
        ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 2 GiB", True),
        ("OSError: [Errno 12] Cannot allocate memory", True),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED", True),
        ("RuntimeError: the loss is nan", False),
    ],
)
def test_errors(error: str, expected: bool) -> None:
    assert memory_kills.is_said_by(error) is expected


def test_error_of_torch_on_cpus() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**50)
    assert memory_kills.is_said_by(f"RuntimeError: {raised.value}")


@pytest.mark.parametrize(
    ("code", "output", "expected"),
    [
        (137, "it.sh: line 4: 20401 Killed   python3 train.py", True),
        (1, "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.", True),
        (1, "traceback : Signal 9 (SIGKILL) received by PID 7", True),
        (1, "BrokenProcessPool: A process in the pool was terminated abruptly", True),
        (1, "ValueError: 9 classes, and the signal has 8", False),
        (143, "Terminated", False),
    ],
)  # fmt: skip
def test_end_of_a_process_of_the_program(
    code: int, output: str, expected: bool
) -> None:
    assert memory_kills.says_killed(code, output) is expected


def test_ranks_that_fail_together_are_one_failure(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert memory_failures.count(run) == 0
    error = SlurmftError("out of memory")
    for rank in (0, 1):
        run.add(Failure.of(f"rank {rank}", error, attempt=1, memory_failures=0))
    run.add(Failure.of("rank 1", error, attempt=2, memory_failures=1))
    run.add(Failure.of("rank 1", SlurmftError("another"), attempt=2))
    assert memory_failures.count(run) == 2
    # Slurm has killed the task: no process was left to count.
    error.out_of_memory = True
    run.add(Failure.of("as Slurm reports", error, attempt=3))
    assert memory_failures.count(run) == 3
    # The next start has counted them all.
    counted = SlurmftError("out of memory")
    run.add(Failure.of("rank 0", counted, attempt=4, memory_failures=3))
    assert memory_failures.count(run) == 4


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The present folder, with a program that needs memory."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    write(folder, "own.py", NEEDS_MEMORY)
    return folder


@pytest.mark.processes
@pytest.mark.parametrize("attaches", [False, True])
def test_program_that_takes_less_until_it_fits(project: Path, attaches: bool) -> None:
    """Without a checkpoint, and on all ranks alike. What attaches records its failures itself."""
    if attaches:
        lines = "".join(f"    {line}\n" for line in NEEDS_MEMORY.splitlines())
        write(project, "own.py", f"import slurmft\nwith slurmft.attach():\n{lines}")
    done = slurmft(
        *("run", "--cluster", "local", "--follow", "--nproc-per-node", "2", "--"),
        *("own.py", "{halved:8}", "{doubled:3}"),
        imported=True,
    )
    assert done.code == 0, done.err
    texts = [done.run.rank_log(rank).read_text() for rank in (0, 1)]
    # The first rank that fails may end the others before they print.
    for line in ("batch 8 steps 3 failures 0", "batch 4 steps 6 failures 1"):
        assert any(line in text for text in texts), texts
    for text in texts:
        assert "batch 2 steps 12 failures 2" in text.splitlines()[-1]
    assert done.run.attempt_number() == 1
    assert memory_failures.count(done.run) == 2


@pytest.mark.processes
@pytest.mark.usefixtures("project")
def test_program_that_cannot_take_less_ends() -> None:
    """It fails in the same way once more: that may not go on for ever."""
    words = ("run", "--cluster", "local", "--follow", "--", "own.py", "8", "1")
    done = slurmft(*words, imported=True)
    assert done.code == 1
    assert "CUDA out of memory" in done.err
    assert memory_failures.count(done.run) == 2
    assert done.run.attempt_number() == 1


@pytest.mark.processes
@pytest.mark.extra("faults")
def test_kernel_that_ends_a_program(project: Path) -> None:
    write(project, "own.py", TAKES_MEMORY)
    words = ("--follow", "--nproc-per-node", "1", "--", "own.py", "{halved:4}")
    with limited(3 * 2**30) as enter:
        done = slurmft("run", "--cluster", "local", *words, enter=enter)
    assert done.code == 0, done.err
    assert "fits" in done.run.rank_log(0).read_text()
    assert memory_failures.count(done.run) == 1
    # Slurm would report the kill, and no exit code.
    assert done.run.ended_well(1, 0).exists()


@pytest.mark.processes
@pytest.mark.extra("faults")
def test_kernel_that_ends_a_process_of_a_program(project: Path) -> None:
    """The program is a shell, which only reports that its Python was killed."""
    write(project, "own.py", TAKES_MEMORY)
    shell = write(project, "own.sh", f'#!/bin/sh\n{sys.executable} own.py "$1"\n')
    shell.chmod(0o755)
    words = ("--follow", "--nproc-per-node", "1", "--", "./own.sh", "{halved:4}")
    with limited(3 * 2**30) as enter:
        done = slurmft("run", "--cluster", "local", *words, enter=enter)
    assert done.code == 0, done.err
    assert memory_failures.count(done.run) == 1
    (failure,) = done.run.all_failures()
    assert "exit code 137" in failure.message
    assert "the kernel reports that memory ran out" in failure.message
