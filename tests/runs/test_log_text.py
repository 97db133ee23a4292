"""`slurmft logs`: the logs of all ranks as one, and what failed first before it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from slurmft import Run
from slurmft.cli import logs
from slurmft.core.errors import SlurmftError, UsageError
from slurmft.core.files import write_json
from slurmft.core.run_files import Failure
from slurmft.runs import log_times, logfiles, rundir
from slurmft.runs.logfiles import Choice, Logs
from slurmft.runs.rundir import RunDir
from tests.conftest import Following, slurmft
from tests.support import PATIENCE_S, until
from tests.support.made_runs import write_run
from tests.support.models import write_model, write_raising
from tests.train.test_resume import held

pytestmark = pytest.mark.processes

T = 1_790_000_000.0
"""Some Unix time."""


def put(path: Path, *lines: tuple[float | None, str]) -> None:
    """Appends lines with their stamps, and those without."""
    path.parent.mkdir(exist_ok=True)
    with open(path, "a") as file:
        for when, text in lines:
            file.write(f"{'' if when is None else log_times.stamp(when) + ' '}{text}\n")


def texts(run: RunDir, *arguments: str) -> list[str]:
    """What `slurmft logs` prints behind time, host and rank."""
    done = slurmft("logs", str(run.path), *arguments)
    assert done.code == 0, done.err
    return [line.partition(" | ")[2] for line in done.out.splitlines() if " | " in line]


def test_stamp_comes_back() -> None:
    line = f"{log_times.stamp(T + 0.25)} step 1: 2026-11-20 10:11:12"
    assert log_times.split(line) == (T + 0.25, "step 1: 2026-11-20 10:11:12")
    assert log_times.split("step 1") == (None, "step 1")


def test_lines_behind_progress_bars_have_no_stamps(tmp_path: Path) -> None:
    """As Trainer prints them: its bar on stderr, its metrics on stdout; the stamps were shown."""
    run = write_run(tmp_path / "r")
    bar = "\r  0%| | 0/2\r 50%|# | 1/2"
    metrics = log_times.stamp(T + 1) + " {'loss': 1.5}"
    put(
        run.rank_log(0),
        (T, f"{bar}\r   \r{metrics}"),
        (None, f"{bar}{log_times.stamp(T + 2)} epoch 1"),
        # What the program itself prints stays.
        (T + 3, f"begun at {log_times.stamp(T)} here"),
    )
    lines = list(Logs(run, Choice()).lines())
    assert [line.text for line in lines] == [
        "{'loss': 1.5}",
        "50%|# | 1/2  epoch 1",
        f"begun at {log_times.stamp(T)} here",
    ]
    assert [line.time - T for line in lines] == [1, 2, 3]


@pytest.mark.parametrize(
    "line",
    [
        "[2026-11-20 10:31:07] n1:71:90 [0] transport.cc:77 NCCL WARN Call to ibv failed",
        "[rank3]:[W1120 10:31:07.123456789 ProcessGroupNCCL.cpp:1250] Warning: not destroyed",
        "E1120 10:31:07.500000 4711 torch/distributed/elastic/multiprocessing/api.py:1002] failed",
        "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-20T10:31:07 DUE TO TIME LIMIT ***",
        "submitit INFO (2026-11-20 10:31:07,345) - Job completed successfully",
    ],
)
def test_times_of_others(line: str) -> None:
    found = log_times.foreign(line, 2026)
    assert found is not None
    assert int(found) == time.mktime((2026, 11, 20, 10, 31, 7, 0, 0, -1))
    assert log_times.foreign("Feb 31: [W231 10:31:07.123456 x.cpp:1]", 2026) is None


def test_printing_process_stamps_its_lines(tmp_path: Path) -> None:
    """Those of C libraries come without; a text of several lines is one; nothing waits in memory
    when the process is killed."""
    code = (
        "import os, sys, signal\n"
        "from slurmft.runs import log_times\n"
        "log_times.stamp_output('stdout', 'stderr')\n"
        "print('one'); print('two\\nthree'); print('fo', end=''); print('ur')\n"
        "os.write(2, b'from C\\n')\n"
        "print('five', file=sys.stderr)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    began = time.time()
    with open(tmp_path / "log", "wb") as log:
        subprocess.run(
            [sys.executable, "-c", code], stdout=log, stderr=log, timeout=PATIENCE_S
        )
    found = [
        log_times.split(line) for line in (tmp_path / "log").read_text().splitlines()
    ]
    assert [text for _, text in found] == [
        "one",
        "two",
        "three",
        "four",
        "from C",
        "five",
    ]
    assert [when is not None for when, _ in found] == [
        True,
        True,
        False,
        True,
        False,
        True,
    ]
    assert began - 1 < (found[0][0] or 0) < time.time()


def test_merged_in_time_order(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", nodes=2)
    put(
        run.rank_log(0),
        (T, "rank 0 on n1, attempt 1, pid 7"),
        (T + 2, "b"),
        (None, "b, too"),
    )
    put(run.rank_log(1), (T + 1, "a"), (T + 2.5, "c"))
    put(run.logs / "node-001.log", (T + 1.5, "torchrun"))
    put(
        run.submitit / "7_0_log.err",
        (T + 3, "by us"),
        (None, "srun: error: n2: task 1: Exited"),
    )
    done = slurmft("logs", str(run.path))
    shown = [line.split("  ", 1)[1] for line in done.out.splitlines()[1:]]
    assert shown == [
        "n1  rank 0 | rank 0 on n1, attempt 1, pid 7",
        "n2  rank 1 | a",
        "n2  node 1 | torchrun",
        "n1  rank 0 | b",
        "n1  rank 0 | b, too",
        "n2  rank 1 | c",
        "n1  task 0 | by us",
        "n1  slurm  | srun: error: n2: task 1: Exited",
    ]
    assert texts(run, "--rank", "1") == ["a", "c"]
    # More than a deque can be long.
    assert texts(run, "--rank", "1", "--tail", "99999999999999999999") == ["a", "c"]
    assert texts(run, "--rank", "0", "--rank", "1", "--tail", "2") == ["b, too", "c"]
    assert (
        texts(run, "--node", "n2")
        == texts(run, "--node", "1")
        == ["a", "torchrun", "c"]
    )
    told = [
        json.loads(line)
        for line in slurmft("logs", str(run.path), "--json").out.splitlines()
    ]
    assert told[1] == {
        "time": T + 1,
        "source": "rank 1",
        "host": "n2",
        "attempt": None,
        "text": "a",
    }


def test_a_choice_that_no_line_fits_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program of one's own records no ranks: its logs say which there are."""
    run = write_run(tmp_path / "run", nodes=2)
    assert logs.main([str(run.path), "--rank", "1"]) == 0
    assert capsys.readouterr().err == "the run has logged nothing yet\n"
    put(run.rank_log(0), (T, "rank 0 on n1, attempt 1, pid 7"))
    for flag, value in (("--rank", "1"), ("--node", "n7"), ("--node", "2")):
        text = f"no line of the logs is from {flag} {value}"
        with pytest.raises(UsageError, match=text) as error:
            logs.main([str(run.path), flag, value])
        assert error.value.hint == "there are logs of rank 0"
    assert logs.main([str(run.path), "--tail", "0"]) == 0
    assert capsys.readouterr().out == ""


def test_tracebacks_stay_together(tmp_path: Path) -> None:
    """Python prints one that nobody caught in pieces, each with its own time."""
    run = write_run(tmp_path / "run", nodes=2)
    trace = [
        (T + 1, "Traceback (most recent call last):"),
        (T + 1.1, '  File "x.py", line 1, in f'),
        (None, "    g()"),
        (T + 1.2, "KeyError: 'x'"),
        (T + 1.3, ""),
        (
            T + 1.4,
            "During handling of the above exception, another exception occurred:",
        ),
        (T + 1.5, ""),
        (T + 1.6, "Traceback (most recent call last):"),
        (T + 1.7, '  File "y.py", line 2, in h'),
        (T + 1.8, "RuntimeError: y"),
    ]
    put(run.rank_log(0), *trace, (T + 1.9, "after"))
    put(run.rank_log(1), (T + 1.15, "a"), (T + 1.65, "b"), (T + 1.85, "c"))
    assert texts(run) == [*(text for _, text in trace), "a", "b", "c", "after"]


def test_attempts(tmp_path: Path) -> None:
    """A log goes on after a requeue; what has no head is told by when the attempts began."""
    run = write_run(tmp_path / "run", state="running")
    run.set_state("running", attempt=1)
    first = run.history()[-1].time
    run.set_state("requeued")
    run.set_state("running", attempt=2)
    write_json(
        run.attempt, {"number": 2, "job": "7", "hosts": ["n2"], "time": time.time()}
    )
    second = run.history()[-1].time + 10
    heads = ["rank 0 on n1, attempt 1, pid 7", "rank 0 on n2, attempt 2, pid 8"]
    put(
        run.rank_log(0),
        (first, heads[0]),
        (first, "a"),
        (second, heads[1]),
        (second + 1, "b"),
    )
    put(run.logs / "task-000.log", (first, "one"), (second, "two"))
    assert texts(run, "--attempt", "1") == [heads[0], "a", "one"]
    assert texts(run, "--attempt", "2", "--tail", "2") == ["two", "b"]
    assert texts(run, "--node", "n2") == [heads[1], "b"]
    assert (
        "has started 2 time(s)" in slurmft("logs", str(run.path), "--attempt", "3").err
    )


def test_what_failed_first_comes_first(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", nodes=2, state="running")
    lost = SlurmftError("connection closed by peer")
    run.add(
        Failure.of(
            "rank 0 on n1", lost, traceback="Traceback: lost", secondary=True, attempt=0
        )
    )
    cause = SlurmftError("KeyError: 3", "a hint")
    run.add(
        Failure.of(
            "rank 1 on n2", cause, traceback="Tr: KeyError: 3\n", step=7, attempt=0
        )
    )
    run.add(
        Failure.of(
            "node n2", SlurmftError("its ranks ended"), secondary=True, attempt=0
        )
    )
    run.set_state("failed", "", 1)
    put(run.rank_log(0), (T, "a line"))
    out = slurmft("logs", str(run.path)).out.splitlines()
    assert out[:5] == [
        "failed first: rank 1 on n2, attempt 0, after step 7",
        "Tr: KeyError: 3",
        "hint: a hint",
        "then: rank 0 on n1, node n2",
        "",
    ]
    assert out[-1].endswith("rank 0 | a line")
    told = json.loads(slurmft("logs", str(run.path), "--json").out.splitlines()[0])
    assert (told["event"], told["where"]) == ("failure", "rank 1 on n2")
    ended = slurmft("logs", str(run.path), "--follow", "--tail", "0")
    assert (ended.code, ended.err) == (1, "")


def test_the_same_in_a_script(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", nodes=2, state="running")
    assert Run(run.path).logs() == ""
    run.add(
        Failure.of(
            "rank 1 on n2",
            SlurmftError("boom", "a hint"),
            traceback="Tr: boom",
            attempt=0,
        )
    )
    run.set_state("failed", "", 1)
    put(run.rank_log(0), (T, "a"), (T + 2, "c"))
    put(run.rank_log(1), (T + 1, "b"), (T + 3, "d"))
    found = Run(run.path)
    for call, flags in (
        (found.logs(), []),
        (found.logs(rank=1), ["--rank", "1"]),
        (
            found.logs(rank=[0, 1], tail=2),
            ["--rank", "0", "--rank", "1", "--tail", "2"],
        ),
        (found.logs(node="n2"), ["--node", "n2"]),
        (found.logs(node=0), ["--node", "0"]),
    ):
        assert call == slurmft("logs", str(run.path), *flags).out, flags
    assert found.logs().startswith(
        "failed first: rank 1 on n2, attempt 0\nTr: boom\nhint: a hint"
    )
    assert [line[-1] for line in found.logs(tail=1).splitlines()[5:]] == ["d"]
    for wrong in ({"rank": 2}, {"attempt": 3}, {"tail": -1}):
        with pytest.raises(UsageError):
            found.logs(**wrong)


def read(logs: Logs, whole: bool = False) -> Sequence[str]:
    return [line.text for line in logs.lines(whole)]


def test_reads_on(tmp_path: Path) -> None:
    """New lines, new files, files that were replaced; half a line waits for its rest."""
    run = write_run(tmp_path / "run", nodes=2)
    logs = Logs(run, Choice())
    put(run.rank_log(0), (T, "a"))
    with open(run.rank_log(0), "a") as file:
        file.write("half")
    assert read(logs) == ["a"]
    assert read(logs) == []
    put(run.rank_log(0), (None, " a line"))
    put(run.rank_log(1), (T + 1, "new"))
    assert read(logs) == ["new", "half a line"]  # seen now: later than what says when
    put(tmp_path / "other", (T + 9, "replaced"))
    os.replace(tmp_path / "other", run.rank_log(1))
    assert read(logs) == ["replaced"]
    with open(run.rank_log(1), "a") as file:
        file.write("no end")
    assert read(logs, whole=True) == ["no end"]


def test_logs_larger_than_what_is_read_at_once(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", nodes=2)
    for rank in (0, 1):
        put(
            run.rank_log(rank),
            *((T + n + rank / 2, f"{rank} {n} {'x' * 90}") for n in range(9999)),
        )
    lines = list(Logs(run, Choice()).lines())
    assert [line.text.split()[:2] for line in lines] == [
        [str(rank), str(n)] for n in range(9999) for rank in (0, 1)
    ]
    assert [line.text.split()[1] for line in Logs(run, Choice(ranks=(1,))).lines(last=2)] == [
        "9997", "9998",
    ]  # fmt: skip


def test_lines_of_any_length_and_files_of_any_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long line is several, holes are passed over, and the first files are read."""
    monkeypatch.setattr(logfiles, "_PIECE_BYTES", 1000)
    monkeypatch.setattr(logfiles, "MOST_FILES", 2)
    run = write_run(tmp_path / "run")
    put(run.rank_log(0), (T, "a"), (None, "é" * 10_000), (None, "b"))
    put(run.rank_log(1), (T + 1, "c"))
    with open(run.rank_log(1), "ab") as file:
        file.truncate(2**40)
        file.seek(2**40)
        file.write(b"\nd\n")
    put(run.logs / "node-000.log", (T + 2, "too many"))
    logs = Logs(run, Choice())
    lines = [line.text.strip("\0") for line in logs.lines()]
    assert logs.left_out == 1
    shown = [line for line in lines if line]
    assert (shown[0], shown[-2:]) == ("a", ["c", "d"])
    assert max(map(len, lines)) <= 5000
    assert sum(line.count("é") + line.count("\ufffd") for line in lines) >= 10_000
    assert [line.text for line in Logs(run, Choice(ranks=(0,))).lines(last=1)] == ["b"]
    assert [line.text for line in Logs(run, Choice(ranks=(1,))).lines(last=1)] == ["d"]
    assert list(Logs(run, Choice()).lines(last=0)) == []


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, int, str]:
    """Two ranks, of which one gets a text that is too long, followed by `slurmft logs`: the run,
    the command's exit code and what it printed."""
    top = tmp_path_factory.mktemp("failed")
    model = write_model(top / "model")
    name = write_raising(top / "project")
    flags = ("--nodes", "2", "--batch-size", "4", "--seed", "1", "--max-restarts", "0")
    task = (
        "--task",
        name,
        "--data",
        "data",
        "--model",
        str(model),
        "--log-every",
        "1",
    )
    where = ("--cluster", "local", "--runs-dir", str(top / "runs"))
    with contextlib.chdir(top / "project"):
        job = Following(*where, *flags, *task, imported=True)
    until(job.run.rank_log(0).exists, every_s=0.02)
    command = [sys.executable, "-m", "slurmft", "logs", str(job.run.path), "--follow"]
    with held([int(job.job_id)]):  # the job does not end before it is followed
        pipe = subprocess.PIPE
        following = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
        assert following.stdout is not None
        following.stdout.readline()
    out, err = following.communicate(timeout=PATIENCE_S)
    job.end()
    return job.run, following.returncode, out + err


def test_first_failing_rank_of_a_real_run(failed: tuple[RunDir, int, str]) -> None:
    run, code, followed = failed
    out = slurmft("logs", str(run.path)).out.splitlines()
    host = os.uname().nodename
    assert out[0].startswith(f"failed first: rank 1 on {host}, attempt 1, after step ")
    assert out[1] == "Traceback (most recent call last):"
    error = next(
        n
        for n, line in enumerate(out)
        if line.startswith("ValueError: a text of 42 tokens")
    )
    assert any("in batch" in line for line in out[:error])
    assert out[error + 2].startswith(f"then: rank 0 on {host}")
    lines = list(Logs(run, Choice()).lines())
    assert [line.time for line in lines] == sorted(line.time for line in lines)
    assert {"rank 0", "rank 1", "node 0", "node 1"} <= {line.label for line in lines}
    assert {line.attempt for line in lines if line.label.startswith("rank")} == {1}
    heads = [rundir.read_log_head(line.text) for line in lines]
    assert heads.count((host, 1)) == 4
    assert code == 1
    assert "rank 1 on" in followed.splitlines()[-2]
    assert followed.count("rank 1 | ValueError: a text of 42 tokens is") == 1
