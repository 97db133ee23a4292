"""slurmft: fine-tune Hugging Face transformers on Slurm clusters, from one command.

In scripts and notebooks: `from slurmft import Run, SlurmftError, run, submit`. In the program of a
job: `slurmft.attach()`. Between the two is the run directory, and nothing else.
"""

from slurmft.core import interpreter

interpreter.leave_out_present_folder()  # before it would be asked for the next module

from typing import TYPE_CHECKING, Any  # noqa: E402

if TYPE_CHECKING:
    from slurmft.api import Run, run
    from slurmft.core.errors import SlurmftError
    from slurmft.job import Job, attach
    from slurmft.train.api import submit

UNKNOWN_VERSION = "0+unknown"
try:  # written by the build, from git's tags
    from slurmft._version import __version__ as __version__
except ImportError:  # a checkout that was never installed
    __version__ = UNKNOWN_VERSION

__all__ = ["Job", "Run", "SlurmftError", "attach", "run", "submit"]

_HOMES = {
    "Job": "job",
    "Run": "api",
    "SlurmftError": "core.errors",
    "attach": "job",
    "run": "api",
    "submit": "train.api",
}
"""Public name -> its module, which is imported when the name is first used: commands and ranks
import this package, too."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
