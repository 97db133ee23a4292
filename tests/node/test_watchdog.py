"""The watchdog, without ranks: what it takes for a hang, and what it does not."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmft.core.files import write_json
from slurmft.node import ccl, flight_recorder, watchdog
from slurmft.node.heartbeat import Heart, note_end, note_process, read
from slurmft.node.watchdog import Watchdog
from tests.support.made_runs import calls_of_rank, write_run


@pytest.fixture
def dog() -> Iterator[Watchdog]:
    watching = Watchdog(timeout_s=100)
    yield watching
    watching.close()


class Clock:
    """A monotonic clock that a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def sleep(self, dog: Watchdog, seconds: float) -> None:
        """Time passes, while the watchdog looks every five seconds."""
        for _ in range(int(seconds / 5)):
            self.now += 5
            dog.check()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def heart(dog: Watchdog, rank: int, pid: int | None = None) -> Heart:
    (dog.folder / f"pid-{rank}").write_text(str(pid or os.getpid()))
    return Heart(dog.folder / f"beat-{rank}")


def test_beats(tmp_path: Path) -> None:
    assert read(tmp_path / "none") is None
    beats = Heart(tmp_path / "beat")
    beats.beat(7, "train")
    beat = read(tmp_path / "beat")
    assert beat is not None
    assert (beat.step, beat.phase, beat.patience) == (7, "train", 1.0)


def test_late_rank_is_found(clock: Clock, dog: Watchdog) -> None:
    hearts = [heart(dog, rank) for rank in (0, 1)]
    hearts[1].beat(5, "train")
    hearts[0].beat(6, "train")
    clock.sleep(dog, 95)
    assert dog.check() is None
    clock.sleep(dog, 10)
    hang = dog.check()
    assert hang is not None
    assert (hang.rank, hang.certain) == (1, False)
    assert "after step 5" in hang.description
    assert hang.seconds == pytest.approx(105, abs=1)


@pytest.mark.processes
def test_stopped_rank_is_the_one(clock: Clock, dog: Watchdog) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"]
    ) as child:
        try:
            for rank, pid in ((0, None), (1, child.pid)):
                heart(dog, rank, pid).beat(5, "train")
            child.send_signal(19)
            while watchdog.process_state(child.pid) != "T":
                pass
            clock.sleep(dog, 105)
            hang = dog.check()
        finally:
            child.kill()
    assert hang is not None
    assert (hang.rank, hang.certain) == (1, True)


def test_start_and_save_may_take_longer(clock: Clock, dog: Watchdog) -> None:
    beats = heart(dog, 0)
    clock.sleep(dog, 500)
    assert dog.check() is None
    beats.beat(1, "train")
    clock.sleep(dog, 105)
    assert dog.check() is not None


def test_ranks_that_connect_have_no_more_time_than_a_step(
    clock: Clock, dog: Watchdog
) -> None:
    """Before that, some may still import; after it, tokens are made."""
    beats = heart(dog, 0)
    clock.sleep(dog, 500)
    beats.beat(0, "connect")
    clock.sleep(dog, 95)
    assert dog.check() is None
    clock.sleep(dog, 10)
    assert dog.check() is not None
    beats.beat(0, "start")
    clock.sleep(dog, 500)
    assert dog.check() is None
    # A connection is no step: it makes no limit longer.
    beats.beat(1, "train")
    clock.sleep(dog, 105)
    assert dog.check() is not None


@pytest.mark.processes
@pytest.mark.parametrize("uses_ccl", [True, False])
def test_shared_memory_of_ranks_that_ended(uses_ccl: bool, tmp_path: Path) -> None:
    """Also of those before a restart, and of a task that was killed; nobody else's."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    first = subprocess.Popen(["true"])
    first.wait()
    user = os.getuid()
    left = {f"{ended.pid}:{user}:0", f"{ended.pid}:{user}:1", f"{first.pid}:{user}:0"}
    others = {
        f"{os.getpid()}:{user}:0",
        f"{ended.pid}:{user + 1}:0",
        f"{ended.pid}1:{user}:0",
        f"{ended.pid}",
        "libpod_lock",
    }
    for name in left | others:
        (tmp_path / name).touch()
    folder = tmp_path / f"{watchdog._prefix()}{ended.pid}-abc"
    folder.mkdir()
    note_process(folder, 0, first.pid)
    note_process(folder, 0, ended.pid)
    note_process(folder, 1, os.getpid())
    if uses_ccl:
        (folder / ccl.MARK).touch()
    watchdog.remove_stale(tmp_path)
    assert not folder.exists()
    found = {file.name for file in tmp_path.iterdir()}
    assert found == (others if uses_ccl else left | others)


def test_limit_grows_with_the_steps(clock: Clock, dog: Watchdog) -> None:
    beats = heart(dog, 0)
    beats.beat(1, "train")
    clock.sleep(dog, 30)
    beats.beat(2, "train")
    clock.sleep(dog, 300)
    assert dog.check() is None  # steps of 30 s: 600 s are no hang
    clock.sleep(dog, 305)
    assert dog.check() is not None


@pytest.mark.parametrize(
    ("step_s", "pause_s", "limit_s"),
    [
        pytest.param(1, 1, 60, id="short steps"),
        pytest.param(5, 20, 200, id="ten times the slowest of the last"),
        pytest.param(90, 90, 600, id="at most the timeout"),
        pytest.param(400, 400, 1200, id="steps that are long beside the timeout"),
    ],
)
def test_limit_of_a_step_is_that_of_the_last_ones(
    clock: Clock, step_s: int, pause_s: int, limit_s: int
) -> None:
    with contextlib.closing(Watchdog(timeout_s=600, knows_steps=True)) as dog:
        beats = heart(dog, 0)
        for step in range(1, 200):
            clock.now += 5000 if step == 10 else pause_s if step == 180 else step_s
            beats.beat(step, "train")
        dog.check()
        clock.sleep(dog, limit_s - 5)
        assert dog.check() is None
        clock.sleep(dog, 10)
        assert dog.check() is not None


@pytest.mark.parametrize("phase", ["evaluate", "save"])
def test_other_phases_have_the_timeout(clock: Clock, phase: str) -> None:
    with contextlib.closing(Watchdog(timeout_s=600, knows_steps=True)) as dog:
        beats = heart(dog, 0)
        for step in range(1, 50):
            clock.now += 1
            beats.beat(step, "train")
        beats.beat(49, phase)
        dog.check()
        clock.sleep(dog, 595)
        assert dog.check() is None
        beats.beat(50, "train")  # and after it a step has its own limit again
        clock.sleep(dog, 70)
        assert dog.check() is not None


@pytest.mark.parametrize(("steps", "knows_steps"), [(5, True), (200, False)])
def test_too_few_steps_or_a_program_of_the_users(
    clock: Clock, steps: int, knows_steps: bool
) -> None:
    with contextlib.closing(Watchdog(timeout_s=600, knows_steps=knows_steps)) as dog:
        beats = heart(dog, 0)
        for step in range(1, steps):
            clock.now += 1
            beats.beat(step, "train")
        dog.check()
        clock.sleep(dog, 595)
        assert dog.check() is None


def test_suspended_job_does_not_hang(clock: Clock, dog: Watchdog) -> None:
    heart(dog, 0).beat(1, "train")
    clock.now += 5000  # the watchdog was stopped as well
    assert dog.check() is None
    clock.sleep(dog, 105)
    assert dog.check() is not None


def test_folders_of_dead_tasks_are_removed(tmp_path: Path) -> None:
    own = watchdog._prefix()
    (tmp_path / f"{own}99999999-ab").mkdir()
    (tmp_path / f"{own}{os.getpid()}-ab").mkdir()
    watchdog.remove_stale(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [f"{own}{os.getpid()}-ab"]


def test_folders_of_other_users_are_not_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody can make one in /dev/shm: with a FIFO in it, or with process ids of ours."""
    folder = tmp_path / f"{watchdog._prefix()}99999999-ab"
    folder.mkdir()
    (folder / ccl.MARK).touch()
    note_process(folder, 0, 99999998)
    memory = tmp_path / f"99999998:{os.getuid()}:0"
    memory.touch()
    (tmp_path / f"{watchdog._prefix()}99999999-link").symlink_to(folder)
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    watchdog.remove_stale(tmp_path)
    assert memory.exists()
    assert folder.exists()
    monkeypatch.undo()
    watchdog.remove_stale(tmp_path)
    assert not memory.exists()
    assert not folder.exists()


def test_a_rank_without_a_number_gets_no_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0 would be the process group of the task itself."""
    dog = Watchdog(timeout_s=100)
    (dog.folder / "pid-0").touch()
    (dog.folder / "stacks-0").touch()
    signalled: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: signalled.append(pid))
    monkeypatch.setattr(watchdog, "_DUMP_S", 0)
    monkeypatch.setattr(dog, "_stack_text", lambda rank, start: "")
    dog.dump(write_run(tmp_path / "run"))
    dog.close()
    assert signalled == []


@pytest.mark.processes
def test_folders_of_tasks_in_other_containers_stay(tmp_path: Path) -> None:
    """They share /dev/shm, but this process is none there."""
    task = Watchdog(timeout_s=0)
    folder = tmp_path / task.folder.name
    folder.mkdir()
    task.close()
    script = "import sys, pathlib; from slurmft.node import watchdog; "
    script += "watchdog.remove_stale(pathlib.Path(sys.argv[1]))"
    container = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    command = [*container, sys.executable, "-c", script, str(tmp_path)]
    subprocess.run(command, check=True, timeout=60)
    assert folder.exists()


def test_never(clock: Clock) -> None:
    off = Watchdog(timeout_s=0)
    heart(off, 0)
    clock.sleep(off, 10000)
    assert off.check() is None
    off.close()


def test_ranks_that_moved_may_hang_later(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they told the first time is not taken for what they do the second time."""
    dog = Watchdog(timeout_s=100)
    run = write_run(tmp_path / "run")
    beats = heart(dog, 0)
    stacks = dog.folder / "stacks-0"
    stacks.touch()
    places = iter(["at first", "later", "never"])

    def write_stacks(pid: int, number: int) -> None:
        with stacks.open("a") as file:
            file.write(next(places))

    monkeypatch.setattr(os, "kill", write_stacks)
    monkeypatch.setattr(watchdog, "_DUMP_S", 0)
    dog.dump(run)
    # Of the same hang, on the word of another node.
    dog.dump(run)
    clock.now += 1
    beats.beat(1, "train")
    dog.dump(run)
    dog.close()
    _, first, second = run.stacks(0).read_text().split("--- ")
    assert first.endswith("at first")
    assert second.endswith("later")
    assert "at first" not in second


def test_a_dump_that_takes_long_is_no_sleep(
    clock: Clock, dog: Watchdog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watchdog looks again after it, to see whether ranks have moved."""

    def sleep(seconds: float) -> None:
        clock.now += seconds

    heart(dog, 0)
    clock.sleep(dog, 605)
    assert dog.check() is not None
    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(watchdog, "_DUMP_S", 30)
    monkeypatch.setattr(dog, "_stack_text", lambda rank, start: "")
    dog.dump(write_run(tmp_path / "run"))
    assert dog.check() is not None


class Answers:
    """A rank that answers what it is asked, at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.idle_s = 0.0
        self.waits_s: float | None = None
        self.asked = 0
        monkeypatch.setattr(flight_recorder, "ask", self.ask)

    def ask(self, folder: str, rank: int) -> bool:
        self.asked += 1
        calls = calls_of_rank(idle_s=self.idle_s, waits_s=self.waits_s)
        write_json(Path(flight_recorder.answer_file(folder, rank)), calls)
        return True


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    return Answers(monkeypatch)


def test_a_silent_rank_with_collectives_does_not_hang(
    clock: Clock, dog: Watchdog, answers: Answers
) -> None:
    """Of most programs the first rank alone prints."""
    heart(dog, 0).beat(0, "output")
    answers.idle_s = 3
    clock.sleep(dog, 1000)
    assert dog.check() is None
    # Once in each time that it may be silent.
    assert answers.asked == 9
    answers.idle_s = 120
    clock.sleep(dog, 115)
    hang = dog.check()
    assert hang is not None
    assert hang.description.startswith("no output for")


def test_a_silent_rank_that_does_not_answer_hangs(
    clock: Clock, dog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_recorder, "ask", lambda folder, rank: True)
    heart(dog, 0).beat(0, "output")
    clock.sleep(dog, 120)
    assert dog.check() is not None


def test_a_program_that_starts_silently_has_the_time_of_a_start(
    clock: Clock, dog: Watchdog, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its imports may take long on a busy node."""
    heart(dog, 0).beat(0, "silent")
    with monkeypatch.context() as starts:
        starts.setattr(flight_recorder, "ask", lambda folder, rank: False)
        clock.sleep(dog, 595)
        assert dog.check() is None
    # As soon as it has a process group, its collectives are its signs.
    answers.idle_s = 120
    clock.sleep(dog, 10)
    hang = dog.check()
    assert hang is not None
    assert hang.description.startswith("no output for")


@pytest.mark.parametrize("knows_steps", [True, False])
def test_a_process_that_is_gone_has_the_time_of_a_start(
    clock: Clock, knows_steps: bool
) -> None:
    """Its ranks are being started again: the limit of a step is not theirs."""
    with contextlib.closing(Watchdog(timeout_s=100, knows_steps=knows_steps)) as dog:
        beats = heart(dog, 0, pid=99999999)
        for step in range(20):
            clock.now += 1
            beats.beat(step, "train")
        dog.check()
        clock.sleep(dog, 595)
        assert dog.check() is None
        clock.sleep(dog, 10)
        assert dog.check() is not None


def test_a_process_that_has_ended_well_does_not_hang(
    clock: Clock, dog: Watchdog
) -> None:
    """The first rank may evaluate alone, for as long as it likes."""
    heart(dog, 1, pid=99999999).beat(0, "output")
    note_end(dog.folder, 1)
    clock.sleep(dog, 5000)
    assert dog.check() is None


def test_a_rank_is_asked_as_soon_as_it_has_a_group(
    clock: Clock, dog: Watchdog, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start may be silent for long."""
    patient = Watchdog(timeout_s=0)
    heart(patient, 0).beat(0, "output")
    with monkeypatch.context() as starts:
        starts.setattr(flight_recorder, "ask", lambda folder, rank: False)
        clock.sleep(patient, 350)
        assert not patient.has_new_wait()
    clock.now += 1
    answers.waits_s = answers.idle_s = 301
    assert [patient.has_new_wait() for _ in range(2)] == [False, True]
    patient.close()


def test_a_process_that_has_ended_without_an_error(dog: Watchdog) -> None:
    """It is that of the last start."""
    note_process(dog.folder, 0, 11)
    note_end(dog.folder, 0)
    assert watchdog.rank_state(dog.folder, 0) == "ended"
    note_process(dog.folder, 0, 99999999)
    assert watchdog.rank_state(dog.folder, 0) == "gone"


def test_a_wait_is_told_where_no_hang_ends_a_job(
    clock: Clock, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    signalled: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: signalled.append(pid))
    patient = Watchdog(timeout_s=0)
    heart(patient, 0).beat(0, "output")

    def is_told(seconds: int) -> int:
        count = 0
        for _ in range(seconds // 5):
            clock.now += 5
            if answers.waits_s is not None:
                answers.waits_s += 5
                answers.idle_s += 5
            count += patient.has_new_wait()
            assert patient.check() is None
        return count

    # It prints nothing, and has no collective that waits.
    assert is_told(1000) == 0
    answers.waits_s = answers.idle_s = 0.0
    assert is_told(290) == 0
    assert is_told(5000) == 1
    # The next one.
    answers.waits_s = answers.idle_s = 0.0
    assert is_told(1000) == 1
    patient.close()
    assert signalled == []
