"""A run that suffers faults, and must end as one that nothing has disturbed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from slurmft.runs.rundir import RunDir
from tests.conftest import Following, records, slurmft
from tests.support import faults, until
from tests.support.cluster import Cluster
from tests.support.faults import Fault
from tests.train.test_resume import assert_same


def undisturbed(folder: Path, flags: tuple[str, ...]) -> RunDir:
    """Returns a finished run with the given flags, on two simulated nodes: to the last bit the
    same as on a Slurm."""
    where = ("--cluster", "local", "--runs-dir", str(folder))
    threads = {"OMP_NUM_THREADS": "1"}
    done = slurmft("submit", "--follow", *flags, *where, env=threads, imported=True)
    assert done.code == 0, done.err
    return done.run


class Sufferer:
    """The run that suffers now; it is replaced by a new one while it has steps enough to come."""

    def __init__(
        self, cluster: Cluster | None, start: Callable[[], Following], whole: RunDir
    ) -> None:
        self.cluster = cluster
        self.start = start
        self.whole = whole
        self.steps = max(step_numbers(whole))
        self.job: Following | None = None
        self.suffered: list[str] = []
        """Of this run."""

    def living(self) -> Following:
        """Returns a run that can recover from another fault."""
        if self.job is not None and max(step_numbers(self.job.run)) > 0.6 * self.steps:
            self.end()
        if self.job is None:
            self.job = self.start()
            self.suffered.clear()
            self.await_steps(35)
        return self.job

    def suffer(self, fault: Fault) -> None:
        """Does the harm, and waits until training is well behind the place where it was."""
        job = self.living()
        self.suffered.append(fault.name)
        attempt = job.run.attempt_number()
        lost_before = faults.steps_lost(job.run)
        saved = saved_step(job.run)
        began = time.time()
        fault.harm(self.cluster, job)  # type: ignore[arg-type]  # those of any job ignore it
        until(
            lambda: job.run.attempt_number() >= attempt + fault.attempts - 1,
            lambda: (fault.name, job.run.history()),
        )
        self.await_steps(20)
        assert job.run.attempt_number() == attempt + fault.attempts - 1, fault.name
        lost = faults.steps_lost(job.run) - lost_before
        recovery_s = faults.recovery_s(job.run, began)
        print(f"{fault.name}: {lost} steps lost, {recovery_s:.1f} s to recover")
        # Only what was not saved is done again, however fast the machine is beside its disk.
        again = max(0, faults.furthest_again(job.run) - saved)
        assert lost <= (0 if fault.signalled else again), fault.name
        if fault.check:
            fault.check(job.run)

    def await_steps(self, more: int) -> None:
        """Waits for so many steps that were never done before."""
        assert self.job is not None
        job = self.job
        goal = max(step_numbers(job.run), default=0) + more

        def are_done() -> bool:
            steps = step_numbers(job.run)
            assert job.process.poll() is None, (self.suffered, job.end(10)[1])
            return max(steps, default=0) >= goal

        until(are_done, lambda: (self.suffered, job.run.history()), every_s=0.2)

    def end(self) -> None:
        """Waits for the end of the run, and compares it."""
        assert self.job is not None
        job = self.job
        self.job = None
        code, text = job.end()
        assert code == 0, (self.suffered, text)
        assert_same(job.run, self.whole)
        assert not list(job.run.checkpoints.glob(".*")), self.suffered


def saved_step(run: RunDir) -> int:
    """Returns the step of the last checkpoint but one: the newest may be what is damaged."""
    names = run.checkpoint_names()[-2:]
    return int(names[0].split("-")[1]) if names else 0


def step_numbers(run: RunDir) -> list[int]:
    return [r["step"] for r in records(run, "step")] if run.records.exists() else []
