"""Checkpoint folders: whole or not there, verified, pruned."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.errors import SlurmftError
from slurmft.core.files import write_json
from slurmft.core.program import Program
from slurmft.job import checkpoints
from slurmft.job.checkpoints import BadCheckpointError, Checkpoints, checkpoint_name
from slurmft.runs.rundir import ATTEMPT, RunDir
from tests.support.lockfs import TwoNodes


def new_run(folder: Path) -> RunDir:
    program = Program(kind="script", name="plain", module="plain")
    return RunDir.create(RunConfig(program=program, job=JobConfig(runs_dir=str(folder))))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return new_run(tmp_path)


def write(store: Checkpoints, step: int, best: bool = False) -> None:
    with store.write(checkpoint_name(step), best) as folder:
        (folder / "parts").mkdir()
        (folder / "parts" / "weights").write_bytes(b"\0" * 1000)
        (folder / "state.json").write_text(f'{{"step": {step}}}')


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("name", ["parts/weights", "state.json", "manifest.json"])
@pytest.mark.parametrize("harm", [flip, truncate, Path.unlink])
def test_damage_is_found_and_the_one_before_is_taken(run: RunDir, name: str, harm: object) -> None:
    store = Checkpoints(run, every_s=0, keep=3)
    for step in (1, 2):
        write(store, step)
    checkpoints.verify(run.checkpoints / "step-00000002")
    assert callable(harm)
    harm(run.checkpoints / "step-00000002" / name)
    with pytest.raises(BadCheckpointError):
        checkpoints.verify(run.checkpoints / "step-00000002")
    warnings: list[str] = []
    assert checkpoints.newest(run, warnings.append) == run.checkpoints / "step-00000001"
    assert len(warnings) == 1
    assert "step-00000002 is damaged" in warnings[0]
    assert run.checkpoint_names() == ["step-00000001"]  # the bad one is put aside, not removed
    assert len(list(run.checkpoints.glob("bad-*"))) == 1


def test_where_none_is_whole_the_run_starts_anew(run: RunDir) -> None:
    warnings: list[str] = []
    assert checkpoints.newest(run, warnings.append) is None
    assert warnings == []
    write(Checkpoints(run, every_s=0, keep=3), 1)
    flip(run.checkpoints / "step-00000001" / "state.json")
    assert checkpoints.newest(run, warnings.append) is None
    assert "starts from its beginning" in warnings[-1]


@pytest.mark.usefixtures("two_nodes")  # it says what is missing
def test_a_file_system_that_fails_is_no_reason_to_start_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where already the listing fails: the client of a mount has died."""
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    with TwoNodes(tmp_path) as two:
        run = new_run(two.nodes[0])
        write(Checkpoints(run, every_s=0, keep=3), 1)
        two.crash(0)
        with pytest.raises(SlurmftError, match="checkpoints': Transport endpoint is not") as error:
            checkpoints.newest(run, lambda warning: pytest.fail(warning))
    assert "slurmft resume" in str(error.value.hint)
    assert pauses == [1, 2, 3, 4]


def test_names_sort_by_progress(run: RunDir) -> None:
    names = ["step-00000009", "step-00000010", "step-00000010-e00000512", "step-00000010-evaluated"]
    for name in reversed([*names, "step-00000011"]):
        (run.checkpoints / name).mkdir(parents=True)
    assert run.checkpoint_names() == [*names, "step-00000011"]


def test_prune_keeps_the_newest_and_the_best(run: RunDir) -> None:
    store = Checkpoints(run, every_s=0, keep=2)
    for step in range(1, 6):
        write(store, step, best=step == 2)
    assert run.checkpoint_names() == ["step-00000002", "step-00000004", "step-00000005"]
    assert not list(run.checkpoints.glob(".*"))


def test_attempt_that_slurm_gave_up_writes_no_checkpoint(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(run.attempt, {"number": 2, "job": "7", "hosts": ["n1"]})
    monkeypatch.setenv(ATTEMPT, "1")
    with pytest.raises(OSError, match="later attempt"):
        write(Checkpoints(run, every_s=0, keep=2), 1)
    assert run.checkpoint_names() == []
    monkeypatch.setenv(ATTEMPT, "2")
    write(Checkpoints(run, every_s=0, keep=2), 1)
    assert run.checkpoint_names() == ["step-00000001"]


def test_one_that_fails_is_not_seen_and_the_next_is_due_after_a_pause(run: RunDir) -> None:
    store = Checkpoints(run, every_s=1e-9, keep=2)
    assert store.is_due()

    def fail() -> None:
        with store.write("step-00000001") as folder:
            (folder / "half").touch()
            assert not store.is_due()  # while it is written
            raise ValueError("no such layer")

    with pytest.raises(ValueError, match="no such layer"):
        fail()
    assert not list(run.checkpoints.iterdir())
    assert not store.is_due()  # not at every step
    write(store, 2)


def test_leftovers_of_a_kill_are_removed(run: RunDir) -> None:
    (run.checkpoints / ".step-00000001.123.ab").mkdir(parents=True)
    checkpoints.remove_leftovers(run)
    assert not list(run.checkpoints.iterdir())
