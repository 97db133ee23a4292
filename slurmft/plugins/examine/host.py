"""Calls that may hang, as in a dead file system; and the versions that must agree everywhere."""

import platform
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import slurmft
from slurmft.core import interpreter

Result = TypeVar("Result")


def call_all(
    timeout_s: float, calls: Sequence[Callable[[], Result]]
) -> list[Result | Exception]:
    """Makes all calls at the same time; returns their results, in order.

    The result of a call that raises is its exception. A call that takes longer has a TimeoutError,
    and runs on in its thread until this process ends.
    """
    late = TimeoutError(f"no answer in {timeout_s:.0f} s")
    results: list[Result | Exception] = [late] * len(calls)

    def run(index: int, call: Callable[[], Result]) -> None:
        try:
            results[index] = call()
        except Exception as error:
            results[index] = error

    threads = []
    for index, call in enumerate(calls):
        # Daemons: Python does not wait for them at its end.
        thread = threading.Thread(target=run, args=(index, call), daemon=True)
        thread.start()
        threads.append(thread)
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        # One deadline for all: where several hang, the time limit still is that of the whole.
        left_s = max(0.0, deadline - time.monotonic())
        thread.join(timeout=left_s)
    return list(results)  # a copy: late threads still write to the other


def installed(package: str) -> str | None:
    """Returns the version of a package, without importing it; None: it is not installed."""
    from importlib import metadata  # 20 ms

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def software() -> dict[str, str | None]:
    """Returns the versions that must be the same on all nodes and on the login node."""
    packages = ("torch", "transformers", "accelerate", "datasets")
    return {
        "Python": f"{platform.python_version()} ({interpreter.PYTHON})",
        "slurmft": slurmft.__version__,
        **{name: installed(name) for name in packages},
    }
