"""The watch over the first node of a job that outlives its nodes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurmft.cluster.slurm import commands, first_node, head_watch
from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.errors import Exit, SlurmftError
from slurmft.core.program import Program
from slurmft.core.run_files import ATTEMPT
from slurmft.node import signals
from slurmft.runs import attempts
from slurmft.runs.rundir import RunDir

pytestmark = pytest.mark.processes  # `attempts.begin` asks for the packages

Make = Callable[..., RunDir]


class Slurm:
    """Answers to the commands of Slurm's that the watch runs."""

    def __init__(self) -> None:
        self.nodes: list[str] = []
        """Of the job, at each look; the last one for ever. "": it does not run; "?": no answer."""
        self.unwell = ""
        self.commands: list[str] = []

    def __call__(self, *command: str, timeout_s: float = 0) -> str:
        match command[:2]:
            case ("squeue", _):
                nodes = self.nodes.pop(0) if self.nodes[1:] else self.nodes[0]
                if nodes == "?":
                    raise SlurmftError("squeue did not answer within 30 s")
                return f"{nodes}\n"
            case ("sinfo", _):
                return self.unwell
            case ("scontrol", "show"):
                return command[3].replace(",", "\n")
        self.commands.append(" ".join(command))
        return ""


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    slurm = Slurm()
    monkeypatch.setattr(commands, "call", slurm)
    monkeypatch.setattr(signal, "sigtimedwait", lambda *_: None)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1,n2,n3")
    # `attempts.begin` sets it.
    monkeypatch.setenv(ATTEMPT, "0")
    with pytest.MonkeyPatch.context() as mask:
        # The requeue blocks signals, which the tests go on without.
        mask.setattr(signals, "block", lambda: None)
        yield slurm


@pytest.fixture
def make(tmp_path: Path, slurm: Slurm) -> Make:
    def make(**job: object) -> RunDir:
        options = {"runs_dir": str(tmp_path), "nodes": 2, "spare_nodes": 1, **job}
        config = JobConfig(**options)  # type: ignore[arg-type]
        program = Program(kind="script", name="plain", module="plain")
        run = RunDir.create(RunConfig(program=program, job=config))
        attempts.begin(run, ["n1", "n2"], "7")
        return run

    return make


def test_job_whose_first_node_is_lost_is_requeued(make: Make, slurm: Slurm) -> None:
    """Slurm keeps it, and its batch script is gone. A controller may be away for a moment."""
    run = make()
    slurm.nodes = ["n1,n2,n3", "?", "n2,n3"]
    assert head_watch.watch(run) == Exit.STOPPED
    assert slurm.commands == ["scontrol requeue 7"]
    state = run.get_state()
    assert (state.state, state.in_allocation) == ("requeued", False)
    assert state.reason == "it was lost: Slurm reports it as down (node n1)"
    assert run.blamed_hosts(1) == {"n1"}


@pytest.mark.parametrize("nodes", [["n1,n2,n3", ""], ["n1,n2,n3", "n1,n3", ""]])
def test_watch_ends_with_the_job(make: Make, slurm: Slurm, nodes: list[str]) -> None:
    run = make()
    slurm.nodes = nodes
    assert head_watch.watch(run) == Exit.OK
    assert slurm.commands == []
    assert run.get_state().state == "running"


def test_watch_ends_with_its_attempt(
    make: Make, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make()
    attempts.begin(run, ["n1", "n3"], "7")
    monkeypatch.setenv(ATTEMPT, "1")
    slurm.nodes = ["n2,n3"]
    assert head_watch.watch(run) == Exit.OK
    assert slurm.commands == []


def test_job_that_made_no_progress_is_cancelled(make: Make, slurm: Slurm) -> None:
    """Nobody else would end it: the other nodes would idle until the time limit."""
    run = make(max_requeues=0)
    slurm.nodes = ["n2,n3"]
    head_watch.watch(run)
    assert slurm.commands == ["scancel 7"]
    assert run.get_state().state == "failed"
    assert "no new checkpoint in this attempt" in run.get_state().reason


@pytest.mark.parametrize(
    ("job", "hosts", "unwell", "watcher"),
    [
        ({}, ["n1", "n2"], "", "n2"),
        # The spare node, where the run has one node.
        ({"nodes": 1, "spare_nodes": 2}, ["n1"], "", "n3"),
        ({"nodes": 1, "spare_nodes": 2}, ["n1"], "n3|down*|none", "n2"),
        ({"nodes": 1, "spare_nodes": 2}, ["n1"], "n2|down|x\nn3|down|x", ""),
        # Slurm itself requeues them.
        ({"spare_nodes": 0}, ["n1", "n2"], "", ""),
        ({"spare_nodes": 0, "min_nodes": 1, "requeue": False}, ["n1", "n2"], "", ""),
    ],
)  # fmt: skip
def test_host_that_watches(
    make: Make,
    slurm: Slurm,
    job: dict[str, object],
    hosts: list[str],
    unwell: str,
    watcher: str,
) -> None:
    run = make(**job)
    slurm.nodes = ["n1,n2,n3"]
    slurm.unwell = unwell
    assert first_node.watcher_of_head(run, hosts) == watcher
