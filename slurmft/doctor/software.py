"""Versions of what a run uses; nothing is imported for them."""

from __future__ import annotations

import platform
import sys

import slurmft


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
