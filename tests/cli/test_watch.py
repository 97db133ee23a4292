"""`slurmft watch`: what a person sees of a run, on a screen of 80 x 24 and in a pipe."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.screen import Screen

from slurmft.cluster import local
from slurmft.core.files import write_json
from slurmft.core.run_records import record_of
from slurmft.runs.records import RecordWriter
from slurmft.runs.rundir import RunDir
from slurmft.show.watch_screen import ASCII_LEVELS, LEVELS, RunView, draw
from tests.conftest import slurmft
from tests.support import terminal
from tests.support.made_runs import write_run

pytestmark = pytest.mark.processes


def take(view: RunView, *found: dict[str, Any]) -> None:
    for record in found:
        taken = record_of({"time": 1000.0} | record)
        assert taken is not None
        view.take(taken)


def text_of(view: RunView, width: int = 80, height: int = 24) -> list[str]:
    console = Console(width=width, height=height, file=io.StringIO(), no_color=True)
    with console.capture() as captured:
        console.print(Screen(view))
    return [line.rstrip() for line in captured.get().rstrip().splitlines()]


def made_view(ranks: int) -> RunView:
    view = RunView(
        "a-run",
        hosts=[f"n{rank // 4}" for rank in range(ranks)],
        state="job 7 running",
        footer="the footer",
    )
    take(
        view,
        {"event": "start", "task": "emotion", "world_size": ranks, "nodes": 2, "precision": "bf16",
         "backend": "gloo", "global_batch_size": 256, "parameters": 66_000_000,
         "total_steps": 400},
        *({"event": "step", "step": n, "epoch": n / 100, "loss": 2 / n} for n in range(1, 100)),
        {"event": "step", "step": 100, "epoch": 1.0, "loss": 0.02, "samples_per_s": 1280.0,
         "left_s": 187.0, "total_steps": 400},
        {"event": "ranks", "step": 100, "memory_mib": [1000 + r for r in range(ranks)],
         "own_ms": [20.0 if rank == 1 else 10.0 + rank / 1000 for rank in range(ranks)]},
        {"event": "warning", "text": "something is odd"},
    )  # fmt: skip
    return view


def test_screen() -> None:
    lines = text_of(made_view(4))
    assert lines[:2] == ["a-run", "job 7 running"]
    text = "\n".join(lines)
    for part in (
        " 25%  step 100/400",
        "3:07 min of training",
        "1,280 samples/s, 320 per rank",
    ):
        assert part in text
    assert "slowest: rank 1 on n0, 100% longer than the median" in text
    assert lines[-2].endswith("warning: something is odd")
    assert lines[-1] == "the footer"
    bars = {
        line.split()[0]: len(re.findall("[━╸]", line))
        for line in lines
        if "  n0  " in line
    }
    assert bars["1"] == 2 * bars["0"] == 2 * bars["3"]


def test_program_that_tells_little() -> None:
    """Steps without loss or epoch, as a script may tell them."""
    view = RunView("a-run")
    speed = {"samples_per_s": 64.0, "left_s": 9.0, "total_steps": 20}
    take(view, {"event": "step", "step": 2} | speed)
    text = "\n".join(text_of(view))
    assert "10%  step 2/20" in text
    assert "epoch" not in text
    assert "loss" not in text
    take(
        view,
        {"event": "step", "step": 3, "loss": 0.5},
        {"event": "step", "step": 4} | speed,
    )
    take(view, {"event": "epoch", "step": 4, "metrics": {"accuracy": 0.75}})
    rows = {line.split()[0]: line.split()[1:] for line in text_of(view) if line}
    assert rows["loss"][0] == "0.5000"
    assert rows["metrics"] == ["accuracy", "0.7500"]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 12), (200, 60), (20, 5)])
@pytest.mark.parametrize("ranks", [1, 4, 64])
def test_every_screen_has_room(width: int, height: int, ranks: int) -> None:
    lines = text_of(made_view(ranks), width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert lines[-1] == "the footer" or height < 15
    if ranks == 64 and (width, height) == (80, 24):
        # the slowest is shown
        assert any(line.startswith("   1  n0") for line in lines)
        assert any("more, which take less time" in line for line in lines)


def test_curve_is_drawn_at_any_width() -> None:
    points = [(float(step), float(step)) for step in range(1, 4001)]
    assert draw(points, 8, LEVELS) == LEVELS
    assert len(draw(points, 10_000, ASCII_LEVELS)) == 4000
    assert draw([(1.0, 2.0)], 10, ASCII_LEVELS) == ASCII_LEVELS[0]
    assert draw([], 10, ASCII_LEVELS) == ""


class LiveRun:
    """A run whose job is a process of the test's own."""

    def __init__(self, path: Path) -> None:
        self.run = write_run(path, nodes=2, state="running")
        self.job = subprocess.Popen(["sleep", "100"])
        pid = self.job.pid
        self.run.submitit.mkdir()
        write_json(self.run.job, {"cluster": "local", "id": str(pid)})
        write_json(self.run.submitit / "pid.json", local.Process.of(pid))

    def write(self, *found: dict[str, Any]) -> None:
        RecordWriter(self.run.records).write(*found)

    def end(self, state: str) -> None:
        self.run.set_state(state, "a reason", 0 if state == "finished" else 3)
        self.job.kill()
        self.job.wait()


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveRun]:
    made = LiveRun(tmp_path / "emotion-20261120-093012-a1b2")
    yield made
    made.job.kill()
    made.job.wait()


class Terminal(terminal.Terminal):
    """`slurmft watch` on a terminal of 80 x 24."""

    def __init__(self, run: RunDir, **env: Any) -> None:
        super().__init__("watch", str(run.path), **env)


def test_watched_to_its_end(live: LiveRun) -> None:
    terminal = Terminal(live.run)
    text = terminal.until(lambda text: "step 20/20" in text and "Ctrl-C quits" in text)
    lines = [line.rstrip() for line in text.splitlines()]
    assert lines[0] == "emotion-20261120-093012-a1b2"
    assert lines[1] == f"job {live.job.pid} running"
    assert any(line.startswith("speed 640 samples/s, 320 per rank") for line in lines)
    assert any(
        line.startswith("loss  0.1000  ") and line.endswith("▁") for line in lines
    )
    assert "Ctrl-C quits" in text
    live.write(
        {"event": "ranks", "step": 20, "own_ms": [10.0, 15.0], "memory_mib": [800, 900]}
    )
    terminal.until(
        lambda text: "slowest: rank 1 on n2, 20% longer than the median" in text
    )
    terminal.resize(60, 15)
    terminal.until(
        lambda text: "Ctrl-C quits" in text and max(map(len, text.split("\n"))) == 60
    )
    live.end("failed")
    assert terminal.end() == 3
    assert b"\x1b[32m" in terminal.raw
    # the screen from before is back, with the end below
    assert b"\x1b[?1049l" in terminal.raw
    assert "error: a reason" in terminal.raw.decode()


@pytest.mark.parametrize(
    ("key", "code", "word"),
    [(b"\x03", 130, "following;"), (b"\x1c", 131, "following (SIGQUIT);")],
    ids=["Ctrl-C", "Ctrl-backslash"],
)
def test_leaves_the_job_alone(live: LiveRun, key: bytes, code: int, word: str) -> None:
    terminal = Terminal(live.run, NO_COLOR="1")
    terminal.until(lambda text: "Ctrl-C quits" in text)
    terminal.press(key)
    assert terminal.end() == code
    assert f"no longer {word} job" in terminal.raw.decode()
    assert live.job.poll() is None
    assert live.run.get_state().state == "running"
    assert not any(f"\x1b[{n}m".encode() in terminal.raw for n in (31, 32, 33))


def test_records_cannot_command_the_terminal(live: LiveRun) -> None:
    live.write({"event": "warning", "text": "\x1b]0;title\x07 \x9b2J \x1b[31mred"})
    terminal = Terminal(live.run)
    terminal.until(lambda text: "warning: \\u001b]0;title\\u0007 \\u009b2J red" in text)
    terminal.press(b"\x03")
    assert terminal.end() == 130
    assert not any(
        each in terminal.raw for each in (b"\x1b]", b"\x07", b"\xc2\x9b", b"\x1b[31m")
    )


def test_terminal_that_cannot_draw(live: LiveRun) -> None:
    terminal = Terminal(live.run, TERM="dumb")
    terminal.until(lambda text: "20/20" in text)
    live.end("failed")
    assert terminal.end() == 3
    assert b"\x1b" not in terminal.raw


def test_in_a_pipe_it_follows(live: LiveRun) -> None:
    live.write(
        {"event": "epoch", "epoch": 1, "loss": 0.1, "metrics": {"accuracy": 0.9}}
    )
    command = [sys.executable, "-m", "slurmft", "watch", str(live.run.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        seen = ""
        while "is running" not in seen:
            seen += watch.stdout.readline()
        watch.send_signal(signal.SIGINT)
        rest = watch.stdout.read()
    assert watch.returncode == 130
    assert "step 20/20  loss 0.1000  640 samples/s  0 s left" in seen
    assert "epoch 1 done: train loss 0.1000  accuracy 0.9000" in seen
    assert "no longer following" in rest


def test_ended_run_is_shown_with_its_result(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    run.submitit.mkdir()
    write_json(run.job, {"cluster": "local", "id": "4194305"})  # above all process ids
    gone = {"pid": 4194305, "started": "1", "boot": ""}
    write_json(run.submitit / "pid.json", gone)
    done = slurmft("watch", str(run.path))
    assert done.code == 0
    assert "step 20/20" in done.out
    assert "accuracy      0.9000" in done.out
    assert done.out.splitlines()[-1] == f"records: {run.path}"  # it has saved no model
    run.model.mkdir()
    done = slurmft("watch", str(run.path))
    assert done.out.splitlines()[-1] == f"model and records: {run.path}"


def test_times_that_no_calendar_has(tmp_path: Path) -> None:
    """A colleague's file may have any number."""
    view = made_view(1)
    take(view, {"event": "step", "step": 101, "samples_per_s": 1280.0, "left_s": 1e18,
                "total_steps": 400, "time": 1e18},
         {"event": "warning", "text": "in a far future", "time": -1e18})  # fmt: skip
    assert "? warning: in a far future" in "\n".join(text_of(view))
    run = write_run(tmp_path / "r")
    state = json.loads(run.state.read_text())
    state["history"][0]["time"] = 1e18
    write_json(run.state, state)
    status = slurmft("status", str(run.path))
    assert status.code == 0, status.err
    assert "?  submitted" in status.out
