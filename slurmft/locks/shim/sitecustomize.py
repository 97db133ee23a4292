"""Puts the lock shim into a Python that a run has started, whatever it executes.

This folder comes first on PYTHONPATH (`slurmft.locks.environment`). After it, the site's own
sitecustomize has its turn.
"""

import importlib.machinery
import importlib.util
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))


def _arm() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 - any Python may find this file
        return  # the Python of some tool, which does not touch our caches
    package = os.path.dirname(os.path.dirname(os.path.dirname(_here)))
    sys.path.append(package)
    try:
        from slurmft import locks
    finally:
        sys.path.remove(package)
    locks.arm(os.environ.get(locks.VARIABLE, "auto"))


def _show_stacks() -> None:
    """On SIGUSR1 this Python writes where its threads are, if its node's watchdog may ask."""
    path = os.environ.get("SLURMFT_STACKS")
    if path:
        import faulthandler
        import signal

        file = open(path, "a")  # noqa: SIM115 - open as long as this Python
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)


def _next() -> None:
    others = [p for p in sys.path if os.path.abspath(p or ".") != _here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


try:
    _arm()
    _show_stacks()
finally:
    _next()
