"""The trainer for scripts and notebooks: `from slurmft import submit`."""

from typing import Any

from slurmft.api import Run, call_text, checked_options, submit_config
from slurmft.train.login.configure import OPTIONS, configure


def submit(**given: Any) -> Run:
    """Submits a run, as `slurmft submit` does; returns at once.

    Args:
        given: options by the names of the command's flags: task="emotion", nodes=4, time=30,
            setup=["module load cuda"]; `slurmft submit --help` lists them. None: not given.
            Defaults are those of the recipe and the site file.

    Raises:
        UsageError: no such option, or a value that cannot be right.
        SlurmftError: the job was refused.
    """
    flags = checked_options("submit()", given, OPTIONS)
    config = configure(flags)
    return submit_config(config, call_text("submit", given), flags, OPTIONS)
