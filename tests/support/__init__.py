"""What tests share: made runs and models, ranks, the test cluster, node-local file systems."""

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from slurmft.core.errors import SlurmftWarning

CHECKOUT = Path(__file__).parents[2]
"""The root of the repository."""

PATIENCE_S = 200.0
"""How long a test waits for what takes seconds on a quiet machine. It looks again and again: a
busy machine has its time, and a quiet one waits no longer than it must."""


def until(
    met: Callable[[], object],
    told: Callable[[], object] = lambda: "",
    every_s: float = 0.1,
) -> None:
    """Waits until a condition is met; `told` says what is there instead."""
    deadline = time.monotonic() + PATIENCE_S
    while not met():
        assert time.monotonic() < deadline, told()
        time.sleep(every_s)


@contextlib.contextmanager
def recorded_warnings() -> Iterator[list[warnings.WarningMessage]]:
    """Records slurmft's warnings. Others come at any time, as that of a socket which another test
    has left open."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", SlurmftWarning)
        yield found
