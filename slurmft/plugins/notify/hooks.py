"""Hooks of `--notify` and `--notify-command`: their check, and a message for a change of state."""

from collections.abc import Callable

from slurmft.core.config import JobConfig
from slurmft.core.hooks import Hooks
from slurmft.plugins.notify.options import NotifyOptions
from slurmft.runs.rundir import RunDir


class Notify(Hooks):
    """Tells the user of the end, a failure, a hang, a requeue without progress."""

    def check(self, job: JobConfig, cluster: str) -> None:
        options = job.options_of(NotifyOptions)
        if options.notify:
            # Not at the top: every command asks these hooks.
            from slurmft.plugins.notify import notification

            notification.check(options)

    def state_changed(self, run: RunDir, from_login: bool) -> Callable[[], None] | None:
        from slurmft.plugins.notify import notification

        sending = notification.start(run, later=from_login)
        if sending is None:
            return None
        return lambda: notification.finish(sending)
