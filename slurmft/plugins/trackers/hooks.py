"""Hooks of `--log-with`: its check, a run's trackers, and the commands that show their data."""

from slurmft.core.config import JobConfig
from slurmft.core.hooks import Hooks, Recorder
from slurmft.plugins.trackers.options import TrackerOptions
from slurmft.runs.rundir import RunDir


class Trackers(Hooks):
    """Gives the trackers of a run copies of its records."""

    def check(self, job: JobConfig, cluster: str) -> None:
        if job.options_of(TrackerOptions).names:
            from slurmft.plugins.trackers import trackers

            trackers.check(job)

    # Modules are imported where a run has trackers: every command asks these hooks.

    def recorder(self, run: RunDir) -> Recorder | None:
        if not run.load_config().job.options_of(TrackerOptions).names:
            return None
        from slurmft.plugins.trackers.trackers import Tracking

        return Tracking(run)

    def next_commands(self, run: RunDir) -> list[str]:
        if not run.load_config().job.options_of(TrackerOptions).names:
            return []
        from slurmft.plugins.trackers import trackers

        return trackers.next_commands(run)
