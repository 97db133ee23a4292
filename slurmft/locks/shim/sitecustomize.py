"""Puts the lock shim, and the seals of torch's stores, into a Python that a run has started,
whatever it executes.

This folder comes first on PYTHONPATH (`slurmft.locks.environment`). After it, the site's own
sitecustomize has its turn.
"""

import contextlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator
from types import ModuleType

_here = os.path.dirname(os.path.abspath(__file__))


@contextlib.contextmanager
def _package_on_path() -> Iterator[None]:
    """Makes slurmft importable for a moment: this Python's own packages stay as they are."""
    package = os.path.dirname(os.path.dirname(os.path.dirname(_here)))
    sys.path.append(package)
    try:
        yield
    finally:
        sys.path.remove(package)


def _arm() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 - any Python may find this file
        return  # the Python of some tool, which does not touch our caches
    with _package_on_path():
        from slurmft import locks
    locks.arm(os.environ.get(locks.VARIABLE, "auto"))


def _seal_stores() -> None:
    """Has torch seal what it writes into the job's stores, once it is imported here."""
    # 3.9: older Pythons cannot import the seals.
    if not os.environ.get("SLURMFT_STORE_SECRET") or sys.version_info < (3, 9):
        return
    with _package_on_path():
        from slurmft.core.after_import import AfterImport
        from slurmft.node import sealed

    def seal(module: ModuleType) -> None:
        with _package_on_path():
            from slurmft.node import sealed_store
        sealed_store.seal_stores(module)

    AfterImport(sealed.MODULES, seal)


def _show_stacks() -> None:
    """On SIGUSR1 this Python writes where its threads are, if its node's watchdog may ask."""
    path = os.environ.get("SLURMFT_STACKS")
    if path:
        import faulthandler
        import signal

        file = open(path, "a")  # noqa: SIM115 - open as long as this Python
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)


def _tell_collectives() -> None:
    """Has this Python answer its node's watchdog, if it is a rank, about its collectives."""
    is_rank = os.environ.get("SLURMFT_NODE_FOLDER") and "RANK" in os.environ
    if not is_rank or sys.version_info < (3, 9):
        return
    with _package_on_path():
        from slurmft.core.after_import import AfterImport
        from slurmft.node import flight_recorder
    AfterImport((flight_recorder.MODULE,), flight_recorder.serve_after_init)


def _next() -> None:
    others = [p for p in sys.path if os.path.abspath(p or ".") != _here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


try:
    _arm()
    _seal_stores()
    _show_stacks()
    _tell_collectives()
finally:
    _next()
