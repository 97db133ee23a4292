"""What both the login node and the nodes tell of themselves; and calls that may hang, as in a dead
file system, with a limit on how long they are waited for."""

import platform
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import slurmft

Result = TypeVar("Result")


def call_all(timeout_s: float, calls: Sequence[Callable[[], Result]]) -> list[Result | Exception]:
    """Makes all calls at the same time; returns their results, in order, or the exceptions that
    they raised, or a TimeoutError: such a call runs on in its thread, until this process ends."""
    late = TimeoutError(f"no answer in {timeout_s:.0f} s")
    results: list[Result | Exception] = [late] * len(calls)

    def run(index: int, call: Callable[[], Result]) -> None:
        try:
            results[index] = call()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=c, daemon=True) for c in enumerate(calls)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(timeout=max(0.0, deadline - time.monotonic()))
    return list(results)


def installed(package: str) -> str | None:
    """The version of a package, which is not imported for it; None: it is not there."""
    from importlib import metadata  # 20 ms

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def software() -> dict[str, str | None]:
    """What must be the same on all nodes, and here."""
    packages = ("torch", "transformers", "accelerate", "datasets")
    return {
        "Python": f"{platform.python_version()} ({sys.executable})",
        "slurmft": slurmft.__version__,
        **{name: installed(name) for name in packages},
    }
