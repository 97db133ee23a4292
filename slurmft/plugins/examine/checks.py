"""The checks of an examination, and the report of them: for people, as JSON, and for support."""

import dataclasses
import os
import platform
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import slurmft
from slurmft.core.credentials import HIDDEN, is_private, redact
from slurmft.core.errors import Exit
from slurmft.core.files import to_json
from slurmft.core.text import clock

_WIDTH = 100
_REPORTED = (
    "APPTAINER_", "CCL_", "CONDA_", "CUDA_", "FI_", "GLOO_", "HF_", "I_MPI_", "KMP_", "LANG", "LC_",
    "LD_", "MALLOC_", "MKL_", "NCCL_", "NVIDIA_", "OMP_", "PATH", "PMI", "PYTHON", "SLURM",
    "SRUN_", "TMPDIR", "TORCH", "TRANSFORMERS_", "UCX_", "VIRTUAL_ENV", "XDG_CACHE_HOME",
)  # fmt: skip
"""Prefixes of the variables that affect runs; no others are reported."""


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    """Jobs run, but slower, or not for long, or not as asked."""
    FAILURE = "failure"
    """Jobs do not run."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    level: Level
    about: str
    """A word or two: the lines' first column."""
    text: str
    """What was found, with node and figure."""
    hint: str | None
    figures: dict[str, Any]
    """What was found, for programs; units are in the names."""


def ok(about: str, text: str, **figures: Any) -> Check:
    return Check(Level.OK, about, text, None, figures)


def warning(about: str, text: str, hint: str | None = None, **figures: Any) -> Check:
    return Check(Level.WARNING, about, text, hint, figures)


def failure(about: str, text: str, hint: str | None = None, **figures: Any) -> Check:
    return Check(Level.FAILURE, about, text, hint, figures)


# --- the report ---


@dataclass(kw_only=True)
class Report:
    """The checks, and what was measured for them."""

    checks: list[Check] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    """How long the examination took, without the queue."""
    queued_s: float = 0.0

    @property
    def exit_code(self) -> int:
        """Warnings are no failure."""
        return Exit.FAILED if any(c.level == Level.FAILURE for c in self.checks) else Exit.OK

    def text(self) -> str:
        counts = Counter(check.level for check in self.checks)
        queued = f", after {self.queued_s:.1f} s in the queue" if self.queued_s else ""
        summary = (
            f"{counts[Level.OK]} ok, {counts[Level.WARNING]} warning(s), {counts[Level.FAILURE]} "
            f"failure(s); took {self.seconds:.1f} s{queued}"
        )
        return redact("\n".join([*lines(self.checks), "", summary]))

    def json(self) -> str:
        return redact(to_json(self._facts()))

    def for_support(self) -> str:
        """The text, then as JSON everything that was measured, and the environment."""
        head = f"slurmft doctor {slurmft.__version__} on {platform.node()}, {clock(time.time())}"
        facts = self._facts() | {"measured": self.measured}
        facts |= {"environment": reported_environment(os.environ)}
        parts = [head, "", self.text(), "", "--- JSON ---", redact(to_json(facts, indent=1)), ""]
        return "\n".join(parts)

    def _facts(self) -> dict[str, Any]:
        return {
            "slurmft": slurmft.__version__,
            "time": time.time(),
            "host": platform.node(),
            "command": sys.argv[1:],
            "seconds": self.seconds,
            "waited_s": self.queued_s,
            "exit_code": self.exit_code,
            "checks": [dataclasses.asdict(check) for check in self.checks],
        }


def lines(checks: Sequence[Check]) -> list[str]:
    """The checks for people, a paragraph each."""
    width = max((len(c.about) for c in checks), default=0)
    found = []
    for check in checks:
        level = check.level if check.level == Level.OK else check.level.upper()
        indent = f"{level:<7}  {check.about:<{width}}  "
        inner = " " * len(indent)
        found += _filled(check.text, indent, inner)
        if check.hint:
            found += _filled(check.hint, f"{inner}-> ", f"{inner}   ")
    return found


def _filled(text: str, first: str, other: str) -> list[str]:
    """Lines of a text no wider than `_WIDTH`, but for long words; its own line breaks are kept."""
    found: list[str] = []
    for line in text.split("\n"):
        start = other if found else first
        filled = textwrap.wrap(line, _WIDTH, initial_indent=start, subsequent_indent=other,
                               break_long_words=False, break_on_hyphens=False)  # fmt: skip
        is_table = "  " in line  # its columns must stay
        found += [start + line] if is_table else filled or [start.rstrip()]
    return found


def reported_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a report shows; of secrets only that they are set."""
    shown = {k: v for k, v in sorted(environment.items()) if k.startswith(_REPORTED)}
    return {k: HIDDEN if is_private(k) and v else v for k, v in shown.items()}
